/* Lines of JSON to a telemetry file, by the rules of the core's own. Failures are OSError, as those of Python's
 * files. */
#include "convert.h"

#include <errno.h>

#include "../../../src/telemetry/jsonl.h"

static PyObject *raise_os_error(sth_status status) {
    const sth_error *last = sth_last_error();
    if (status == STH_OUT_OF_HOST_MEMORY) return PyErr_NoMemory();
    PyObject *message = text_or_empty(last->message);
    long code = last->native_code ? last->native_code : EINVAL;
    PyObject *error = message ? PyObject_CallFunction(PyExc_OSError, "lO", code, message) : NULL;
    Py_XDECREF(message);
    if (error) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
    return NULL;
}

PyObject *append_lines(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *path;
    const char *text;
    Py_ssize_t length;
    uint64_t limit;
    bool full = false;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&y#O&:append_lines", PyUnicode_FSConverter, &path, &text, &length, to_u64,
                          &limit))
        return NULL;
    WITHOUT_GIL(status, sthi_jsonl_append_text(PyBytes_AsString(path), limit, text, (size_t)length, &full));
    Py_DECREF(path);
    return status == STH_OK ? PyBool_FromLong(!full) : raise_os_error(status);
}
