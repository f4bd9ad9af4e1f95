/* Messages of the library for a Python callable, the only one of the process. It is called by a thread inside a call of
 * the library, which has let the GIL go, and holds no lock of the library's (stagehand/log.h). The reference is guarded
 * by the GIL. Once the interpreter is ending nothing is called. */
#include "convert.h"

#include <string.h>

#include "stagehand/log.h"

static PyObject *callable;

static void say(void *context, sth_log_level level, const char *message) {
    (void)context;
    PyObject *type, *value, *trace;
    if (!Py_IsInitialized()) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyErr_Fetch(&type, &value, &trace);
    PyObject *to = callable;
    Py_XINCREF(to);
    PyObject *text = to ? PyUnicode_DecodeUTF8(message, (Py_ssize_t)strlen(message), "replace") : NULL;
    PyObject *result = text ? PyObject_CallFunction(to, "iO", (int)level, text) : NULL;
    if (to && !result) cannot_raise(to);
    Py_XDECREF(result);
    Py_XDECREF(text);
    Py_XDECREF(to);
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
}

PyObject *set_log(PyObject *module, PyObject *given) {
    (void)module;
    if (given != Py_None && !PyCallable_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "set_log takes a callable or None");
        return NULL;
    }
    PyObject *before = callable;
    callable = given == Py_None ? NULL : given;
    Py_XINCREF(callable);
    sth_log_set(callable ? say : NULL, NULL, STH_LOG_DEBUG);
    Py_XDECREF(before);
    Py_RETURN_NONE;
}
