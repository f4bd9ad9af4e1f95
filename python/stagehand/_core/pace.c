/* Type BudgetPace: when the device's memory is read for a model whose budget is found. Plain data under the GIL. */
#include "convert.h"

typedef struct pace_object {
    PyObject ob_base;
    sth_budget_pace pace;
} pace_object;

static sth_budget_pace *pace_of(PyObject *op) { return &((pace_object *)op)->pace; }

static bool parse_time(PyObject *value, int64_t *out) {
    *out = PyLong_AsLongLong(value);
    return *out != -1 || !PyErr_Occurred();
}

static PyObject *pace_inputs(PyObject *op, PyObject *args) {
    uint64_t bytes;
    int inside;
    if (!PyArg_ParseTuple(args, "O&p:inputs", to_u64, &bytes, &inside)) return NULL;
    sth_budget_pace_inputs(pace_of(op), bytes, inside);
    Py_RETURN_NONE;
}

static PyObject *pace_due(PyObject *op, PyObject *args) {
    long long now;
    int turn;
    double growth;
    if (!PyArg_ParseTuple(args, "Lp:due", &now, &turn)) return NULL;
    bool due = sth_budget_pace_due(pace_of(op), now, turn, &growth);
    return Py_BuildValue("(Od)", due ? Py_True : Py_False, growth);
}

static PyObject *pace_looked(PyObject *op, PyObject *value) {
    int64_t now;
    if (!parse_time(value, &now)) return NULL;
    sth_budget_pace_looked(pace_of(op), now);
    Py_RETURN_NONE;
}

static PyObject *pace_hurry(PyObject *op, PyObject *none) {
    (void)none;
    sth_budget_pace_hurry(pace_of(op));
    Py_RETURN_NONE;
}

static PyObject *pace_renew(PyObject *op, PyObject *none) {
    (void)none;
    sth_budget_pace_renew(pace_of(op));
    Py_RETURN_NONE;
}

static PyObject *pace_steps(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(pace_of(op)->steps);
}

static PyObject *pace_last(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromLongLong(pace_of(op)->looked_ns);
}

static PyMethodDef pace_methods[] = {
    {"inputs", pace_inputs, METH_VARARGS,
     "inputs(bytes, inside_step, /)\n--\n\nA pass with so many bytes of inputs is about to begin."},
    {"due", pace_due, METH_VARARGS,
     "due(now_ns, turn, /)\n--\n\n"
     "(whether a step that begins now begins with a reading, growth of its inputs for that). turn: another\n"
     "model ran before it."},
    {"looked", pace_looked, METH_O, "looked(now_ns, /)\n--\n\nA reading was taken."},
    {"hurry", pace_hurry, METH_NOARGS, "hurry()\n--\n\nThe next step has all that there is."},
    {"renew", pace_renew, METH_NOARGS, "renew()\n--\n\nNothing that was seen counts any more."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pace_members[] = {
    {"steps", pace_steps, NULL, "Steps that began with a reading.", NULL},
    {"looked_ns", pace_last, NULL, "Time of the last reading.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot pace_slots[] = {
    {Py_tp_doc, (void *)"BudgetPace()\n--\n\n"
                        "When memory is read for a model whose budget is found (stagehand/residency.h)."},
    {Py_tp_dealloc, object_free},
    {Py_tp_methods, pace_methods},
    {Py_tp_getset, pace_members},
    {0, NULL},
};

PyType_Spec pace_spec = {
    .name = "stagehand._core.BudgetPace",
    .basicsize = sizeof(pace_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = pace_slots,
};
