// The Python module: each kernel is a function that takes tensors, numbers and None. It returns None when the work is done
// and False when the kernel wants other strides. Everything is checked before a kernel runs.
#include <string.h>

#include "entry.hpp"

namespace lz {
namespace {

constexpr int MOST_ARGS = 40;
constexpr int MOST_KERNELS = 256;

Entry entries[MOST_KERNELS];
int entry_count;
int chosen;  // rank of the instruction set in use

// Tensors made for a call, which live as long as it does.
struct Made {
  PyObject* items[MOST_ARGS];
  int count = 0;
  ~Made() {
    for (int i = 0; i < count; ++i) Py_DecRef(items[i]);
  }
};

bool shown(PyObject* given, Entry* e, int n, DLTensor* d) {
  if (torch.exchange->view(given, d) == 0) return true;
  if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%s: argument %d shows no memory", e->method.ml_name, n);
  return false;
}

bool has_no_memory(const DLTensor& d) { return d.data == nullptr && tensor_of(d).count() != 0; }

bool read_tensor(Entry* e, int n, PyObject* given, Arg* arg, int64_t* bytes, Made* made) {
  if (given->ob_type != torch.tensor && !PyType_IsSubtype(given->ob_type, torch.tensor)) {
    PyErr_Format(PyExc_TypeError, "%s: argument %d must be a tensor", e->method.ml_name, n);
    return false;
  }
  DLTensor d;
  bool other = negated(given);
  if (!shown(given, e, n, &d)) return false;
  if (other || has_no_memory(d)) {  // or zeros that were never written
    PyObject* written = PyObject_CallFunctionObjArgs(torch.clone, given, nullptr);
    if (written == nullptr) return false;
    made->items[made->count++] = written;
    if (!shown(written, e, n, &d)) return false;
  }
  if (!in_cpu_memory(d)) {
    PyErr_Format(PyExc_ValueError, "%s: argument %d is not in the memory of the CPU", e->method.ml_name, n);
    return false;
  }
  arg->t = tensor_of(d);
  if (arg->t.dtype == NONE) {
    PyErr_Format(PyExc_TypeError, "%s: argument %d has a dtype that no kernel knows", e->method.ml_name, n);
    return false;
  }
  if (has_no_memory(d)) {  // a fake tensor says it is on the CPU and has nothing there
    PyErr_Format(PyExc_TypeError, "%s: argument %d shows no memory", e->method.ml_name, n);
    return false;
  }
  *bytes += arg->t.count() * size_of(arg->t.dtype);
  return true;
}

PyObject* call_kernel(PyObject* self, PyObject* const* given, Py_ssize_t count) {
  Entry* e = static_cast<Entry*>(PyCapsule_GetPointer(self, nullptr));
  const char* signature = e->signature;
  Arg args[MOST_ARGS];
  Made made;
  if (e->run == nullptr)
    return PyErr_Format(PyExc_RuntimeError, "%s was not built for %s or less", e->method.ml_name, ISAS[chosen].name);
  const Py_ssize_t most = Py_ssize_t(strlen(signature)), least = Py_ssize_t(strcspn(signature, "o"));
  if (count < least || count > most)
    return PyErr_Format(PyExc_TypeError, "%s: expected %d arguments, got %d", e->method.ml_name,
                        int(most), int(count));
  int64_t bytes = 0;
  for (int n = 0; n < most; ++n) {
    PyObject* item = n < count ? given[n] : &_Py_NoneStruct;
    switch (signature[n]) {
      case 'o':
      case 'O':
        if (item == &_Py_NoneStruct) {
          args[n].t = Tensor{nullptr, nullptr, nullptr, 0, NONE};
          break;
        }
        [[fallthrough]];
      case 'T':
        if (!read_tensor(e, n, item, &args[n], &bytes, &made)) return nullptr;
        break;
      case 'i':
        args[n].i = PyLong_AsLongLong(item);
        if (args[n].i == -1 && PyErr_Occurred()) return nullptr;
        break;
      default:
        args[n].f = PyFloat_AsDouble(item);
        if (args[n].f == -1.0 && PyErr_Occurred()) return nullptr;
    }
  }
  Status status = nullptr;
  if (!run_kernel(e, args, int(most), bytes, &status)) return nullptr;
  if (status == nullptr) {
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
  }
  if (status == RELAYOUT) {
    Py_IncRef(&_Py_FalseStruct);
    return &_Py_FalseStruct;
  }
  return PyErr_Format(PyExc_ValueError, "%s: %s", e->method.ml_name, status);
}

}  // namespace

Entry* entry_named(const char* name) {
  for (int i = 0; i < entry_count; ++i)
    if (strcmp(entries[i].method.ml_name, name) == 0) return &entries[i];
  return nullptr;
}

namespace {

// Each kernel from the best instruction set that is not above `rank` and that it was built for.
void choose(int rank) {
  for (int i = 0; i < entry_count; ++i) entries[i].run = nullptr;
  for (int r = rank; r >= 0; --r)
    for (const Unit* u = UNITS; u->isa; ++u) {
      if (strcmp(u->isa, ISAS[r].name) != 0) continue;
      for (const Kernel* k = u->kernels; k->name; ++k) {
        Entry* e = entry_named(k->name);
        if (e != nullptr && e->run == nullptr) {
          e->run = k->run;
          e->isa = u->isa;
        }
      }
    }
  chosen = rank;
}

int best_rank() {
  int best = 0;
  for (int i = 0; ISAS[i].name; ++i)
    if (ISAS[i].here()) best = i;
  return best;
}

PyObject* names(bool only_here) {
  int n = 0;
  for (int i = 0; ISAS[i].name; ++i) n += !only_here || ISAS[i].here();
  PyObject* out = PyTuple_New(n);
  int at = 0;
  for (int i = 0; ISAS[i].name; ++i)
    if (!only_here || ISAS[i].here()) PyTuple_SetItem(out, at++, PyUnicode_FromString(ISAS[i].name));
  return out;
}

PyObject* isa(PyObject*, PyObject*) { return PyUnicode_FromString(ISAS[chosen].name); }
PyObject* isas(PyObject*, PyObject*) { return names(false); }
PyObject* isas_here(PyObject*, PyObject*) { return names(true); }

PyObject* set_isa(PyObject*, PyObject* given) {
  const char* name = PyUnicode_AsUTF8AndSize(given, nullptr);
  if (name == nullptr) return nullptr;
  int rank = isa_rank(name);
  if (rank < 0) return PyErr_Format(PyExc_ValueError, "no instruction set is called %s", name);
  if (!ISAS[rank].here()) return PyErr_Format(PyExc_ValueError, "this machine has no %s", name);
  choose(rank);
  Py_IncRef(&_Py_NoneStruct);
  return &_Py_NoneStruct;
}

PyObject* isa_of(PyObject*, PyObject* given) {
  const char* name = PyUnicode_AsUTF8AndSize(given, nullptr);
  if (name == nullptr) return nullptr;
  Entry* e = entry_named(name);
  if (e == nullptr) return PyErr_Format(PyExc_ValueError, "no kernel is called %s", name);
  return PyUnicode_FromString(e->run ? e->isa : "");
}

// set_team(address): 0 for workers of ours.
PyObject* use_team(PyObject*, PyObject* given) {
  long long address = PyLong_AsLongLong(given);
  if (address == -1 && PyErr_Occurred()) return nullptr;
  set_team(reinterpret_cast<void*>(static_cast<intptr_t>(address)));
  return none();
}

PyMethodDef methods[] = {
    {"isa", isa, METH_NOARGS, "the instruction set in use"},
    {"isas", isas, METH_NOARGS, "every instruction set of this processor family, worst first"},
    {"isas_here", isas_here, METH_NOARGS, "those this machine has"},
    {"set_isa", set_isa, METH_O, "use no better instruction set than this"},
    {"set_team", use_team, METH_O, "have the threads of this OpenMP do the work (the address of GOMP_parallel); 0: our own"},
    {"isa_of", isa_of, METH_O, "the instruction set a kernel's code is for; empty where it has none here"},
    {"setup", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(setup)), METH_FASTCALL, "say which tensors there are"},
    {"setup_adapters", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(setup_adapters)), METH_FASTCALL,
     "say how torch makes a tensor and who wants gradients"},
    {"adapter", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(adapter)), METH_FASTCALL,
     "a whole call of a kernel in C, which leaves what is not plain to a function in Python"},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    {1, nullptr, nullptr, 0, nullptr}, "_native", "LayerZero's CPU kernels", -1, methods, nullptr, nullptr, nullptr,
    nullptr};

}  // namespace
}  // namespace lz

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__native(void) {
  using namespace lz;
  PyObject* module = PyModule_Create2(&definition, 3);
  if (module == nullptr) return nullptr;
  entry_count = 0;
  for (const Unit* u = UNITS; u->isa; ++u)
    for (const Kernel* k = u->kernels; k->name; ++k)
      if (entry_named(k->name) == nullptr && entry_count < MOST_KERNELS && strlen(k->signature) <= size_t(MOST_ARGS)) {
        Entry& e = entries[entry_count++];
        e.method = {k->name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_kernel)), METH_FASTCALL, nullptr};
        e.signature = k->signature;
      }
  choose(best_rank());
  PyObject* all = PyTuple_New(entry_count);
  for (int i = 0; i < entry_count; ++i) {
    PyObject* self = PyCapsule_New(&entries[i], nullptr, nullptr);
    PyObject* function = PyCFunction_NewEx(&entries[i].method, self, nullptr);
    Py_DecRef(self);
    if (function == nullptr || PyModule_AddObjectRef(module, entries[i].method.ml_name, function) < 0) return nullptr;
    Py_DecRef(function);
    PyTuple_SetItem(all, i, PyUnicode_FromString(entries[i].method.ml_name));
  }
  PyModule_AddObjectRef(module, "kernels", all);
  PyObject* hash = PyUnicode_FromString(SOURCE_HASH);
  PyModule_AddObjectRef(module, "source_hash", hash);
  Py_DecRef(all);
  Py_DecRef(hash);
  return module;
}
