/* A call as far as it is understood: its arguments by parameter, and its keys. */
#ifndef LAYERZERO_KEYING_H
#define LAYERZERO_KEYING_H

#include <math.h>

#include "bucketed.h"
#include "ops.h"

/* A call as far as it is understood. `words` are the objects whose identity is in the key; the last `owned` of them
 * are references of our own. */
typedef struct {
    PyObject *values[MOST_PARAMETERS];
    PyObject *words[MOST_PARAMETERS];
    PyObject *owned[MOST_PARAMETERS];
    int word_count, owned_count;
    Key key;
    int rest; /* words of the key before q, k and v */
    View views[3];
    int64_t sizes[3][4], steps[3][4];
} Call;

static void release(Call *c)
{
    for (int i = 0; i < c->owned_count; i++)
        Py_DecRef(c->owned[i]);
    c->owned_count = c->word_count = 0;
}

/* The arguments by parameter; 0 where Python must say what is wrong with them. */
static inline int bind(const Op *op, Call *c, PyObject *const *args, Py_ssize_t given, PyObject *names)
{
    if (given > op->positional)
        return 0;
    memcpy(c->values, op->defaults, (size_t)op->count * sizeof(PyObject *));
    for (Py_ssize_t i = 0; i < given; i++)
        c->values[i] = args[i];
    Py_ssize_t named = names == NULL ? 0 : PyTuple_Size(names);
    for (Py_ssize_t n = 0; n < named; n++) {
        PyObject *name = PyTuple_GetItem(names, n);
        int i = (int)given; /* what was given by position may not be named again */
        while (i < op->count && op->parameters[i].name != name)
            i++;
        if (i == op->count)
            return 0; /* unknown, given twice, or a name that is not interned */
        c->values[i] = args[given + n];
    }
    for (int i = (int)given; i < op->required; i++)
        if (c->values[i] == NULL)
            return 0;
    return 1;
}

static inline int is_plain(PyObject *object)
{
    return TYPE(object) == torch.tensor || TYPE(object) == torch.parameter;
}

/* 1, 0, or -1 where torch gives no answer. Autocast of the CPU and of CUDA: what is on for another kind of device
 * touches neither, and tensors of another kind have no key here (see `add_view`). */
static inline int records_gradients(void)
{
    return shortcut.trusted ? shortcut.grad_enabled() : truth(ask(&torch.grad_enabled));
}

static inline int casts(void)
{
    return shortcut.trusted ? shortcut.autocast_enabled(TORCH_CPU) || shortcut.autocast_enabled(TORCH_CUDA)
                            : truth(ask(&torch.any_autocast));
}

/* Whether a dispatch mode, the tracer or functorch follows every op of this thread; what cannot be asked is a yes. */
static inline int followed(void)
{
    if (shortcut.trusted) {
        for (int i = 0; i < shortcut.follower_count; i++)
            if (shortcut.key_included(shortcut.followers[i]))
                return 1;
        return 0;
    }
    PyObject *modes = ask(&torch.dispatch_modes);
    int found = modes == NULL || PyLong_AsLongLong(modes) != 0;
    Py_DecRef(modes);
    PyObject *state = found ? NULL : ask(&torch.tracing_state);
    found = found || state != Py_None;
    Py_DecRef(state);
    if (PyErr_Occurred() != NULL)
        PyErr_Clear();
    return found;
}

/* Whether torch wants to see this call (`layerzero.dispatch.hot.watched`): then it is Python's to show it. */
static inline int watched(void)
{
    PyObject *level = PyDict_GetItemWithError(torch.forward_ad, torch.current_level);
    PyObject *profiling = PyDict_GetItemWithError(torch.profiler, torch.is_profiler_enabled);
    if (level == NULL || profiling != Py_False)
        return 1;
    return PyLong_AsLongLong(level) >= 0 || followed();
}

/* Types and torch's modes. Everything that may run Python code comes here, before any view is lent. */
static inline int readable(const Op *op, const Call *c, int *deterministic)
{
    int grad = records_gradients();
    if (grad < 0 || watched())
        return 0;
    for (int n = 0; n < op->tensor_count; n++) {
        int i = op->tensors[n];
        PyObject *value = c->values[i];
        if (value == Py_None && op->parameters[i].kind == MAYBE)
            continue;
        if (!is_plain(value) || (grad && needs_grad(value) != 0))
            return 0;
    }
    *deterministic = truth(ask(&torch.deterministic));
    return *deterministic >= 0 && casts() == 0;
}

static inline int add_view(Key *key, PyObject *tensor, View *view)
{
    if (torch.exchange->view(tensor, view) != 0) {
        PyErr_Clear();
        return 0;
    }
    if (shortcut.trusted && view->device_type > DL_CUDA_HOST && view->device_type != DL_ROCM
        && view->device_type != DL_ROCM_HOST)
        return 0; /* autocast was not asked for its device; torch's name for ROCm is CUDA */
    if (!keyable(view) || key->length + 1 + 2 * MOST_AXES + MOST_PARAMETERS > MOST_WORDS)
        return 0;
    add_tensor(key, view);
    return 1;
}

static inline int add_word(Call *c, PyObject *value)
{
    /* A dtype is one object that lives as long as torch. */
    if (value != Py_None && value != Py_True && value != Py_False && TYPE(value) != torch.dtype) {
        if (TYPE(value) != &PyUnicode_Type)
            return 0;
        Py_IncRef(value);
        PyUnicode_InternInPlace(&value); /* one object for each text, so that identity means equality */
        c->owned[c->owned_count++] = value;
    }
    c->words[c->word_count++] = value;
    c->key.words[c->key.length++] = (uint64_t)(uintptr_t)value;
    return 1;
}

static inline int add_parameter(const Op *op, Call *c, int i)
{
    const Parameter *p = &op->parameters[i];
    PyObject *value = c->values[i];
    View view;
    if (value == p->fallback) { /* judged once and for all; core keeps it alive */
        c->key.words[c->key.length] = p->word;
        c->key.length += p->keyed;
        return 1;
    }
    switch (p->kind) {
    case MAYBE:
        if (value == Py_None) {
            c->key.words[c->key.length++] = 0;
            return 1;
        }
        return add_view(&c->key, value, &view);
    case TENSOR:
        return add_view(&c->key, value, &view);
    case NUMBER:
        if (TYPE(value) != &PyFloat_Type && TYPE(value) != &PyLong_Type && value != Py_None)
            return 0;
        if (TYPE(value) == &PyFloat_Type && !isfinite(PyFloat_AsDouble(value)))
            return 0; /* refused, in Python */
        c->key.words[c->key.length++] = TYPE(value) == &PyFloat_Type ? 1 : value == Py_None ? 3 : 2;
        return 1;
    case WORD:
        return add_word(c, value);
    case FINITE:
        return value == Py_None || (TYPE(value) == &PyFloat_Type && isfinite(PyFloat_AsDouble(value)));
    case ZERO:
        return TYPE(value) == &PyFloat_Type && PyFloat_AsDouble(value) == 0.0;
    case ABSENT: /* 0 means that it is not asked for */
        return TYPE(value) == &PyFloat_Type && PyFloat_AsDouble(value) == 0.0;
    case NOTHING:
        return value == Py_None;
    default:
        return p->kind == IGNORED;
    }
}

/* The exact key of the call; 0 when it has none. */
static inline int write_key(const Op *op, Call *c)
{
    int deterministic, first = op->bucketed ? 3 : 0;
    c->word_count = c->owned_count = 0;
    if (!readable(op, c, &deterministic))
        return 0;
    c->key.words[0] = (uint64_t)(op - ops) << 1 | (uint64_t)deterministic;
    c->key.length = 1;
    for (int i = first; i < op->count; i++)
        if (!add_parameter(op, c, i))
            return 0;
    c->rest = c->key.length;
    for (int i = 0; i < first; i++) {
        View *view = &c->views[i];
        if (!add_view(&c->key, c->values[i], view))
            return 0;
        if (view->ndim == 4) { /* a copy: the shape is torch's, and may be gone when the bucketed key is asked for */
            memcpy(c->sizes[i], view->shape, sizeof(c->sizes[i]));
            memcpy(c->steps[i], view->strides, sizeof(c->steps[i]));
        }
        view->shape = c->sizes[i];
        view->strides = c->steps[i];
    }
    return 1;
}

static int write_bucketed(const Op *op, const Call *c, const Table *table, Key *out)
{
    if (!op->bucketed || table->edges == NULL || c->values[3] != Py_None)
        return 0;
    PyObject *layout = c->values[op->layout];
    if (TYPE(layout) != &PyUnicode_Type)
        return 0; /* None, a flag or a dtype: Python refuses it */
    return bucketed_key(out, &c->views[0], &c->views[1], &c->views[2],
                        layout == torch.sequence_first || PyUnicode_CompareWithASCIIString(layout, "BSHD") == 0,
                        c->key.words, c->rest, table->edges, table->edge_count);
}

#endif
