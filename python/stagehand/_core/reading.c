/* Calls of readers: modules whose forwards read weights of modules inside them without calling those
 * (weights/reading.py). What autograd saves of such a weight becomes a handle, as in the weight's own calls, where a
 * pair of hooks stands. A pair costs time for everything that is saved, and a module that may read, by the names in
 * its code, need not: PEFT's layers do when they merge. So the pair is put up by the first read of a call. It goes with
 * the end of the call, and must not be taken for another one that ends before: it is put up where the pair in force
 * is that of the call's begin. Where it is not, later calls of the module have it from their begin on. Threads: that of
 * the call. */
#include "seat.h"

int opts_out(PyObject *module, bool plain) {
    PyObject *attributes = PyObject_GetAttr(module, name___dict__);
    if (!attributes) return -1;
    PyObject *value = PyDict_GetItemWithError(attributes, name_stagehand_saved_handles);
    int out = value ? PyObject_Not(value) : 0;
    Py_DECREF(attributes);
    if (PyErr_Occurred()) return -1;
    PyObject *type = (PyObject *)Py_TYPE(module);
    if (value || plain || !PyObject_HasAttr(type, name_stagehand_saved_handles)) return out;
    int with = flag_of(type, name_stagehand_saved_handles);
    return with < 0 ? -1 : !with;
}

static PyObject *pair_in_force(const calls_object *calls) {
    return PyObject_CallFunctionObjArgs(calls->top_hooks, Py_True, NULL);
}

static bool same_pair(PyObject *a, PyObject *b) {
    if (a == Py_None || b == Py_None) return a == b;
    return PyTuple_GetItem(a, 0) == PyTuple_GetItem(b, 0) && PyTuple_GetItem(a, 1) == PyTuple_GetItem(b, 1);
}

/* Whether the pair makes handles of the session's weights. */
static bool makes_handles(const calls_object *calls, PyObject *pair) {
    return pair != Py_None && saver_is_of(PyTuple_GetItem(pair, 0), calls);
}

static bool put_up(reading *self) {
    int yes = says(self->calls->hooks_enabled);
    if (yes > 0 && (yes = opts_out(self->module, false)) >= 0) yes = !yes;
    if (yes <= 0) return yes == 0;
    PyObject *now = pair_in_force(self->calls);
    if (!now) return false;
    if (same_pair(now, self->top)) self->saver = saver_outside(self->calls);
    else if (!makes_handles(self->calls, now)) self->late = true;
    Py_DECREF(now);
    return !PyErr_Occurred();
}

PyObject *here_save_outside(PyObject *here, PyObject *none) {
    (void)none;
    reading *call = ((here_object *)here)->reading;
    if (call && call->top && !call->saver && !put_up(call)) return NULL;
    Py_RETURN_NONE;
}

bool reading_begin(reading *self, here_object *here, calls_object *calls, PyObject *module, bool early) {
    *self = (reading){.around = here->reading, .calls = calls, .module = module};
    here->reading = self;
    if (calls->top_hooks == Py_None) return true; /* a PyTorch that does not tell which hooks are in force */
    int records = says(calls->grad_enabled);
    if (records <= 0) return records == 0;
    self->top = pair_in_force(calls);
    if (!self->top) return false;
    /* Weights that were leased before and that somebody has may be used in this call, too. */
    if (!here_look(here)) return false;
    return (early || PyList_Size(here->held)) ? put_up(self) : true;
}

bool reading_end(reading *self, here_object *here) {
    here->reading = self->around;
    bool done = !self->saver || saver_end(self->saver);
    Py_CLEAR(self->saver);
    Py_CLEAR(self->top);
    return done;
}
