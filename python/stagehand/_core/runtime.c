/* Type Runtime: units, steps and leases of an sth_runtime.
 *
 * A lease is the life of a storage: acquire hands out a tensor whose deleter releases the lease, on any
 * thread, without the GIL, also after close (the sth_runtime stays until its leases are gone). The Runtime
 * keeps what its units read from, arenas and checkpoints, until the sth_runtime has ended. Every call into
 * the library releases the GIL: the library calls Python allocators with its lock held. */
#include "runtime.h"

#include <string.h>

#include "convert.h"
#include "sources.h"

static void end_runtime(void *owner) { sth_runtime_destroy(((runtime_object *)owner)->runtime); }

static void runtime_ended(void *owner) {
    runtime_object *self = owner;
    let_checkpoints_go(&self->checkpoints);
    Py_CLEAR(self->arenas);
    py_allocator *allocator = self->allocator;
    self->allocator = NULL;
    py_allocator_release(allocator);
}

static bool parse_policy(const char *name, sth_policy *out) {
    if (!strcmp(name, "planned"))
        *out = STH_POLICY_PLANNED;
    else if (!strcmp(name, "static"))
        *out = STH_POLICY_STATIC;
    else
        return raise_error(STH_INVALID_ARGUMENT, "policy", "policy is \"planned\" or \"static\"") != NULL;
    return true;
}

/* What the constructor was given, beside the options proper. */
typedef struct extras {
    device_object *device;
    const char *policy;
    PyObject *telemetry_path, *alloc, *free, *trim, *pool;
} extras;

static bool parse_options(core_state *state, PyObject *args, PyObject *kwargs, sth_runtime_options *o,
                          extras *more) {
    static char *names[] = {"device",
                            "budget",
                            "policy",
                            "prefetch_window",
                            "high_watermark",
                            "low_watermark",
                            "link_bytes_per_s",
                            "chunk_bytes",
                            "reader_threads",
                            "staging_bytes",
                            "copy_priority",
                            "read_only",
                            "telemetry_path",
                            "telemetry_max_bytes",
                            "alloc",
                            "free",
                            "reserved",
                            "pool",
                            "ram_budget",
                            "trim",
                            "name",
                            "parked",
                            "least_room",
                            "stages",
                            NULL};
    int read_only = 0, parked = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O!O&|$sO&O&O&dO&O&O&ipOO&OOO&OO&OzpO&O&:Runtime", names, state->device, &more->device,
            to_u64, &o->budget, &more->policy, to_u32, &o->prefetch_window, to_u64, &o->high_watermark,
            to_u64, &o->low_watermark, &o->link_bytes_per_s, to_u64, &o->chunk_bytes, to_u32,
            &o->reader_threads, to_u64, &o->staging_bytes, &o->copy_priority, &read_only,
            &more->telemetry_path, to_u64, &o->telemetry_max_bytes, &more->alloc, &more->free,
            to_u64, &o->reserved, &more->pool, to_u64, &o->ram_budget, &more->trim, &o->name, &parked, to_u64,
            &o->least_room, to_u32, &o->stages))
        return false;
    if (more->pool != Py_None && !PyObject_TypeCheck(more->pool, (PyTypeObject *)state->pool))
        return raise_error(STH_INVALID_ARGUMENT, "pool", "pool is a stagehand.PinnedPool's core or None") != NULL;
    if (more->pool != Py_None) o->pool = ((pool_object *)more->pool)->pool;
    o->read_only = read_only;
    o->parked = parked;
    return parse_policy(more->policy, &o->policy);
}

/* Makes the allocator, if one is asked for, and the lists. */
static bool make_members(runtime_object *self, const extras *more, sth_runtime_options *options) {
    self->arenas = PyList_New(0);
    self->checkpoints = PyList_New(0);
    if (!self->arenas || !self->checkpoints) return false;
    /* The slabs are kept as the arenas are. */
    if (more->pool != Py_None && PyList_Append(self->arenas, more->pool) < 0) return false;
    if (more->alloc == Py_None && more->free == Py_None) return true;
    self->allocator = py_allocator_new(more->alloc, more->free, more->trim);
    if (self->allocator) options->allocator = py_allocator_table(self->allocator);
    return self->allocator != NULL;
}

static bool create(runtime_object *self, device_object *device, const sth_runtime_options *options) {
    sth_status status;
    if (!guard_enter(&device->guard)) return false;
    WITHOUT_GIL(status, sth_runtime_create(device->device, options, &self->runtime));
    self->dl = device->dl;
    if (status != STH_OK) raise_status(status);
    guard_leave(&device->guard);
    return status == STH_OK;
}

static PyObject *runtime_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    sth_runtime_options options;
    extras more = {.policy = "planned", .telemetry_path = Py_None, .alloc = Py_None, .free = Py_None,
                   .trim = Py_None, .pool = Py_None};
    PyObject *path = NULL;
    sth_runtime_options_init(&options);
    if (!parse_options(PyType_GetModuleState(type), args, kwargs, &options, &more)) return NULL;
    if (more.telemetry_path != Py_None) {
        if (!PyUnicode_FSConverter(more.telemetry_path, &path)) return NULL;
        options.telemetry_path = PyBytes_AsString(path);
    }
    runtime_object *self = (runtime_object *)PyType_GenericAlloc(type, 0);
    if (self) {
        if (make_members(self, &more, &options) && create(self, more.device, &options))
            self->guard = (guard){
                .owner = self, .end = end_runtime, .ended = runtime_ended, .name = "Runtime", .open = true};
        else
            Py_CLEAR(self);
    }
    Py_XDECREF(path);
    return (PyObject *)self;
}

static int runtime_traverse(PyObject *op, visitproc visit, void *arg) {
    runtime_object *self = (runtime_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->arenas);
    Py_VISIT(self->checkpoints);
    return self->allocator ? py_allocator_traverse(self->allocator, visit, arg) : 0;
}

/* Closing is what breaks cycles, and it must come before any member of a cycle is cleared: a Python free
 * callable may run. */
static void runtime_finalize(PyObject *op) { guard_close(&((runtime_object *)op)->guard); }

static int runtime_clear(PyObject *op) {
    runtime_finalize(op);
    return 0;
}

static void runtime_dealloc(PyObject *op) {
    runtime_object *self = (runtime_object *)op;
    PyObject_GC_UnTrack(op);
    runtime_finalize(op);
    runtime_ended(self); /* for one that was never created */
    PyMem_Free(self->unit_bytes);
    object_free(op);
}

/* ---- units ---- */

/* *out is from PyMem_Malloc, its names belong to the objects in `items`, a tuple. */
static bool parse_tensors(PyObject *items, sth_unit_tensor **out, uint32_t *out_count) {
    Py_ssize_t count = PyTuple_Size(items);
    sth_unit_tensor *tensors = count ? PyMem_Malloc((size_t)count * sizeof *tensors) : NULL;
    bool valid = tensors || !count;
    if (!valid) PyErr_NoMemory();
    for (Py_ssize_t i = 0; valid && i < count; i++) {
        PyObject *item = PyTuple_GetItem(items, i);
        valid = PyTuple_Check(item) && PyArg_ParseTuple(item, "sO&;a tensor is (name, offset in the place)",
                                                        &tensors[i].name, to_u64, &tensors[i].place_offset);
        if (!valid && !PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a tensor is a tuple");
    }
    if (!valid) {
        PyMem_Free(tensors);
        return false;
    }
    *out = tensors;
    *out_count = (uint32_t)count;
    return true;
}

static bool keep_arena(runtime_object *self, PyObject *arena) {
    return arena == Py_None || is_listed(self->arenas, arena) || PyList_Append(self->arenas, arena) == 0;
}

static bool check_sources(runtime_object *self, PyObject *arena, PyObject *checkpoint) {
    core_state *state = PyType_GetModuleState(Py_TYPE((PyObject *)self));
    if (arena != Py_None && !PyObject_TypeCheck(arena, state->arena)) {
        PyErr_SetString(PyExc_TypeError, "add_unit: arena must be an Arena or None");
        return false;
    }
    if (checkpoint != Py_None && !PyObject_TypeCheck(checkpoint, state->checkpoint)) {
        PyErr_SetString(PyExc_TypeError, "add_unit: checkpoint must be a Checkpoint or None");
        return false;
    }
    return true;
}

/* Room for the size of one more unit than there is. */
static bool grow_units(runtime_object *self) {
    if (self->unit_count < self->unit_capacity) return true;
    uint32_t capacity = self->unit_capacity ? 2 * self->unit_capacity : 64;
    uint64_t *grown = PyMem_Realloc(self->unit_bytes, capacity * sizeof *grown);
    if (!grown) {
        PyErr_NoMemory();
        return false;
    }
    memset(grown + self->unit_capacity, 0, (capacity - self->unit_capacity) * sizeof *grown);
    self->unit_bytes = grown;
    self->unit_capacity = capacity;
    return true;
}

static PyObject *add(runtime_object *self, const sth_unit_desc *desc) {
    uint32_t unit = 0;
    sth_status status;
    if (!grow_units(self)) return NULL;
    WITHOUT_GIL(status, sth_runtime_add_unit(self->runtime, desc, &unit));
    if (status != STH_OK) return raise_status(status);
    while (unit >= self->unit_capacity) { /* other threads have added units meanwhile */
        self->unit_count = self->unit_capacity;
        if (!grow_units(self)) return NULL;
    }
    self->unit_bytes[unit] = desc->bytes;
    if (unit >= self->unit_count) self->unit_count = unit + 1;
    return PyLong_FromUnsignedLong(unit);
}

/* What add_unit() was given in sequences; freed by free_parts. */
typedef struct unit_parts {
    sth_segment *segments;
    sth_file_range *ranges;
    sth_unit_tensor *tensors;
    PyObject *names; /* the tuple that holds the tensors' names */
} unit_parts;

static void free_parts(unit_parts *parts) {
    PyMem_Free(parts->segments);
    PyMem_Free(parts->ranges);
    PyMem_Free(parts->tensors);
    Py_XDECREF(parts->names);
}

static bool parse_parts(PyObject *ranges, PyObject *segments, PyObject *tensors, unit_parts *parts,
                        sth_unit_desc *desc) {
    if (ranges && !parse_ranges(ranges, &parts->ranges, &desc->range_count)) return false;
    if (segments != Py_None && !unpack_segments(segments, &parts->segments, &desc->segment_count)) return false;
    if (tensors && !(parts->names = PySequence_Tuple(tensors))) return false;
    if (tensors && !parse_tensors(parts->names, &parts->tensors, &desc->tensor_count)) return false;
    desc->ranges = parts->ranges;
    desc->segments = parts->segments;
    desc->tensors = parts->tensors;
    return true;
}

static PyObject *runtime_add_unit(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"name",   "bytes",    "group",        "flags",  "host",    "arena", "checkpoint",
                            "ranges", "segments", "packed_bytes", "master", "tensors", NULL};
    runtime_object *self = (runtime_object *)op;
    sth_unit_desc desc = {0};
    unit_parts parts = {0};
    uint64_t host = 0, master = 0;
    PyObject *arena = Py_None, *checkpoint = Py_None, *ranges = NULL, *segments = Py_None, *tensors = NULL;
    PyObject *result = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sO&|$zO&O&OOOOO&O&O:add_unit", names, &desc.name, to_u64,
                                     &desc.bytes, &desc.group, to_u32, &desc.flags, to_u64, &host, &arena, &checkpoint,
                                     &ranges, &segments, to_u64, &desc.packed_bytes, to_u64, &master, &tensors))
        return NULL;
    if (!check_sources(self, arena, checkpoint)) return NULL;
    if (parse_parts(ranges, segments, tensors, &parts, &desc) && guard_enter(&self->guard)) {
        desc.host = (const void *)(uintptr_t)host;
        desc.master = (const void *)(uintptr_t)master;
        if (arena != Py_None) desc.arena = ((arena_object *)arena)->arena;
        if (checkpoint != Py_None) desc.checkpoint = ((checkpoint_object *)checkpoint)->checkpoint;
        if (keep_arena(self, arena) && keep_checkpoint(self->checkpoints, checkpoint)) result = add(self, &desc);
        guard_leave(&self->guard);
    }
    free_parts(&parts);
    return result;
}

/* ---- leases ---- */

static void release_lease(byte_tensor *tensor) { sth_lease_release(tensor->object, &tensor->lease); }

PyObject *lease_capsule(runtime_object *self, uint32_t unit, uint64_t stream, const tensor_view *view) {
    sth_status status;
    if (view && (unit >= self->unit_count || view->bytes > self->unit_bytes[unit]))
        return PyErr_Format(PyExc_ValueError, "acquire: the view reaches past the unit");
    byte_tensor *tensor = byte_tensor_new();
    if (!tensor) return NULL;
    if (view) tensor->view = *view;
    WITHOUT_GIL(status, sth_unit_acquire(self->runtime, unit, stream, &tensor->lease));
    if (status != STH_OK) {
        byte_tensor_drop(tensor);
        return raise_status(status);
    }
    tensor->object = self->runtime;
    tensor->release = release_lease;
    return byte_tensor_capsule(tensor, tensor->lease.address, self->unit_bytes[unit], self->dl);
}

static PyObject *runtime_acquire(PyObject *op, PyObject *const *args, Py_ssize_t count) {
    runtime_object *self = (runtime_object *)op;
    uint32_t unit;
    uint64_t stream = 0;
    if (count < 1 || count > 3) {
        PyErr_Format(PyExc_TypeError, "acquire() takes a unit, a stream and a view, %zd arguments were given",
                     count);
        return NULL;
    }
    tensor_view view;
    bool seen = count == 3 && args[2] != Py_None;
    if (!to_u32(args[0], &unit) || (count >= 2 && !to_u64(args[1], &stream))) return NULL;
    if ((seen && !unpack_tensor_view(args[2], &view)) || !guard_enter(&self->guard)) return NULL;
    PyObject *capsule = lease_capsule(self, unit, stream, seen ? &view : NULL);
    guard_leave(&self->guard);
    return capsule;
}

/* ---- steps and the rest ---- */

static PyObject *runtime_seal(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_runtime_seal);
}
static PyObject *runtime_step_begin(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_step_begin);
}
static PyObject *runtime_step_pause(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_step_pause);
}
static sth_status mark_backward(sth_runtime *runtime) { return sth_step_mark_backward(runtime, true); }
static sth_status mark_forward(sth_runtime *runtime) { return sth_step_mark_backward(runtime, false); }
static PyObject *runtime_mark_backward(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, mark_backward);
}
static PyObject *runtime_mark_forward(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, mark_forward);
}
static PyObject *runtime_flush_telemetry(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_runtime_flush_telemetry);
}

static PyObject *runtime_step_end(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_step_end);
}
static PyObject *runtime_poll(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_runtime_poll);
}
static PyObject *runtime_fence(PyObject *op, PyObject *none) { return (void)none, runtime_call(op, sth_runtime_fence); }
static PyObject *runtime_pass_end(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_runtime_pass_end);
}
static PyObject *runtime_synchronize(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_runtime_synchronize);
}

static PyObject *runtime_set_conductor(PyObject *op, PyObject *value) {
    runtime_object *self = (runtime_object *)op;
    sth_conductor *conductor;
    sth_status status;
    if (!conductor_or_none(PyType_GetModuleState(Py_TYPE(op)), value, &conductor)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_runtime_set_conductor(self->runtime, conductor));
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static NUMBER_METHOD(runtime_set_prefetch_window, 32, runtime_core, runtime_guard, sth_runtime_set_prefetch_window)

static NUMBER_METHOD(runtime_set_max_inflight, 32, runtime_core, runtime_guard, sth_runtime_set_max_inflight)

static NUMBER_METHOD(runtime_gather, 64, runtime_core, runtime_guard, sth_runtime_gather)

static NUMBER_METHOD(runtime_mark_written, 32, runtime_core, runtime_guard, sth_unit_mark_written)

static PyObject *runtime_set_host(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"unit", "host", "arena", NULL};
    runtime_object *self = (runtime_object *)op;
    uint32_t unit;
    uint64_t host;
    PyObject *arena;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O:set_host", names, to_u32, &unit, to_u64, &host, &arena) ||
        !check_sources(self, arena, Py_None))
        return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    sth_arena *memory = arena != Py_None ? ((arena_object *)arena)->arena : NULL;
    WITHOUT_GIL(status, sth_unit_set_host(self->runtime, unit, (const void *)(uintptr_t)host, memory));
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *runtime_give_master(PyObject *op, PyObject *args) {
    runtime_object *self = (runtime_object *)op;
    uint32_t unit;
    uint64_t master;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O&:give_master", to_u32, &unit, to_u64, &master)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_unit_give_master(self->runtime, unit, (const void *)(uintptr_t)master));
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *runtime_drop_master(PyObject *op, PyObject *args) {
    runtime_object *self = (runtime_object *)op;
    uint32_t unit;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&:drop_master", to_u32, &unit) || !guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_unit_drop_master(self->runtime, unit));
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *runtime_keep_master(PyObject *op, PyObject *args) {
    runtime_object *self = (runtime_object *)op;
    uint32_t unit;
    bool kept = false;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&:keep_master", to_u32, &unit) || !guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_unit_keep_master(self->runtime, unit, &kept));
    PyObject *result = status == STH_OK ? PyBool_FromLong(kept) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *runtime_dropped_masters(PyObject *op, PyObject *args) {
    runtime_object *self = (runtime_object *)op;
    enum { AT_ONCE = 64 };
    uint32_t units[AT_ONCE], count = 0;
    int wait;
    sth_status status = STH_OK;
    if (!PyArg_ParseTuple(args, "p:dropped_masters", &wait) || !guard_enter(&self->guard)) return NULL;
    PyObject *list = PyList_New(0);
    while (list) {
        WITHOUT_GIL(status, sth_runtime_dropped_masters(self->runtime, wait, units, AT_ONCE, &count));
        for (uint32_t i = 0; list && status == STH_OK && i < count; i++) {
            PyObject *unit = PyLong_FromUnsignedLong(units[i]);
            if (!unit || PyList_Append(list, unit) != 0) Py_CLEAR(list);
            Py_XDECREF(unit);
        }
        if (status != STH_OK || count < AT_ONCE) break;
    }
    if (status != STH_OK) {
        Py_CLEAR(list);
        raise_status(status);
    }
    guard_leave(&self->guard);
    return list;
}

static NUMBER_METHOD(runtime_set_budget, 64, runtime_core, runtime_guard, sth_runtime_set_budget)

static bool parse_time(PyObject *value, int64_t *out) {
    *out = PyLong_AsLongLong(value);
    return *out != -1 || !PyErr_Occurred();
}

static PyObject *runtime_missing_budget(PyObject *op, PyObject *value) {
    runtime_object *self = (runtime_object *)op;
    int64_t now;
    uint64_t missing;
    if (!parse_time(value, &now) || !guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(missing, sth_runtime_missing_budget(self->runtime, now));
    guard_leave(&self->guard);
    return PyLong_FromUnsignedLongLong(missing);
}

static PyObject *runtime_ask_again(PyObject *op, PyObject *value) {
    runtime_object *self = (runtime_object *)op;
    int64_t now;
    sth_status status;
    if (!parse_time(value, &now) || !guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_runtime_ask_again(self->runtime, now));
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *runtime_verify(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"unit", NULL};
    runtime_object *self = (runtime_object *)op;
    uint32_t unit;
    bool equal = false;
    uint64_t hash = 0;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:verify", names, to_u32, &unit)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_unit_verify(self->runtime, unit, &equal, &hash));
    PyObject *same = equal ? Py_True : Py_False;
    PyObject *result =
        status == STH_OK ? Py_BuildValue("(OK)", same, (unsigned long long)hash) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *runtime_close(PyObject *op, PyObject *none) {
    (void)none;
    guard_close(&((runtime_object *)op)->guard);
    Py_RETURN_NONE;
}

static PyObject *runtime_unit_count(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLong(((runtime_object *)op)->unit_count);
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static PyMethodDef runtime_methods[] = {
    {"set_conductor", runtime_set_conductor, METH_O,
     "set_conductor(conductor, /)\n--\n\nCopies pass through a Conductor; None: not any more."},
    {"set_prefetch_window", runtime_set_prefetch_window, METH_O,
     "set_prefetch_window(units, /)\n--\n\nStatic policy: units fetched ahead from now on."},
    {"set_max_inflight", runtime_set_max_inflight, METH_O,
     "set_max_inflight(units, /)\n--\n\nStatic policy: loads ahead under way at once; 0: no limit."},
    {"add_unit", KEYWORDS(runtime_add_unit),
     "add_unit(name, bytes, *, group=None, flags=0, host=0, arena=None, checkpoint=None, ranges=(),\n"
     "         segments=None, packed_bytes=0, master=0, tensors=())\n--\n\n"
     "Adds what is used together, before seal(), in the order of use as far as it is known. Returns\n"
     "its index. bytes: size of its place. flags: UNIT_ bits. One source: `host`, the address of an\n"
     "image in host memory, in `arena` (or in memory of the caller's that outlives the runtime: then\n"
     "it is staged), or `ranges` of `checkpoint`, a sequence of (file index, file offset, bytes,\n"
     "offset in the place). With `segments` the source is a packed image of `packed_bytes`, made from the\n"
     "image of the place at the address `master` (0: it is not watched). `tensors`: (name, offset in the\n"
     "place) of each, in this order, for errors. The Runtime keeps the arena and the checkpoint alive. Raises\n"
     "InvalidArgumentError naming the unit, InvalidStateTransitionError after seal."},
    {"seal", runtime_seal, METH_NOARGS,
     "seal()\n--\n\n"
     "Plans on the guessed order, allocates device memory, starts loading. Raises StagehandOOMError\n"
     "when the budget is too small (names the unit and the smallest budget) or device memory is out;\n"
     "then only close() is left."},
    {"step_begin", runtime_step_begin, METH_NOARGS,
     "step_begin()\n--\n\nBegins a step; acquire() does so if needed."},
    {"step_pause", runtime_step_pause, METH_NOARGS,
     "step_pause()\n--\n\n"
     "Waits until no copy reads a writable image; none is read before the next acquire or step_begin.\n"
     "An acquire goes on with the step."},
    {"mark_backward", runtime_mark_backward, METH_NOARGS,
     "mark_backward()\n--\n\nUses from here on are those of a backward: recordings say so. A step begins without."},
    {"mark_forward", runtime_mark_forward, METH_NOARGS, "mark_forward()\n--\n\nNo longer those of a backward."},
    {"report", runtime_report, METH_VARARGS,
     "report(page, /)\n--\n\n"
     "The runtime as HTML, a str: a whole page, or a part to stand in one."},
    {"curve", runtime_curve, METH_VARARGS,
     "curve(points, /)\n--\n\n"
     "Step times over so many budgets as (text, JSON, SVG). Raises InvalidStateTransitionError where there\n"
     "are no plans, InvalidArgumentError."},
    {"flush_telemetry", runtime_flush_telemetry, METH_NOARGS,
     "flush_telemetry()\n--\n\n"
     "Writes what is gathered for the telemetry file. Waits for the device. Raises TransferError, as step_end()."},
    {"step_end", runtime_step_end, METH_NOARGS,
     "step_end()\n--\n\nEnds a step. Waits only for copies that still read writable host images."},
    {"acquire", (PyCFunction)(void (*)(void))runtime_acquire, METH_FASTCALL,
     "acquire(unit, stream=0, view=None, /)\n--\n\n"
     "Makes `stream` (a CUstream as an int) wait for the unit and returns its bytes on the device as\n"
     "a DLPack capsule, shape (bytes,), dtype uint8, or as `view` from tensor_view() says. The unit stays\n"
     "while the tensor made from it, or a view of it, lives; its end releases the lease, on any thread,\n"
     "also after close(). Waits on the host only for bytes that are not read yet. Raises\n"
     "StagehandOOMError when what is leased leaves no room, TransferError and CheckpointError from the\n"
     "source."},
    {"poll", runtime_poll, METH_NOARGS,
     "poll()\n--\n\n"
     "Handles released leases and issues the copies that have become possible. Does not wait."},
    {"gather", runtime_gather, METH_O,
     "gather(bytes, /)\n--\n\n"
     "Makes one piece of all device memory of the places, where nothing is leased: for units that are leased\n"
     "together, need `bytes`, and found no room. Raises StagehandOOMError where the device refuses it."},
    {"mark_written", runtime_mark_written, METH_O,
     "mark_written(unit, /)\n--\n\n"
     "The unit's host image was changed: it is copied again before its next use."},
    {"set_host", KEYWORDS(runtime_set_host),
     "set_host(unit, host, arena)\n--\n\n"
     "The unit's bytes are at the address `host` in `arena` from now on; the old image is let go of."},
    {"give_master", runtime_give_master, METH_VARARGS,
     "give_master(unit, master, /)\n--\n\n"
     "The plain image of a packed unit is at the address `master` from now on, with the values of the packed one."},
    {"drop_master", runtime_drop_master, METH_VARARGS,
     "drop_master(unit, /)\n--\n\n"
     "The unit's master, which nobody writes from now on, is to go once the packed image says all that it holds."},
    {"keep_master", runtime_keep_master, METH_VARARGS,
     "keep_master(unit, /)\n--\n\n"
     "It is not to go any more. Whether it is there still; else it may be given."},
    {"dropped_masters", runtime_dropped_masters, METH_VARARGS,
     "dropped_masters(wait, /)\n--\n\n"
     "The numbers of units whose master went since it was asked last. Sees to those that are to go; wait: until a\n"
     "thread has looked at all of them."},
    {"fence", runtime_fence, METH_NOARGS,
     "fence()\n--\n\n"
     "Host images may have been written without a word: watched units are compared again at their next\n"
     "use. A step's begin implies it."},
    {"pass_end", runtime_pass_end, METH_NOARGS,
     "pass_end()\n--\n\n"
     "Waits until the copies behind which uses are enqueued have read their host images, which code of\n"
     "the caller's may write then."},
    {"synchronize", runtime_synchronize, METH_NOARGS,
     "synchronize()\n--\n\n"
     "Waits until every copy issued so far has read its host image; images may be written then."},
    {"set_budget", runtime_set_budget, METH_O,
     "set_budget(bytes, /)\n--\n\n"
     "Changes the budget between steps. Waits for copies in flight. Raises StagehandOOMError when it\n"
     "is too small (the old one stays), InvalidStateTransitionError inside a step."},
    {"missing_budget", runtime_missing_budget, METH_O,
     "missing_budget(now_ns, /)\n--\n\n"
     "Bytes of the budget that the device refused and that are to be asked for again now, if it has them; 0: none.\n"
     "now_ns: on any steady clock."},
    {"ask_again", runtime_ask_again, METH_O,
     "ask_again(now_ns, /)\n--\n\n"
     "Asks for all of the budget again, between steps. Where less is had that is the budget."},
    {"verify", KEYWORDS(runtime_verify),
     "verify(unit)\n--\n\n"
     "Reads the unit back from the device and compares it with its source. Returns (equal, XXH3-64 of\n"
     "the bytes on the device)."},
    {"unit_stats", KEYWORDS(runtime_unit_stats),
     "unit_stats(unit)\n--\n\n"
     "A dict: name, group, bytes, state, resident, copies (loads since seal), and means in ms:\n"
     "h2d_ms, compute_ms, stall_ms. image_hash: of samples of the host image that was copied last."},
    {"stats", runtime_stats, METH_NOARGS,
     "stats()\n--\n\n"
     "A dict of counters since seal: bytes (budget, device_bytes, device_peak, resident_bytes,\n"
     "in_flight_bytes, h2d_bytes, mapped_bytes, d2h_bytes, staging_bytes, packed_bytes), counts (copies,\n"
     "joined_copies, demand_loads, evictions, host_waits, steps, replans, deviations, yields), limit (the\n"
     "part of the budget that others on the device leave), parked, staging_pinned, planned, link_bytes_per_s."},
    {"files", runtime_files, METH_NOARGS,
     "files()\n--\n\n"
     "One dict for each file that units stream from: path, way (\"io_uring\", \"direct\", \"page cache\",\n"
     "\"buffered\"), why, align, read_bytes, cached_bytes."},
    {"prediction", runtime_prediction, METH_NOARGS,
     "prediction()\n--\n\n"
     "What the plan in force predicts, a dict: step_ns, compute_ns, link_ns, stall_ns,\n"
     "expand_ns, lower_bound_ns, bytes_per_step, resident_bytes, packed_bytes, ring_bytes, streamed_bytes,\n"
     "total_bytes, bound_by (\"compute\", \"link\" or \"ring\")."},
    {"metrics", KEYWORDS(runtime_metrics),
     "metrics(i=0)\n--\n\n"
     "The record of the i-th newest finished step of the last 100, a dict with the fields of METRICS;\n"
     "None past the end."},
    {"count_guards", KEYWORDS(runtime_count_guards),
     "count_guards(promotions, nans, infs)\n--\n\n"
     "Adds counts of guard violations to the current step's record."},
    {"count_mapped", runtime_count_mapped, METH_O,
     "count_mapped(bytes, /)\n--\n\nAdds bytes that crossed the link by mapped host memory."},
    {"count_d2h", runtime_count_d2h, METH_O,
     "count_d2h(bytes, /)\n--\n\nAdds bytes that were brought from the device to the host (gradients)."},
    {"smallest_budget", runtime_smallest_budget, METH_NOARGS,
     "smallest_budget()\n--\n\nBytes of the smallest budget that can work for the units added so far."},
    {"keep_begin", runtime_keep_begin, METH_NOARGS,
     "keep_begin()\n--\n\n"
     "Its memory is nobody else's until keep_end(), counted; a parked runtime comes back now. Raises\n"
     "StagehandOOMError naming who keeps how much of the device."},
    {"keep_end", runtime_keep_end, METH_NOARGS, "keep_end()\n--\n\nEnds a keep_begin(). One too many does nothing."},
    {"reserve", KEYWORDS(runtime_reserve),
     "reserve(priority)\n--\n\n"
     "Reserves what its plan occupies: \"primary\", never given away, or \"secondary\", given away only to a\n"
     "load that would fail. Brings a parked runtime back. Raises as keep_begin()."},
    {"release", runtime_release, METH_NOARGS, "release()\n--\n\nEnds the reservation. Again is fine."},
    {"guest_begin", runtime_guest_begin, METH_NOARGS,
     "guest_begin()\n--\n\nComes to the device as a guest, counted. Raises as keep_begin()."},
    {"guest_end", runtime_guest_end, METH_NOARGS,
     "guest_end()\n--\n\n"
     "Ends a guest_begin(); with the last one all places are given back, unless the runtime is kept or\n"
     "reserved. Returns the bytes that leases keep. Raises InvalidStateTransitionError inside a step."},
    {"set_aside", runtime_set_aside, METH_VARARGS,
     "set_aside(units, aside, /)\n--\n\n"
     "No plan counts these units any more (UNIT_ASIDE), or plans do again. Ends a step that is paused."},
    {"lend", runtime_lend, METH_O,
     "lend(bytes, /)\n--\n\n"
     "Idle, it gives up so many bytes of the device, or all that it has; it asks for them when it is used."},
    {"budget_without", runtime_budget_without, METH_VARARGS,
     "budget_without(bytes, spare, /)\n--\n\n"
     "(budget, bytes freed) with which it gives, idle, so many bytes to others, or as many as it can; (0, 0):\n"
     "it has none to give. spare: bytes of its reserved that can be given up. Changes nothing."},
    {"set_reserved", runtime_set_reserved, METH_O,
     "set_reserved(bytes, /)\n--\n\n"
     "The part of the budget that the caller fills itself. Before it takes more, after it gave some back."},
    {"soften", runtime_soften, METH_O,
     "soften(bytes, /)\n--\n\n"
     "So many of the reserved bytes are given to places, once, rather than that an acquire is refused."},
    {"graph_prepare", runtime_graph_prepare, METH_NOARGS,
     "graph_prepare()\n--\n\n"
     "Before the capture of a step: what stays comes to its place, the ring is emptied. Raises StagehandError\n"
     "with the reason where a step cannot be captured. graph_settle() follows in any case."},
    {"graph_fork", runtime_graph_fork, METH_O,
     "graph_fork(stream, /)\n--\n\nThe Runtime's streams join the capture of `stream`, which has begun."},
    {"graph_join", runtime_graph_join, METH_O,
     "graph_join(stream, /)\n--\n\n"
     "`stream` waits for them, so that the capture may end. Raises where an acquire inside has failed."},
    {"graph_settle", runtime_graph_settle, METH_NOARGS,
     "graph_settle()\n--\n\n"
     "After the capture. Returns a dict: edition, h2d_bytes and copies of each replay, read_bytes of what stays.\n"
     "Raises where the graph must not be used."},
    {"graph_replay_begin", runtime_graph_replay_begin, METH_VARARGS,
     "graph_replay_begin(edition, stream, /)\n--\n\n"
     "Before a launch on `stream`. False, and nothing has begun, where the graph is stale."},
    {"graph_replay_end", runtime_graph_replay_end, METH_O,
     "graph_replay_end(stream, /)\n--\n\nAfter the launch, made or not."},
    {"close", runtime_close, METH_NOARGS,
     "close()\n--\n\n"
     "Ends the runtime: waits for its copies and frees its device memory, except places still leased,\n"
     "which go with their tensors. Calls under way on other threads finish first. Again is fine;\n"
     "other calls then raise StagehandError (SHUT_DOWN)."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef runtime_properties[] = {
    {"unit_count", runtime_unit_count, NULL, "Number of units added.", NULL},
    {"parked", runtime_parked, NULL, "Whether it has no places on the device: its next step asks for room.", NULL},
    {"reserved", runtime_reserved, NULL, "Bytes of the budget that the caller fills itself.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot runtime_slots[] = {
    {Py_tp_doc,
     (void *)"Runtime(device, budget, *, policy=\"planned\", prefetch_window=3, high_watermark=0, "
             "low_watermark=0,\n"
             "        link_bytes_per_s=0.0, chunk_bytes=0, reader_threads=..., staging_bytes=0, "
             "copy_priority=-1,\n"
             "        read_only=False, telemetry_path=None, telemetry_max_bytes=67108864, alloc=None, "
             "free=None)\n--\n\n"
             "Streams the units of one model through a device, within `budget` bytes of device\n"
             "memory. policy: \"planned\", or \"static\" with prefetch_window (units), high_watermark\n"
             "and low_watermark (bytes, 0 = budget and 3/4 of it). link_bytes_per_s: 0 = measured at\n"
             "seal, then what steps see. chunk_bytes, staging_bytes: 0 = chosen. reserved: bytes of the budget\n"
             "that the caller fills itself. ram_budget: bytes in which units of files are kept. pool: slabs to\n"
             "stage through. reader_threads: for sources that are files or pageable; left out: as the files need.\n"
             "copy_priority: of the copy streams, lower is more urgent. read_only:\n"
             "host images change only where mark_written() says so. telemetry_path: JSONL file to\n"
             "append to, up to telemetry_max_bytes. alloc(nbytes) -> address, free(address, nbytes):\n"
             "where places come from; multiples of 512. They run inside calls of this Runtime and\n"
             "must not call it. An exception of alloc ends as StagehandOOMError with its text. trim(): gives\n"
             "back what alloc keeps unused. name: of the model, for messages. parked: seal() takes no memory, the\n"
             "first step does. least_room: bytes of the budget that units leased together cannot do without. stages:\n"
             "buffers in which packed bytes arrive, as budget_advice() says."},
    {Py_tp_new, runtime_new},
    {Py_tp_dealloc, runtime_dealloc},
    {Py_tp_traverse, runtime_traverse},
    {Py_tp_clear, runtime_clear},
    {Py_tp_finalize, runtime_finalize},
    {Py_tp_methods, runtime_methods},
    {Py_tp_getset, runtime_properties},
    {0, NULL},
};
PyType_Spec runtime_spec = {"stagehand._core.Runtime", sizeof(runtime_object), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, runtime_slots};
