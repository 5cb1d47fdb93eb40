/* The part of Python's stable ABI (3.11) that is used here, declared so that no Python headers are needed to build and
 * one binary serves every later Python. Reference counts go through functions: only Python itself knows which objects
 * are immortal in its version.
 */
#ifndef LAYERZERO_PYABI_H
#define LAYERZERO_PYABI_H

#include <stddef.h>
#include <stdint.h>

typedef ptrdiff_t Py_ssize_t;
typedef struct _typeobject PyTypeObject;
typedef struct _object { /* as in every build that loads abi3 libraries */
    Py_ssize_t ob_refcnt;
    PyTypeObject *ob_type;
} PyObject;

typedef PyObject *(*PyCFunction)(PyObject *, PyObject *);
typedef PyObject *(*FastCFunction)(PyObject *, PyObject *const *, Py_ssize_t);
typedef PyObject *(*KeywordCFunction)(PyObject *, PyObject *const *, Py_ssize_t, PyObject *);
typedef PyObject *(*descrgetfunc)(PyObject *, PyObject *, PyObject *);
typedef int (*visitproc)(PyObject *, void *);
typedef void (*freefunc)(void *);

enum { METH_VARARGS = 1, METH_NOARGS = 4, METH_O = 8, METH_FASTCALL = 0x80, METH_KEYWORDS = 2 };
enum { Py_tp_clear = 51, Py_tp_dealloc = 52, Py_tp_descr_get = 54, Py_tp_traverse = 71, Py_tp_free = 74 };
#define Py_TPFLAGS_DISALLOW_INSTANTIATION (1ul << 7)
#define Py_TPFLAGS_HAVE_GC (1ul << 14)
#define PYTHON_ABI_VERSION 3

typedef struct {
    const char *ml_name;
    PyCFunction ml_meth;
    int ml_flags;
    const char *ml_doc;
} PyMethodDef;

typedef struct {
    PyObject ob_base;
    PyObject *(*m_init)(void);
    Py_ssize_t m_index;
    PyObject *m_copy;
} PyModuleDef_Base;

typedef struct {
    PyModuleDef_Base m_base;
    const char *m_name;
    const char *m_doc;
    Py_ssize_t m_size;
    PyMethodDef *m_methods;
    void *m_slots;
    void *m_traverse;
    void *m_clear;
    void *m_free;
} PyModuleDef;

typedef struct {
    int slot;
    void *pfunc;
} PyType_Slot;

typedef struct {
    const char *name;
    int basicsize;
    int itemsize;
    unsigned int flags;
    PyType_Slot *slots;
} PyType_Spec;

extern PyTypeObject PyUnicode_Type, PyFloat_Type, PyLong_Type, PyDict_Type, PyTuple_Type, PyCFunction_Type;
extern PyObject _Py_NoneStruct, _Py_TrueStruct, _Py_FalseStruct;
extern const unsigned long Py_Version;
extern PyObject *PyExc_Exception, *PyExc_TypeError, *PyExc_ValueError, *PyExc_RuntimeError;
#define Py_None (&_Py_NoneStruct)
#define Py_True (&_Py_TrueStruct)
#define Py_False (&_Py_FalseStruct)
#define TYPE(object) (((PyObject *)(object))->ob_type)

void Py_IncRef(PyObject *);
void Py_DecRef(PyObject *); /* both take NULL */
PyObject *PyModule_Create2(PyModuleDef *, int);
int PyModule_AddObjectRef(PyObject *, const char *, PyObject *);
int PyModule_AddIntConstant(PyObject *, const char *, long);
int PyModule_AddStringConstant(PyObject *, const char *, const char *);
PyObject *PyType_FromSpec(PyType_Spec *);
void *PyType_GetSlot(PyTypeObject *, int);
PyObject *PyType_GenericAlloc(PyTypeObject *, Py_ssize_t);
void PyObject_GC_UnTrack(void *);
PyObject *PyCFunction_NewEx(PyMethodDef *, PyObject *, PyObject *);
PyCFunction PyCFunction_GetFunction(PyObject *);
PyObject *PyCFunction_GetSelf(PyObject *);
int PyCFunction_GetFlags(PyObject *);
void *PyCapsule_GetPointer(PyObject *, const char *);
PyObject *PyImport_ImportModule(const char *);
PyObject *PyObject_GetAttr(PyObject *, PyObject *);
PyObject *PyObject_GetAttrString(PyObject *, const char *);
int PyObject_SetAttr(PyObject *, PyObject *, PyObject *);
int PyObject_IsTrue(PyObject *);
PyObject *PyObject_Call(PyObject *, PyObject *, PyObject *);
PyObject *PyObject_CallNoArgs(PyObject *);
PyObject *PyObject_CallFunctionObjArgs(PyObject *, ...);
PyObject *PyObject_CallMethodObjArgs(PyObject *, PyObject *, ...);
PyObject *PyNumber_Add(PyObject *, PyObject *);
PyObject *PyDict_New(void);
PyObject *PyDict_GetItemWithError(PyObject *, PyObject *);
int PyDict_SetItem(PyObject *, PyObject *, PyObject *);
Py_ssize_t PyDict_Size(PyObject *);
PyObject *PyTuple_New(Py_ssize_t);
PyObject *PyTuple_GetItem(PyObject *, Py_ssize_t);
int PyTuple_SetItem(PyObject *, Py_ssize_t, PyObject *);
Py_ssize_t PyTuple_Size(PyObject *);
PyObject *PyUnicode_InternFromString(const char *);
void PyUnicode_InternInPlace(PyObject **);
int PyUnicode_CompareWithASCIIString(PyObject *, const char *);
const char *PyUnicode_AsUTF8AndSize(PyObject *, Py_ssize_t *);
PyObject *PyBytes_FromStringAndSize(const char *, Py_ssize_t);
double PyFloat_AsDouble(PyObject *);
long long PyLong_AsLongLong(PyObject *);
PyObject *PyLong_FromLongLong(long long);
PyObject *Py_BuildValue(const char *, ...);
int PyArg_ParseTuple(PyObject *, const char *, ...);
void PyErr_SetString(PyObject *, const char *);
PyObject *PyErr_Format(PyObject *, const char *, ...);
PyObject *PyErr_NoMemory(void);
PyObject *PyErr_Occurred(void);
int PyErr_ExceptionMatches(PyObject *);
void PyErr_Clear(void);
void PyErr_Fetch(PyObject **, PyObject **, PyObject **);
void PyErr_NormalizeException(PyObject **, PyObject **, PyObject **);
int PyException_SetTraceback(PyObject *, PyObject *);
void *PyMem_Malloc(size_t);
void *PyMem_Calloc(size_t, size_t);
void PyMem_Free(void *);

#endif
