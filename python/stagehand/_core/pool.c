/* Type Pool: equal slabs of pinned host memory. The pool ends with the Pool object; calls under way hold a
 * reference to it, so nothing waits in the pool by then. Slabs must not be used after that. */
#include "convert.h"
#include "stagehand/pool.h"


static const field stats_fields[] = {
    FIELD(sth_pool_stats, total, U32),
    FIELD(sth_pool_stats, free, U32),
    FIELD(sth_pool_stats, in_use, U32),
    FIELD(sth_pool_stats, peak_in_use, U32),
    FIELD(sth_pool_stats, wait_count, U64),
    FIELD(sth_pool_stats, total_wait_ns, I64),
    FIELD_END,
};

/* Runs on the thread that waits, which has released the GIL. */
static void warn_of_wait(void *arg, uint32_t wanted, uint32_t free_slabs) {
    (void)arg;
    if (!Py_IsInitialized()) return;
    PyGILState_STATE gil = PyGILState_Ensure();
    if (PyErr_WarnFormat(
            PyExc_RuntimeWarning, 1,
            "waiting for %u pinned slabs for more than 100 ms, %u are free: release slabs earlier, or "
            "make the pool larger",
            (unsigned)wanted, (unsigned)free_slabs) < 0)
        cannot_raise(NULL);
    PyGILState_Release(gil);
}

static bool make_pool(pool_object *self, device_object *device, uint64_t total, uint64_t slab,
                      uint64_t alignment) {
    sth_status status;
    sth_pool_stats stats = {0};
    if (device) {
        if (!guard_enter(&device->guard)) return false;
        sth_device_retain(device->device);
        self->device = device->device;
        guard_leave(&device->guard);
    }
    Py_BEGIN_ALLOW_THREADS
    status = sth_pool_create(self->device, total, slab, alignment, &self->pool);
    if (status == STH_OK) status = sth_pool_stats_get(self->pool, &stats);
    Py_END_ALLOW_THREADS
    if (status != STH_OK) return raise_status(status) != NULL;
    self->slabs = stats.total;
    sth_pool_set_wait_handler(self->pool, warn_of_wait, NULL);
    return true;
}

static PyObject *pool_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"total_bytes", "slab_bytes", "alignment", "device", NULL};
    core_state *state = PyType_GetModuleState(type);
    uint64_t total, slab, alignment = 512;
    PyObject *device = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&O:Pool", names, to_u64, &total, to_u64, &slab,
                                     to_u64, &alignment, &device))
        return NULL;
    if (device != Py_None && !PyObject_TypeCheck(device, state->device)) {
        PyErr_SetString(PyExc_TypeError, "Pool: device must be a Device or None");
        return NULL;
    }
    pool_object *self = (pool_object *)PyType_GenericAlloc(type, 0);
    if (self &&
        !make_pool(self, device == Py_None ? NULL : (device_object *)device, total, slab, alignment))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void pool_dealloc(PyObject *op) {
    pool_object *self = (pool_object *)op;
    Py_BEGIN_ALLOW_THREADS
    sth_pool_destroy(self->pool);
    sth_device_close(self->device);
    Py_END_ALLOW_THREADS
    object_free(op);
}

static PyObject *slab_list(sth_pool *pool, const sth_slab *slabs, uint32_t count) {
    PyObject *list = PyList_New(count);
    for (uint32_t i = 0; list && i < count; i++) {
        PyObject *pair =
            Py_BuildValue("(KK)", (unsigned long long)slabs[i],
                          (unsigned long long)(uintptr_t)sth_pool_slab_address(pool, slabs[i]));
        if (!pair || PyList_SetItem(list, (Py_ssize_t)i, pair) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *pool_acquire(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"nbytes", NULL};
    pool_object *self = (pool_object *)op;
    uint64_t bytes;
    uint32_t count = 0;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:acquire", names, to_u64, &bytes)) return NULL;
    /* A request for more slabs than there are is refused by the pool, which fills in no more than it has.
     */
    sth_slab *slabs = PyMem_Malloc(self->slabs * sizeof *slabs);
    if (!slabs) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    status = sth_pool_acquire(self->pool, bytes, slabs, sth_pool_slabs_for(self->pool, bytes), &count);
    Py_END_ALLOW_THREADS
    PyObject *list = status == STH_OK ? slab_list(self->pool, slabs, count) : raise_status(status);
    if (!list && status == STH_OK) sth_pool_release(self->pool, slabs, count);
    PyMem_Free(slabs);
    return list;
}

static PyObject *pool_release(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"ids", NULL};
    pool_object *self = (pool_object *)op;
    PyObject *given;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:release", names, &given)) return NULL;
    PyObject *ids = PySequence_Tuple(given);
    if (!ids) return NULL;
    Py_ssize_t count = PyTuple_Size(ids);
    sth_slab *slabs = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *slabs);
    PyObject *result = slabs ? Py_None : PyErr_NoMemory();
    for (Py_ssize_t i = 0; result && i < count; i++)
        if (!to_u64(PyTuple_GetItem(ids, i), &slabs[i])) result = NULL;
    if (result) result = none_or_raise(sth_pool_release(self->pool, slabs, (uint32_t)count));
    PyMem_Free(slabs);
    Py_DECREF(ids);
    return result;
}

static PyObject *pool_stats(PyObject *op, PyObject *none) {
    (void)none;
    sth_pool_stats stats;
    sth_status status = sth_pool_stats_get(((pool_object *)op)->pool, &stats);
    return status == STH_OK ? dict_of(&stats, stats_fields) : raise_status(status);
}

static PyObject *pool_shutdown(PyObject *op, PyObject *none) {
    (void)none;
    sth_pool_shutdown(((pool_object *)op)->pool);
    Py_RETURN_NONE;
}

static PyObject *pool_slab_bytes(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(sth_pool_slab_bytes(((pool_object *)op)->pool));
}

static PyObject *pool_slab_count(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLong(((pool_object *)op)->slabs);
}

static PyObject *pool_pinned(PyObject *op, void *closure) {
    (void)closure;
    return PyBool_FromLong(sth_pool_is_pinned(((pool_object *)op)->pool));
}

static PyObject *pool_warning(PyObject *op, void *closure) {
    (void)closure;
    return text_or_empty(sth_pool_warning(((pool_object *)op)->pool));
}

static PyMethodDef pool_methods[] = {
    {"acquire", (PyCFunction)(void (*)(void))pool_acquire, METH_VARARGS | METH_KEYWORDS,
     "acquire(nbytes)\n--\n\n"
     "Takes ceil(nbytes / slab_bytes) slabs together and returns a list of (slab id, host address).\n"
     "The slabs are not neighbours, and are the caller's until release(). Blocks until they are free\n"
     "with the GIL released, and warns (RuntimeWarning) after 100 ms. Raises StagehandOOMError for\n"
     "more than the pool has, StagehandError (SHUT_DOWN) after shutdown()."},
    {"release", (PyCFunction)(void (*)(void))pool_release, METH_VARARGS | METH_KEYWORDS,
     "release(ids)\n--\n\n"
     "Gives slabs back: all or, on an error, none. Raises InvalidArgumentError for a slab of another\n"
     "pool or one twice in the list, StagehandError (STALE) for one that was released."},
    {"stats", pool_stats, METH_NOARGS,
     "stats()\n--\n\n"
     "A dict: total, free, in_use, peak_in_use (slabs), wait_count (acquires that waited),\n"
     "total_wait_ns."},
    {"shutdown", pool_shutdown, METH_NOARGS,
     "shutdown()\n--\n\n"
     "Waiting and later acquires raise StagehandError (SHUT_DOWN). Held slabs stay valid. Again is\n"
     "fine."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef pool_properties[] = {
    {"slab_bytes", pool_slab_bytes, NULL, "Bytes of one slab.", NULL},
    {"slab_count", pool_slab_count, NULL, "Number of slabs.", NULL},
    {"pinned", pool_pinned, NULL, "Whether the memory is pinned.", NULL},
    {"warning", pool_warning, NULL, "Why it is not pinned although a device was given; \"\" otherwise.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot pool_slots[] = {
    {Py_tp_doc, (void *)"Pool(total_bytes, slab_bytes, alignment=512, device=None)\n--\n\n"
                        "A pool of total_bytes / slab_bytes equal slabs of host memory, pinned for\n"
                        "`device` where one is given and allows it. All memory is taken now and freed\n"
                        "with the Pool. Raises InvalidArgumentError for sizes that do not fit\n"
                        "together, StagehandOOMError."},
    {Py_tp_new, pool_new},
    {Py_tp_dealloc, pool_dealloc},
    {Py_tp_methods, pool_methods},
    {Py_tp_getset, pool_properties},
    {0, NULL},
};
PyType_Spec pool_spec = {"stagehand._core.Pool", sizeof(pool_object), 0, Py_TPFLAGS_DEFAULT, pool_slots};
