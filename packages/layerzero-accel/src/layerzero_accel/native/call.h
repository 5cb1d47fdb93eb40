/* One call: bind its arguments, write its key, find, run; or hand it to Python and learn from what Python did. */
#ifndef LAYERZERO_CALL_H
#define LAYERZERO_CALL_H

#include "keying.h"
#include "worlds.h"

#define FREE_SLOT_BEFORE ((size_t)1 << (8 * sizeof(size_t) - 1)) /* PY_VECTORCALL_ARGUMENTS_OFFSET */

/* What a kernel is told of a parameter. */
static inline PyObject *told(const Op *op, const Call *c, int index)
{
    return op->parameters[index].kind == ABSENT ? Py_None : c->values[index];
}

static PyObject *arguments(const Op *op, const Call *c)
{
    PyObject *made = PyTuple_New(op->canonical_count);
    for (int i = 0; made != NULL && i < op->canonical_count; i++) {
        PyObject *value = told(op, c, op->canonical[i]);
        Py_IncRef(value);
        PyTuple_SetItem(made, i, value);
    }
    return made;
}

static inline PyObject *named(const Call *c, int index)
{
    return index < 0 ? Py_None : c->values[index];
}

/* The same call in Python, exactly as it was made. */
static PyObject *in_python(const Op *op, PyObject *const *args, Py_ssize_t given, PyObject *names)
{
    counts.python++;
    if (torch.vectorcall != NULL)
        return torch.vectorcall(op->python, args, (size_t)given, names);
    PyObject *positional = PyTuple_New(given), *keywords = NULL, *result = NULL;
    for (Py_ssize_t i = 0; positional != NULL && i < given; i++) {
        Py_IncRef(args[i]);
        PyTuple_SetItem(positional, i, args[i]);
    }
    int fine = positional != NULL;
    if (fine && names != NULL) {
        fine = (keywords = PyDict_New()) != NULL;
        for (Py_ssize_t i = 0; fine && i < PyTuple_Size(names); i++)
            fine = PyDict_SetItem(keywords, PyTuple_GetItem(names, i), args[given + i]) == 0;
    }
    if (fine)
        result = PyObject_Call(op->python, positional, keywords);
    Py_DecRef(positional);
    Py_DecRef(keywords);
    return result;
}

/* Take over what Python has made hot for this call. The key is written once more: a call that changed its own inputs,
 * or the modes of torch, teaches nothing. -1 for what `find` lets through: an interrupt, a handler's exception. */
static int learn(const Op *op, Call *c, PyObject *world)
{
    int status = 0;
    PyObject *given = arguments(op, c), *found = NULL;
    if (given != NULL)
        found = PyObject_CallFunctionObjArgs(op->find, world, given, named(c, op->layout), named(c, op->backend), NULL);
    if (found != NULL && TYPE(found) == &PyTuple_Type && PyTuple_Size(found) == 2) {
        Call again;
        memcpy(again.values, c->values, sizeof(again.values));
        again.word_count = again.owned_count = 0;
        Table *table = NULL;
        if (write_key(op, &again) && same_key(&again.key, &c->key) && (table = table_of(world, 1)) != NULL) {
            PyObject *bound = PyTuple_GetItem(found, 0), *edges = PyTuple_GetItem(found, 1);
            Key bucketed;
            table_insert(table, &c->key, bound, c->words, c->word_count);
            if (edges != Py_None) {
                table_edges(table, edges);
                if (write_bucketed(op, c, table, &bucketed))
                    table_insert(table, &bucketed, bound, c->words, c->word_count);
            }
            table->hot_size = PyDict_Size(table->hot);
            counts.learnt++;
        }
        Py_DecRef((PyObject *)table);
        release(&again);
    }
    if (PyErr_Occurred() != NULL) {
        status = given != NULL && found == NULL ? -1 : 0;
        if (status == 0)
            PyErr_Clear();
    }
    Py_DecRef(found);
    Py_DecRef(given);
    return status;
}

/* The kernel raised: core decides whose fault it was, and runs the next candidate where there is one. */
static PyObject *rescued(const Op *op, const Call *c, PyObject *world, PyObject *bound)
{
    PyObject *type, *error, *trace;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace != NULL)
        PyException_SetTraceback(error, trace);
    PyObject *given = arguments(op, c), *result = NULL;
    if (given != NULL)
        result = PyObject_CallFunctionObjArgs(op->rescue, error, world, bound, given, named(c, op->layout),
                                              named(c, op->backend), NULL);
    Py_DecRef(given);
    Py_DecRef(type);
    Py_DecRef(error);
    Py_DecRef(trace);
    return result;
}

static inline PyObject *run_bound(const Op *op, const Call *c, PyObject *world, PyObject *bound)
{
    PyObject *run = read_slot(bound, &torch.run), *result;
    if (run == NULL)
        return NULL;
    if (torch.vectorcall != NULL) {
        PyObject *stack[MOST_PARAMETERS + 1];
        for (int i = 0; i < op->canonical_count; i++)
            stack[i + 1] = told(op, c, op->canonical[i]);
        result = torch.vectorcall(run, stack + 1, (size_t)op->canonical_count | FREE_SLOT_BEFORE, NULL);
    } else {
        PyObject *given = arguments(op, c);
        result = given == NULL ? NULL : PyObject_Call(run, given, NULL);
        Py_DecRef(given);
    }
    Py_DecRef(run);
    return result != NULL ? result : rescued(op, c, world, bound);
}

/* 1: it may run; 0: not now; -1: the guard raised. */
static inline int guarded(PyObject *bound)
{
    if (torch.guard.offset != 0 && TYPE(bound) == torch.guard.owner
        && *(PyObject *const *)((const char *)bound + torch.guard.offset) == Py_None)
        return 1; /* most have none */
    PyObject *guard = read_slot(bound, &torch.guard);
    int holds = guard == NULL ? -1 : 1;
    if (guard != NULL && guard != Py_None) {
        PyObject *answer = PyObject_CallNoArgs(guard);
        holds = answer == NULL ? -1 : PyObject_IsTrue(answer);
        Py_DecRef(answer);
    }
    Py_DecRef(guard);
    return holds;
}

/* As core counts them; by a rare race one count may be lost, as in Python. */
static void count_bucketed(void)
{
    PyObject *before = PyObject_GetAttr(torch.now, torch.bucketed_hits);
    PyObject *after = before == NULL ? NULL : PyNumber_Add(before, torch.one);
    if (after == NULL || PyObject_SetAttr(torch.now, torch.bucketed_hits, after) < 0)
        PyErr_Clear();
    Py_DecRef(before);
    Py_DecRef(after);
    counts.bucketed++;
}

static Key last_bucketed; /* the exact key that was last found by its bucket */

static PyObject *find_bucketed(const Op *op, const Call *c, Table *table);

/* The bound kernel of this call, a reference of our own; NULL when the table, which is borrowed, does not know it. */
static inline PyObject *find_bound(const Op *op, const Call *c, Table *table)
{
    Entry **recent = &table->recent[op - ops], *entry = *recent;
    if (entry == NULL || !is_entry_of(entry, &c->key))
        entry = table_find(table, &c->key, hash_of(&c->key));
    if (entry != NULL) {
        *recent = entry;
        counts.exact++;
        Py_IncRef(entry->bound);
        return entry->bound;
    }
    Py_IncRef((PyObject *)table);
    PyObject *bound = find_bucketed(op, c, table);
    Py_DecRef((PyObject *)table);
    return bound;
}

static PyObject *find_bucketed(const Op *op, const Call *c, Table *table)
{
    Entry *entry;
    PyObject *bound = NULL;
    Key bucketed;
    if (write_bucketed(op, c, table, &bucketed) && (entry = table_find(table, &bucketed, hash_of(&bucketed))) != NULL) {
        bound = entry->bound;
        Py_IncRef(bound);
        /* Met twice in a row, by the next layer of the same step, the exact key is worth its place. */
        if (same_key(&last_bucketed, &c->key))
            table_insert(table, &c->key, bound, c->words, c->word_count);
        else
            memcpy(&last_bucketed, &c->key, offsetof(Key, words) + (size_t)c->key.length * sizeof(uint64_t));
        count_bucketed();
    }
    return bound;
}

static __attribute__((noinline)) PyObject *call(const Op *op, PyObject *const *args, Py_ssize_t given, PyObject *names)
{
    Call c;
    if (!bind(op, &c, args, given, names))
        return in_python(op, args, given, names);
    PyObject *world = NULL, *result = NULL, *bound = NULL;
    int guard = 0;
    if (write_key(op, &c) && (world = current_world()) != NULL) {
        Table *table = table_to_read(world);
        if (table != NULL)
            bound = find_bound(op, &c, table);
        if (bound != NULL)
            guard = guarded(bound);
    } else if (PyErr_Occurred() != NULL) {
        guard = -1; /* by a handler, while a scope was asked for its World */
    }
    if (guard > 0) {
        result = run_bound(op, &c, world, bound);
    } else if (guard == 0) {
        result = in_python(op, args, given, names);
        if (result != NULL && world != NULL && bound == NULL && learn(op, &c, world) < 0) {
            Py_DecRef(result);
            result = NULL;
        }
    }
    Py_DecRef(bound);
    Py_DecRef(world);
    release(&c);
    return result;
}

#endif
