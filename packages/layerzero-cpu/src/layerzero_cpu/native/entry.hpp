// What the files of the Python module share: the kernels by name, what was said of torch, and the one way to run a kernel.
#pragma once
#include "dlpack.hpp"
#include "isa.hpp"
#include "pyabi.hpp"

namespace lz {

struct Entry {
  PyMethodDef method;
  const char* signature;
  Status (*run)(Call&);
  const char* isa;
};

Entry* entry_named(const char* name);  // nullptr: there is no such kernel

// torch, as far as it was made known by setup() and setup_adapters().
struct Torch {
  DLExchange* exchange;
  PyTypeObject *tensor, *parameter;
  PyObject* thread_count;  // torch.get_num_threads
  PyCFunction is_neg;      // the function behind Tensor.is_neg, or null
  PyObject* ask_neg;       // Tensor.is_neg
  PyObject* clone;         // Tensor.clone: its memory holds the values, whatever stood for them before
};
extern Torch torch;

// Whether the values are the memory's with the other sign (torch's negative bit: the imaginary part of a conjugate, say),
// which no view shows. True also where torch gives no answer. May run Python code.
bool negated(PyObject* tensor);

DType dtype_of(const DLTensor& d);  // NONE: one that no kernel knows

inline bool in_cpu_memory(const DLTensor& d) {
  return d.device_type == DL_CPU || d.device_type == DL_CUDA_HOST || d.device_type == DL_ROCM_HOST;
}

inline Tensor tensor_of(const DLTensor& d) {
  return Tensor{static_cast<char*>(d.data) + d.byte_offset, d.shape, d.strides, d.ndim, dtype_of(d)};
}

// Run a kernel with checked arguments that hold `bytes` in all: with torch's threads and without Python's lock where that
// pays. false: a Python exception is set and nothing was run.
bool run_kernel(Entry* e, Arg* args, int count, int64_t bytes, Status* status);

PyObject* setup(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* setup_adapters(PyObject*, PyObject* const* given, Py_ssize_t count);
PyObject* adapter(PyObject*, PyObject* const* given, Py_ssize_t count);

inline PyObject* none() {
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

}  // namespace lz
