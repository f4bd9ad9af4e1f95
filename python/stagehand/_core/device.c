/* Type Device and the functions that list devices. A Device holds one reference of an sth_device; tensors
 * from it, arenas and runtimes hold their own, so closing it is always safe. */
#include "convert.h"

static const field info_fields[] = {
    FIELD(sth_device_info, name, CHARS),         FIELD(sth_device_info, backend, CHARS),
    FIELD(sth_device_info, index, INT),          FIELD(sth_device_info, capabilities, U32),
    FIELD(sth_device_info, memory_total, U64),   FIELD(sth_device_info, memory_free, U64),
    FIELD(sth_device_info, driver_version, INT), FIELD_END,
};

/* The simulated device's memory is the host's, so its tensors are CPU tensors. */
static dl_device dl_device_of(const sth_device_info *info) {
    if (!strcmp(info->backend, "cuda")) return (dl_device){DL_CUDA, info->index};
    if (!strcmp(info->backend, "hip")) return (dl_device){DL_ROCM, info->index};
    return (dl_device){DL_CPU, 0};
}

static void end_device(void *owner) { sth_device_close(((device_object *)owner)->device); }

static bool open_device(device_object *self, const char *name, const sth_sim_options *options) {
    sth_status status;
    sth_device_info info;
    Py_BEGIN_ALLOW_THREADS
    status = sth_device_open(name, options, &self->device);
    if (status == STH_OK) {
        status = sth_device_info_get(self->device, &info);
        if (status != STH_OK) sth_device_close(self->device);
    }
    Py_END_ALLOW_THREADS
    if (status != STH_OK) return raise_status(status) != NULL;
    self->dl = dl_device_of(&info);
    self->capabilities = info.capabilities;
    self->guard = (guard){.owner = self, .end = end_device, .name = "Device", .open = true};
    return true;
}

static PyObject *device_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"name",         "memory_bytes", "link_bytes_per_s", "copy_latency_ns",
                            "virtual_time", "poison",       "pin_limit_bytes",  "budget", "expand", NULL};
    sth_sim_options options;
    sth_sim_options_init(&options);
    const char *name = "sim";
    long long latency = options.copy_latency_ns;
    int virtual_time = 0, poison = 1, expand = 1;
    PyObject *budget = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|s$O&O&LppO&Op:Device", names, &name, to_u64_or_none,
                                     &options.memory_bytes, to_u64_or_none, &options.link_bytes_per_s,
                                     &latency, &virtual_time, &poison, to_u64_or_none,
                                     &options.pin_limit_bytes, &budget, &expand))
        return NULL;
    options.copy_latency_ns = latency;
    options.virtual_time = virtual_time;
    options.poison = poison;
    options.no_expand = !expand;
    device_object *self = (device_object *)PyType_GenericAlloc(type, 0);
    if (self && (!open_device(self, name, &options) || !device_take_budget(self, budget))) Py_CLEAR(self);
    return (PyObject *)self;
}

static void device_dealloc(PyObject *op) {
    guard_close(&((device_object *)op)->guard);
    object_free(op);
}

static PyObject *device_close(PyObject *op, PyObject *none) {
    (void)none;
    guard_close(&((device_object *)op)->guard);
    Py_RETURN_NONE;
}

static PyObject *device_info(PyObject *op, PyObject *none) {
    (void)none;
    device_object *self = (device_object *)op;
    sth_device_info info;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_device_info_get(self->device, &info);
    Py_END_ALLOW_THREADS
    PyObject *result = status == STH_OK ? dict_of(&info, info_fields) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *device_measure_h2d(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"bytes", "repeats", "pinned", NULL};
    device_object *self = (device_object *)op;
    uint64_t bytes;
    int repeats = 5, pinned = 1;
    double rate = 0;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|ip:measure_h2d", names, to_u64, &bytes, &repeats,
                                     &pinned))
        return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_device_measure_h2d(self->device, bytes, repeats, pinned, &rate);
    Py_END_ALLOW_THREADS
    PyObject *result = status == STH_OK ? PyFloat_FromDouble(rate) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *device_now_ns(PyObject *op, PyObject *none) {
    (void)none;
    device_object *self = (device_object *)op;
    int64_t now;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    now = sth_device_now_ns(self->device);
    Py_END_ALLOW_THREADS
    guard_leave(&self->guard);
    return PyLong_FromLongLong(now);
}

static PyObject *device_compute(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ns", "stream", NULL};
    device_object *self = (device_object *)op;
    long long ns;
    uint64_t stream = 0;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "L|O&:compute", names, &ns, to_u64, &stream))
        return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_sim_compute(self->device, stream, ns);
    Py_END_ALLOW_THREADS
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static void release_memory(byte_tensor *tensor) {
    sth_device_free(tensor->object, (sth_devptr)(uintptr_t)tensor->managed.tensor.data,
                    (uint64_t)tensor->length);
    sth_device_close(tensor->object);
}

static PyObject *device_empty(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"nbytes", NULL};
    device_object *self = (device_object *)op;
    uint64_t bytes;
    sth_devptr address;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:empty", names, to_u64, &bytes)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *result = NULL;
    byte_tensor *tensor = byte_tensor_new();
    if (tensor) {
        Py_BEGIN_ALLOW_THREADS
        status = sth_device_alloc(self->device, bytes, &address);
        Py_END_ALLOW_THREADS
        if (status == STH_OK) {
            sth_device_retain(self->device);
            tensor->object = self->device;
            tensor->release = release_memory;
            result = byte_tensor_capsule(tensor, address, bytes, self->dl);
        } else {
            byte_tensor_drop(tensor);
            raise_status(status);
        }
    }
    guard_leave(&self->guard);
    return result;
}

static PyObject *device_capabilities(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLong(((device_object *)op)->capabilities);
}

PyObject *backends(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    PyObject *list = PyList_New(0);
    const char *name;
    for (int i = 0; list && (name = sth_backend_name(i)); i++) {
        PyObject *text = text_or_empty(name);
        if (!text || PyList_Append(list, text) < 0) Py_CLEAR(list);
        Py_XDECREF(text);
    }
    return list;
}

PyObject *device_count(PyObject *module, PyObject *args) {
    (void)module;
    const char *backend;
    int count;
    if (!PyArg_ParseTuple(args, "s:device_count", &backend)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    sth_error_set(STH_OK, NULL, 0, NULL, NULL); /* so that the reason read below is this call's */
    count = sth_device_count(backend);
    Py_END_ALLOW_THREADS
    PyObject *reason = text_or_empty(count ? "" : sth_last_error()->message);
    return reason ? Py_BuildValue("(iN)", count, reason) : NULL;
}

static PyMethodDef device_methods[] = {
    {"info", device_info, METH_NOARGS,
     "info()\n--\n\n"
     "Returns a dict: name, backend, index, capabilities (CAP_ bits), memory_total and memory_free\n"
     "(bytes, the latter at the time of the call), driver_version (0 for sim)."},
    {"measure_h2d", (PyCFunction)(void (*)(void))device_measure_h2d, METH_VARARGS | METH_KEYWORDS,
     "measure_h2d(bytes, repeats=5, pinned=True)\n--\n\n"
     "Measures the link from host to device: the median of `repeats` copies of `bytes`, from pinned\n"
     "or pageable memory. Returns bytes per second. Blocks for the copies with the GIL released.\n"
     "Raises InvalidArgumentError, StagehandOOMError, TransferError."},
    {"now_ns", device_now_ns, METH_NOARGS,
     "now_ns()\n--\n\n"
     "The device's clock in nanoseconds: wall time, or virtual time where CAP_VIRTUAL_TIME."},
    {"compute", (PyCFunction)(void (*)(void))device_compute, METH_VARARGS | METH_KEYWORDS,
     "compute(ns, stream=0)\n--\n\n"
     "Simulated device only: the next `ns` nanoseconds of work on `stream`. On stream 0 in real time\n"
     "this waits with the GIL released; in virtual time it advances the clock. Raises StagehandError\n"
     "(UNSUPPORTED)."},
    {"empty", (PyCFunction)(void (*)(void))device_empty, METH_VARARGS | METH_KEYWORDS,
     "empty(nbytes)\n--\n\n"
     "Fresh device memory, 512-byte aligned, as a DLPack capsule of shape (nbytes,), dtype uint8. The\n"
     "tensor made from it owns the memory and keeps the device alive. Raises StagehandOOMError."},
    {"set_budget", (PyCFunction)(void (*)(void))device_set_budget, METH_VARARGS | METH_KEYWORDS,
     "set_budget(budget)\n--\n\n"
     "Sets the cap on the memory of all models on this Device: bytes, a size such as \"20GB\", or None\n"
     "for the default. Raises StagehandOOMError when they occupy more now."},
    {"residency", device_residency, METH_NOARGS,
     "residency()\n--\n\n"
     "A dict, in bytes: cap, occupied (by all runtimes), free, peak (of occupied), primary, secondary\n"
     "and kept (parts of occupied that are reserved, or kept resident), yielding (the rest), fixed (the\n"
     "part of occupied outside of places: norms, buffers), and runtimes, their number."},
    {"assume_free", (PyCFunction)(void (*)(void))device_assume_free, METH_VARARGS | METH_KEYWORDS,
     "assume_free(bytes)\n--\n\n"
     "Without a budget of the Device's: so many bytes beside what its runtimes occupy can be had."},
    {"find_budget", (PyCFunction)(void (*)(void))device_find_budget, METH_VARARGS | METH_KEYWORDS,
     "find_budget(*, total=0, free=0, framework_reserved=0, framework_allocated=0, framework_peak=0, failures=0,\n"
     "            retries=0, budget=0, want=0, least=0, steps=0, growth=0.0, phase=0, runs=False, ceiling=0,\n"
     "            runtime=None, spare=0)\n--\n\n"
     "A reading of the device's memory, in bytes, and what the runtime that asks may have: a dict with budget, why,\n"
     "text, cap, capacity, others, margin, reserve, growths, shrinks, reset_peak and trim (stagehand/residency.h).\n"
     "runtime: its step is about to begin; spare: bytes of its reserved that can be given up."},
    {"above_ceiling", (PyCFunction)(void (*)(void))device_above_ceiling, METH_VARARGS | METH_KEYWORDS,
     "above_ceiling(**reading)\n--\n\n"
     "Whether more than the ceiling is taken once the runtime that asks has the reading's budget."},
    {"turn_begin", device_turn_begin, METH_NOARGS,
     "turn_begin()\n--\n\n"
     "The thread was refused room, and asks again in its turn. Counted: each needs a turn_end()."},
    {"turn_is_first", device_turn_is_first, METH_NOARGS,
     "turn_is_first()\n--\n\n"
     "Whether it is the thread's turn: others give back what they have brought before they wait."},
    {"turn_wait", device_turn_wait, METH_NOARGS,
     "turn_wait()\n--\n\n"
     "Until it is the thread's turn; where it is, until something has changed, 20 ms at most. False: it has\n"
     "waited for 30 s since the turn began. Blocks with the GIL released."},
    {"turn_end", device_turn_end, METH_NOARGS, "turn_end()\n--\n\nEnds what turn_begin() began."},
    {"forget", device_forget, METH_NOARGS,
     "forget()\n--\n\nForgets what find_budget has observed."},
    {"close", device_close, METH_NOARGS,
     "close()\n--\n\n"
     "Gives the device back. Arenas, runtimes and tensors on it keep what they need. Again is fine;\n"
     "other calls then raise StagehandError (SHUT_DOWN). Blocks until its streams are idle when it\n"
     "was the last user."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef device_properties[] = {
    {"capabilities", device_capabilities, NULL, "CAP_ bits of the device, an int.", NULL},
    {"budget", device_budget, NULL, "The cap on the memory of all its models, as it was given, in bytes; or None.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot device_slots[] = {
    {Py_tp_doc,
     (void *)"Device(name=\"sim\", *, memory_bytes=None, link_bytes_per_s=0, copy_latency_ns=2000, "
             "virtual_time=False,\n"
             "       poison=True, pin_limit_bytes=0, budget=None, expand=True)\n--\n\n"
             "Opens \"sim\", \"cuda\" or \"cuda:1\". budget: what all models on it may occupy together,\n"
             "bytes or a size such as \"20GB\"; None: what is free, on the simulated device its memory. Pass\n"
             "one Device as device= to each of them. The other keyword arguments are for the simulated\n"
             "device alone: memory_bytes: capacity (None: 8 GiB). link_bytes_per_s: rate of the link\n"
             "each way, 0 = as fast as memcpy. copy_latency_ns: added to each copy. virtual_time:\n"
             "time is computed, not spent. poison: freed memory is overwritten with NaN.\n"
             "expand: False: as a card without a run-time compiler. pin_limit_bytes: limit of pinned host "
             "memory, 0 = none. Raises StagehandError\n"
             "(BACKEND_UNAVAILABLE) with the reason when driver or card are missing."},
    {Py_tp_new, device_new},
    {Py_tp_dealloc, device_dealloc},
    {Py_tp_methods, device_methods},
    {Py_tp_getset, device_properties},
    {0, NULL},
};
PyType_Spec device_spec = {"stagehand._core.Device", sizeof(device_object), 0, Py_TPFLAGS_DEFAULT,
                           device_slots};
