/* Types Here, Mark, Calls: what a call looks at of its thread, of a weight, and of its session. */
#include "seat.h"

#include <stddef.h>
#include <structmember.h>

/* Types of references alone: the fields, from the first on, are objects. */
static PyObject **references(PyObject *op) { return (PyObject **)(op + 1); }

static int visit_references(PyObject *op, size_t count, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(op));
    for (size_t i = 0; i < count; i++) Py_VISIT(references(op)[i]);
    return 0;
}

static int clear_references(PyObject *op, size_t count) {
    for (size_t i = 0; i < count; i++) Py_CLEAR(references(op)[i]);
    return 0;
}

#define CALLS_NAME(name) #name,
static const char *const calls_names[] = {CALLS_FIELDS(CALLS_NAME)};
#undef CALLS_NAME
enum {
    HERE_COUNT = 5,
    CALLS_COUNT = sizeof calls_names / sizeof *calls_names
};

static int here_traverse(PyObject *op, visitproc visit, void *arg) {
    return visit_references(op, HERE_COUNT, visit, arg);
}
static int calls_traverse(PyObject *op, visitproc visit, void *arg) {
    return visit_references(op, CALLS_COUNT, visit, arg);
}
static int here_clear(PyObject *op) { return clear_references(op, HERE_COUNT); }
static int calls_clear(PyObject *op) { return clear_references(op, CALLS_COUNT); }

static void here_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    here_clear(op);
    object_free(op);
}

static void calls_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    calls_clear(op);
    object_free(op);
}

bool is_calls(PyObject *value) { return PyType_GetSlot(Py_TYPE(value), Py_tp_dealloc) == (void *)calls_dealloc; }

static PyObject *here_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *passes, *strays, *frames, *held, *look;
    static char *names[] = {"passes", "strays", "frames", "held", "look", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O!O!O!O:Here", names, &PyDict_Type, &passes,
                                     &PyList_Type, &strays, &PyDict_Type, &frames, &PyList_Type, &held, &look))
        return NULL;
    here_object *self = (here_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    Py_INCREF(passes), self->passes = passes;
    Py_INCREF(strays), self->strays = strays;
    Py_INCREF(frames), self->frames = frames;
    Py_INCREF(held), self->held = held;
    Py_INCREF(look), self->look = look;
    return (PyObject *)self;
}

bool here_look(const here_object *self) {
    if (!PyList_Size(self->held)) return true;
    PyObject *done = PyObject_CallNoArgs(self->look);
    Py_XDECREF(done);
    return done != NULL;
}

static PyObject *here_inside(PyObject *op, void *closure) {
    (void)closure;
    PyObject *inside = ((here_object *)op)->inside;
    inside = inside ? inside : Py_None;
    Py_INCREF(inside);
    return inside;
}

static PyGetSetDef here_properties[] = {
    {"inside", here_inside, NULL,
     "The Forward whose module's own forward the thread is in, the innermost, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef here_members[] = {
    {"saving", T_INT, offsetof(here_object, saving), 0, "In how many masters() the thread is."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef here_methods[] = {
    {"save_outside", here_save_outside, METH_NOARGS,
     "save_outside()\n--\n\n"
     "The thread is about to lease a weight from outside its own module's call. In a reader's call, what autograd\n"
     "saves of it becomes handles from now on, where hooks may be put up."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot here_slots[] = {
    {Py_tp_doc,
     (void *)"Here(passes, strays, frames, held, look)\n--\n\n"
             "What calls look at of one thread: members of its Local. Before a lease look() is called where\n"
             "held has items."},
    {Py_tp_new, here_new},     {Py_tp_dealloc, here_dealloc}, {Py_tp_traverse, here_traverse},
    {Py_tp_clear, here_clear}, {Py_tp_members, here_members},
    {Py_tp_getset, here_properties}, {Py_tp_methods, here_methods}, {0, NULL},
};
PyType_Spec here_spec = {"stagehand._core.Here", sizeof(here_object), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, here_slots};

static PyObject *calls_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    core_state *state = PyType_GetModuleState(type);
    PyObject *values[CALLS_COUNT] = {NULL};
    if (PyTuple_Size(args) || !kwargs || PyDict_Size(kwargs) != CALLS_COUNT)
        return PyErr_Format(PyExc_TypeError, "Calls takes %d keywords", (int)CALLS_COUNT);
    for (int i = 0; i < CALLS_COUNT; i++)
        if (!(values[i] = PyDict_GetItemString(kwargs, calls_names[i])))
            return PyErr_Format(PyExc_TypeError, "Calls wants %s", calls_names[i]);
    calls_object *self = (calls_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    for (int i = 0; i < CALLS_COUNT; i++) Py_INCREF(values[i]), references((PyObject *)self)[i] = values[i];
    if (Py_TYPE(self->runtime) == state->runtime && PyType_Check(self->handle) && PyType_Check(self->saver) &&
        PyType_IsSubtype((PyTypeObject *)self->handle, state->handle) &&
        PyType_IsSubtype((PyTypeObject *)self->saver, state->saver) && PyDict_Check(self->dtypes) &&
        PyAnySet_Check(self->kinds))
        return (PyObject *)self;
    Py_DECREF(self);
    return PyErr_Format(PyExc_TypeError, "Calls: a Runtime, types over Handle and Saver, a dict and a set");
}

static PyMemberDef calls_members[] = {
    {"session", T_OBJECT, offsetof(calls_object, session), READONLY, "Whose calls they are."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_doc,
     (void *)"Calls(*, session, runtime, steps, ...)\n--\n\n"
             "What the calls of one session need: it, its Runtime and Steps; torch's functions: whether gradients\n"
             "are recorded (grad_enabled), code is compiled (compiler), the device has autocast; the current\n"
             "stream, or None; torch.Tensor; how many tensors share a storage, by its number, or None\n"
             "(storage_uses); getweakrefcount (weak_refs); Frame; seen(capsule, master, plain) -> tensor;\n"
             "refused(error) -> error; the pairs of saved-tensor hooks (hooks_enabled, top_hooks, push_hooks,\n"
             "pop_hooks), unpack_saved() of this module, and the exception that stops a recomputation (stop);\n"
             "the types saver and handle, over Saver and Handle; the set of types of plain tensors (kinds),\n"
             "torch.strided, DLPack's (code, bits) by dtype (dtypes); kind_of(tensor) -> int; raw(capsule) ->\n"
             "tensor; the number of the backward under way, or -1 (task)."},
    {Py_tp_new, calls_new},     {Py_tp_dealloc, calls_dealloc}, {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear}, {Py_tp_members, calls_members}, {0, NULL},
};
PyType_Spec calls_spec = {"stagehand._core.Calls", sizeof(calls_object), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, calls_slots};

static PyMemberDef mark_members[] = {
    {"version", T_LONGLONG, offsetof(mark_object, version), 0, "Of the master."},
    {"address", T_ULONGLONG, offsetof(mark_object, address), 0, "Of the master."},
    {"written", T_BOOL, offsetof(mark_object, written), 0,
     "By an optimizer, which need not show in the version."},
    {"is_cast", T_BOOL, offsetof(mark_object, cast), 0, "Whether calls see it in another dtype than the image's."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot mark_slots[] = {
    {Py_tp_doc,
     (void *)"What a master looked like when its bytes were last known to be the ones that get copied."},
    {Py_tp_members, mark_members},
    {0, NULL},
};
PyType_Spec mark_spec = {"stagehand._core.Mark", sizeof(mark_object), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, mark_slots};
