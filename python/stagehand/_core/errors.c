/* From a status to a Python exception. stagehand.errors holds the classes and the table; it is imported
 * when the first failure happens. Needs the GIL; reads the calling thread's error record. */
#include "convert.h"

static PyObject *raise_exception(sth_status status, const char *message, const char *object,
                                 long native_code) {
    PyObject *module = PyImport_ImportModule("stagehand.errors");
    if (!module) return NULL;
    PyObject *message_text = text_or_empty(message), *object_text = text_or_empty(object), *error = NULL;
    if (message_text && object_text)
        error = PyObject_CallMethod(module, "for_status", "sOOl", sth_status_name(status), message_text,
                                    object_text, native_code);
    Py_DECREF(module);
    Py_XDECREF(message_text);
    Py_XDECREF(object_text);
    if (error) {
        PyErr_SetObject((PyObject *)Py_TYPE(error), error);
        Py_DECREF(error);
    }
    return NULL;
}

PyObject *raise_status(sth_status status) {
    const sth_error *last = sth_last_error();
    if (last->status != status) return raise_exception(status, sth_status_text(status), "", 0);
    return raise_exception(status, last->message, last->object, last->native_code);
}

PyObject *raise_error(sth_status status, const char *object, const char *message) {
    return raise_exception(status, message, object, 0);
}

PyObject *none_or_raise(sth_status status) {
    if (status != STH_OK) return raise_status(status);
    Py_RETURN_NONE;
}
