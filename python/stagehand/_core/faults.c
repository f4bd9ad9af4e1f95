/* Private functions for the tests: the library's fault points, armed from Python, and how many blocks of memory it
 * holds. With lines.c the only file here that sees inside the library; as in C, the points are always there and cost a
 * load. */
#include "convert.h"

#include <string.h>

#include "../../../src/base/fault.h"
#include "../../../src/base/memory.h"

static const char *const kinds[] = {
#define KIND_TEXT(name, text) text,
    STHI_FAULT_LIST(KIND_TEXT)
#undef KIND_TEXT
};

static bool find_kind(const char *text, sthi_fault_kind *out) {
    for (int k = 0; k < STHI_FAULT_KINDS; k++)
        if (!strcmp(text, kinds[k])) {
            *out = (sthi_fault_kind)k;
            return true;
        }
    PyErr_Format(PyExc_ValueError, "no fault point is called '%s'", text);
    return false;
}

PyObject *fault_arm(PyObject *module, PyObject *args) {
    (void)module;
    const char *text;
    uint64_t n;
    int forever;
    sthi_fault_kind kind;
    if (!PyArg_ParseTuple(args, "sO&p:_fault_arm", &text, to_u64, &n, &forever) || !find_kind(text, &kind)) return NULL;
    sthi_fault_arm(kind, n, forever);
    Py_RETURN_NONE;
}

PyObject *fault_disarm(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    sthi_fault_disarm_all();
    Py_RETURN_NONE;
}

PyObject *fault_seen(PyObject *module, PyObject *args) {
    (void)module;
    const char *text;
    sthi_fault_kind kind;
    if (!PyArg_ParseTuple(args, "s:_fault_seen", &text) || !find_kind(text, &kind)) return NULL;
    return PyLong_FromUnsignedLongLong(sthi_fault_seen(kind));
}

PyObject *live_blocks(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyLong_FromLong(sthi_alloc_live());
}

PyObject *assume_available(PyObject *module, PyObject *bytes) {
    (void)module;
    uint64_t available;
    if (!to_u64(bytes, &available)) return NULL;
    sthi_memory_assume(available);
    Py_RETURN_NONE;
}
