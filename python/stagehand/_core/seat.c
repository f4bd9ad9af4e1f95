/* Type Seat: where a module's calls find the weight of a module that has one, all of a unit. Type Sitter:
 * that weight. Other threads may give the seat another sitter, or none, wherever the GIL is let go: so a call
 * takes the sitter once, with a reference, and what says which weight it is never changes in it. A call
 * leases the sitter's unit and shows a tensor over the place. A tensor is made once for each place and shown
 * again when the unit comes back to it: while a call runs its storage holds the lease, as with
 * Runtime.acquire(); behind the call the sitter takes lease and tensor back, if it can tell that nobody else
 * has the tensor, its memory, or a weak reference. Otherwise the storage keeps the lease to its end. What a
 * kept tensor lies over is anybody's, but nobody sees it. */
#include "seat.h"

#include <stddef.h>
#include <stdlib.h>
#include <structmember.h>

#include "convert.h"

#define SEAT_NAME(name) PyObject *name_##name;
SEAT_NAMES(SEAT_NAME)
#undef SEAT_NAME

bool seat_names(void) {
#define SEAT_NAME(name) \
    if (!name_##name && !(name_##name = PyUnicode_InternFromString(#name))) return false;
    SEAT_NAMES(SEAT_NAME)
#undef SEAT_NAME
    return true;
}

int says(PyObject *callable) {
    PyObject *answer = PyObject_CallNoArgs(callable);
    if (!answer) return -1;
    int yes = PyObject_IsTrue(answer);
    Py_DECREF(answer);
    return yes;
}

int flag_of(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (!value) return -1;
    int yes = PyObject_IsTrue(value);
    Py_DECREF(value);
    return yes;
}

/* The number in `value`, which is let go of; -1 with an exception. */
static long long number_in(PyObject *value) {
    if (!value) return -1;
    long long number = PyLong_AsLongLong(value);
    Py_DECREF(value);
    return number;
}

here_object *seat_here(const seat_object *self) {
    if (self->here && self->thread == PyThread_get_thread_ident()) {
        Py_INCREF(self->here);
        return self->here;
    }
    return (here_object *)PyObject_GetAttr(self->local, name_here);
}

int sitter_current(const sitter_object *self, PyObject *master) {
    const mark_object *mark = (const mark_object *)self->entry;
    if (mark->written || mark->cast) return 0;
    long long version = number_in(PyObject_GetAttr(master, name__version));
    if (version == -1 && PyErr_Occurred()) return -1;
    if (version != mark->version) return 0;
    if (mark->address == FOLDED_ADDRESS) return 1; /* its data changes by unfolding alone, which gives another one */
    PyObject *address = PyObject_CallMethodObjArgs(master, name_data_ptr, NULL);
    if (!address) return -1;
    unsigned long long at = PyLong_AsUnsignedLongLong(address);
    Py_DECREF(address);
    if (at == (unsigned long long)-1 && PyErr_Occurred()) return -1;
    return at == mark->address;
}

/* ---- tensors ---- */

static void place_release(place *at) {
    if (atomic_exchange(&at->leased, false)) sth_lease_release(at->runtime, &at->lease);
}

static void place_unref(place *at) {
    if (atomic_fetch_sub(&at->refs, 1) == 1) free(at);
}

static void storage_died(byte_tensor *tensor) {
    place *at = tensor->object;
    atomic_store(&at->gone, true);
    place_release(at);
    place_unref(at);
}

void shown_drop(shown *out) {
    PyObject *copy = out->copy, *storage = out->storage, *number = out->number;
    place *at = out->at;
    *out = (shown){0};
    if (at) place_unref(at);
    Py_XDECREF(number);
    Py_XDECREF(storage);
    Py_XDECREF(copy);
}

static bool count_holders(const calls_object *calls, const shown *s, holders *out) {
    *out = (holders){
        .refs = (long long)Py_REFCNT(s->copy),
        .storage_refs = (long long)Py_REFCNT(s->storage),
        .weak = number_in(PyObject_CallFunctionObjArgs(calls->weak_refs, s->copy, NULL)),
        .uses = number_in(PyObject_CallMethodObjArgs(s->copy, name__use_count, NULL)),
        .sharers = number_in(PyObject_CallFunctionObjArgs(calls->storage_uses, s->number, NULL)),
    };
    return out->weak >= 0 && out->uses >= 0 && out->sharers >= 0;
}

/* A capsule over the place of a lease that has been taken. Its storage's end releases it; so does failure. */
static PyObject *capsule_over(const sitter_object *self, const sth_lease *lease, shown *out) {
    runtime_object *runtime = (runtime_object *)self->calls->runtime;
    byte_tensor *tensor = byte_tensor_new();
    place *at = calloc(1, sizeof *at);
    if (!tensor || !at) {
        if (tensor) PyErr_NoMemory(), byte_tensor_drop(tensor);
        free(at);
        sth_lease_release(runtime->runtime, lease);
        return NULL;
    }
    *at = (place){.runtime = runtime->runtime, .lease = *lease};
    atomic_init(&at->refs, 2);
    atomic_init(&at->leased, true);
    out->at = at;
    tensor->object = at;
    tensor->release = storage_died;
    tensor->view = self->view;
    return byte_tensor_capsule(tensor, lease->address, runtime->unit_bytes[self->index], runtime->dl);
}

static int attribute_count(PyObject *tensor) {
    PyObject *attributes = PyObject_GetAttr(tensor, name___dict__);
    if (!attributes) return -1;
    int count = (int)PyDict_Size(attributes);
    Py_DECREF(attributes);
    return count;
}

/* A new tensor over the lease's place. `out` says what for. */
static bool make_copy(const sitter_object *self, PyObject *master, const sth_lease *lease, shown *out) {
    PyObject *capsule = capsule_over(self, lease, out);
    PyObject *plain = out->plain ? Py_True : Py_False;
    if (capsule) out->copy = PyObject_CallFunctionObjArgs(self->calls->seen, capsule, master, plain, NULL);
    Py_XDECREF(capsule);
    if (out->copy) {
        out->bare = attribute_count(master) == 0;
        out->attributes = attribute_count(out->copy);
    }
    if (out->bare && self->calls->storage_uses != Py_None && !PyErr_Occurred()) {
        out->storage = PyObject_CallMethodObjArgs(out->copy, name_untyped_storage, NULL);
        out->number = out->storage ? PyObject_GetAttr(out->storage, name__cdata) : NULL;
        if (out->number) count_holders(self->calls, out, &out->holders);
    }
    if (!PyErr_Occurred()) return true;
    shown_drop(out);
    return false;
}

/* Moves the kept tensor into `wanted` if it is what this call would make. -1 with an exception. */
static int take_kept(sitter_object *self, PyObject *master, const sth_lease *lease, shown *wanted) {
    int count = attribute_count(master);
    if (count) return count < 0 ? -1 : 0;
    const shown *kept = &self->kept; /* another thread may have taken it before, but not from here on */
    if (!kept->copy || atomic_load(&kept->at->gone) || kept->at->lease.address != lease->address ||
        kept->version != wanted->version || kept->plain != wanted->plain || kept->grad != wanted->grad ||
        kept->autocast != wanted->autocast)
        return 0;
    *wanted = *kept;
    self->kept = (shown){0};
    wanted->at->lease = *lease;
    atomic_store(&wanted->at->leased, true);
    return 1;
}

bool calls_stream(const calls_object *self, uint64_t *out) {
    *out = 0;
    if (self->stream == Py_None) return true;
    PyObject *handle = PyObject_CallNoArgs(self->stream);
    bool done = handle && to_u64(handle, out);
    Py_XDECREF(handle);
    return done;
}

static bool acquire(const sitter_object *self, sth_lease *out) {
    runtime_object *runtime = (runtime_object *)self->calls->runtime;
    uint64_t stream;
    sth_status status;
    if (!calls_stream(self->calls, &stream) || !guard_enter(&runtime->guard)) return false;
    WITHOUT_GIL(status, sth_unit_acquire(runtime->runtime, self->index, stream, out));
    if (status != STH_OK) raise_status(status);
    guard_leave(&runtime->guard);
    return status == STH_OK;
}

void calls_refuse(const calls_object *self) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    PyObject *said = error ? PyObject_CallFunctionObjArgs(self->refused, error, NULL) : NULL;
    if (said) {
        PyErr_SetObject((PyObject *)Py_TYPE(said), said);
        Py_DECREF(said);
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

bool sitter_lease(sitter_object *self, PyObject *master, bool plain, shown *out) {
    sth_lease lease;
    *out = (shown){.version = ((mark_object *)self->entry)->version, .plain = plain};
    int grad = flag_of(master, name_requires_grad), autocast = grad > 0 ? says(self->calls->autocast) : 0;
    if (grad < 0 || autocast < 0) return false;
    out->grad = grad;
    out->autocast = autocast;
    if (!acquire(self, &lease)) return calls_refuse(self->calls), false;
    int same = take_kept(self, master, &lease, out);
    if (same) {
        if (same < 0) sth_lease_release(((runtime_object *)self->calls->runtime)->runtime, &lease);
        return same > 0;
    }
    return make_copy(self, master, &lease, out);
}

/* Whether only `out` has the tensor. */
static bool is_alone(const calls_object *calls, const shown *out) {
    holders now;
    if (!out->number || atomic_load(&out->at->gone)) return false;
    if (!count_holders(calls, out, &now)) return PyErr_Clear(), false;
    const holders *then = &out->holders;
    return now.refs == then->refs && now.storage_refs == then->storage_refs && now.weak == then->weak &&
           now.uses == then->uses && now.sharers == then->sharers;
}

void sitter_return(sitter_object *self, shown *out) {
    if (!is_alone(self->calls, out)) {
        shown_drop(out);
        return;
    }
    shown before = self->kept; /* of another place, where there is one */
    place_release(out->at);
    self->kept = *out;
    *out = (shown){0};
    shown_drop(&before);
}

int shown_unmarked(const shown *out) {
    if (out->plain) return 1;
    int count = attribute_count(out->copy);
    return count < 0 ? -1 : out->bare && count == out->attributes;
}

/* ---- types ---- */

/* The type that made the object, for those that are not subclassed. */
static bool made_by(PyObject *value, destructor dealloc) {
    return PyType_GetSlot(Py_TYPE(value), Py_tp_dealloc) == (void *)dealloc;
}

static int sitter_traverse(PyObject *op, visitproc visit, void *arg) {
    sitter_object *self = (sitter_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->calls);
    Py_VISIT(self->key);
    Py_VISIT(self->entry);
    Py_VISIT(self->unit);
    Py_VISIT(self->frame);
    Py_VISIT(self->kept.copy);
    Py_VISIT(self->kept.storage);
    return 0;
}

static int sitter_clear(PyObject *op) {
    sitter_object *self = (sitter_object *)op;
    Py_CLEAR(self->calls);
    Py_CLEAR(self->key);
    Py_CLEAR(self->entry);
    Py_CLEAR(self->unit);
    Py_CLEAR(self->frame);
    shown_drop(&self->kept);
    return 0;
}

static void sitter_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    sitter_clear(op);
    object_free(op);
}

static PyMemberDef sitter_members[] = {
    {"key", T_OBJECT, offsetof(sitter_object, key), READONLY, "The weight's name."},
    {"entry", T_OBJECT, offsetof(sitter_object, entry), READONLY, NULL},
    {"unit", T_OBJECT, offsetof(sitter_object, unit), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot sitter_slots[] = {
    {Py_tp_doc, (void *)"The weight that has a Seat, which makes it."},
    {Py_tp_dealloc, sitter_dealloc}, {Py_tp_traverse, sitter_traverse}, {Py_tp_clear, sitter_clear},
    {Py_tp_members, sitter_members}, {0, NULL},
};
PyType_Spec sitter_spec = {"stagehand._core.Sitter", sizeof(sitter_object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                           sitter_slots};

static int seat_traverse(PyObject *op, visitproc visit, void *arg) {
    seat_object *self = (seat_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->plan);
    Py_VISIT(self->local);
    Py_VISIT(self->managed);
    Py_VISIT(self->sitter);
    return 0;
}

static int seat_clear(PyObject *op) {
    seat_object *self = (seat_object *)op;
    Py_CLEAR(self->sitter);
    Py_CLEAR(self->plan);
    Py_CLEAR(self->local);
    Py_CLEAR(self->managed);
    return 0;
}

static void seat_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    seat_clear(op);
    object_free(op);
}

bool is_seat(PyObject *value) { return made_by(value, seat_dealloc); }

static PyObject *seat_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *plan, *local, *managed;
    core_state *state = PyType_GetModuleState(type);
    static char *names[] = {"plan", "local", "managed", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO!:Seat", names, &plan, &local, &PyDict_Type, &managed))
        return NULL;
    PyObject *here = PyObject_GetAttr(local, name_here);
    bool valid = here && Py_TYPE(here) == state->here;
    Py_XDECREF(here);
    if (!valid) return PyErr_SetString(PyExc_TypeError, "Seat: local.here is no Here"), NULL;
    seat_object *self = (seat_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    Py_INCREF(plan), self->plan = plan;
    Py_INCREF(local), self->local = local;
    Py_INCREF(managed), self->managed = managed;
    return (PyObject *)self;
}

static PyObject *seat_take(PyObject *op, PyObject *args) {
    seat_object *self = (seat_object *)op;
    core_state *state = PyType_GetModuleState(Py_TYPE(op));
    PyObject *calls, *key, *unit, *entry, *view;
    uint32_t index;
    tensor_view seen;
    if (!PyArg_ParseTuple(args, "O!O!OO&O!O:take", state->calls, &calls, &PyUnicode_Type, &key, &unit, to_u32,
                          &index, state->mark, &entry, &view) || !unpack_tensor_view(view, &seen))
        return NULL;
    const runtime_object *runtime = (runtime_object *)((calls_object *)calls)->runtime;
    if (index >= runtime->unit_count || seen.bytes > runtime->unit_bytes[index])
        return PyErr_SetString(PyExc_ValueError, "take: the view reaches past the unit"), NULL;
    sitter_object *sitter = (sitter_object *)PyType_GenericAlloc(state->sitter, 0);
    if (!sitter) return NULL;
    Py_INCREF(calls), sitter->calls = (calls_object *)calls;
    Py_INCREF(key), sitter->key = key;
    Py_INCREF(entry), sitter->entry = entry;
    Py_INCREF(unit), sitter->unit = unit;
    sitter->index = index;
    sitter->view = seen;
    sitter_object *before = self->sitter;
    self->sitter = sitter;
    Py_XDECREF(before);
    Py_RETURN_NONE;
}

static PyObject *seat_leave_empty(PyObject *op, PyObject *none) {
    (void)none;
    Py_CLEAR(((seat_object *)op)->sitter);
    Py_RETURN_NONE;
}

static PyMethodDef seat_methods[] = {
    {"take", seat_take, METH_VARARGS,
     "take(calls, key, unit, index, entry, view, /)\n--\n\n"
     "The sitter is the weight `key`, `entry`, which is all of `unit`, the runtime's `index`, and seen as\n"
     "`view` from tensor_view()."},
    {"empty", seat_leave_empty, METH_NOARGS, "empty()\n--\n\nThere is no such weight, or no more."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef seat_members[] = {
    {"plain", T_BOOL, offsetof(seat_object, plain), 0, "Whether the module's forward is torch's own."},
    {"sitter", T_OBJECT, offsetof(seat_object, sitter), READONLY, "The Sitter, None: there is none."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot seat_slots[] = {
    {Py_tp_doc, (void *)"Seat(plan, local, managed)\n--\n\n"
                        "Where a module's calls see a weight that is all the module has. plan: its\n"
                        "ModulePlan. local: the session's Local. managed: the plan's dictionary."},
    {Py_tp_new, seat_new},         {Py_tp_dealloc, seat_dealloc}, {Py_tp_traverse, seat_traverse},
    {Py_tp_clear, seat_clear},     {Py_tp_methods, seat_methods}, {Py_tp_members, seat_members},
    {0, NULL},
};
PyType_Spec seat_spec = {"stagehand._core.Seat", sizeof(seat_object), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, seat_slots};
