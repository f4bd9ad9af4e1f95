/* Checkpoints and ranges of their files, for Runtime and Rows. */
#include "sources.h"

#include "convert.h"

static bool parse_one_range(PyObject *item, sth_file_range *out) {
    PyObject *tuple = PySequence_Tuple(item);
    if (!tuple) return false;
    int valid = PyArg_ParseTuple(
        tuple, "O&O&O&O&;a range is (file index, file offset, bytes, offset in the place)", to_u32,
        &out->file, to_u64, &out->file_offset, to_u64, &out->bytes, to_u64, &out->place_offset);
    Py_DECREF(tuple);
    return valid;
}

bool parse_ranges(PyObject *given, sth_file_range **out_ranges, uint32_t *out_count) {
    PyObject *items = PySequence_Tuple(given);
    if (!items) return false;
    Py_ssize_t count = PyTuple_Size(items);
    sth_file_range *ranges = NULL;
    bool valid = count <= (Py_ssize_t)UINT32_MAX;
    if (!valid) PyErr_SetString(PyExc_ValueError, "too many ranges");
    if (valid && count) {
        ranges = PyMem_Malloc((size_t)count * sizeof *ranges);
        valid = ranges != NULL;
        if (!valid) PyErr_NoMemory();
    }
    for (Py_ssize_t i = 0; valid && i < count; i++)
        valid = parse_one_range(PyTuple_GetItem(items, i), &ranges[i]);
    Py_DECREF(items);
    if (!valid) {
        PyMem_Free(ranges);
        return false;
    }
    *out_ranges = ranges;
    *out_count = (uint32_t)count;
    return true;
}

bool is_listed(PyObject *list, PyObject *object) {
    for (Py_ssize_t i = PyList_Size(list); i-- > 0;)
        if (PyList_GetItem(list, i) == object) return true;
    return false;
}

bool keep_checkpoint(PyObject *list, PyObject *checkpoint) {
    if (checkpoint == Py_None || is_listed(list, checkpoint)) return true;
    if (!guard_enter(&((checkpoint_object *)checkpoint)->guard)) return false;
    if (PyList_Append(list, checkpoint) == 0) return true;
    guard_leave(&((checkpoint_object *)checkpoint)->guard);
    return false;
}

void let_checkpoints_go(PyObject **list) {
    PyObject *checkpoints = *list;
    *list = NULL;
    Py_ssize_t count = checkpoints ? PyList_Size(checkpoints) : 0;
    for (Py_ssize_t i = 0; i < count; i++)
        guard_leave(&((checkpoint_object *)PyList_GetItem(checkpoints, i))->guard);
    Py_XDECREF(checkpoints);
}
