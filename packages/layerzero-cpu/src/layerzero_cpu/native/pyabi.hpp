// The part of Python's stable ABI (3.11) that the module uses, declared here so that no Python headers are needed to build
// and one binary serves every later Python.
#pragma once
#include <stddef.h>
#include <stdint.h>

extern "C" {
struct _object;
typedef struct _object PyObject;
typedef struct _typeobject PyTypeObject;
typedef ptrdiff_t Py_ssize_t;
typedef PyObject* (*PyCFunction)(PyObject*, PyObject*);

struct PyMethodDef {
  const char* ml_name;
  PyCFunction ml_meth;
  int ml_flags;
  const char* ml_doc;
};
struct PyModuleDef_Base {
  Py_ssize_t ob_refcnt;
  PyTypeObject* ob_type;
  PyObject* (*m_init)(void);
  Py_ssize_t m_index;
  PyObject* m_copy;
};
struct PyModuleDef {
  PyModuleDef_Base m_base;
  const char* m_name;
  const char* m_doc;
  Py_ssize_t m_size;
  PyMethodDef* m_methods;
  void* m_slots;
  void* m_traverse;
  void* m_clear;
  void* m_free;
};
typedef struct _ts PyThreadState;

PyObject* PyModule_Create2(PyModuleDef*, int);
int PyModule_AddObjectRef(PyObject*, const char*, PyObject*);
PyObject* PyCFunction_NewEx(PyMethodDef*, PyObject*, PyObject*);
PyCFunction PyCFunction_GetFunction(PyObject*);
PyObject* PyCFunction_GetSelf(PyObject*);
int PyCFunction_GetFlags(PyObject*);
void* PyType_GetSlot(PyTypeObject*, int);
int PyGC_Enable(void);
int PyGC_Disable(void);
PyObject* PyCapsule_New(void*, const char*, void (*)(PyObject*));
void* PyCapsule_GetPointer(PyObject*, const char*);
PyObject* PyUnicode_FromString(const char*);
const char* PyUnicode_AsUTF8AndSize(PyObject*, Py_ssize_t*);
int PyUnicode_CompareWithASCIIString(PyObject*, const char*);
PyObject* PyTuple_New(Py_ssize_t);
PyObject* PyTuple_GetItem(PyObject*, Py_ssize_t);
Py_ssize_t PyTuple_Size(PyObject*);
PyObject* PyDict_New(void);
int PyDict_SetItem(PyObject*, PyObject*, PyObject*);
PyObject* PyLong_FromLongLong(long long);
int PyTuple_SetItem(PyObject*, Py_ssize_t, PyObject*);
long long PyLong_AsLongLong(PyObject*);
double PyFloat_AsDouble(PyObject*);
PyObject* PyObject_CallNoArgs(PyObject*);
PyObject* PyObject_Call(PyObject*, PyObject*, PyObject*);
PyObject* PyObject_CallFunctionObjArgs(PyObject*, ...);
PyObject* PyObject_GetAttrString(PyObject*, const char*);
PyObject* PyErr_Format(PyObject*, const char*, ...);
PyObject* PyErr_Occurred(void);
void PyErr_Clear(void);
void Py_IncRef(PyObject*);
void Py_DecRef(PyObject*);  // both take a null pointer
int PyType_IsSubtype(PyTypeObject*, PyTypeObject*);
PyThreadState* PyEval_SaveThread(void);
void PyEval_RestoreThread(PyThreadState*);
PyObject* PyBool_FromLong(long);
extern PyObject* PyExc_TypeError;
extern PyObject* PyExc_ValueError;
extern PyObject* PyExc_RuntimeError;
extern PyObject _Py_NoneStruct;
extern PyObject _Py_FalseStruct;
extern PyObject _Py_TrueStruct;
extern PyTypeObject PyFloat_Type, PyLong_Type, PyUnicode_Type, PyTuple_Type, PyCFunction_Type;
extern const unsigned long Py_Version;
}

enum { METH_VARARGS = 1, METH_KEYWORDS = 2, METH_NOARGS = 4, METH_O = 8, METH_FASTCALL = 0x80 };
enum { Py_tp_descr_get = 54 };

struct _object {  // as the stable ABI has it for builds without Py_TRACE_REFS
  Py_ssize_t ob_refcnt;
  PyTypeObject* ob_type;
};
