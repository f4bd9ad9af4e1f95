/* Advice on the budget of a model that has not run yet: stagehand/budget.h. */
#include "convert.h"

#include <string.h>

#include "stagehand/budget.h"

typedef bool parser(PyObject *item, void *out);

/* Parses each item of an iterable into an array of `each` bytes, from PyMem_Malloc; NULL with an exception. */
static void *parse_list(PyObject *given, size_t each, parser *parse, uint32_t *out_count) {
    PyObject *items = PySequence_Tuple(given);
    if (!items) return NULL;
    Py_ssize_t count = PyTuple_Size(items);
    char *list = PyMem_Calloc((size_t)count + 1, each);
    if (!list) PyErr_NoMemory();
    for (Py_ssize_t i = 0; list && i < count; i++)
        if (!parse(PyTuple_GetItem(items, i), list + (size_t)i * each)) {
            PyMem_Free(list);
            list = NULL;
        }
    Py_DECREF(items);
    *out_count = (uint32_t)count;
    return list;
}

/* With its segment behind it. */
typedef struct weight {
    sth_budget_weight weight;
    sth_segment packed;
} weight;

static bool parse_weight(PyObject *item, void *out) {
    weight *w = out;
    PyObject *packed;
    char *bytes;
    Py_ssize_t size;
    if (!PyTuple_Check(item) ||
        !PyArg_ParseTuple(item, "O&O&O&O&O;a weight is (bytes, module, kind, flags, segment or None)", to_u64,
                          &w->weight.bytes, to_u32, &w->weight.module, to_u32, &w->weight.kind, to_u32,
                          &w->weight.flags, &packed)) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "weights are tuples");
        return false;
    }
    if (packed == Py_None) return true;
    if (PyBytes_AsStringAndSize(packed, &bytes, &size) < 0) return false;
    if (size != (Py_ssize_t)sizeof w->packed) {
        PyErr_SetString(PyExc_ValueError, "a segment comes from transfer_segments() or QuantFile.segment()");
        return false;
    }
    memcpy(&w->packed, bytes, sizeof w->packed);
    w->weight.packed = &w->packed;
    return true;
}

static bool parse_flags(PyObject *item, void *out) { return to_u32(item, out) != 0; }

static bool parse_pair(PyObject *item, void *out) {
    sth_budget_pair *pair = out;
    if (PyTuple_Check(item))
        return PyArg_ParseTuple(item, "O&O&;a pair is two numbers", to_u32, &pair->first, to_u32, &pair->second);
    PyErr_SetString(PyExc_TypeError, "owners and inside are tuples");
    return false;
}

/* What a model points to; freed with free_lists. */
typedef struct lists {
    weight *given;
    sth_budget_weight *weights;
    uint32_t *modules;
    sth_budget_pair *owners, *inside;
} lists;

static void free_lists(lists *l) {
    PyMem_Free(l->given);
    PyMem_Free(l->weights);
    PyMem_Free(l->modules);
    PyMem_Free(l->owners);
    PyMem_Free(l->inside);
}

static bool parse_model(PyObject *weights, PyObject *modules, PyObject *owners, PyObject *inside, lists *l,
                        sth_budget_model *m) {
    l->given = parse_list(weights, sizeof *l->given, parse_weight, &m->weight_count);
    l->modules = l->given ? parse_list(modules, sizeof *l->modules, parse_flags, &m->module_count) : NULL;
    l->owners = l->modules ? parse_list(owners, sizeof *l->owners, parse_pair, &m->owner_count) : NULL;
    l->inside = l->owners ? parse_list(inside, sizeof *l->inside, parse_pair, &m->inside_count) : NULL;
    if (!l->inside) return false;
    l->weights = PyMem_Calloc(m->weight_count + (size_t)1, sizeof *l->weights);
    if (!l->weights) return PyErr_NoMemory() != NULL;
    for (uint32_t i = 0; i < m->weight_count; i++) l->weights[i] = l->given[i].weight;
    m->weights = l->weights;
    m->modules = l->modules;
    m->owners = l->owners;
    m->inside = l->inside;
    return true;
}

static const field advice_fields[] = {
    FIELD(sth_budget_advice, works, BOOL),       FIELD(sth_budget_advice, piece_bytes, U64),
    FIELD(sth_budget_advice, stays_bytes, U64),  FIELD(sth_budget_advice, stage_bytes, U64),
    FIELD(sth_budget_advice, units_bytes, U64),  FIELD(sth_budget_advice, units_least, U64),
    FIELD(sth_budget_advice, least_room, U64),   FIELD(sth_budget_advice, smallest, U64),
    FIELD(sth_budget_advice, comfortable, U64),  FIELD(sth_budget_advice, stages, U32),
    FIELD_END,
};

/* Takes over the reference to `value`, which may be NULL. */
static bool put(PyObject *dict, const char *name, PyObject *value) {
    bool done = value && PyDict_SetItemString(dict, name, value) == 0;
    Py_XDECREF(value);
    return done;
}

static PyObject *units_of(const sth_budget_advice *a) {
    PyObject *list = PyList_New(a->weight_count);
    for (uint32_t i = 0; list && i < a->weight_count; i++) {
        PyObject *item = a->unit[i] == STH_BUDGET_STAYS ? Py_NewRef(Py_None) : PyLong_FromUnsignedLong(a->unit[i]);
        if (!item || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *keeps_of(const sth_budget_advice *a) {
    PyObject *list = PyList_New(a->unit_count);
    for (uint32_t i = 0; list && i < a->unit_count; i++) PyList_SetItem(list, i, PyBool_FromLong(a->keep[i]));
    return list;
}

static PyObject *advise(const sth_budget_model *m, uint64_t budget) {
    sth_budget_advice *advice = NULL;
    sth_status status;
    Py_BEGIN_ALLOW_THREADS
    status = sth_budget_advise(m, budget, &advice);
    Py_END_ALLOW_THREADS
    if (status != STH_OK) return raise_status(status);
    PyObject *dict = dict_of(advice, advice_fields);
    if (dict && !(put(dict, "unit", units_of(advice)) && put(dict, "keep", keeps_of(advice)))) Py_CLEAR(dict);
    sth_budget_advice_destroy(advice);
    return dict;
}

static PyObject *with_room(const sth_budget_model *m, uint64_t room) {
    uint64_t budget = 0;
    sth_status status;
    Py_BEGIN_ALLOW_THREADS
    status = sth_budget_with_room(m, room, &budget);
    Py_END_ALLOW_THREADS
    return status == STH_OK ? PyLong_FromUnsignedLongLong(budget) : raise_status(status);
}

PyObject *budget_advice(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"budget", "weights", "modules", "owners", "inside", "fixed", "one_extent", "room", NULL};
    PyObject *weights, *modules, *owners, *inside, *room = Py_None;
    int one_extent;
    uint64_t budget, bytes = 0;
    sth_budget_model m;
    lists l = {NULL};
    (void)module;
    sth_budget_model_init(&m);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$OOOOO&pO:budget_advice", names, to_u64, &budget, &weights,
                                     &modules, &owners, &inside, to_u64, &m.fixed_bytes, &one_extent, &room) ||
        !to_u64_or_none(room, &bytes))
        return NULL;
    m.one_extent = one_extent;
    PyObject *result = NULL;
    if (parse_model(weights, modules, owners, inside, &l, &m))
        result = room == Py_None ? advise(&m, budget) : with_room(&m, bytes);
    free_lists(&l);
    return result;
}
