/* The table of one World: key -> bound kernel. A Python object that hangs in the World's memo and dies with it.
 *
 * Open addressing over entries that hold their whole key, so that a hash is never taken for an answer. Nothing here
 * calls into Python while the table is being changed: what an entry held is let go of afterwards.
 */
#ifndef LAYERZERO_TABLE_H
#define LAYERZERO_TABLE_H

#include "key.h"
#include "pyabi.h"

#define MOST_OPS 48

typedef struct {
    uint64_t hash;
    PyObject *bound;
    int length;      /* words of the key */
    int held_count;  /* objects whose identity stands in the key, kept alive so that no other can take their place */
    uint64_t words[];
} Entry;

typedef struct {
    PyObject base;
    PyObject *hot;         /* the World's own table in Python, a plain dict */
    Py_ssize_t hot_size;   /* its size when something was last learnt: a smaller one means it was emptied */
    Entry **slots;
    uint64_t mask;
    uint64_t used;
    Entry *recent[MOST_OPS]; /* what each op's last call found: the next one is often the same */
    int64_t *edges;        /* where the buckets of the KV length end; NULL while unknown */
    int64_t edge_count;
} Table;

static PyTypeObject *table_type;
static uint64_t most_entries;

static inline PyObject **held_of(Entry *entry)
{
    return (PyObject **)(entry->words + entry->length);
}

static void free_entry(Entry *entry)
{
    PyObject **held = held_of(entry);
    for (int i = 0; i < entry->held_count; i++)
        Py_DecRef(held[i]);
    Py_DecRef(entry->bound);
    PyMem_Free(entry);
}

static inline int is_entry_of(const Entry *entry, const Key *key)
{
    return entry->length == key->length
        && memcmp(entry->words, key->words, (size_t)key->length * sizeof(uint64_t)) == 0;
}

static inline Entry *table_find(const Table *table, const Key *key, uint64_t hash)
{
    if (table->slots == NULL)
        return NULL;
    for (uint64_t place = hash >> 20;; place++) {
        Entry *entry = table->slots[place & table->mask];
        if (entry == NULL)
            return NULL;
        if (entry->hash == hash && is_entry_of(entry, key))
            return entry;
    }
}

static void put(Entry **slots, uint64_t mask, Entry *entry)
{
    uint64_t place = entry->hash >> 20;
    while (slots[place & mask] != NULL)
        place++;
    slots[place & mask] = entry;
}

/* Forget every entry. */
static void table_empty(Table *table)
{
    Entry **slots = table->slots;
    uint64_t count = slots == NULL ? 0 : table->mask + 1;
    table->slots = NULL;
    table->mask = table->used = 0;
    memset(table->recent, 0, sizeof(table->recent));
    for (uint64_t i = 0; i < count; i++)
        if (slots[i] != NULL)
            free_entry(slots[i]);
    PyMem_Free(slots);
}

static int table_grow(Table *table)
{
    uint64_t size = table->slots == NULL ? 64 : (table->mask + 1) * 2;
    Entry **slots = PyMem_Calloc(size, sizeof(Entry *));
    if (slots == NULL)
        return -1;
    for (uint64_t i = 0; table->slots != NULL && i <= table->mask; i++)
        if (table->slots[i] != NULL)
            put(slots, size - 1, table->slots[i]);
    PyMem_Free(table->slots);
    table->slots = slots;
    table->mask = size - 1;
    return 0;
}

/* Enter a key; one that is there already gets the new answer. Memory that is missing is no error: it stays cold. */
static void table_insert(Table *table, const Key *key, PyObject *bound, PyObject *const *held, int held_count)
{
    uint64_t hash = hash_of(key);
    Entry *entry = table_find(table, key, hash);
    if (entry != NULL) {
        PyObject *before = entry->bound;
        Py_IncRef(bound);
        entry->bound = bound;
        Py_DecRef(before);
        return;
    }
    if (table->used >= most_entries)
        table_empty(table);
    if ((table->slots == NULL || table->used * 2 > table->mask) && table_grow(table) < 0)
        return;
    entry = PyMem_Malloc(sizeof(Entry) + (size_t)key->length * sizeof(uint64_t) + (size_t)held_count * sizeof(PyObject *));
    if (entry == NULL)
        return;
    entry->hash = hash;
    entry->length = key->length;
    entry->held_count = held_count;
    memcpy(entry->words, key->words, (size_t)key->length * sizeof(uint64_t));
    for (int i = 0; i < held_count; i++) {
        Py_IncRef(held[i]);
        held_of(entry)[i] = held[i];
    }
    Py_IncRef(bound);
    entry->bound = bound;
    put(table->slots, table->mask, entry);
    table->used++;
}

/* -- as a Python object ------------------------------------------------------------------------------------------ */
static int table_traverse(PyObject *self, visitproc visit, void *arg)
{
    Table *table = (Table *)self;
    int stop = visit((PyObject *)TYPE(self), arg);
    if (!stop && table->hot != NULL)
        stop = visit(table->hot, arg);
    for (uint64_t i = 0; !stop && table->slots != NULL && i <= table->mask; i++) {
        Entry *entry = table->slots[i];
        if (entry == NULL)
            continue;
        stop = visit(entry->bound, arg);
        for (int j = 0; !stop && j < entry->held_count; j++)
            stop = visit(held_of(entry)[j], arg);
    }
    return stop;
}

static int table_clear(PyObject *self)
{
    Table *table = (Table *)self;
    PyObject *hot = table->hot;
    table->hot = NULL;
    table_empty(table);
    Py_DecRef(hot);
    return 0;
}

static void table_dealloc(PyObject *self)
{
    PyTypeObject *type = TYPE(self);
    PyObject_GC_UnTrack(self);
    table_clear(self);
    PyMem_Free(((Table *)self)->edges);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DecRef((PyObject *)type);
}

static PyType_Slot table_slots[] = {
    {Py_tp_traverse, (void *)table_traverse},
    {Py_tp_clear, (void *)table_clear},
    {Py_tp_dealloc, (void *)table_dealloc},
    {0, NULL},
};

static PyType_Spec table_spec = {
    "layerzero_accel.Table", sizeof(Table), 0, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, table_slots,
};

static Table *table_new(PyObject *hot)
{
    Table *table = (Table *)PyType_GenericAlloc(table_type, 0);
    if (table == NULL)
        return NULL;
    Py_IncRef(hot);
    table->hot = hot;
    return table;
}

/* Take the ends of the buckets from a tuple of ints; once, they are the World's for good. */
static void table_edges(Table *table, PyObject *edges)
{
    if (table->edges != NULL || TYPE(edges) != &PyTuple_Type)
        return;
    Py_ssize_t count = PyTuple_Size(edges);
    int64_t *found = PyMem_Malloc((size_t)(count + 1) * sizeof(int64_t));
    if (found == NULL)
        return;
    for (Py_ssize_t i = 0; i < count; i++) {
        found[i] = PyLong_AsLongLong(PyTuple_GetItem(edges, i));
        if (found[i] == -1 && PyErr_Occurred() != NULL) {
            PyErr_Clear();
            PyMem_Free(found);
            return;
        }
    }
    table->edges = found;
    table->edge_count = count;
}

#endif
