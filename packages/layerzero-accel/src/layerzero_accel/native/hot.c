/* The hot path in C: read the key off the arguments, find the bound kernel in the World's table, call it.
 *
 * Every doubt ends in the same function in Python: an argument that is no plain tensor, a gradient, autocast, a tensor
 * DLPack cannot lend (vmap's, a fake, a sparse one, one of the meta device), a World that counts its calls, a guard that
 * does not hold, a key that is not known yet. After such a call the choice Python has made is learnt, if it is hot there.
 */
#include "call.h"

#define SEAM 5 /* what core and this library agree on; core refuses another number */

static PyObject *count(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K}", "exact", counts.exact, "bucketed", counts.bucketed,
                         "python", counts.python, "learnt", counts.learnt, "dropped", counts.dropped);
}

static PyObject *forget(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    remember(NULL, NULL);
    Py_IncRef(Py_None);
    return Py_None;
}

/* modes() -> None where torch has no shortcuts, else (records gradients, casts) as they say it now. */
static PyObject *modes(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    if (shortcut.autocast_enabled == NULL) {
        Py_IncRef(Py_None);
        return Py_None;
    }
    return Py_BuildValue("(ii)", shortcut.grad_enabled(),
                         shortcut.autocast_enabled(TORCH_CPU) || shortcut.autocast_enabled(TORCH_CUDA));
}

/* follows() -> None where torch has no shortcuts, else whether they say that something follows every op here. */
static PyObject *follows(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *found = Py_None;
    if (shortcut.key_included != NULL) {
        int before = shortcut.trusted;
        shortcut.trusted = 1;
        found = followed() ? Py_True : Py_False;
        shortcut.trusted = before;
    }
    Py_IncRef(found);
    return found;
}

static PyObject *trust(PyObject *module, PyObject *answer)
{
    (void)module;
    shortcut.trusted = answer == Py_True && shortcut.autocast_enabled != NULL;
    Py_IncRef(Py_None);
    return Py_None;
}

/* Each op is a plain built-in function without `self`: it pickles by name, and Dynamo takes it like any other. */
#define EACH(X)                                                                                                        \
    X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15) X(16) X(17) X(18) X(19)      \
    X(20) X(21) X(22) X(23) X(24) X(25) X(26) X(27) X(28) X(29) X(30) X(31) X(32) X(33) X(34) X(35) X(36) X(37) X(38)  \
    X(39) X(40) X(41) X(42) X(43) X(44) X(45) X(46) X(47)
#define ENTRANCE(N)                                                                                                    \
    static PyObject *entrance_##N(PyObject *self, PyObject *const *args, Py_ssize_t given, PyObject *names)            \
    {                                                                                                                  \
        (void)self;                                                                                                    \
        return call(&ops[N], args, given, names);                                                                      \
    }
EACH(ENTRANCE)
#define NAMED(N) entrance_##N,
static const KeywordCFunction entrances[MOST_OPS] = {EACH(NAMED)};

/* What each default adds to a key, found by adding it; one that has no key is a mistake in the description. */
static int read_defaults(Op *op)
{
    for (int i = op->required; i < op->count; i++) {
        Call c;
        Parameter *p = &op->parameters[i];
        PyObject *fallback = p->fallback;
        c.values[i] = fallback;
        c.key.words[0] = 0;
        c.key.length = c.word_count = c.owned_count = 0;
        p->fallback = NULL; /* looked at like any value */
        int fine = p->kind != TENSOR && (p->kind != MAYBE || fallback == Py_None) && add_parameter(op, &c, i);
        p->fallback = fallback;
        release(&c);
        if (!fine) {
            PyErr_Format(PyExc_ValueError, "the default of parameter %d does not suit its kind", i);
            return -1;
        }
        p->word = c.key.words[0];
    }
    return 0;
}

static int read_parameters(Op *op, PyObject *described)
{
    op->count = (int)PyTuple_Size(described);
    op->positional = op->tensor_count = op->required = 0;
    op->layout = op->backend = -1;
    if (op->count < 1 || op->count > MOST_PARAMETERS) {
        PyErr_SetString(PyExc_ValueError, "1 to 16 parameters");
        return -1;
    }
    for (int i = 0; i < op->count; i++) {
        Parameter *to = &op->parameters[i];
        PyObject *name, *kind, *fallback = NULL;
        int by_position;
        if (!PyArg_ParseTuple(PyTuple_GetItem(described, i), "OOp|O:parameter", &name, &kind, &by_position, &fallback))
            return -1;
        const char *letter = PyUnicode_AsUTF8AndSize(kind, NULL);
        if (letter == NULL)
            return -1;
        if (strchr("TONWFZYAI", letter[0]) == NULL || letter[0] == 0 || letter[1] != 0) {
            PyErr_Format(PyExc_ValueError, "kind %s: one of T O N W F Z Y A I", letter);
            return -1;
        }
        op->positional += by_position;
        if (by_position && op->positional != i + 1) {
            PyErr_SetString(PyExc_ValueError, "positional parameters come first");
            return -1;
        }
        if (PyUnicode_CompareWithASCIIString(name, "layout") == 0)
            op->layout = i;
        if (PyUnicode_CompareWithASCIIString(name, "backend") == 0)
            op->backend = i;
        Py_IncRef(name);
        PyUnicode_InternInPlace(&name);
        Py_IncRef(fallback);
        if (fallback != NULL && TYPE(fallback) == &PyUnicode_Type)
            PyUnicode_InternInPlace(&fallback);
        *to = (Parameter){name, fallback, 0, letter[0], strchr("TONW", letter[0]) != NULL};
        op->defaults[i] = fallback;
        if (fallback == NULL && op->required++ != i) {
            PyErr_SetString(PyExc_ValueError, "required parameters come first");
            return -1;
        }
        if (letter[0] == TENSOR || letter[0] == MAYBE)
            op->tensors[op->tensor_count++] = i;
    }
    return read_defaults(op);
}

/* function(name, module, doc, parameters, canonical, python, find, rescue, bucketed) -> a built-in function.
 *
 * `parameters` holds (name, kind, by_position[, default]) each, `canonical` the indices the kernel is called with.
 */
static PyObject *function(PyObject *module, PyObject *args)
{
    const char *name, *doc;
    PyObject *owner, *parameters, *canonical, *python, *find, *rescue;
    int bucketed;
    (void)module;
    if (!PyArg_ParseTuple(args, "sOsOOOOOp:function", &name, &owner, &doc, &parameters, &canonical, &python, &find,
                          &rescue, &bucketed))
        return NULL;
    if (torch.exchange == NULL || op_count >= MOST_OPS)
        return PyErr_Format(PyExc_RuntimeError, torch.exchange == NULL ? "not set up" : "48 functions at most");
    if (TYPE(parameters) != &PyTuple_Type || TYPE(canonical) != &PyTuple_Type)
        return PyErr_Format(PyExc_TypeError, "parameters and canonical are tuples");
    Op *op = &ops[op_count];
    if (read_parameters(op, parameters) < 0)
        return NULL;
    op->canonical_count = (int)PyTuple_Size(canonical);
    if (op->canonical_count < 1 || op->canonical_count > MOST_PARAMETERS)
        return PyErr_Format(PyExc_ValueError, "1 to 16 canonical arguments");
    for (int i = 0; i < op->canonical_count; i++) {
        long long index = PyLong_AsLongLong(PyTuple_GetItem(canonical, i));
        if (index < 0 || index >= op->count)
            return PyErr_Occurred() != NULL ? NULL : PyErr_Format(PyExc_ValueError, "no such parameter");
        op->canonical[i] = (int)index;
    }
    op->bucketed = bucketed;
    for (int i = 0; bucketed && i < 4; i++)
        if (op->count < 4 || op->layout < 0 || op->parameters[i].kind != (i < 3 ? TENSOR : MAYBE))
            return PyErr_Format(PyExc_ValueError, "a bucketed op begins with q, k, v, mask and has a layout");
    size_t name_size = strlen(name) + 1, doc_size = strlen(doc) + 1;
    char *texts = PyMem_Malloc(name_size + doc_size);
    if (texts == NULL)
        return PyErr_NoMemory();
    memcpy(texts, name, name_size);
    memcpy(texts + name_size, doc, doc_size);
    op->method = (PyMethodDef){texts, (PyCFunction)(void (*)(void))entrances[op_count], METH_FASTCALL | METH_KEYWORDS,
                               texts + name_size};
    op->python = python;
    op->find = find;
    op->rescue = rescue;
    PyObject *made = PyCFunction_NewEx(&op->method, NULL, owner);
    if (made == NULL) {
        PyMem_Free(texts);
        return NULL;
    }
    Py_IncRef(python);
    Py_IncRef(find);
    Py_IncRef(rescue);
    op_count++;
    return made;
}

static PyObject *as_bytes(const Key *key)
{
    return PyBytes_FromStringAndSize((const char *)key->words, key->length * (Py_ssize_t)sizeof(uint64_t));
}

/* key(name, values, edges) -> None or (exact, bucketed): for tests, which hold these against the keys in Python. */
static PyObject *key(PyObject *module, PyObject *args)
{
    const char *name;
    PyObject *values, *edges, *exact = NULL, *bucketed = NULL, *result = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "sOO:key", &name, &values, &edges))
        return NULL;
    Op *op = NULL;
    for (int i = 0; i < op_count; i++)
        if (strcmp(ops[i].method.ml_name, name) == 0)
            op = &ops[i];
    if (op == NULL || TYPE(values) != &PyTuple_Type || PyTuple_Size(values) != op->count)
        return PyErr_Format(PyExc_ValueError, "no such op, or not as many values as it has parameters");
    Call c;
    for (int i = 0; i < op->count; i++)
        c.values[i] = PyTuple_GetItem(values, i);
    Table table = {0};
    Key found;
    table_edges(&table, edges);
    if (!write_key(op, &c)) {
        Py_IncRef(Py_None);
        result = Py_None;
    } else if ((exact = as_bytes(&c.key)) != NULL) {
        if (!write_bucketed(op, &c, &table, &found)) {
            Py_IncRef(Py_None);
            bucketed = Py_None;
        } else {
            bucketed = as_bytes(&found);
        }
        if (bucketed != NULL)
            result = Py_BuildValue("(OO)", exact, bucketed);
    }
    Py_DecRef(exact);
    Py_DecRef(bucketed);
    PyMem_Free(table.edges);
    release(&c);
    return result;
}

static PyMethodDef methods[] = {
    {"setup", setup, METH_VARARGS, "setup(exchange, tensor, parameter, requires_grad, is_grad_enabled, any_autocast, "
                                   "deterministic, now, scope, another_now, a_bound, limit, dispatch_modes, tracing_state, "
                                   "forward_ad, profiler, followers)\n--\n\nSay once where torch keeps what a key reads."},
    {"function", function, METH_VARARGS, "function(name, module, doc, parameters, canonical, python, find, rescue, "
                                         "bucketed)\n--\n\nThe C form of a public function."},
    {"counts", count, METH_NOARGS, "counts()\n--\n\nCalls since the start: found exactly, by bucket, left to Python, learnt, "
                                   "tables dropped."},
    {"key", key, METH_VARARGS, "key(name, values, edges)\n--\n\nThe words of a call's keys, or None; for tests."},
    {"modes", modes, METH_NOARGS, "modes()\n--\n\nWhat torch's own libraries say of gradients and autocast, or None."},
    {"follows", follows, METH_NOARGS, "follows()\n--\n\nWhether torch's own libraries say that a mode, a tracer or "
                                      "functorch follows every op, or None."},
    {"trust", trust, METH_O, "trust(answer)\n--\n\nWhether calls may go by `modes`."},
    {"forget", forget, METH_NOARGS, "forget()\n--\n\nLet go of the World that was last met: it was replaced."},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    .m_base = {{1, NULL}, NULL, 0, NULL},
    .m_name = "layerzero_accel._hot",
    .m_doc = "LayerZero's hot path in C; see layerzero.dispatch.accel.",
    .m_size = -1,
    .m_methods = methods,
};

__attribute__((visibility("default"))) PyObject *PyInit__hot(void);

PyObject *PyInit__hot(void)
{
    fill_factors();
    if (table_type == NULL && (table_type = (PyTypeObject *)PyType_FromSpec(&table_spec)) == NULL)
        return NULL;
    PyObject *module = PyModule_Create2(&definition, PYTHON_ABI_VERSION);
    if (module == NULL || PyModule_AddIntConstant(module, "SEAM", SEAM) < 0
        || PyModule_AddStringConstant(module, "SOURCE", SOURCE_HASH) < 0
        || PyModule_AddObjectRef(module, "Table", (PyObject *)table_type) < 0) {
        Py_DecRef(module);
        return NULL;
    }
    return module;
}
