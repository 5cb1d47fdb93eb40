// Running a kernel, and what torch tells about its tensors and threads.
#include "entry.hpp"

namespace lz {

Torch torch;

namespace {
constexpr int64_t PARALLEL_BYTES = 64 << 10;  // smaller calls are done before a worker could wake
constexpr int64_t UNLOCK_BYTES = 32 << 10;    // and these before another Python thread could get the lock
}  // namespace

DType dtype_of(const DLTensor& d) {
  if (d.lanes != 1) return NONE;
  switch (d.code) {
    case 0: return d.bits == 8 ? I8 : d.bits == 16 ? I16 : d.bits == 32 ? I32 : d.bits == 64 ? I64 : NONE;
    case 1: return d.bits == 8 ? U8 : NONE;
    case 2: return d.bits == 32 ? F32 : d.bits == 16 ? F16 : d.bits == 64 ? F64 : NONE;
    case 4: return BF16;
    case 6: return BOOL;
    case 10: return F8E4M3;
    case 12: return F8E5M2;
    default: return NONE;
  }
}

bool run_kernel(Entry* e, Arg* args, int count, int64_t bytes, Status* status) {
  Call call = {args, int32_t(count), 1};
  if (bytes >= PARALLEL_BYTES) {
    PyObject* threads = PyObject_CallNoArgs(torch.thread_count);
    if (threads == nullptr) return false;
    long long n = PyLong_AsLongLong(threads);
    Py_DecRef(threads);
    call.threads = n < 1 ? 1 : n > 256 ? 256 : int32_t(n);
  }
  if (bytes >= UNLOCK_BYTES) {
    PyThreadState* saved = PyEval_SaveThread();
    *status = e->run(call);
    PyEval_RestoreThread(saved);
  } else {
    *status = e->run(call);
  }
  return true;
}

bool negated(PyObject* tensor) {
  PyObject* answer = torch.is_neg != nullptr ? torch.is_neg(tensor, nullptr)
                                             : PyObject_CallFunctionObjArgs(torch.ask_neg, tensor, nullptr);
  if (answer == nullptr) PyErr_Clear();
  bool no = answer == &_Py_FalseStruct;
  Py_DecRef(answer);
  return !no;
}

// setup(torch.Tensor, torch.get_num_threads): the tensors and the setting that calls go by.
PyObject* setup(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "expected the tensor type and a function");
  PyObject* capsule = PyObject_GetAttrString(given[0], "__dlpack_c_exchange_api__");
  if (capsule == nullptr) return nullptr;
  DLExchange* found = static_cast<DLExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_DecRef(capsule);
  if (found == nullptr) return nullptr;
  while (found != nullptr && found->major != 1) found = found->previous;
  if (found == nullptr || found->view == nullptr)
    return PyErr_Format(PyExc_RuntimeError, "this torch shows its tensors by no table of version 1");
  torch.exchange = found;
  Py_IncRef(given[0]);
  Py_IncRef(given[1]);
  torch.tensor = reinterpret_cast<PyTypeObject*>(given[0]);
  torch.thread_count = given[1];
  torch.ask_neg = PyObject_GetAttrString(given[0], "is_neg");
  torch.clone = PyObject_GetAttrString(given[0], "clone");
  PyObject* empty = PyObject_CallNoArgs(given[0]);
  if (torch.ask_neg == nullptr || torch.clone == nullptr || empty == nullptr) return nullptr;
  PyObject* asked = PyObject_GetAttrString(empty, "is_neg");
  if (asked == nullptr) return nullptr;
  // what a call of the method ends in; the method is asked where this torch has made it of another kind
  if (asked->ob_type == &PyCFunction_Type && PyCFunction_GetFlags(asked) == METH_NOARGS)
    torch.is_neg = PyCFunction_GetFunction(asked);
  Py_DecRef(asked);
  Py_DecRef(empty);
  return none();
}

}  // namespace lz
