/* What core tells us once: where torch and the runtime keep what a key depends on, and the shape of each op's call. */
#ifndef LAYERZERO_OPS_H
#define LAYERZERO_OPS_H

#include <dlfcn.h>
#include <stdbool.h>

/* By the versions these have had since the first glibc of the processor: the linker would take the newest, 2.34, and the
 * library would ask for that C library without using anything of it. They are the same functions. */
#if defined(__GLIBC__) && defined(__x86_64__)
#define OLDEST(name) __asm__(".symver " #name "," #name "@GLIBC_2.2.5")
#elif defined(__GLIBC__) && defined(__aarch64__)
#define OLDEST(name) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif
#ifdef OLDEST
OLDEST(dlopen);
OLDEST(dlsym);
OLDEST(dlclose);
#endif

#include "pyabi.h"
#include "table.h"

#define MOST_PARAMETERS 16

/* How a parameter enters the key. Anything else than what its kind takes is Python's to judge. */
enum Kind {
    TENSOR = 'T',   /* a plain tensor */
    MAYBE = 'O',    /* a plain tensor or None */
    NUMBER = 'N',   /* a finite float or an int, by type; or None */
    WORD = 'W',     /* None, True, False, a dtype or a str, by identity */
    FINITE = 'F',   /* None or a finite float, not keyed */
    ZERO = 'Z',     /* 0.0 */
    ABSENT = 'Y',   /* 0.0; kernels are told None */
    NOTHING = 'A',  /* None */
    IGNORED = 'I',  /* anything, not looked at */
};

typedef struct {
    PyObject *name;     /* interned */
    PyObject *fallback; /* the default; NULL: required */
    uint64_t word;      /* what the default adds to a key, where `keyed` */
    char kind, keyed;
} Parameter;

typedef struct {
    PyObject *python; /* the same function in Python: what runs whenever there is no key */
    PyObject *find;   /* (world, arguments, layout, backend) -> None or (bound, edges) */
    PyObject *rescue; /* (error, world, bound, arguments, layout, backend) -> result */
    Parameter parameters[MOST_PARAMETERS];
    PyObject *defaults[MOST_PARAMETERS];
    int count, positional, required; /* parameters; how many may be given by position; how many have no default */
    int tensors[MOST_PARAMETERS];   /* which of them are tensors */
    int tensor_count;
    int canonical[MOST_PARAMETERS]; /* the kernel's arguments, as indices of parameters */
    int canonical_count;
    int layout, backend; /* indices; -1: the op has none */
    int bucketed;        /* the first three tensors are q, k, v, and the length of k and v grows; the fourth is a mask */
    PyMethodDef method;
} Op;

/* A function of torch without arguments, called without Python's machinery where it is a plain C function. */
typedef struct {
    PyObject *callable;
    PyCFunction direct;
    FastCFunction fast;
    PyObject *self;
} Asked;

/* An attribute that lives in a slot (__slots__) of exact type `owner`, read where it lies; offset 0: ask Python. */
typedef struct {
    PyTypeObject *owner;
    size_t offset;
    PyObject *name;
} Slot;

static struct {
    const Exchange *exchange;
    PyTypeObject *tensor, *parameter, *dtype;
    Asked grad_enabled, any_autocast, deterministic, scope, dispatch_modes, tracing_state;
    PyObject *forward_ad, *profiler; /* the namespaces of these modules, which say whether they are at work */
    PyObject *current_level, *is_profiler_enabled;
    PyObject *requires_grad;
    descrgetfunc get_requires_grad;
    PyObject *now;
    Slot world, guard, run;
    PyObject *memo, *hot, *bucketed_hits, *accel, *sequence_first, *one;
    /* In the stable ABI since 3.12, exported with the same signature before: found by name, and missed by nobody. */
    PyObject *(*vectorcall)(PyObject *, PyObject *const *, size_t, PyObject *);
} torch;

#define MOST_FOLLOWERS 8

/* Three modes by the names under which torch's own libraries export them: through Python's functions they cost as much
 * as two tensors, for those ask every kind of device there is. `followers` are the dispatch keys that a dispatch mode,
 * the tracer or functorch includes in a thread. Core lets them be used only after it has seen each of them say what
 * torch says, on and off; a torch without the names, or with other answers, is asked in Python's way. */
static struct {
    bool (*grad_enabled)(void);
    bool (*autocast_enabled)(signed char device_type);
    bool (*key_included)(unsigned short key);
    unsigned short followers[MOST_FOLLOWERS];
    int follower_count;
    int trusted;
} shortcut;
enum { TORCH_CPU = 0, TORCH_CUDA = 1 };

static void find_shortcuts(void)
{
    static const char *libraries[] = {"libc10.so", "libtorch_cpu.so", "libc10.so"};
    static const char *names[] = {"_ZN3c108GradMode10is_enabledEv",
                                  "_ZN2at8autocast19is_autocast_enabledEN3c1010DeviceTypeE",
                                  "_ZN3c104impl28tls_is_dispatch_key_includedENS_11DispatchKeyE"};
    void *found[3] = {NULL, NULL, NULL};
    for (int i = 0; i < 3; i++) {
        void *library = dlopen(libraries[i], RTLD_LAZY | RTLD_NOLOAD);
        if (library != NULL) {
            found[i] = dlsym(library, names[i]);
            dlclose(library); /* torch holds it */
        }
    }
    if (found[0] != NULL && found[1] != NULL && found[2] != NULL) {
        memcpy(&shortcut.grad_enabled, &found[0], sizeof(found[0]));
        memcpy(&shortcut.autocast_enabled, &found[1], sizeof(found[1]));
        memcpy(&shortcut.key_included, &found[2], sizeof(found[2]));
    }
}

static struct {
    unsigned long long exact, bucketed, python, learnt, dropped;
} counts;

static Op ops[MOST_OPS];
static int op_count;

static int ask_setup(Asked *asked, PyObject *callable)
{
    Py_IncRef(callable);
    asked->callable = callable;
    if (TYPE(callable) == &PyCFunction_Type) {
        int flags = PyCFunction_GetFlags(callable);
        if (flags == METH_NOARGS)
            asked->direct = PyCFunction_GetFunction(callable);
        else if (flags == METH_FASTCALL)
            asked->fast = (FastCFunction)(void (*)(void))PyCFunction_GetFunction(callable);
        asked->self = PyCFunction_GetSelf(callable);
        if (PyErr_Occurred() != NULL)
            return -1;
    }
    return 0;
}

static inline PyObject *ask(const Asked *asked)
{
    if (asked->direct != NULL)
        return asked->direct(asked->self, NULL);
    if (asked->fast != NULL)
        return asked->fast(asked->self, NULL, 0);
    return PyObject_CallNoArgs(asked->callable);
}

/* 1, 0, or -1 when the answer is neither True nor False; no exception is left behind. */
static inline int truth(PyObject *answer)
{
    int found = answer == Py_True ? 1 : answer == Py_False ? 0 : -1;
    if (answer == NULL)
        PyErr_Clear();
    else if (found < 0 || Py_Version < 0x030c0000) /* from 3.12 on True and False are immortal */
        Py_DecRef(answer);
    return found;
}

static inline int needs_grad(PyObject *tensor)
{
    return truth(torch.get_requires_grad(torch.requires_grad, tensor, (PyObject *)TYPE(tensor)));
}

/* The attribute, a reference of our own; NULL with an exception. */
static inline PyObject *read_slot(PyObject *object, const Slot *slot)
{
    if (slot->offset != 0 && TYPE(object) == slot->owner) {
        PyObject *found = *(PyObject *const *)((const char *)object + slot->offset);
        if (found != NULL) {
            Py_IncRef(found);
            return found;
        }
    }
    return PyObject_GetAttr(object, slot->name);
}

/* Find out where a slot lies: `example`, an object of the type that nobody else uses, is given a value no other slot
 * can hold, which is then looked for. Not found: the slot is asked for by name, as any attribute. */
static int slot_setup(Slot *slot, PyObject *example, const char *name)
{
    PyObject *size = PyObject_GetAttrString((PyObject *)TYPE(example), "__basicsize__");
    PyObject *mark = PyTuple_New(1);
    long long bytes = size == NULL ? -1 : PyLong_AsLongLong(size);
    int status = -1;
    Py_IncRef(Py_None);
    if (mark != NULL && PyTuple_SetItem(mark, 0, Py_None) == 0 && bytes > 0
        && (slot->name = PyUnicode_InternFromString(name)) != NULL
        && PyObject_SetAttr(example, slot->name, mark) == 0) {
        status = 0;
        Py_IncRef((PyObject *)TYPE(example));
        slot->owner = TYPE(example);
        for (size_t at = sizeof(PyObject); at + sizeof(mark) <= (size_t)bytes; at += sizeof(mark))
            if (memcmp((const char *)example + at, &mark, sizeof(mark)) == 0)
                slot->offset = at;
    }
    Py_DecRef(mark);
    Py_DecRef(size);
    return status;
}

static const Exchange *exchange_of(PyObject *capsule)
{
    const Exchange *found = PyCapsule_GetPointer(capsule, EXCHANGE_CAPSULE);
    while (found != NULL && found->major > EXCHANGE_MAJOR)
        found = found->older;
    if (found == NULL || found->major != EXCHANGE_MAJOR || found->view == NULL) {
        if (PyErr_Occurred() == NULL)
            PyErr_SetString(PyExc_ValueError, "the exchange table is not of DLPack 1 or cannot lend views");
        return NULL;
    }
    return found;
}

/* The dispatch keys by number; -1 with an exception where there are too many or one is no number. */
static int read_followers(PyObject *keys)
{
    Py_ssize_t count = TYPE(keys) == &PyTuple_Type ? PyTuple_Size(keys) : MOST_FOLLOWERS + 1;
    if (count > MOST_FOLLOWERS) {
        PyErr_SetString(PyExc_ValueError, "a tuple of at most 8 dispatch keys");
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        long long key = PyLong_AsLongLong(PyTuple_GetItem(keys, i));
        if (key < 0) {
            if (PyErr_Occurred() == NULL)
                PyErr_SetString(PyExc_ValueError, "a dispatch key below 0");
            return -1;
        }
        shortcut.followers[i] = (unsigned short)key;
    }
    shortcut.follower_count = (int)count;
    return 0;
}

/* setup(exchange, Tensor, Parameter, requires_grad, is_grad_enabled, any_autocast, deterministic, now, scope,
 *       another_now, a_bound, limit, dispatch_modes, tracing_state, forward_ad, profiler, followers): `another_now` and
 *       `a_bound` are examples of their types, to find their slots by; `forward_ad` and `profiler` are the namespaces of
 *       torch's modules. */
static PyObject *setup(PyObject *module, PyObject *args)
{
    PyObject *capsule, *tensor, *parameter, *descriptor, *grad, *autocast, *deterministic, *now, *scope, *another,
        *bound, *dispatch_modes, *tracing_state, *forward_ad, *profiler, *followers;
    unsigned long long limit;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOKOOOOO:setup", &capsule, &tensor, &parameter, &descriptor, &grad, &autocast,
                          &deterministic, &now, &scope, &another, &bound, &limit, &dispatch_modes, &tracing_state,
                          &forward_ad, &profiler, &followers))
        return NULL;
    if (torch.exchange != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "set up already");
        return NULL;
    }
    descrgetfunc get = (descrgetfunc)PyType_GetSlot(TYPE(descriptor), Py_tp_descr_get);
    const Exchange *exchange = exchange_of(capsule);
    if (exchange == NULL)
        return NULL;
    if (get == NULL || limit < 1) {
        PyErr_SetString(PyExc_TypeError, "requires_grad must be a descriptor, the limit at least 1");
        return NULL;
    }
    if (TYPE(forward_ad) != &PyDict_Type || TYPE(profiler) != &PyDict_Type) {
        PyErr_SetString(PyExc_TypeError, "forward_ad and profiler are namespaces");
        return NULL;
    }
    static const char *names[] = {"memo", "hot", "bucketed_hits", "accel", "BSHD", "_current_level",
                                  "_is_profiler_enabled"};
    PyObject **to[] = {&torch.memo,  &torch.hot, &torch.bucketed_hits, &torch.accel, &torch.sequence_first,
                       &torch.current_level, &torch.is_profiler_enabled};
    if (slot_setup(&torch.world, another, "world") < 0 || slot_setup(&torch.guard, bound, "guard") < 0
        || slot_setup(&torch.run, bound, "run") < 0)
        return NULL;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
        if ((*to[i] = PyUnicode_InternFromString(names[i])) == NULL)
            return NULL;
    if ((torch.one = PyLong_FromLongLong(1)) == NULL || ask_setup(&torch.grad_enabled, grad) < 0
        || ask_setup(&torch.any_autocast, autocast) < 0 || ask_setup(&torch.deterministic, deterministic) < 0
        || ask_setup(&torch.scope, scope) < 0 || ask_setup(&torch.dispatch_modes, dispatch_modes) < 0
        || ask_setup(&torch.tracing_state, tracing_state) < 0 || read_followers(followers) < 0)
        return NULL;
    PyObject *home = PyImport_ImportModule("torch"), *dtype = NULL;
    if (home != NULL)
        dtype = PyObject_GetAttrString(home, "dtype");
    Py_DecRef(home);
    if (dtype == NULL)
        return NULL;
    Py_IncRef(forward_ad);
    Py_IncRef(profiler);
    torch.forward_ad = forward_ad;
    torch.profiler = profiler;
    Py_IncRef(tensor);
    Py_IncRef(parameter);
    Py_IncRef(descriptor);
    Py_IncRef(now);
    torch.tensor = (PyTypeObject *)tensor;
    torch.parameter = (PyTypeObject *)parameter;
    torch.dtype = (PyTypeObject *)dtype;
    torch.requires_grad = descriptor;
    torch.get_requires_grad = get;
    torch.now = now;
    torch.vectorcall = (PyObject * (*)(PyObject *, PyObject *const *, size_t, PyObject *))(uintptr_t)
        dlsym(RTLD_DEFAULT, "PyObject_Vectorcall");
    find_shortcuts();
    most_entries = limit;
    torch.exchange = exchange; /* last: until then nothing is keyed */
    Py_IncRef(Py_None);
    return Py_None;
}

#endif
