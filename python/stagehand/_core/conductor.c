/* Type Conductor: phases, reservations, tokens and hints of an sth_conductor, by numbers. Names of the numbers are
 * in CONDUCTOR; stagehand.conductor is what users see. The sth_conductor ends with the object and the runtimes that
 * are attached to it. Calls release the GIL. */
#include "convert.h"

#include "stagehand/conductor.h"

typedef struct conductor_object {
    PyObject ob_base;
    sth_conductor *conductor;
} conductor_object;

static sth_conductor *core_of(PyObject *op) { return ((conductor_object *)op)->conductor; }

bool conductor_or_none(core_state *state, PyObject *value, sth_conductor **out) {
    *out = NULL;
    if (value == Py_None) return true;
    if (!PyObject_TypeCheck(value, state->conductor)) {
        PyErr_SetString(PyExc_TypeError, "a Conductor or None is needed");
        return false;
    }
    *out = core_of(value);
    return true;
}

static PyObject *conductor_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"soft_cap", "hard_cap", "pinned_cap", "h2d_slots", "d2h_slots", "piece_bytes",
                            "event_trace", NULL};
    sth_conductor_options o;
    int trace = 0;
    sth_status status;
    sth_conductor_options_init(&o);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$O&O&O&O&O&O&p:Conductor", names, to_u64, &o.soft_cap, to_u64,
                                     &o.hard_cap, to_u64, &o.pinned_cap, to_u32, &o.h2d_slots, to_u32, &o.d2h_slots,
                                     to_u64, &o.piece_bytes, &trace))
        return NULL;
    o.event_trace = trace;
    conductor_object *self = (conductor_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    status = sth_conductor_create(&o, &self->conductor);
    if (status == STH_OK) return (PyObject *)self;
    raise_status(status);
    Py_DECREF(self);
    return NULL;
}

static void conductor_dealloc(PyObject *op) {
    sth_conductor *core = core_of(op);
    Py_BEGIN_ALLOW_THREADS
    sth_conductor_destroy(core);
    Py_END_ALLOW_THREADS
    object_free(op);
}

static PyObject *conductor_shutdown(PyObject *op, PyObject *none) {
    (void)none;
    sth_status status;
    WITHOUT_GIL(status, sth_conductor_shutdown(core_of(op)));
    return none_or_raise(status);
}

static PyObject *conductor_register(PyObject *op, PyObject *args) {
    const char *name;
    uint32_t owner;
    sth_status status;
    if (!PyArg_ParseTuple(args, "s", &name)) return NULL;
    WITHOUT_GIL(status, sth_conductor_register(core_of(op), name, &owner));
    return status == STH_OK ? PyLong_FromUnsignedLong(owner) : raise_status(status);
}

static PyObject *conductor_enter(PyObject *op, PyObject *args) {
    int phase;
    bool changed;
    sth_status status;
    if (!PyArg_ParseTuple(args, "i", &phase)) return NULL;
    WITHOUT_GIL(status, sth_conductor_enter(core_of(op), (sth_phase)phase, &changed));
    return status == STH_OK ? PyBool_FromLong(changed) : raise_status(status);
}

static PyObject *conductor_end_step(PyObject *op, PyObject *none) {
    (void)none;
    sth_status status;
    WITHOUT_GIL(status, sth_conductor_end_step(core_of(op)));
    return none_or_raise(status);
}

static PyObject *conductor_phase(PyObject *op, PyObject *none) {
    (void)none;
    sth_phase phase;
    WITHOUT_GIL(phase, sth_conductor_phase(core_of(op)));
    return PyLong_FromLong(phase);
}

static PyObject *conductor_reserve(PyObject *op, PyObject *args) {
    uint32_t owner;
    int resource, mode, priority, scope;
    uint64_t bytes;
    sth_grant g;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&iO&iii", to_u32, &owner, &resource, to_u64, &bytes, &mode, &priority, &scope))
        return NULL;
    WITHOUT_GIL(status, sth_conductor_reserve(core_of(op), owner, (sth_resource)resource, bytes, (sth_reserve_mode)mode,
                               (sth_priority)priority, (sth_phase)scope, &g));
    if (status != STH_OK) return raise_status(status);
    return Py_BuildValue("(iiKK)", (int)g.status, (int)g.reason, (unsigned long long)g.granted_bytes,
                         (unsigned long long)g.id);
}

static PyObject *conductor_granted(PyObject *op, PyObject *args) {
    uint64_t id, bytes;
    if (!PyArg_ParseTuple(args, "O&", to_u64, &id)) return NULL;
    WITHOUT_GIL(bytes, sth_conductor_granted(core_of(op), id));
    return PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *conductor_changed(PyObject *op, PyObject *none) {
    (void)none;
    uint64_t id, bytes;
    sth_status status;
    WITHOUT_GIL(status, sth_conductor_changed(core_of(op), &id, &bytes));
    if (status != STH_OK) return raise_status(status);
    return Py_BuildValue("(KK)", (unsigned long long)id, (unsigned long long)bytes);
}

static PyObject *conductor_headroom(PyObject *op, PyObject *args) {
    int resource, hard;
    uint64_t bytes;
    if (!PyArg_ParseTuple(args, "ip", &resource, &hard)) return NULL;
    WITHOUT_GIL(bytes, sth_conductor_headroom(core_of(op), (sth_resource)resource, hard));
    return PyLong_FromUnsignedLongLong(bytes);
}

/* Calls of one number. */
#define METHOD(name, bits) static NUMBER_METHOD(conductor_##name, bits, core_of, NO_GUARD, sth_conductor_##name)
METHOD(unregister, 32)
METHOD(begin_step, 64)
METHOD(release, 64)
METHOD(set_unmanaged, 64)
METHOD(set_unmanaged_pinned, 64)
METHOD(set_allocated, 64)
METHOD(release_token, 64)
METHOD(set_window, 32)
#undef METHOD

static PyObject *conductor_acquire(PyObject *op, PyObject *args) {
    uint32_t owner;
    int direction, priority;
    uint64_t bytes, block;
    sth_token token;
    sth_denial reason;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&iO&iO&", to_u32, &owner, &direction, to_u64, &bytes, &priority, to_u64, &block))
        return NULL;
    WITHOUT_GIL(status, sth_conductor_acquire(core_of(op), owner, (sth_direction)direction, bytes,
                                              (sth_priority)priority, block, &token, &reason));
    if (status != STH_OK) return raise_status(status);
    return Py_BuildValue("(Ki)", (unsigned long long)token, (int)reason);
}

static PyObject *conductor_complete(PyObject *op, PyObject *args) {
    uint64_t token, bytes;
    double ms;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O&d", to_u64, &token, to_u64, &bytes, &ms)) return NULL;
    WITHOUT_GIL(status, sth_conductor_complete(core_of(op), token, bytes, ms));
    return none_or_raise(status);
}

static const field hint_fields[] = {
    FIELD(sth_hints, max_inflight_h2d, U32),
    FIELD(sth_hints, max_inflight_d2h, U32),
    FIELD(sth_hints, prefetch_window_cap, U32),
    FIELD(sth_hints, suppress_speculative, BOOL),
    FIELD_END,
};

static PyObject *conductor_hints(PyObject *op, PyObject *none) {
    (void)none;
    sth_hints hints;
    sth_status status;
    WITHOUT_GIL(status, sth_conductor_hints_get(core_of(op), &hints));
    return status == STH_OK ? dict_of(&hints, hint_fields) : raise_status(status);
}

#define PHASE_FIELD(phase) \
    {"ns_" #phase, FIELD_I64, offsetof(sth_conductor_stats, phase_ns) + sizeof(int64_t) * STH_PHASE_##phase},
#define DIRECTION_FIELDS(d)                                                            \
    {"bytes_per_s_" #d, FIELD_DOUBLE,                                                  \
     offsetof(sth_conductor_stats, bytes_per_s) + sizeof(double) * STH_DIRECTION_##d}, \
    {"flight_bytes_" #d, FIELD_U64, offsetof(sth_conductor_stats, flight_bytes) + sizeof(uint64_t) * STH_DIRECTION_##d},
static const field stats_fields[] = {
    FIELD(sth_conductor_stats, step, U64),
    FIELD(sth_conductor_stats, phase, INT),
    FIELD(sth_conductor_stats, vram_granted, U64),
    FIELD(sth_conductor_stats, pinned_granted, U64),
    FIELD(sth_conductor_stats, vram_unmanaged, U64),
    FIELD(sth_conductor_stats, vram_allocated, U64),
    FIELD(sth_conductor_stats, vram_headroom, U64),
    FIELD(sth_conductor_stats, pinned_unmanaged, U64),
    FIELD(sth_conductor_stats, pinned_headroom, U64),
    FIELD(sth_conductor_stats, h2d_inflight, U32),
    FIELD(sth_conductor_stats, d2h_inflight, U32),
    FIELD(sth_conductor_stats, grants, U64),
    FIELD(sth_conductor_stats, denials, U64),
    FIELD(sth_conductor_stats, partials, U64),
    FIELD(sth_conductor_stats, shrinks, U64),
    FIELD(sth_conductor_stats, flights, U64),
    FIELD(sth_conductor_stats, ordered, U64),
    FIELD(sth_conductor_stats, split, U64),
    FIELD(sth_conductor_stats, deferred, U64),
    STH_PHASE_LIST(PHASE_FIELD) STH_DIRECTION_LIST(DIRECTION_FIELDS)
    FIELD_END,
};

static PyObject *conductor_stats(PyObject *op, PyObject *none) {
    (void)none;
    sth_conductor_stats stats;
    sth_status status;
    WITHOUT_GIL(status, sth_conductor_stats_get(core_of(op), &stats));
    return status == STH_OK ? dict_of(&stats, stats_fields) : raise_status(status);
}

static PyObject *conductor_events(PyObject *op, PyObject *none) {
    (void)none;
    sth_conductor_event e;
    sth_status status;
    PyObject *list = PyList_New(0);
    while (list) {
        WITHOUT_GIL(status, sth_conductor_event_next(core_of(op), &e));
        if (status == STH_NOT_FOUND) return list;
        PyObject *event = status == STH_OK
                              ? Py_BuildValue("(LiKKK)", (long long)e.ns, (int)e.kind, (unsigned long long)e.a,
                                              (unsigned long long)e.b, (unsigned long long)e.c)
                              : raise_status(status);
        if (!event || PyList_Append(list, event) < 0) Py_CLEAR(list);
        Py_XDECREF(event);
    }
    return NULL;
}

PyObject *conductor_names(void) {
#define COUNT(...) "s"
#define NAME(name, ...) , #name
#define SPELLING(name, text, what) , text
#define MEANING(name, text, what) , what
#define NAMES(list) Py_BuildValue("(" list(COUNT) ")" list(NAME))
    return Py_BuildValue("{sNsNsNsNsNsNsNsNsN}", "phases", NAMES(STH_PHASE_LIST), "modes", NAMES(STH_RESERVE_MODE_LIST),
                         "priorities", NAMES(STH_PRIORITY_LIST), "resources", NAMES(STH_RESOURCE_LIST), "directions",
                         NAMES(STH_DIRECTION_LIST), "statuses", NAMES(STH_GRANT_LIST), "denials",
                         NAMES(STH_DENIAL_LIST), "events",
                         Py_BuildValue("(" STH_CONDUCTOR_EVENT_LIST(COUNT) ")" STH_CONDUCTOR_EVENT_LIST(SPELLING)),
                         "event_fields",
                         Py_BuildValue("(" STH_CONDUCTOR_EVENT_LIST(COUNT) ")" STH_CONDUCTOR_EVENT_LIST(MEANING)));
#undef COUNT
#undef NAME
#undef SPELLING
#undef MEANING
#undef NAMES
}

static PyMethodDef conductor_methods[] = {
    {"shutdown", conductor_shutdown, METH_NOARGS, "shutdown()\n--\n\nEverything is denied from now on. Again is fine."},
    {"register", conductor_register, METH_VARARGS,
     "register(name, /)\n--\n\nAn owner; its number. InvalidStateTransitionError when the name is taken."},
    {"unregister", conductor_unregister, METH_O,
     "unregister(owner, /)\n--\n\nEnds it, its reservations and its tokens."},
    {"begin_step", conductor_begin_step, METH_O, "begin_step(step, /)\n--\n\nWhatever the last phase was."},
    {"enter", conductor_enter, METH_VARARGS,
     "enter(phase, /)\n--\n\nTrue when the phase is another now. InvalidStateTransitionError."},
    {"end_step", conductor_end_step, METH_NOARGS, "end_step()\n--\n\nInvalidStateTransitionError without a step."},
    {"phase", conductor_phase, METH_NOARGS, "phase()\n--\n\nAn index into CONDUCTOR[\"phases\"]."},
    {"reserve", conductor_reserve, METH_VARARGS,
     "reserve(owner, resource, bytes, mode, priority, scope, /)\n--\n\n"
     "(status, reason, granted bytes, id). scope: a phase, or their count for none."},
    {"release", conductor_release, METH_O, "release(id, /)\n--\n\nAgain is fine."},
    {"granted", conductor_granted, METH_VARARGS, "granted(id, /)\n--\n\nBytes that the reservation is worth now."},
    {"changed", conductor_changed, METH_NOARGS,
     "changed()\n--\n\n(id, bytes) of a reservation that is worth other bytes than last told; (0, 0): none."},
    {"headroom", conductor_headroom, METH_VARARGS, "headroom(resource, hard, /)\n--\n\nBytes below the cap."},
    {"set_unmanaged", conductor_set_unmanaged, METH_O,
     "set_unmanaged(bytes, /)\n--\n\nDevice memory that no reservation covers."},
    {"set_unmanaged_pinned", conductor_set_unmanaged_pinned, METH_O,
     "set_unmanaged_pinned(bytes, /)\n--\n\nPinned host memory that no reservation covers."},
    {"set_allocated", conductor_set_allocated, METH_O, "set_allocated(bytes, /)\n--\n\nFor rule 1."},
    {"set_window", conductor_set_window, METH_O, "set_window(units, /)\n--\n\nThe base of the window cap."},
    {"acquire", conductor_acquire, METH_VARARGS,
     "acquire(owner, direction, bytes, priority, block, /)\n--\n\n(token, reason); the token is 0 when denied."},
    {"complete", conductor_complete, METH_VARARGS, "complete(token, bytes, ms, /)\n--\n\nFor the measured rate."},
    {"release_token", conductor_release_token, METH_O, "release_token(token, /)\n--\n\nAgain is fine."},
    {"hints", conductor_hints, METH_NOARGS, "hints()\n--\n\nA dict of the members of sth_hints."},
    {"stats", conductor_stats, METH_NOARGS, "stats()\n--\n\nA dict of the members of sth_conductor_stats."},
    {"events", conductor_events, METH_NOARGS,
     "events()\n--\n\nThose not read yet: (ns, kind, a, b, c), kind an index into CONDUCTOR[\"events\"]."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot conductor_slots[] = {
    {Py_tp_doc, (void *)"Conductor(*, soft_cap, hard_cap, pinned_cap=0, h2d_slots=2, d2h_slots=2, piece_bytes=8 MiB,\n"
                        "          event_trace=False)\n--\n\n"
                        "One arbiter for a device; stagehand.conductor wraps it. Sizes in bytes. Numbers of\n"
                        "phases, modes, priorities and so on are indices into the tuples of CONDUCTOR."},
    {Py_tp_new, conductor_new},
    {Py_tp_dealloc, conductor_dealloc},
    {Py_tp_methods, conductor_methods},
    {0, NULL},
};
PyType_Spec conductor_spec = {"stagehand._core.Conductor", sizeof(conductor_object), 0, Py_TPFLAGS_DEFAULT,
                              conductor_slots};
