/* Type Masters: a dictionary whose items are asked for in each call of a managed module. Inside a call it
 * answers with what the thread's frame has; all else is for the Python class (masters.py), whose `seat` is
 * the plan's. */
#include "seat.h"

/* What a frame of this thread has for the key: a borrowed reference; NULL, perhaps with an exception. */
static PyObject *in_frame(const seat_object *seat, PyObject *key, PyObject *master) {
    here_object *here = seat_here(seat);
    if (!here) return NULL;
    PyObject *frame = here->saving ? NULL : PyDict_GetItemWithError(here->frames, seat->plan);
    PyObject *copy = frame ? PyDict_GetItemWithError(frame, key) : NULL;
    Py_DECREF(here);
    if (!copy) return NULL;
    int takes = seat->sitter ? says(seat->sitter->calls->grad_enabled) : 1;
    if (takes > 0) { /* what a mode may see is asked in Python, where none does */
        int seen = functions_are_seen();
        takes = seen ? seen : flag_of(master, name_requires_grad);
    }
    return takes == 0 ? copy : NULL;
}

static PyObject *masters_item(PyObject *op, PyObject *key) {
    PyObject *master = PyDict_GetItemWithError(op, key);
    if (!master) return PyErr_Occurred() ? NULL : (PyErr_SetObject(PyExc_KeyError, key), NULL);
    PyObject *seat = PyObject_GetAttr(op, name_seat);
    if (!seat) return NULL;
    if (!is_seat(seat)) return PyErr_SetString(PyExc_TypeError, "seat is a Seat"), Py_DECREF(seat), NULL;
    Py_INCREF(master);
    int managed = PyDict_Contains(((seat_object *)seat)->managed, key);
    PyObject *seen = NULL;
    if (managed == 0) {
        seen = master;
        Py_INCREF(seen);
    } else if (managed > 0) {
        seen = in_frame((seat_object *)seat, key, master);
        Py_XINCREF(seen);
        if (!seen && !PyErr_Occurred()) seen = PyObject_CallMethodObjArgs(op, name_shown, key, NULL);
    }
    Py_DECREF(master);
    Py_DECREF(seat);
    return seen;
}

static PyType_Slot masters_slots[] = {
    {Py_tp_doc, (void *)"The base of masters.Masters: its items inside calls. `seat`: of the module's plan.\n"
                        "shown(key): the others."},
    {Py_mp_subscript, masters_item},
    {0, NULL},
};
PyType_Spec masters_spec = {"stagehand._core.Masters", 0, 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                            masters_slots};
