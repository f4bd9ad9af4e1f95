/* Recordings of stagehand/timeline.h, one at a time in the process. */
#include "convert.h"

#include "stagehand/timeline.h"

PyObject *timeline_begin(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *path;
    sth_timeline_options options;
    sth_status status;
    sth_timeline_options_init(&options);
    if (!PyArg_ParseTuple(args, "O&|O&:timeline_begin", PyUnicode_FSConverter, &path, to_u32, &options.events))
        return NULL;
    options.path = PyBytes_AsString(path);
    Py_BEGIN_ALLOW_THREADS
    status = sth_timeline_begin(&options);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    return none_or_raise(status);
}

PyObject *timeline_end(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    uint64_t lost = 0;
    sth_status status;
    Py_BEGIN_ALLOW_THREADS
    status = sth_timeline_end(&lost);
    Py_END_ALLOW_THREADS
    return status == STH_OK ? PyLong_FromUnsignedLongLong(lost) : raise_status(status);
}
