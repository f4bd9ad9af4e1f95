/* Types Saver and Place: the pair of saved-tensor hooks for one call of a managed module. The object is the
 * pack hook: it makes a handle (handle.c) of a saved tensor that lies in one of the places that the call
 * leases, and leaves all else to `pack_other` of the Python class (weights/saved.py). unpack_saved() is the
 * other hook. Threads: that of the call. */
#include "seat.h"

#include <stddef.h>
#include <structmember.h>

#include "convert.h"

/* Memory that a call sees a weight in: bytes from begin up to end. */
typedef struct place_object {
    PyObject ob_base;
    unsigned long long begin, end;
    PyObject *unit, *entry, *copy, *storage;
    PyObject *cast; /* the dtype of a copy that is a cast of the place; None: the copy lies over it */
} place_object;

typedef struct saver_object {
    PyObject ob_base;
    calls_object *calls;
    PyObject *places, *handles; /* lists; NULL behind the end */
    PyObject *below;            /* the pair that was in force before, or None */
} saver_object;

/* ---- places ---- */

static PyObject *place_new(PyTypeObject *type, uint64_t begin, uint64_t bytes, PyObject *unit, PyObject *entry,
                           PyObject *copy, PyObject *storage, PyObject *cast) {
    place_object *self = (place_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->begin = begin;
    self->end = begin + bytes;
    Py_INCREF(unit), self->unit = unit;
    Py_INCREF(entry), self->entry = entry;
    Py_INCREF(copy), self->copy = copy;
    Py_INCREF(storage), self->storage = storage;
    Py_INCREF(cast), self->cast = cast;
    return (PyObject *)self;
}

static PyObject *place_of(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    const core_state *state = PyType_GetModuleState(type);
    uint64_t begin, bytes;
    PyObject *unit, *entry, *copy, *storage, *cast = Py_None;
    static char *names[] = {"begin", "nbytes", "unit", "entry", "copy", "storage", "cast", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&OO!OO|O:Place", names, to_u64, &begin, to_u64, &bytes, &unit,
                                     state->mark, &entry, &copy, &storage, &cast))
        return NULL;
    return place_new(type, begin, bytes, unit, entry, copy, storage, cast);
}

/* ---- packing ---- */

/* The address of a plain strided tensor whose bytes are its values, no mode active; 0: it is none; -1 with an
 * exception. */
static int address_of(const calls_object *calls, PyObject *tensor, uint64_t *out) {
    *out = 0;
    int yes = PySet_Contains(calls->kinds, (PyObject *)Py_TYPE(tensor));
    if (yes > 0 && (yes = observed()) >= 0) yes = !yes;
    if (yes <= 0) return yes;
    PyObject *layout = PyObject_GetAttr(tensor, name_layout);
    if (!layout) return -1;
    Py_DECREF(layout);
    if (layout != calls->strided) return 0;
    PyObject *negative = PyObject_CallMethodObjArgs(tensor, name_is_neg, NULL);
    if (!negative) return -1;
    Py_DECREF(negative);
    if (negative != Py_False) return 0;
    PyObject *address = PyObject_CallMethodObjArgs(tensor, name_data_ptr, NULL);
    yes = address && to_u64(address, out) ? 1 : -1;
    Py_XDECREF(address);
    return yes;
}

/* The place of the call's that has the address, borrowed; NULL: none. */
static place_object *place_at(const saver_object *self, uint64_t address) {
    for (Py_ssize_t i = 0; i < PyList_Size(self->places); i++) {
        place_object *place = (place_object *)PyList_GetItem(self->places, i);
        if (place->cast == Py_None && place->begin <= address && address < place->end) return place;
    }
    return NULL;
}

/* A new handle; NULL, perhaps with an exception: it is not for us. */
static PyObject *handle_for(saver_object *self, PyObject *tensor) {
    uint64_t address;
    if (address_of(self->calls, tensor, &address) <= 0 || !address) return NULL;
    place_object *place = place_at(self, address);
    if (!place) return NULL;
    looks seen;
    PyObject *handle = NULL;
    uint64_t offset = address - place->begin;
    if (looks_of(self->calls, tensor, &seen) && seen.direct && seen.view.bytes &&
        seen.view.bytes <= place->end - address)
        handle = handle_new(self->calls, place->unit, place->entry, place->copy, tensor, offset, &seen);
    looks_drop(&seen);
    if (handle && PyList_Append(self->handles, handle) < 0) Py_CLEAR(handle);
    return handle;
}

/* Whether the pair below is that of checkpointing, which keeps nothing. -1 with an exception. */
static int below_keeps_nothing(const saver_object *self) {
    if (self->below == Py_None) return 1;
    PyObject *pack = PyTuple_GetItem(self->below, 0);
    PyObject *where = pack ? PyObject_GetAttr(pack, name___module__) : NULL;
    if (!where) {
        if (!pack || !PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
        PyErr_Clear();
        return 0;
    }
    int same = PyUnicode_Check(where) && !PyUnicode_CompareWithASCIIString(where, "torch.utils.checkpoint");
    Py_DECREF(where);
    return same;
}

static PyObject *saver_pack(PyObject *op, PyObject *args, PyObject *kwargs) {
    saver_object *self = (saver_object *)op;
    PyObject *tensor;
    if (kwargs || !PyArg_ParseTuple(args, "O:pack", &tensor)) return NULL;
    if (!self->places) return PyErr_Format(PyExc_RuntimeError, "the call of these hooks is over");
    PyObject *handle = handle_for(self, tensor);
    if (!handle) return PyErr_Occurred() ? NULL : PyObject_CallMethodObjArgs(op, name_pack_other, tensor, NULL);
    int quiet = below_keeps_nothing(self);
    if (quiet > 0) return handle;
    PyObject *noted = quiet < 0 ? NULL : PyObject_CallMethodObjArgs(op, name_note_copies, handle, NULL);
    Py_XDECREF(noted);
    if (!noted) Py_CLEAR(handle);
    return handle;
}

/* ---- beginning and end ---- */

static bool fill(saver_object *self, calls_object *calls, PyObject *places) {
    self->handles = PyList_New(0);
    Py_INCREF(places), self->places = places;
    Py_INCREF(calls), self->calls = calls;
    return self->handles != NULL;
}

/* The pair is in force from now on. */
static bool put_up(saver_object *self) {
    const calls_object *calls = self->calls;
    self->below = PyObject_CallFunctionObjArgs(calls->top_hooks, Py_True, NULL);
    if (!self->below) return false;
    PyObject *done = PyObject_CallFunctionObjArgs(calls->push_hooks, (PyObject *)self, calls->unpack, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

PyObject *saver_begin(sitter_object *sitter, const shown *shown) {
    calls_object *calls = sitter->calls;
    const core_state *state = PyType_GetModuleState(Py_TYPE(sitter));
    PyObject *storage = shown->storage;
    Py_XINCREF(storage);
    if (!storage && !(storage = PyObject_CallMethodObjArgs(shown->copy, name_untyped_storage, NULL))) return NULL;
    PyObject *place = place_new(state->place, shown->at->lease.address, sitter->view.bytes, sitter->unit,
                                sitter->entry, shown->copy, storage, Py_None);
    Py_DECREF(storage);
    PyObject *places = place ? PyList_New(0) : NULL;
    saver_object *self = NULL;
    if (places && PyList_Append(places, place) == 0)
        self = (saver_object *)PyType_GenericAlloc((PyTypeObject *)calls->saver, 0);
    if (self && !(fill(self, calls, places) && put_up(self))) Py_CLEAR(self);
    Py_XDECREF(places);
    Py_XDECREF(place);
    return (PyObject *)self;
}

bool saver_is_of(PyObject *value, const calls_object *calls) {
    return Py_TYPE(value) == (PyTypeObject *)calls->saver && ((saver_object *)value)->calls == calls;
}

PyObject *saver_outside(calls_object *calls) {
    PyObject *places = PyList_New(0);
    saver_object *self = places ? (saver_object *)PyType_GenericAlloc((PyTypeObject *)calls->saver, 0) : NULL;
    if (self && !(fill(self, calls, places) && put_up(self))) Py_CLEAR(self);
    Py_XDECREF(places);
    return (PyObject *)self;
}

/* Whether a weight that the call saw has been written; 1 with an exception. */
static bool anything_written(const saver_object *self) {
    for (Py_ssize_t i = 0; i < PyList_Size(self->places); i++)
        if (flag_of(((place_object *)PyList_GetItem(self->places, i))->copy, name__version)) return true;
    return false;
}

bool saver_end(PyObject *op) {
    saver_object *self = (saver_object *)op;
    PyObject *done = PyObject_CallNoArgs(self->calls->pop_hooks);
    if (done && PyList_Size(self->handles) && anything_written(self)) {
        Py_DECREF(done);
        done = PyErr_Occurred() ? NULL : PyObject_CallMethodObjArgs(op, name_settle, NULL);
    }
    Py_XDECREF(done);
    /* Autograd keeps the pair with each saved tensor: it must not keep the places. */
    Py_CLEAR(self->places);
    Py_CLEAR(self->handles);
    Py_CLEAR(self->below);
    return done != NULL;
}

static int saver_init(PyObject *op, PyObject *args, PyObject *kwargs) {
    saver_object *self = (saver_object *)op;
    PyObject *calls, *places;
    if (!PyArg_ParseTuple(args, "OO!:Saver", &calls, &PyList_Type, &places)) return -1;
    if (!kwargs && !self->calls && is_calls(calls)) return fill(self, (calls_object *)calls, places) ? 0 : -1;
    return PyErr_SetString(PyExc_TypeError, "Saver(calls, places): once, of a Calls"), -1;
}

static PyObject *saver_stand(PyObject *op, PyObject *none) {
    (void)none;
    if (!put_up((saver_object *)op)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *saver_leave(PyObject *op, PyObject *none) {
    (void)none;
    saver_object *self = (saver_object *)op;
    if (!self->places || !self->below) return PyErr_Format(PyExc_RuntimeError, "end() of hooks that do not stand");
    if (!saver_end(op)) return NULL;
    Py_RETURN_NONE;
}

/* ---- the types ---- */

static int place_traverse(PyObject *op, visitproc visit, void *arg) {
    place_object *self = (place_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->unit);
    Py_VISIT(self->entry);
    Py_VISIT(self->copy);
    Py_VISIT(self->storage);
    return 0;
}

static int place_clear(PyObject *op) {
    place_object *self = (place_object *)op;
    Py_CLEAR(self->unit);
    Py_CLEAR(self->entry);
    Py_CLEAR(self->copy);
    Py_CLEAR(self->storage);
    Py_CLEAR(self->cast);
    return 0;
}

static void place_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    place_clear(op);
    object_free(op);
}

static PyMemberDef place_members[] = {
    {"begin", T_ULONGLONG, offsetof(place_object, begin), READONLY, "Address of the first byte."},
    {"end", T_ULONGLONG, offsetof(place_object, end), READONLY, "Address behind the last one."},
    {"unit", T_OBJECT, offsetof(place_object, unit), READONLY, NULL},
    {"entry", T_OBJECT, offsetof(place_object, entry), READONLY, "The weight."},
    {"copy", T_OBJECT, offsetof(place_object, copy), READONLY, "What the call sees; says its `_version`."},
    {"storage", T_OBJECT, offsetof(place_object, storage), READONLY, "Of the copy."},
    {"cast", T_OBJECT, offsetof(place_object, cast), READONLY,
     "The copy's dtype, where it is a cast of the place. None: it lies over the place."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot place_slots[] = {
    {Py_tp_doc, (void *)"Place(begin, nbytes, unit, entry, copy, storage, cast=None)\n--\n\n"
                        "Memory that a call sees the weight `entry` of `unit` in."},
    {Py_tp_new, place_of},       {Py_tp_dealloc, place_dealloc}, {Py_tp_traverse, place_traverse},
    {Py_tp_clear, place_clear},  {Py_tp_members, place_members}, {0, NULL},
};
PyType_Spec place_spec = {"stagehand._core.Place", sizeof(place_object), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, place_slots};

static int saver_traverse(PyObject *op, visitproc visit, void *arg) {
    saver_object *self = (saver_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->calls);
    Py_VISIT(self->places);
    Py_VISIT(self->handles);
    Py_VISIT(self->below);
    return 0;
}

static int saver_clear(PyObject *op) {
    saver_object *self = (saver_object *)op;
    Py_CLEAR(self->calls);
    Py_CLEAR(self->places);
    Py_CLEAR(self->handles);
    Py_CLEAR(self->below);
    return 0;
}

static void saver_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    saver_clear(op);
    object_free(op);
}

static PyMethodDef saver_methods[] = {
    {"begin", saver_stand, METH_NOARGS, "begin()\n--\n\nThe pair is in force on this thread until end()."},
    {"end", saver_leave, METH_NOARGS, "end()\n--\n\nThe call is over. settle() comes first where it wrote a weight."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef saver_members[] = {
    {"calls", T_OBJECT, offsetof(saver_object, calls), READONLY, "Of the session."},
    {"places", T_OBJECT, offsetof(saver_object, places), READONLY, "List of Place; None behind the end."},
    {"handles", T_OBJECT, offsetof(saver_object, handles), READONLY, "List of Handle; None behind the end."},
    {"below", T_OBJECT, offsetof(saver_object, below), READONLY, "The pair that was in force before, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot saver_slots[] = {
    {Py_tp_doc, (void *)"Saver(calls, places, /)\n--\n\n"
                        "The base of saved.Saver, and the pack hook for one call. places: of the call.\n"
                        "pack_other(tensor): packs what lies in none of them; note_copies(handle): of a handle that\n"
                        "hooks of the caller's below are not given; settle(): handles of what was written."},
    {Py_tp_call, saver_pack},         {Py_tp_init, saver_init},       {Py_tp_dealloc, saver_dealloc},
    {Py_tp_traverse, saver_traverse}, {Py_tp_clear, saver_clear},     {Py_tp_methods, saver_methods},
    {Py_tp_members, saver_members},   {0, NULL},
};
PyType_Spec saver_spec = {"stagehand._core.Saver", sizeof(saver_object), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, saver_slots};
