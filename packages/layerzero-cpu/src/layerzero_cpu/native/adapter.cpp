// The part of every adapter that is the same: reading tensors, making new ones, handing the rest to Python.
#include "adapter.hpp"

#include <string.h>

namespace lz {
namespace {

typedef PyObject* (*Getter)(PyObject*, PyObject*, PyObject*);

struct {
  PyCFunction grad_enabled;  // torch.is_grad_enabled
  PyObject* grad_self;
  PyObject* requires_grad;  // Tensor's descriptor
  Getter get_requires_grad;
  PyObject* empty;  // (size, stride, dtype) -> a new tensor
  PyCFunction empty_direct;
  PyObject* empty_self;
  PyObject* dtypes;    // torch's, by our number
  PyObject* uniform;   // Tensor.uniform_
  PyObject* keyword;   // "generator"
  bool ready;
} known;

// What the maker of tensors is called with, kept for the next result of the same kind: a decode loop makes few kinds.
struct Recipe {
  int32_t ndim;
  DType dtype;
  int64_t sizes[MOST_AXES], steps[MOST_AXES];
  PyObject* arguments;
};
constexpr uint32_t RECIPES = 256;
Recipe recipes[RECIPES];

PyObject* tuple_of(const int64_t* numbers, int count) {
  PyObject* made = PyTuple_New(count);
  for (int i = 0; made != nullptr && i < count; ++i) {
    PyObject* item = PyLong_FromLongLong(numbers[i]);
    if (item == nullptr) {
      Py_DecRef(made);
      return nullptr;
    }
    PyTuple_SetItem(made, i, item);
  }
  return made;
}

// A borrowed tuple; nullptr with an exception.
PyObject* recipe(const int64_t* sizes, const int64_t* steps, int ndim, DType dtype) {
  uint64_t hash = uint64_t(dtype) << 8 | uint64_t(ndim);
  for (int i = 0; i < ndim; ++i) hash = (hash ^ uint64_t(sizes[i])) * 0x9e3779b97f4a7c15ull + uint64_t(steps[i]);
  hash *= 0x9e3779b97f4a7c15ull;
  Recipe& r = recipes[(hash >> 40) % RECIPES];
  size_t bytes = size_t(ndim) * sizeof(int64_t);
  if (r.arguments != nullptr && r.ndim == ndim && r.dtype == dtype && memcmp(r.sizes, sizes, bytes) == 0 &&
      memcmp(r.steps, steps, bytes) == 0)
    return r.arguments;
  PyObject *size = tuple_of(sizes, ndim), *step = tuple_of(steps, ndim), *made = PyTuple_New(3);
  if (size == nullptr || step == nullptr || made == nullptr) {
    Py_DecRef(size);
    Py_DecRef(step);
    Py_DecRef(made);
    return nullptr;
  }
  PyObject* kind = PyTuple_GetItem(known.dtypes, int(dtype) - 1);
  Py_IncRef(kind);
  PyTuple_SetItem(made, 0, size);
  PyTuple_SetItem(made, 1, step);
  PyTuple_SetItem(made, 2, kind);
  PyObject* before = r.arguments;
  r.ndim = ndim;
  r.dtype = dtype;
  memcpy(r.sizes, sizes, bytes);
  memcpy(r.steps, steps, bytes);
  r.arguments = made;
  Py_DecRef(before);
  return made;
}

// Before Python 3.12 the collector may run wherever an object is made, and with it anybody's finalizers: not between the
// reading of a tensor and its use.
struct Collector {
  bool was_on = Py_Version < 0x030c0000 && PyGC_Disable();
  ~Collector() {
    if (was_on) PyGC_Enable();
  }
};

bool positive(const int64_t* sizes, int ndim) {
  for (int i = 0; i < ndim; ++i)
    if (sizes[i] <= 0) return false;
  return true;
}

// Whether the elements fill a run of memory, each once, in whatever order of axes.
bool fills(const Tensor& t) {
  int64_t expect = 1;
  int left = 0;
  for (int i = 0; i < t.ndim; ++i) left += t.shape[i] != 1;
  for (; left > 0; --left) {
    int at = t.ndim - 1;
    while (at >= 0 && (t.shape[at] == 1 || t.stride[at] != expect)) --at;
    if (at < 0) return false;
    expect *= t.shape[at];
  }
  return true;
}

// Whether the axes come in the order of their strides, with gaps between: empty_like makes such a tensor dense.
bool in_order(const Tensor& t) {
  int64_t least = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] == 1) continue;
    if (t.stride[i] < least) return false;
    least = t.stride[i] * t.shape[i];
  }
  return true;
}

// The same call in Python, as it was made.
PyObject* in_python(const Adapter* a, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  PyObject *positional = PyTuple_New(count), *keywords = nullptr, *result = nullptr;
  for (Py_ssize_t i = 0; positional != nullptr && i < count; ++i) {
    Py_IncRef(given[i]);
    PyTuple_SetItem(positional, i, given[i]);
  }
  bool fine = positional != nullptr;
  if (fine && names != nullptr) {
    fine = (keywords = PyDict_New()) != nullptr;
    for (Py_ssize_t i = 0; fine && i < PyTuple_Size(names); ++i)
      fine = PyDict_SetItem(keywords, PyTuple_GetItem(names, i), given[count + i]) == 0;
  }
  if (fine) result = PyObject_Call(a->fallback, positional, keywords);
  Py_DecRef(positional);
  Py_DecRef(keywords);
  return result;
}

PyObject* call_adapter(const Adapter* a, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  if (names == nullptr && count == a->arity && known.ready) {
    PyObject* made = a->call(*a, given);
    if (made != nullptr || PyErr_Occurred()) return made;
  }
  return in_python(a, given, count, names);
}

// Each adapter is a built-in function without `self`, so that it pickles by its name as a function in Python does.
template <int N> PyObject* entrance(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  return call_adapter(&ADAPTERS[N], given, count, names);
}
typedef PyObject* (*Entrance)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*);
const Entrance ENTRANCES[] = {entrance<0>,  entrance<1>,  entrance<2>,  entrance<3>,  entrance<4>,
                              entrance<5>,  entrance<6>,  entrance<7>,  entrance<8>,  entrance<9>,
                              entrance<10>, entrance<11>, entrance<12>, entrance<13>};
static_assert(sizeof(ENTRANCES) / sizeof(ENTRANCES[0]) == ADAPTER_COUNT, "one for each");

}  // namespace

bool number(PyObject* given, double* to) {
  if (given->ob_type != &PyFloat_Type && given->ob_type != &PyLong_Type) return false;
  *to = PyFloat_AsDouble(given);
  if (*to != -1.0 || !PyErr_Occurred()) return true;
  PyErr_Clear();  // an int too large for a double
  return false;
}

int truth(PyObject* given) { return given == &_Py_TrueStruct ? 1 : given == &_Py_FalseStruct ? 0 : -1; }

Plain::Plain() : results_{nullptr, nullptr}, made_(0), grad_(true), bytes_(0) {
  PyObject* answer = known.grad_enabled(known.grad_self, nullptr);
  if (answer == nullptr) PyErr_Clear();
  grad_ = answer != &_Py_FalseStruct;
  Py_DecRef(answer);
}

Plain::~Plain() {
  Py_DecRef(results_[0]);
  Py_DecRef(results_[1]);
}

bool Plain::tensor(PyObject* given, Arg* to) {
  PyTypeObject* type = given->ob_type;
  if (type != torch.tensor && type != torch.parameter) return false;
  if (grad_) {
    PyObject* wanted = known.get_requires_grad(known.requires_grad, given, reinterpret_cast<PyObject*>(type));
    if (wanted == nullptr) PyErr_Clear();
    bool none_wanted = wanted == &_Py_FalseStruct;
    Py_DecRef(wanted);
    if (!none_wanted) return false;
  }
  if (negated(given)) return false;
  DLTensor d;
  if (torch.exchange->view(given, &d) != 0) {  // a wrapper without memory: functorch's, a fake one, a sparse one
    PyErr_Clear();
    return false;
  }
  if (!in_cpu_memory(d) || d.data == nullptr || d.ndim < 1 || d.ndim > MOST_AXES || d.strides[d.ndim - 1] != 1 ||
      !positive(d.shape, d.ndim))
    return false;
  to->t = tensor_of(d);
  bytes_ += to->t.count() * size_of(to->t.dtype);
  return to->t.dtype != NONE;
}

bool Plain::maybe(PyObject* given, Arg* to) {
  if (given != &_Py_NoneStruct) return tensor(given, to);
  to->t = Tensor{nullptr, nullptr, nullptr, 0, NONE};
  return true;
}

bool Plain::like(const Tensor& t, Arg* to) {
  if (fills(t)) return laid_out(t.shape, t.stride, t.ndim, t.dtype, to);
  return in_order(t) && made(t.shape, t.ndim, t.dtype, to);
}

bool Plain::made(const int64_t* shape, int ndim, DType dtype, Arg* to) {
  int64_t steps[MOST_AXES], step = 1;
  for (int i = ndim - 1; i >= 0; --i) {
    steps[i] = step;
    step *= shape[i];
  }
  return laid_out(shape, steps, ndim, dtype, to);
}

bool Plain::laid_out(const int64_t* shape, const int64_t* steps, int ndim, DType dtype, Arg* to) {
  if (dtype != F32 && dtype != BF16 && dtype != F16 && dtype != F64 && dtype != I64) return false;
  PyObject* arguments = recipe(shape, steps, ndim, dtype);
  if (arguments == nullptr) return false;
  Py_IncRef(arguments);
  PyObject* result;
  {
    Collector paused;
    result = known.empty_direct ? known.empty_direct(known.empty_self, arguments)
                                : PyObject_Call(known.empty, arguments, nullptr);
  }
  Py_DecRef(arguments);
  if (result == nullptr) return false;  // out of memory: torch's own words
  results_[made_++] = result;
  DLTensor d;
  if (result->ob_type != torch.tensor || torch.exchange->view(result, &d) != 0 || !in_cpu_memory(d)) {
    PyErr_Clear();
    return false;
  }
  to->t = tensor_of(d);
  bytes_ += to->t.count() * size_of(dtype);
  return true;
}

bool Plain::run(const Adapter& a, int which, Arg* args, int count) {
  Status status = nullptr;
  return a.entries[which]->run != nullptr && run_kernel(a.entries[which], args, count, bytes_, &status) &&
         status == nullptr;
}

PyObject* Plain::first() {
  PyObject* out = results_[0];
  results_[0] = nullptr;
  return out;
}

PyObject* Plain::both() {
  PyObject* pair = PyTuple_New(2);
  for (int i = 0; pair != nullptr && i < 2; ++i) {
    PyTuple_SetItem(pair, i, results_[i]);
    results_[i] = nullptr;
  }
  return pair;
}

PyObject* Plain::first_and_none() {
  results_[1] = none();
  return both();
}

bool Plain::must_run(const Adapter& a, Arg* args, int count) {
  Status status = nullptr;
  if (!run_kernel(a.entries[0], args, count, bytes_, &status)) return false;
  if (status != nullptr) PyErr_Format(PyExc_ValueError, "%s: %s", a.name, status);
  return status == nullptr;
}

bool Plain::draw(int64_t count, PyObject* generator, Arg* to) {
  int64_t shape[2] = {count, 1};
  if (!made(shape, 2, F64, to)) return false;
  PyObject *given = PyTuple_New(1), *named = nullptr, *drawn = nullptr, *numbers = results_[made_ - 1];
  bool fine = given != nullptr;
  if (fine) {
    Py_IncRef(numbers);
    PyTuple_SetItem(given, 0, numbers);
    if (generator != &_Py_NoneStruct)
      fine = (named = PyDict_New()) != nullptr && PyDict_SetItem(named, known.keyword, generator) == 0;
  }
  if (fine) drawn = PyObject_Call(known.uniform, given, named);
  Py_DecRef(given);
  Py_DecRef(named);
  Py_DecRef(drawn);
  return drawn != nullptr;
}

// setup_adapters(Parameter, requires_grad, is_grad_enabled, empty, dtypes, uniform): `empty` makes a tensor of (size, stride,
// dtype), `dtypes` are torch's in the order of DType, `uniform` fills a tensor with a generator's numbers. False: this torch
// keeps them in another way, and every call is Python's.
PyObject* setup_adapters(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 6) return PyErr_Format(PyExc_TypeError, "expected 6 arguments, got %d", int(count));
  PyObject *grad = given[2], *empty = given[3];
  if (given[4]->ob_type != &PyTuple_Type || PyTuple_Size(given[4]) != int(I64))
    return PyErr_Format(PyExc_TypeError, "the dtypes must be a tuple of %d", int(I64));
  Getter get = reinterpret_cast<Getter>(PyType_GetSlot(given[1]->ob_type, Py_tp_descr_get));
  known.ready = false;
  if (torch.exchange == nullptr || get == nullptr || grad->ob_type != &PyCFunction_Type ||
      PyCFunction_GetFlags(grad) != METH_NOARGS)
    return PyBool_FromLong(0);
  PyObject* keyword = PyUnicode_FromString("generator");
  if (keyword == nullptr) return nullptr;
  for (int i = 0; i < 6; ++i) Py_IncRef(given[i]);
  torch.parameter = reinterpret_cast<PyTypeObject*>(given[0]);
  known.requires_grad = given[1];
  known.get_requires_grad = get;
  known.grad_enabled = PyCFunction_GetFunction(grad);
  known.grad_self = PyCFunction_GetSelf(grad);
  known.empty = empty;
  known.empty_direct = nullptr;
  if (empty->ob_type == &PyCFunction_Type && PyCFunction_GetFlags(empty) == METH_VARARGS) {
    known.empty_direct = PyCFunction_GetFunction(empty);
    known.empty_self = PyCFunction_GetSelf(empty);
  }
  known.dtypes = given[4];
  known.uniform = given[5];
  known.keyword = keyword;
  known.ready = true;
  return PyBool_FromLong(1);
}

// adapter(name, module, documentation, function in Python) -> a built-in function of the same arguments.
PyObject* adapter(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4) return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %d", int(count));
  const char *name = PyUnicode_AsUTF8AndSize(given[0], nullptr), *doc = PyUnicode_AsUTF8AndSize(given[2], nullptr);
  if (name == nullptr || doc == nullptr) return nullptr;
  int at = 0;
  while (at < ADAPTER_COUNT && strcmp(ADAPTERS[at].name, name) != 0) ++at;
  if (at == ADAPTER_COUNT) return PyErr_Format(PyExc_ValueError, "no adapter is called %s", name);
  Adapter* a = &ADAPTERS[at];
  for (int i = 0; i < 2; ++i) {
    if (a->kernels[i] == nullptr) continue;
    Entry* e = entry_named(a->kernels[i]);
    if (e == nullptr || strcmp(e->signature, a->signatures[i]) != 0)
      return PyErr_Format(PyExc_RuntimeError, "kernel %s does not take what its adapter gives", a->kernels[i]);
    a->entries[i] = e;
  }
  Py_IncRef(given[2]);  // the documentation, and with it the text, stays
  Py_IncRef(given[3]);
  Py_DecRef(a->fallback);
  a->fallback = given[3];
  a->method = {a->name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(ENTRANCES[at])),
               METH_FASTCALL | METH_KEYWORDS, doc};
  return PyCFunction_NewEx(&a->method, nullptr, given[1]);
}

}  // namespace lz
