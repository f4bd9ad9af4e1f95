/* Types Activations and ActivationRecord: saved tensors, their copies to the host and back.
 *
 * A record object holds what is on the device of its bytes, so that both end together and no interrupt can come
 * between: when it dies the store orders its stream behind copies under way, then the tensors go. The store ends
 * with the last of its records and the Activations object. */
#include "convert.h"

#include <stddef.h>
#include <structmember.h>

typedef struct activations_object {
    PyObject ob_base;
    sth_activation *store;
    PyObject *held; /* a list of tensors, NULL before the first: see hold() */
} activations_object;

static sth_activation *store_of(PyObject *op) { return ((activations_object *)op)->store; }

/* ---- ActivationRecord */

typedef struct record_object {
    PyObject ob_base;
    PyObject *owner; /* a reference to the Activations */
    unsigned long long number, stream;
    PyObject *tensor, *copy;
} record_object;

/* A copy may be under way to or from a tensor, for the device refused even to be waited for: the tensor stays until the
 * store's streams have ended. */
static void hold(PyObject *op, PyObject *tensor) {
    activations_object *self = (activations_object *)op;
    PyObject *type, *value, *traceback;
    if (!tensor || tensor == Py_None) return;
    PyErr_Fetch(&type, &value, &traceback);
    if (!self->held) self->held = PyList_New(0);
    if (!self->held || PyList_Append(self->held, tensor) < 0) Py_INCREF(tensor); /* for good, then */
    PyErr_Restore(type, value, traceback); /* a MemoryError goes, too */
}

static PyObject *activations_hold(PyObject *op, PyObject *tensor) {
    hold(op, tensor);
    Py_RETURN_NONE;
}

static void record_dealloc(PyObject *op) {
    record_object *self = (record_object *)op;
    PyObject *owner = self->owner, *tensor = self->tensor, *copy = self->copy;
    if (self->number) {
        sth_status status; /* a device that fails says so elsewhere */
        WITHOUT_GIL(status, sth_activation_release(store_of(owner), self->number, self->stream));
        if (status != STH_OK) {
            hold(owner, tensor);
            hold(owner, copy);
        }
    }
    Py_XDECREF(tensor);
    Py_XDECREF(copy);
    Py_XDECREF(owner);
    object_free(op);
}

static PyMemberDef record_members[] = {
    {"number", T_ULONGLONG, offsetof(record_object, number), READONLY, "What the store calls it."},
    {"stream", T_ULONGLONG, offsetof(record_object, stream), 0, "The stream that uses the device's memory."},
    {"tensor", T_OBJECT, offsetof(record_object, tensor), 0, "What was saved, while it is on the device, or None."},
    {"copy", T_OBJECT, offsetof(record_object, copy), 0, "The bytes that came back, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot record_slots[] = {
    {Py_tp_doc, (void *)"A saved storage, from Activations.save(). It ends, and orders its stream behind copies under\n"
                        "way, when the object does; then it lets go of what it holds."},
    {Py_tp_dealloc, record_dealloc},
    {Py_tp_members, record_members},
    {0, NULL},
};
PyType_Spec activation_record_spec = {"stagehand._core.ActivationRecord", sizeof(record_object), 0,
                                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, record_slots};

/* ---- Activations */

/* A tuple of two as the classes of slabs. */
static bool read_classes(PyObject *bytes, PyObject *slabs, sth_activation_options *options) {
    Py_ssize_t count = PyTuple_Size(bytes), others = PyTuple_Size(slabs);
    if (count < 0 || others < 0) return false;
    if (count != others || count > STH_ACTIVATION_CLASSES) {
        PyErr_Format(PyExc_ValueError, "at most %d classes of slabs, and a count for each", STH_ACTIVATION_CLASSES);
        return false;
    }
    for (Py_ssize_t i = 0; i < count; i++)
        if (!to_u64(PyTuple_GetItem(bytes, i), &options->class_bytes[i]) ||
            !to_u32(PyTuple_GetItem(slabs, i), &options->class_slabs[i]))
            return false;
    options->class_count = (uint32_t)count;
    return true;
}

static PyObject *activations_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device",  "high",        "low",       "class_bytes", "class_slabs", "max_d2h",
                            "max_h2d", "ahead_bytes", "checksums", "priority",    NULL};
    core_state *state = PyType_GetModuleState(type);
    sth_activation_options options;
    sth_activation_options_init(&options);
    device_object *device;
    PyObject *class_bytes = NULL, *class_slabs = NULL;
    int checksums = 0;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|$O&O&O!O!O&O&O&pi:Activations", names, state->device, &device,
                                     to_u64, &options.high, to_u64, &options.low, &PyTuple_Type, &class_bytes,
                                     &PyTuple_Type, &class_slabs, to_u32, &options.max_d2h, to_u32,
                                     &options.max_h2d, to_u64, &options.ahead_bytes, &checksums,
                                     &options.priority))
        return NULL;
    if (class_bytes && class_slabs && !read_classes(class_bytes, class_slabs, &options)) return NULL;
    options.checksums = checksums;
    activations_object *self = (activations_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    if (!guard_enter(&device->guard)) {
        Py_DECREF(self);
        return NULL;
    }
    WITHOUT_GIL(status, sth_activation_create(device->device, &options, &self->store));
    guard_leave(&device->guard);
    if (status == STH_OK) return (PyObject *)self;
    raise_status(status);
    Py_DECREF(self);
    return NULL;
}

static void activations_dealloc(PyObject *op) {
    sth_activation *store = store_of(op);
    PyObject *held = ((activations_object *)op)->held;
    Py_BEGIN_ALLOW_THREADS
    sth_activation_destroy(store);
    Py_END_ALLOW_THREADS
    Py_XDECREF(held);
    object_free(op);
}

/* Calls of the form function(record, stream). */
typedef sth_status (*stream_call)(sth_activation *, sth_record, sth_stream);

static PyObject *call_with_stream(PyObject *op, PyObject *args, stream_call call) {
    uint64_t record, stream;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O&", to_u64, &record, to_u64, &stream)) return NULL;
    WITHOUT_GIL(status, call(store_of(op), record, stream));
    return none_or_raise(status);
}

static PyObject *activations_arrive(PyObject *op, PyObject *args) {
    return call_with_stream(op, args, sth_activation_arrive);
}
static PyObject *activations_let_go(PyObject *op, PyObject *args) {
    return call_with_stream(op, args, sth_activation_let_go);
}

/* Calls of the form function(record, address, stream). */
typedef sth_status (*copy_call)(sth_activation *, sth_record, sth_devptr, sth_stream);

static PyObject *call_with_address(PyObject *op, PyObject *args, copy_call call) {
    uint64_t record, address, stream;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O&O&", to_u64, &record, to_u64, &address, to_u64, &stream)) return NULL;
    WITHOUT_GIL(status, call(store_of(op), record, address, stream));
    return none_or_raise(status);
}

static PyObject *activations_spill(PyObject *op, PyObject *args) {
    return call_with_address(op, args, sth_activation_spill);
}
static PyObject *activations_restore(PyObject *op, PyObject *args) {
    return call_with_address(op, args, sth_activation_restore);
}

static NUMBER_METHOD(activations_pass, 64, store_of, NO_GUARD, sth_activation_pass)

static PyObject *activations_save(PyObject *op, PyObject *args) {
    PyObject *tensor;
    uint64_t bytes, stream, record;
    int passing;
    sth_status status;
    if (!PyArg_ParseTuple(args, "OO&pO&", &tensor, to_u64, &bytes, &passing, to_u64, &stream)) return NULL;
    core_state *state = PyType_GetModuleState(Py_TYPE(op));
    record_object *self = (record_object *)PyType_GenericAlloc(state->activation_record, 0);
    if (!self) return NULL;
    Py_INCREF(op);
    self->owner = op;
    Py_INCREF(tensor);
    self->tensor = tensor;
    self->stream = stream;
    WITHOUT_GIL(status, sth_activation_save(store_of(op), bytes, passing, &record));
    if (status == STH_OK) {
        self->number = record;
        return (PyObject *)self;
    }
    raise_status(status);
    Py_DECREF(self);
    return NULL;
}

static NUMBER_METHOD(activations_recomputable, 64, store_of, NO_GUARD, sth_activation_recomputable)
static NUMBER_METHOD(activations_drop, 64, store_of, NO_GUARD, sth_activation_drop)

static PyObject *activations_set_held(PyObject *op, PyObject *args) {
    uint64_t record;
    int held;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&p", to_u64, &record, &held)) return NULL;
    WITHOUT_GIL(status, sth_activation_set_held(store_of(op), record, held));
    return none_or_raise(status);
}

static NUMBER_METHOD(activations_recomputed, 64, store_of, NO_GUARD, sth_activation_recomputed)

static PyObject *activations_relieve(PyObject *op, PyObject *args) {
    uint64_t used, need, stream;
    sth_record record;
    sth_relief relief;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O&O&", to_u64, &used, to_u64, &need, to_u64, &stream)) return NULL;
    WITHOUT_GIL(status, sth_activation_relieve(store_of(op), used, need, stream, &record, &relief));
    if (status != STH_OK) return raise_status(status);
    return Py_BuildValue("(iK)", (int)relief, (unsigned long long)record);
}

static PyObject *activations_ask(PyObject *op, PyObject *args) {
    uint64_t record;
    sth_activation_state state;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&", to_u64, &record)) return NULL;
    WITHOUT_GIL(status, sth_activation_ask(store_of(op), record, &state));
    return status == STH_OK ? PyLong_FromLong(state) : raise_status(status);
}

static PyObject *activations_state(PyObject *op, PyObject *args) {
    uint64_t record;
    sth_activation_state state;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&", to_u64, &record)) return NULL;
    WITHOUT_GIL(status, sth_activation_state_get(store_of(op), record, &state));
    return status == STH_OK ? PyLong_FromLong(state) : raise_status(status);
}

static PyObject *activations_ahead(PyObject *op, PyObject *args) {
    uint64_t used;
    sth_record record;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&", to_u64, &used)) return NULL;
    WITHOUT_GIL(status, sth_activation_ahead(store_of(op), used, &record));
    return status == STH_OK ? PyLong_FromUnsignedLongLong(record) : raise_status(status);
}

static PyObject *activations_set_marks(PyObject *op, PyObject *args) {
    uint64_t high, low;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O&", to_u64, &high, to_u64, &low)) return NULL;
    WITHOUT_GIL(status, sth_activation_set_marks(store_of(op), high, low));
    return none_or_raise(status);
}

static PyObject *activations_set_caps(PyObject *op, PyObject *args) {
    uint32_t d2h, h2d;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O&", to_u32, &d2h, to_u32, &h2d)) return NULL;
    WITHOUT_GIL(status, sth_activation_set_caps(store_of(op), d2h, h2d));
    return none_or_raise(status);
}

static NUMBER_METHOD(activations_set_pinned_limit, 64, store_of, NO_GUARD, sth_activation_set_pinned_limit)

static PyObject *activations_set_conductor(PyObject *op, PyObject *value) {
    sth_conductor *conductor;
    sth_status status;
    if (!conductor_or_none(PyType_GetModuleState(Py_TYPE(op)), value, &conductor)) return NULL;
    WITHOUT_GIL(status, sth_activation_set_conductor(store_of(op), conductor));
    return none_or_raise(status);
}

static PyObject *activations_close(PyObject *op, PyObject *none) {
    (void)none;
    sth_status status;
    WITHOUT_GIL(status, sth_activation_close(store_of(op)));
    return none_or_raise(status);
}

static const field stats_fields[] = {
    FIELD(sth_activation_stats, saved, U64),
    FIELD(sth_activation_stats, spilled, U64),
    FIELD(sth_activation_stats, restored, U64),
    FIELD(sth_activation_stats, ahead, U64),
    FIELD(sth_activation_stats, recalled, U64),
    FIELD(sth_activation_stats, dropped, U64),
    FIELD(sth_activation_stats, recomputed, U64),
    FIELD(sth_activation_stats, spill_bytes, U64),
    FIELD(sth_activation_stats, restore_bytes, U64),
    FIELD(sth_activation_stats, pool_hits, U64),
    FIELD(sth_activation_stats, pool_misses, U64),
    FIELD(sth_activation_stats, fallbacks, U64),
    FIELD(sth_activation_stats, host_bytes, U64),
    FIELD(sth_activation_stats, pinned_bytes, U64),
    FIELD(sth_activation_stats, slab_bytes, U64),
    FIELD(sth_activation_stats, records, U64),
    FIELD(sth_activation_stats, kept_bytes, U64),
    FIELD(sth_activation_stats, peak_bytes, U64),
    FIELD(sth_activation_stats, waits, U64),
    FIELD(sth_activation_stats, link_bytes_per_s, U64),
    FIELD_END,
};

static PyObject *activations_stats(PyObject *op, PyObject *none) {
    (void)none;
    sth_activation_stats stats;
    sth_status status;
    WITHOUT_GIL(status, sth_activation_stats_get(store_of(op), &stats));
    return status == STH_OK ? dict_of(&stats, stats_fields) : raise_status(status);
}

PyObject *activation_states(void) {
#define COUNT(name, text) "s"
#define VALUE(name, text) , text
    return Py_BuildValue("(" STH_ACTIVATION_STATE_LIST(COUNT) ")" STH_ACTIVATION_STATE_LIST(VALUE));
#undef COUNT
#undef VALUE
}

static PyMethodDef activations_methods[] = {
    {"begin", activations_pass, METH_O,
     "begin(step, /)\n--\n\nA new pass: a forward and its backward. `step` is for messages."},
    {"save", activations_save, METH_VARARGS,
     "save(tensor, nbytes, passing, stream, /)\n--\n\n"
     "A storage is saved, which `tensor` keeps; passing: it is not to be spilled. Returns an ActivationRecord.\n"
     "Other calls take its number. Call relieve() after it."},
    {"recomputable", activations_recomputable, METH_O,
     "recomputable(record, /)\n--\n\nWhat lies there can be computed again: it is dropped in place of being spilled."},
    {"set_held", activations_set_held, METH_VARARGS,
     "set_held(record, held, /)\n--\n\nWhether somebody else has the record's memory: it is not chosen then."},
    {"drop", activations_drop, METH_O, "drop(record, /)\n--\n\nWhat can be computed again is let go of."},
    {"recomputed", activations_recomputed, METH_O,
     "recomputed(record, /)\n--\n\nA dropped one is on the device again."},
    {"relieve", activations_relieve, METH_VARARGS,
     "relieve(used, need, stream, /)\n--\n\n"
     "What makes room for `need` bytes: (0, 0) nothing, (1, record) spill it, (2, record) let go of its\n"
     "device copy, (3, record) drop it. In place of 1 and 3: set_held(record, True). used: bytes in use on\n"
     "the device, 0 for the records' own."},
    {"spill", activations_spill, METH_VARARGS,
     "spill(record, address, stream, /)\n--\n\n"
     "Enqueues the copy to the host behind `stream`. What lies at `address` must stay until relieve() says."},
    {"ask", activations_ask, METH_VARARGS,
     "ask(record, /)\n--\n\nBackward asks for it. Returns its state, an index into ACTIVATION_STATES."},
    {"state", activations_state, METH_VARARGS, "state(record, /)\n--\n\nAn index into ACTIVATION_STATES."},
    {"ahead", activations_ahead, METH_VARARGS,
     "ahead(used, /)\n--\n\nThe record to restore before it is asked for, or 0."},
    {"restore", activations_restore, METH_VARARGS,
     "restore(record, address, stream, /)\n--\n\n"
     "Enqueues the copy to `address`, allocated on `stream`. Raises TransferError where a checksum differs."},
    {"arrive", activations_arrive, METH_VARARGS,
     "arrive(record, stream, /)\n--\n\n`stream` waits for the copy back."},
    {"hold", activations_hold, METH_O,
     "hold(tensor, /)\n--\n\n"
     "Keeps the tensor until the store has ended: a copy that failed may be writing to it still."},
    {"let_go", activations_let_go, METH_VARARGS,
     "let_go(record, stream, /)\n--\n\n"
     "Only another backward asks for it: the device copy may be dropped, where the host has one."},
    {"set_marks", activations_set_marks, METH_VARARGS, "set_marks(high, low, /)\n--\n\nWatermarks in bytes."},
    {"set_caps", activations_set_caps, METH_VARARGS,
     "set_caps(max_d2h, max_h2d, /)\n--\n\nCopies under way; max_d2h 0: nothing is spilled."},
    {"set_pinned_limit", activations_set_pinned_limit, METH_O,
     "set_pinned_limit(bytes, /)\n--\n\nMemory taken from now on is pinned up to so many bytes; 0: no limit."},
    {"set_conductor", activations_set_conductor, METH_O,
     "set_conductor(conductor, /)\n--\n\nCopies pass through a Conductor; None: not any more."},
    {"close", activations_close, METH_NOARGS,
     "close()\n--\n\nNothing is spilled or restored ahead any more; records go on."},
    {"stats", activations_stats, METH_NOARGS, "stats()\n--\n\nA dict of the counters of sth_activation_stats."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot activations_slots[] = {
    {Py_tp_doc, (void *)"Activations(device, *, high, low, class_bytes=(), class_slabs=(), max_d2h=1, max_h2d=1, "
                        "ahead_bytes=1 GiB,\n            checksums=False, priority=0)\n--\n\n"
                        "Records of saved tensors. high, low: watermarks in bytes. class_bytes, class_slabs:\n"
                        "sizes and counts of host slabs; none: the pool sizes itself. Calls release the GIL;\n"
                        "one thread at a time for each record."},
    {Py_tp_new, activations_new},
    {Py_tp_dealloc, activations_dealloc},
    {Py_tp_methods, activations_methods},
    {0, NULL},
};
PyType_Spec activations_spec = {"stagehand._core.Activations", sizeof(activations_object), 0, Py_TPFLAGS_DEFAULT,
                                activations_slots};
