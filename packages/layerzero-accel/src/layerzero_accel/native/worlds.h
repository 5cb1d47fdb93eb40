/* Which World a call is made in, and the table that hangs on it. */
#ifndef LAYERZERO_WORLDS_H
#define LAYERZERO_WORLDS_H

#include "ops.h"

/* The World of the active scope, else the current one; NULL where there is none to be had, with the exception of what
 * was raised in Python on the way there. */
static inline PyObject *current_world(void)
{
    PyObject *active = ask(&torch.scope);
    PyObject *world = NULL;
    if (active == Py_None)
        world = read_slot(torch.now, &torch.world);
    else if (active != NULL)
        world = PyObject_CallMethodObjArgs(active, torch.world.name, NULL);
    Py_DecRef(active);
    return world;
}

/* The World last met and its table. Core calls `forget` when it replaces a World, so that it is not kept alive here. */
static struct {
    PyObject *world;
    Table *table;
} last;

static void remember(PyObject *world, Table *table)
{
    PyObject *old_world = last.world, *old_table = (PyObject *)last.table;
    Py_IncRef(world);
    Py_IncRef((PyObject *)table);
    last.world = world;
    last.table = table;
    Py_DecRef(old_table);
    Py_DecRef(old_world);
}

/* Has somebody emptied the World's own table? What hung on it goes too: 0, there is nothing to find. */
static inline int check_size(Table *table)
{
    Py_ssize_t size = PyDict_Size(table->hot);
    if (size >= table->hot_size)
        return 1;
    Py_IncRef((PyObject *)table); /* what is let go of may run anything */
    table->hot_size = size;
    counts.dropped++;
    table_empty(table);
    Py_DecRef((PyObject *)table);
    return 0;
}

/* The World's table, made when `create` says so. A reference of our own, or NULL without an exception. */
static Table *table_of(PyObject *world, int create)
{
    PyObject *memo = PyObject_GetAttr(world, torch.memo), *hot = NULL;
    Table *table = NULL;
    if (memo != NULL && TYPE(memo) == &PyDict_Type) {
        table = (Table *)PyDict_GetItemWithError(memo, torch.accel);
        if (table != NULL && TYPE(table) != table_type)
            table = NULL;
        else if (table != NULL)
            Py_IncRef((PyObject *)table);
        else if (create && (hot = PyObject_GetAttr(world, torch.hot)) != NULL && TYPE(hot) == &PyDict_Type) {
            table = table_new(hot); /* a table of another type counts its calls: those are Python's */
            if (table != NULL && PyDict_SetItem(memo, torch.accel, (PyObject *)table) < 0) {
                Py_DecRef((PyObject *)table);
                table = NULL;
            }
        }
    }
    Py_DecRef(hot);
    Py_DecRef(memo);
    if (PyErr_Occurred() != NULL)
        PyErr_Clear();
    if (table != NULL && table->hot == NULL) { /* the garbage collector has taken it apart */
        Py_DecRef((PyObject *)table);
        table = NULL;
    }
    return table;
}

/* The same for a lookup: the World last met is known by its identity, which our reference keeps from being reused. The
 * table is borrowed: it is held here until the next call that runs Python code. */
static inline Table *table_to_read(PyObject *world)
{
    Table *table;
    if (world == last.world && last.table->hot != NULL) {
        table = last.table;
    } else if ((table = table_of(world, 0)) != NULL) {
        remember(world, table);
        Py_DecRef((PyObject *)table);
    }
    return table != NULL && check_size(table) ? table : NULL;
}

#endif
