/* Between C values and Python objects. Every integer from Python is checked against the range of its C
 * type. Keeps no state; all functions need the GIL. */
#include "convert.h"

#include <string.h>

static int to_unsigned(PyObject *value, uint64_t limit, uint64_t *out) {
    PyObject *number = PyNumber_Index(value);
    if (!number) return 0;
    unsigned long long result = PyLong_AsUnsignedLongLong(number);
    Py_DECREF(number);
    if (result == (unsigned long long)-1 && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_OverflowError)) return 0;
        PyErr_Clear();
    } else if (result <= limit) {
        *out = result;
        return 1;
    }
    PyErr_Format(PyExc_ValueError, "%S is out of range: give an integer from 0 to %llu", value,
                 (unsigned long long)limit);
    return 0;
}

int to_u64(PyObject *value, void *out_uint64) { return to_unsigned(value, UINT64_MAX, out_uint64); }

int to_u32(PyObject *value, void *out_uint32) {
    uint64_t wide = 0;
    if (!to_unsigned(value, UINT32_MAX, &wide)) return 0;
    *(uint32_t *)out_uint32 = (uint32_t)wide;
    return 1;
}

int to_u64_or_none(PyObject *value, void *out_uint64) {
    return value == Py_None ? 1 : to_u64(value, out_uint64);
}

PyObject *text_or_empty(const char *utf8) {
    if (!utf8) utf8 = "";
    return PyUnicode_DecodeUTF8(utf8, (Py_ssize_t)strlen(utf8), "replace");
}

static PyObject *value_of(const void *record, const field *f) {
    const char *at = (const char *)record + f->offset;
    switch (f->kind) {
    case FIELD_U64:
        return PyLong_FromUnsignedLongLong(*(const uint64_t *)at);
    case FIELD_U32:
        return PyLong_FromUnsignedLong(*(const uint32_t *)at);
    case FIELD_I64:
        return PyLong_FromLongLong(*(const int64_t *)at);
    case FIELD_INT:
        return PyLong_FromLong(*(const int *)at);
    case FIELD_BOOL:
        return PyBool_FromLong(*(const bool *)at);
    case FIELD_DOUBLE:
        return PyFloat_FromDouble(*(const double *)at);
    case FIELD_COUNT:
        return PyLong_FromDouble(*(const double *)at);
    case FIELD_CHARS:
        return text_or_empty(at);
    case FIELD_TEXT:
        return text_or_empty(*(const char *const *)at);
    }
    PyErr_SetString(PyExc_SystemError, "unknown kind of field");
    return NULL;
}

PyObject *dict_of(const void *record, const field *fields) {
    PyObject *dict = PyDict_New();
    for (const field *f = fields; dict && f->name; f++) {
        PyObject *value = value_of(record, f);
        if (!value || PyDict_SetItemString(dict, f->name, value) < 0) Py_CLEAR(dict);
        Py_XDECREF(value);
    }
    return dict;
}

void cannot_raise(PyObject *callable) {
    if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) {
        PyErr_WriteUnraisable(callable);
        return;
    }
    PyErr_Clear();
    PyErr_SetInterrupt();
}
