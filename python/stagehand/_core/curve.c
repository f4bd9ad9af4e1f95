/* Step times over budgets, in the forms in which they are read. */
#include "runtime.h"

#include "convert.h"
#include "stagehand/curve.h"

enum { POINTS_MOST = 1000 };

/* The text of `points` in a form, as a str. */
static PyObject *written(const sth_curve_point *points, uint32_t count, uint64_t present, sth_curve_form form) {
    char *text = NULL;
    sth_status status;
    Py_BEGIN_ALLOW_THREADS
    status = sth_curve_write(points, count, present, form, &text);
    Py_END_ALLOW_THREADS
    if (status != STH_OK) return raise_status(status);
    PyObject *made = PyUnicode_FromString(text);
    sth_text_free(text);
    return made;
}

/* (text, JSON, SVG) of the curve. */
PyObject *runtime_curve(PyObject *op, PyObject *args) {
    runtime_object *self = (runtime_object *)op;
    uint32_t count, found = 0;
    sth_runtime_stats stats = {0};
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&:curve", to_u32, &count)) return NULL;
    if (count > POINTS_MOST) return raise_error(STH_INVALID_ARGUMENT, "points", "a curve has 2 to 1000 points");
    sth_curve_point *points = PyMem_Calloc(count + 1, sizeof *points);
    if (!points) return PyErr_NoMemory();
    if (!guard_enter(&self->guard)) {
        PyMem_Free(points);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = sth_runtime_curve(self->runtime, count, points, &found);
    if (status == STH_OK) status = sth_runtime_stats_get(self->runtime, &stats);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL, *text = NULL, *json = NULL, *svg = NULL;
    if (status != STH_OK) raise_status(status);
    else if ((text = written(points, found, stats.budget, STH_CURVE_TEXT)) &&
             (json = written(points, found, stats.budget, STH_CURVE_JSON)) &&
             (svg = written(points, found, stats.budget, STH_CURVE_SVG)))
        result = Py_BuildValue("(OOO)", text, json, svg);
    Py_XDECREF(text);
    Py_XDECREF(json);
    Py_XDECREF(svg);
    guard_leave(&self->guard);
    PyMem_Free(points);
    return result;
}
