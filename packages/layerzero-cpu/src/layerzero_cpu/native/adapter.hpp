// A kernel's whole call in C: tensors in, new tensors out, without Python in between.
//
// An adapter takes an op's canonical arguments. It does plain calls itself: exact tensors in the CPU's memory, last axis
// dense, no gradient wanted. Every other call goes, as it was made, to the adapter in Python, which copies, records
// gradients, and says what is wrong with a wrong one. So nothing here raises for a bad argument.
#pragma once
#include "entry.hpp"

namespace lz {

struct Adapter {
  const char* name;
  int arity;
  int number;  // what tells adapters of one kernel apart
  const char *kernels[2], *signatures[2];
  PyObject* (*call)(const Adapter& a, PyObject* const* given);  // nullptr without an exception: not a plain call
  Entry* entries[2];
  PyObject* fallback;
  PyMethodDef method;
};

constexpr int ADAPTER_COUNT = 14;
extern Adapter ADAPTERS[ADAPTER_COUNT];

PyObject* sample(const Adapter& a, PyObject* const* given);

constexpr int MOST_AXES = 8;

// The arguments of one call, and its results until they are handed over.
class Plain {
 public:
  Plain();
  ~Plain();
  Plain(const Plain&) = delete;
  bool tensor(PyObject* given, Arg* to);
  bool maybe(PyObject* given, Arg* to);  // or None
  void start_over() { grad_ = false, bytes_ = 0; }  // read the same arguments again; gradients do not matter
  // A new tensor laid out as torch.empty_like would, or dense of this shape.
  bool like(const Tensor& t, Arg* to);
  bool made(const int64_t* shape, int ndim, DType dtype, Arg* to);
  bool run(const Adapter& a, int which, Arg* args, int count);
  // After a draw nothing may be left to Python, which would draw again: what goes wrong from there on is raised.
  bool draw(int64_t count, PyObject* generator, Arg* to);  // [count, 1] in float64
  bool must_run(const Adapter& a, Arg* args, int count);
  PyObject* first();  // the results; they are the caller's now
  PyObject* both();
  PyObject* first_and_none();

 private:
  bool laid_out(const int64_t* shape, const int64_t* steps, int ndim, DType dtype, Arg* to);
  PyObject* results_[2];
  int made_;
  bool grad_;
  int64_t bytes_;
};

bool number(PyObject* given, double* to);  // a float or an int, nothing else
int truth(PyObject* given);                // True 1, False 0, anything else -1

}  // namespace lz
