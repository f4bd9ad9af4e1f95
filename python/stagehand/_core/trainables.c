/* Where trained weights live (stagehand/trainables.h): functions of the module. */
#include "stagehand/trainables.h"

#include "convert.h"
#include "core.h"

static const char *const names[] = {
#define NAME(name, text) #name,
    STH_HOME_LIST(NAME)
#undef NAME
};

PyObject *homes_table(void) {
    PyObject *table = PyDict_New();
    for (int i = 0; table && i < STH_HOME_COUNT; i++) {
        PyObject *text = text_or_empty(sth_home_text((sth_home)i));
        if (!text || PyDict_SetItemString(table, names[i], text) < 0) Py_CLEAR(table);
        Py_XDECREF(text);
    }
    return table;
}

static bool parse_weight(PyObject *item, sth_trainable *out) {
    if (PyTuple_Check(item))
        return PyArg_ParseTuple(item, "O&O&O&;a weight is (bytes, of its gradient, of its state)", to_u64, &out->bytes,
                                to_u64, &out->gradient_bytes, to_u64, &out->state_bytes);
    PyErr_SetString(PyExc_TypeError, "weights are tuples");
    return false;
}

static PyObject *chosen(const sth_trainables_input *in, sth_home *homes) {
    uint64_t bytes = 0;
    sth_status status = sth_trainables_choose(in, homes, &bytes);
    if (status != STH_OK) return raise_status(status);
    PyObject *list = PyList_New(in->count);
    for (uint32_t i = 0; list && i < in->count; i++) {
        PyObject *name = text_or_empty(names[homes[i]]);
        if (name) PyList_SetItem(list, i, name);
        else Py_CLEAR(list);
    }
    return list ? Py_BuildValue("(NK)", list, (unsigned long long)bytes) : NULL;
}

PyObject *choose_trainables(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    static char *keywords[] = {"weights", "room", "slack", "link_bytes_per_s", "wanted", NULL};
    PyObject *given, *result = NULL;
    sth_trainables_input in;
    double link = 0;
    int wanted = 0;
    sth_trainables_input_init(&in);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O$O&O&dp:choose_trainables", keywords, &given, to_u64, &in.room,
                                     to_u64, &in.slack, &link, &wanted))
        return NULL;
    PyObject *items = PySequence_Tuple(given);
    if (!items) return NULL;
    Py_ssize_t count = PyTuple_Size(items);
    sth_trainable *weights = PyMem_Malloc((size_t)(count + 1) * sizeof *weights);
    sth_home *homes = PyMem_Malloc((size_t)(count + 1) * sizeof *homes);
    bool valid = weights && homes;
    if (!valid) PyErr_NoMemory();
    for (Py_ssize_t i = 0; valid && i < count; i++) valid = parse_weight(PyTuple_GetItem(items, i), &weights[i]);
    in.weights = weights;
    in.count = (uint32_t)count;
    in.wanted = wanted;
    if (link > 0) in.link_bytes_per_s = link;
    if (valid) result = chosen(&in, homes);
    PyMem_Free(weights);
    PyMem_Free(homes);
    Py_DECREF(items);
    return result;
}
