/* A runtime as a page of HTML, or as a part of one. */
#include "runtime.h"

#include <string.h>

#include "convert.h"
#include "stagehand/report.h"

PyObject *runtime_report(PyObject *op, PyObject *args) {
    runtime_object *self = (runtime_object *)op;
    int page;
    char *text = NULL;
    sth_status status;
    if (!PyArg_ParseTuple(args, "p:report", &page)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_runtime_report(self->runtime, page ? STH_REPORT_PAGE : STH_REPORT_SUMMARY, &text);
    Py_END_ALLOW_THREADS
    guard_leave(&self->guard);
    if (status != STH_OK) return raise_status(status);
    PyObject *made = PyUnicode_DecodeUTF8(text, (Py_ssize_t)strlen(text), "replace");
    sth_text_free(text);
    return made;
}
