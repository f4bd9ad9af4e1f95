/* Python callables as the allocator of a runtime.
 *
 * The runtime calls these with its lock held, on any thread, and frees places that are still leased when it
 * ends later still, perhaps from the deleter of a tensor. So the record counts its maker and every
 * allocation, and goes with the last. The count is guarded by the GIL. Once the interpreter is ending
 * nothing is called: the process gives the memory back. */
#include "convert.h"

#include <stdio.h>

struct py_allocator {
    PyObject *alloc, *free, *trim; /* trim: NULL for none */
    Py_ssize_t references;
};

enum {
    PLACE_ALIGNMENT = 512
};

py_allocator *py_allocator_new(PyObject *alloc, PyObject *free, PyObject *trim) {
    if (!PyCallable_Check(alloc) || !PyCallable_Check(free) || (trim != Py_None && !PyCallable_Check(trim))) {
        PyErr_SetString(PyExc_TypeError, "alloc and free must both be callable, or both None; trim callable or None");
        return NULL;
    }
    py_allocator *allocator = PyMem_Malloc(sizeof *allocator);
    if (!allocator) return (py_allocator *)PyErr_NoMemory();
    Py_INCREF(alloc);
    Py_INCREF(free);
    if (trim != Py_None) Py_INCREF(trim);
    *allocator =
        (py_allocator){.alloc = alloc, .free = free, .trim = trim != Py_None ? trim : NULL, .references = 1};
    return allocator;
}

void py_allocator_release(py_allocator *allocator) {
    if (!allocator || --allocator->references) return;
    Py_DECREF(allocator->alloc);
    Py_DECREF(allocator->free);
    Py_XDECREF(allocator->trim);
    PyMem_Free(allocator);
}

int py_allocator_traverse(py_allocator *allocator, visitproc visit, void *arg) {
    Py_VISIT(allocator->alloc);
    Py_VISIT(allocator->free);
    Py_VISIT(allocator->trim);
    return 0;
}

/* Takes the pending exception's text into the error record, and clears the exception. */
static sth_status report_exception(uint64_t bytes) {
    PyObject *type, *value, *trace;
    char message[512];
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    PyObject *text = value ? PyObject_Str(value) : NULL;
    const char *utf8 = text ? PyUnicode_AsUTF8AndSize(text, NULL) : NULL;
    snprintf(message, sizeof message, "the alloc callable failed for %llu bytes: %s",
             (unsigned long long)bytes, utf8 ? utf8 : "(no text)");
    bool interrupted = type && PyErr_GivenExceptionMatches(type, PyExc_KeyboardInterrupt);
    PyErr_Clear(); /* of the conversion to text */
    Py_XDECREF(text);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    if (interrupted) PyErr_SetInterrupt(); /* Ctrl-C is raised again once the library has returned */
    return sth_error_set(STH_OUT_OF_DEVICE_MEMORY, "python", 0, "alloc", message);
}

static sth_status take(py_allocator *allocator, uint64_t bytes, sth_devptr *out_address) {
    uint64_t address = 0;
    PyObject *result = PyObject_CallFunction(allocator->alloc, "K", (unsigned long long)bytes);
    if (!result) return report_exception(bytes);
    int valid = to_u64(result, &address);
    Py_DECREF(result);
    if (!valid) return report_exception(bytes);
    if (!address || address % PLACE_ALIGNMENT)
        return sth_error_set(
            STH_OUT_OF_DEVICE_MEMORY, "python", 0, "alloc",
            "the alloc callable must return the address of device memory, a multiple of 512");
    allocator->references++;
    *out_address = address;
    return STH_OK;
}

static sth_status call_alloc(void *context, uint64_t bytes, sth_devptr *out_address) {
    PyObject *type, *value, *trace;
    if (!Py_IsInitialized())
        return sth_error_set(STH_OUT_OF_DEVICE_MEMORY, "python", 0, "alloc",
                             "the Python interpreter is ending");
    PyGILState_STATE gil = PyGILState_Ensure();
    PyErr_Fetch(&type, &value, &trace);
    sth_status status = take(context, bytes, out_address);
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
    return status;
}

static void call_free(void *context, sth_devptr address, uint64_t bytes) {
    py_allocator *allocator = context;
    PyObject *type, *value, *trace;
    if (!Py_IsInitialized()) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyErr_Fetch(&type, &value, &trace);
    PyObject *result = PyObject_CallFunction(allocator->free, "KK", (unsigned long long)address,
                                             (unsigned long long)bytes);
    if (!result) cannot_raise(allocator->free);
    Py_XDECREF(result);
    py_allocator_release(allocator);
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
}

static void call_trim(void *context) {
    py_allocator *allocator = context;
    PyObject *type, *value, *trace;
    if (!Py_IsInitialized()) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    PyErr_Fetch(&type, &value, &trace);
    PyObject *result = PyObject_CallFunction(allocator->trim, NULL);
    if (!result) cannot_raise(allocator->trim);
    Py_XDECREF(result);
    PyErr_Restore(type, value, trace);
    PyGILState_Release(gil);
}

sth_allocator py_allocator_table(py_allocator *allocator) {
    return (sth_allocator){.alloc = call_alloc, .free = call_free, .trim = allocator->trim ? call_trim : NULL,
                           .context = allocator};
}
