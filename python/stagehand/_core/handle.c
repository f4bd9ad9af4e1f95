/* Type Handle: a saved tensor that lies in a unit's place, as autograd keeps it: where it lies and how it
 * looks. unpack_saved() makes of a handle a tensor over the place that the unit has now. It does so by itself
 * where the handle is as they usually are: inside a backward that the session knows of, the weight as it was
 * saved, no mode active. All else is for the function that know_unpack() was given (weights/saved.py). */
#include "seat.h"

#include <stddef.h>
#include <structmember.h>

#include "convert.h"

typedef struct handle_object {
    PyObject ob_base;
    calls_object *calls;
    PyObject *unit, *entry, *dtype, *shape, *stride, *held, *overwritten, *cast, *image;
    unsigned long long offset;       /* bytes from the start of the place, or of its cast */
    long long version, copy_version; /* of the weight's master, and of the tensor that the call saw */
    int kind;
} handle_object;

enum { CONSTANT = 0 }; /* of savedmodes.py */

static PyObject *otherwise; /* for good */
static long watchers;       /* guarded by the GIL */

PyObject *know_unpack(PyObject *module, PyObject *function) {
    (void)module;
    PyObject *before = otherwise;
    Py_INCREF(function);
    otherwise = function;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

PyObject *watch_unpack(PyObject *module, PyObject *more) {
    (void)module;
    long count = PyLong_AsLong(more);
    if (count == -1 && PyErr_Occurred()) return NULL;
    watchers += count;
    Py_RETURN_NONE;
}

/* ---- how a tensor looks ---- */

bool looks_of(const calls_object *calls, PyObject *tensor, looks *out) {
    *out = (looks){.dtype = PyObject_GetAttr(tensor, name_dtype), .shape = PyObject_GetAttr(tensor, name_shape)};
    if (!out->dtype || !out->shape) return false;
    out->stride = PyObject_CallMethodObjArgs(tensor, name_stride, NULL);
    if (!out->stride) return false;
    int direct = tensor_view_of(calls->dtypes, out->dtype, out->shape, out->stride, &out->view);
    out->direct = direct > 0;
    return direct >= 0;
}

void looks_drop(looks *self) {
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->shape);
    Py_CLEAR(self->stride);
}

/* ---- made ---- */

static int kind_of(const calls_object *calls, PyObject *tensor) {
    int takes = flag_of(tensor, name_requires_grad);
    if (takes <= 0) return takes < 0 ? -1 : CONSTANT;
    PyObject *kind = PyObject_CallFunctionObjArgs(calls->kind_of, tensor, NULL);
    long number = kind ? PyLong_AsLong(kind) : -1;
    Py_XDECREF(kind);
    return (int)number;
}

/* An attribute that is a whole number. false with an exception. */
static bool number_of(PyObject *object, PyObject *name, long long *out) {
    PyObject *value = PyObject_GetAttr(object, name);
    *out = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return !PyErr_Occurred();
}

/* Where in the place the weight begins. false with an exception. */
static bool offset_of(PyObject *entry, uint64_t *out) {
    PyObject *offset = PyObject_GetAttr(entry, name_offset);
    bool done = offset && to_u64(offset, out);
    Py_XDECREF(offset);
    return done;
}

/* What a saved weight of the open step holds, which lives while a handle does. */
static PyObject *held_now(const calls_object *calls) {
    PyObject *ref = PyObject_GetAttr(calls->steps, name_held_ref);
    if (!ref) return NULL;
    PyObject *held = ref == Py_None ? Py_None : PyWeakref_GetObject(ref);
    Py_XINCREF(held);
    Py_DECREF(ref);
    if (held != Py_None) return held;
    Py_DECREF(held);
    return PyObject_CallMethodObjArgs(calls->steps, name_held, NULL);
}

PyObject *handle_new(calls_object *calls, PyObject *unit, PyObject *entry, PyObject *copy, PyObject *tensor,
                     uint64_t offset, looks *seen) {
    handle_object *self = (handle_object *)PyType_GenericAlloc((PyTypeObject *)calls->handle, 0);
    if (!self) return NULL;
    Py_INCREF(calls), self->calls = calls;
    Py_INCREF(unit), self->unit = unit;
    Py_INCREF(entry), self->entry = entry;
    self->dtype = seen->dtype, self->shape = seen->shape, self->stride = seen->stride;
    *seen = (looks){0};
    uint64_t begin;
    /* A part of a weight has a version of its own making, which the mark's field does not have. */
    if (number_of(entry, name_version, &self->version) && number_of(copy, name__version, &self->copy_version))
        self->kind = kind_of(calls, tensor);
    if (!PyErr_Occurred()) self->held = held_now(calls);
    if (self->held && offset_of(entry, &begin)) {
        self->offset = begin + offset;
        return (PyObject *)self;
    }
    Py_DECREF(self);
    return NULL;
}

static PyObject *handle_of(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    (void)type;
    PyObject *calls, *unit, *entry, *copy, *tensor, *cast = Py_None;
    uint64_t offset;
    looks seen = {0};
    static char *names[] = {"calls", "unit", "entry", "copy", "tensor", "offset", "cast", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOO&|O:Handle", names, &calls, &unit, &entry, &copy, &tensor,
                                     to_u64, &offset, &cast))
        return NULL;
    if (!is_calls(calls) || !PyObject_TypeCheck(entry, ((core_state *)PyType_GetModuleState(Py_TYPE(calls)))->mark))
        return PyErr_Format(PyExc_TypeError, "Handle: of a Calls and a Mark");
    PyObject *self = NULL;
    if (looks_of((calls_object *)calls, tensor, &seen))
        self = handle_new((calls_object *)calls, unit, entry, copy, tensor, offset, &seen);
    looks_drop(&seen);
    if (self && cast != Py_None) {
        Py_INCREF(cast);
        ((handle_object *)self)->cast = cast;
    }
    return self;
}

/* ---- opened ---- */

/* Whether the weight is as it was saved. -1 with an exception. */
static int unchanged(const handle_object *self) {
    long long known, now;
    if (!number_of(self->entry, name_version, &known)) return -1;
    if (known != self->version) return 0;
    PyObject *master = PyObject_GetAttr(self->entry, name_param);
    bool done = master && number_of(master, name__version, &now);
    Py_XDECREF(master);
    return done ? now == self->version : -1;
}

/* Whether the session knows of the backward that the thread is in. -1 with an exception. */
static int in_known_backward(const handle_object *self) {
    PyObject *graph = PyObject_GetAttr(self->held, name_graph);
    int cut_off = graph ? flag_of(graph, name_cut_off) : -1;
    Py_XDECREF(graph);
    if (cut_off) return cut_off < 0 ? -1 : 0;
    PyObject *backwards = PyObject_GetAttr(self->calls->steps, name_backwards);
    PyObject *task = backwards ? PyObject_CallNoArgs(self->calls->task) : NULL;
    int known = task ? PySet_Contains(backwards, task) : -1;
    Py_XDECREF(task);
    Py_XDECREF(backwards);
    return known;
}

static bool is_given(PyObject *value) { return value && value != Py_None; }

/* How a lease is taken. */
typedef struct way {
    tensor_view view;
    uint32_t unit;
} way;

/* The core's number of the unit; 0: it has none; -1 with an exception. */
static int find_unit(const handle_object *self, way *out) {
    long long number;
    if (!number_of(self->unit, name_index, &number)) return -1;
    out->unit = (uint32_t)number;
    return number >= 0;
}

/* 1, 0, or -1 with an exception. */
static int usual(const handle_object *self, way *out) {
    const calls_object *calls = self->calls;
    if (self->offset || is_given(self->overwritten) || is_given(self->cast) || !self->held ||
        !((runtime_object *)calls->runtime)->guard.open)
        return 0;
    int yes = observed();
    if (yes) return yes < 0 ? -1 : 0;
    if ((yes = unchanged(self)) > 0) yes = in_known_backward(self);
    if (yes > 0) yes = find_unit(self, out);
    return yes > 0 ? tensor_view_of(calls->dtypes, self->dtype, self->shape, self->stride, &out->view) : yes;
}

static PyObject *open(const handle_object *self, const way *how) {
    const calls_object *calls = self->calls;
    runtime_object *runtime = (runtime_object *)calls->runtime;
    uint64_t stream;
    if (!calls_stream(calls, &stream) || !guard_enter(&runtime->guard)) return NULL;
    PyObject *capsule = lease_capsule(runtime, how->unit, stream, &how->view);
    guard_leave(&runtime->guard);
    if (!capsule) return calls_refuse(calls), NULL;
    PyObject *tensor = PyObject_CallFunctionObjArgs(calls->raw, capsule, NULL);
    Py_DECREF(capsule);
    return tensor;
}

PyObject *unpack_saved(PyObject *module, PyObject *saved) {
    const core_state *state = PyModule_GetState(module);
    const handle_object *self = (const handle_object *)saved;
    if (!watchers && PyObject_TypeCheck(saved, state->handle) && self->calls &&
        Py_TYPE(saved) == (PyTypeObject *)self->calls->handle) {
        way how;
        int yes = usual(self, &how);
        if (yes) return yes < 0 ? NULL : open(self, &how);
    }
    if (otherwise) return PyObject_CallFunctionObjArgs(otherwise, saved, NULL);
    return PyErr_Format(PyExc_RuntimeError, "unpack_saved: nobody has called know_unpack()");
}

/* ---- the type ---- */

static int handle_traverse(PyObject *op, visitproc visit, void *arg) {
    handle_object *self = (handle_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->calls);
    Py_VISIT(self->unit);
    Py_VISIT(self->entry);
    Py_VISIT(self->held);
    return 0;
}

static int handle_clear(PyObject *op) {
    handle_object *self = (handle_object *)op;
    Py_CLEAR(self->calls);
    Py_CLEAR(self->unit);
    Py_CLEAR(self->entry);
    Py_CLEAR(self->dtype);
    Py_CLEAR(self->shape);
    Py_CLEAR(self->stride);
    Py_CLEAR(self->held);
    Py_CLEAR(self->overwritten);
    Py_CLEAR(self->cast);
    Py_CLEAR(self->image);
    return 0;
}

static void handle_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    handle_clear(op);
    object_free(op);
}

static PyMemberDef members[] = {
    {"calls", T_OBJECT, offsetof(handle_object, calls), READONLY, "Of the session."},
    {"unit", T_OBJECT, offsetof(handle_object, unit), READONLY, NULL},
    {"entry", T_OBJECT, offsetof(handle_object, entry), READONLY, "The weight."},
    {"dtype", T_OBJECT, offsetof(handle_object, dtype), READONLY, NULL},
    {"shape", T_OBJECT, offsetof(handle_object, shape), READONLY, NULL},
    {"stride", T_OBJECT, offsetof(handle_object, stride), READONLY, "In elements."},
    {"offset", T_ULONGLONG, offsetof(handle_object, offset), READONLY,
     "Bytes from the start of the place; with `cast`, of the copy."},
    {"held", T_OBJECT, offsetof(handle_object, held), READONLY, "Of the graph of the step that saved it."},
    {"version", T_LONGLONG, offsetof(handle_object, version), 0, "Of the master, which backward is to find."},
    {"copy_version", T_LONGLONG, offsetof(handle_object, copy_version), READONLY,
     "Of what the call saw, when it was saved."},
    {"overwritten", T_OBJECT, offsetof(handle_object, overwritten), 0,
     "By the forward itself: the version that it left. None: it was not."},
    {"cast", T_OBJECT, offsetof(handle_object, cast), READONLY,
     "The dtype of what the call saw, where that is not the place's. None: it is."},
    {"kind", T_INT, offsetof(handle_object, kind), READONLY, "From kind_of()."},
    {"image", T_OBJECT, offsetof(handle_object, image), 0, "For the Python class."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot handle_slots[] = {
    {Py_tp_doc, (void *)"Handle(calls, unit, entry, copy, tensor, offset, cast=None)\n--\n\n"
                        "The base of saved.Handle, which is the type of what is made: a saved `tensor`, `offset`\n"
                        "bytes behind the start of `copy`, the weight `entry` of `unit` as a call sees it."},
    {Py_tp_new, handle_of},      {Py_tp_dealloc, handle_dealloc}, {Py_tp_traverse, handle_traverse},
    {Py_tp_clear, handle_clear}, {Py_tp_members, members},        {0, NULL},
};
PyType_Spec handle_spec = {"stagehand._core.Handle", sizeof(handle_object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, handle_slots};
