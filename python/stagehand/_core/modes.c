/* Type Aside: a context in which no mode of the caller's (TorchDispatchMode, TorchFunctionMode) sees the work
 * of its thread. torch keeps a stack of each kind for each thread: their modes are taken off, and put back at
 * the end whatever happens. No signal handler runs inside of these functions: an interrupt loses no mode. */
#include "seat.h"

enum {
    DISPATCH,
    FUNCTION,
    KINDS
};

/* torch's functions for a stack. */
typedef struct stack {
    PyObject *count, *pop, *push;
} stack;
static stack stacks[KINDS];

typedef struct aside_object {
    PyObject ob_base;
    PyObject *taken[KINDS]; /* lists, what lay on top first */
} aside_object;

static int any_in(int kind) { return stacks[kind].count ? says(stacks[kind].count) : 0; }

int functions_are_seen(void) { return any_in(FUNCTION); }

int observed(void) {
    int seen = any_in(FUNCTION);
    return seen ? seen : any_in(DISPATCH);
}

PyObject *know_modes(PyObject *module, PyObject *args) {
    (void)module;
    stack given[KINDS];
    if (!PyArg_ParseTuple(args, "(OOO)(OOO):know_modes", &given[0].count, &given[0].pop, &given[0].push,
                          &given[1].count, &given[1].pop, &given[1].push))
        return NULL;
    for (int kind = 0; kind < KINDS; kind++) { /* for good */
        Py_INCREF(given[kind].count);
        Py_INCREF(given[kind].pop);
        Py_INCREF(given[kind].push);
        stacks[kind] = given[kind];
    }
    Py_RETURN_NONE;
}

/* Puts back what was taken, and keeps the exception that is set. false with the first one of its own. */
static bool put_back(aside_object *self, int kind) {
    PyObject *type, *error, *trace, *taken = self->taken[kind];
    if (!taken) return true;
    self->taken[kind] = NULL;
    PyErr_Fetch(&type, &error, &trace);
    for (Py_ssize_t i = PyList_Size(taken); i-- > 0;) {
        PyObject *done = PyObject_CallFunctionObjArgs(stacks[kind].push, PyList_GetItem(taken, i), NULL);
        Py_XDECREF(done);
        if (!done && type) PyErr_Clear();
        else if (!done) PyErr_Fetch(&type, &error, &trace);
    }
    Py_DECREF(taken);
    bool first = !type;
    PyErr_Restore(type, error, trace);
    return first;
}

static long long count_of(int kind) {
    if (!stacks[kind].count) return 0;
    PyObject *count = PyObject_CallNoArgs(stacks[kind].count);
    long long number = count ? PyLong_AsLongLong(count) : -1;
    Py_XDECREF(count);
    return number;
}

static bool take(aside_object *self, int kind) {
    long long count = count_of(kind);
    if (count < 0 || !(self->taken[kind] = PyList_New(0))) return false;
    while (count-- > 0) {
        PyObject *mode = kind == DISPATCH ? PyObject_CallFunctionObjArgs(stacks[kind].pop, Py_None, NULL)
                                          : PyObject_CallNoArgs(stacks[kind].pop);
        int kept = mode ? PyList_Append(self->taken[kind], mode) : -1;
        Py_XDECREF(mode);
        if (kept < 0) return false;
    }
    return true;
}

static PyObject *aside_enter(PyObject *op, PyObject *none) {
    (void)none;
    aside_object *self = (aside_object *)op;
    if (self->taken[DISPATCH]) return PyErr_SetString(PyExc_RuntimeError, "an Aside is entered once"), NULL;
    if (take(self, DISPATCH) && take(self, FUNCTION)) Py_RETURN_NONE;
    put_back(self, FUNCTION);
    put_back(self, DISPATCH);
    return NULL;
}

static PyObject *aside_exit(PyObject *op, PyObject *args) {
    (void)args;
    aside_object *self = (aside_object *)op;
    bool functions = put_back(self, FUNCTION);
    if (put_back(self, DISPATCH) && functions) Py_RETURN_NONE;
    return NULL;
}

static int aside_traverse(PyObject *op, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((aside_object *)op)->taken[DISPATCH]);
    Py_VISIT(((aside_object *)op)->taken[FUNCTION]);
    return 0;
}

static int aside_clear(PyObject *op) {
    Py_CLEAR(((aside_object *)op)->taken[DISPATCH]);
    Py_CLEAR(((aside_object *)op)->taken[FUNCTION]);
    return 0;
}

static void aside_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    aside_clear(op);
    object_free(op);
}

static PyMethodDef methods[] = {
    {"__enter__", aside_enter, METH_NOARGS, "No mode of this thread's sees anything until the end."},
    {"__exit__", aside_exit, METH_VARARGS, "They do again."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot aside_slots[] = {
    {Py_tp_doc, (void *)"Aside()\n--\n\n"
                        "A context in which no mode of the caller's sees the work of this thread. To be entered\n"
                        "once."},
    {Py_tp_dealloc, aside_dealloc}, {Py_tp_traverse, aside_traverse}, {Py_tp_clear, aside_clear},
    {Py_tp_methods, methods},       {0, NULL},
};
PyType_Spec aside_spec = {"stagehand._core.Aside", sizeof(aside_object), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, aside_slots};
