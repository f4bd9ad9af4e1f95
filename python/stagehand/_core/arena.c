/* Type Arena: host memory for weights. An Arena holds one reference of an sth_arena; every tensor over it
 * holds its range, so that those bytes outlive the Arena and the Device for as long as a tensor needs them.
 *
 * Invariant: [begin, end) spans the addresses handed out by reserve; the region is one mapping, so a tensor
 * within it lies in mapped memory. `filling` makes the calls that the library wants one at a time so. */
#include "convert.h"

#include <string.h>

static PyObject *arena_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device", "capacity", "pinned_most", "common", NULL};
    core_state *state = PyType_GetModuleState(type);
    device_object *device;
    uint64_t capacity, most = UINT64_MAX;
    unsigned common = 0;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O&|O&I:Arena", names, state->device, &device, to_u64,
                                     &capacity, to_u64, &most, &common))
        return NULL;
    arena_object *self = (arena_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->dl = device->dl;
    self->filling = PyThread_allocate_lock();
    if (!self->filling || !guard_enter(&device->guard)) {
        if (!self->filling) PyErr_NoMemory();
        Py_DECREF(self);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = common ? sth_arena_create_common(device->device, capacity, most, common, &self->arena)
                    : sth_arena_create_bounded(device->device, capacity, most, &self->arena);
    Py_END_ALLOW_THREADS
    if (status != STH_OK) {
        raise_status(status);
        Py_CLEAR(self);
    }
    guard_leave(&device->guard);
    return (PyObject *)self;
}

static void arena_dealloc(PyObject *op) {
    arena_object *self = (arena_object *)op;
    Py_BEGIN_ALLOW_THREADS
    sth_arena_release(self->arena);
    Py_END_ALLOW_THREADS
    if (self->filling) PyThread_free_lock(self->filling);
    object_free(op);
}

static PyObject *reserved(arena_object *self, void *address, uint64_t bytes) {
    uint64_t begin = (uint64_t)(uintptr_t)address;
    if (!self->begin || begin < self->begin) self->begin = begin;
    if (begin + bytes > self->end) self->end = begin + bytes;
    return PyLong_FromUnsignedLongLong(begin);
}

static PyObject *arena_reserve(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"nbytes", NULL};
    arena_object *self = (arena_object *)op;
    uint64_t bytes;
    void *address = NULL;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:reserve", names, to_u64, &bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(self->filling, WAIT_LOCK);
    status = sth_arena_reserve(self->arena, bytes, &address);
    PyThread_release_lock(self->filling);
    Py_END_ALLOW_THREADS
    return status == STH_OK ? reserved(self, address, bytes) : raise_status(status);
}

/* A list of (offset, address, bytes). NULL: an error is set. The caller frees it. */
static sth_arena_part *parts_of(PyObject *list, uint32_t *out_count) {
    Py_ssize_t count = PyList_Size(list);
    sth_arena_part *parts = count < 0 ? NULL : PyMem_Calloc((size_t)count + 1, sizeof *parts);
    if (!parts && !PyErr_Occurred()) PyErr_NoMemory();
    for (Py_ssize_t i = 0; parts && i < count; i++) {
        uint64_t source;
        PyObject *item = PyList_GetItem(list, i);
        if (!PyArg_ParseTuple(item, "O&O&O&", to_u64, &parts[i].offset, to_u64, &source, to_u64, &parts[i].bytes)) {
            PyMem_Free(parts);
            return NULL;
        }
        parts[i].source = (const void *)(uintptr_t)source;
    }
    *out_count = (uint32_t)count;
    return parts;
}

static PyObject *arena_place(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"nbytes", "parts", "print", NULL};
    arena_object *self = (arena_object *)op;
    uint64_t bytes, sum[2];
    const char *print = NULL;
    Py_ssize_t length = 0;
    uint32_t count;
    PyObject *list;
    void *address = NULL;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O|z#:place", names, to_u64, &bytes, &list, &print, &length))
        return NULL;
    if (print && length != sizeof sum)
        return raise_error(STH_INVALID_ARGUMENT, "arena", "a print has 16 bytes: pass one from arena_print()");
    if (print) memcpy(sum, print, sizeof sum);
    sth_arena_part *parts = parts_of(list, &count);
    if (!parts) return NULL;
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(self->filling, WAIT_LOCK);
    status = sth_arena_place(self->arena, bytes, parts, count, print ? sum : NULL, &address);
    PyThread_release_lock(self->filling);
    Py_END_ALLOW_THREADS
    PyMem_Free(parts);
    return status == STH_OK ? reserved(self, address, bytes) : raise_status(status);
}

PyObject *arena_print(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t bytes, sum[2];
    uint32_t count;
    PyObject *list;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O:arena_print", to_u64, &bytes, &list)) return NULL;
    sth_arena_part *parts = parts_of(list, &count);
    if (!parts) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_arena_print(parts, count, bytes, sum);
    Py_END_ALLOW_THREADS
    PyMem_Free(parts);
    return status == STH_OK ? PyBytes_FromStringAndSize((const char *)sum, sizeof sum) : raise_status(status);
}

static PyObject *arena_leave(PyObject *op, PyObject *args) {
    uint64_t address, bytes;
    if (!PyArg_ParseTuple(args, "O&O&:leave", to_u64, &address, to_u64, &bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    sth_arena_leave(((arena_object *)op)->arena, (const void *)(uintptr_t)address, bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *arena_image(PyObject *op, PyObject *args) {
    uint64_t address;
    if (!PyArg_ParseTuple(args, "O&:image", to_u64, &address)) return NULL;
    const void *image = sth_arena_image(((arena_object *)op)->arena, (const void *)(uintptr_t)address);
    return PyLong_FromUnsignedLongLong((uint64_t)(uintptr_t)image);
}

static PyObject *arena_write(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"address", "source_address", "nbytes", NULL};
    arena_object *self = (arena_object *)op;
    uint64_t address, source, bytes;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&:write", names, to_u64, &address, to_u64, &source,
                                     to_u64, &bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(self->filling, WAIT_LOCK);
    status =
        sth_arena_write(self->arena, (void *)(uintptr_t)address, (const void *)(uintptr_t)source, bytes);
    PyThread_release_lock(self->filling);
    Py_END_ALLOW_THREADS
    return none_or_raise(status);
}

static PyObject *arena_finish(PyObject *op, PyObject *none) {
    (void)none;
    arena_object *self = (arena_object *)op;
    sth_status status;
    Py_BEGIN_ALLOW_THREADS
    PyThread_acquire_lock(self->filling, WAIT_LOCK);
    status = sth_arena_finish(self->arena);
    PyThread_release_lock(self->filling);
    Py_END_ALLOW_THREADS
    return none_or_raise(status);
}

static PyObject *arena_device_alias(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"address", NULL};
    arena_object *self = (arena_object *)op;
    uint64_t address;
    sth_devptr alias;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:device_alias", names, to_u64, &address)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    alias = sth_arena_device_alias(self->arena, (const void *)(uintptr_t)address);
    Py_END_ALLOW_THREADS
    return PyLong_FromUnsignedLongLong(alias);
}

static void release_range(byte_tensor *tensor) {
    sth_arena_release_range(tensor->object, (const void *)(uintptr_t)tensor->host);
}

/* A tensor of `bytes` at `address`, which keeps the arena's bytes at `host` alive. */
static PyObject *tensor_at(arena_object *self, uint64_t host, uint64_t address, uint64_t bytes, dl_device device) {
    byte_tensor *tensor = byte_tensor_new();
    if (!tensor) return NULL;
    sth_arena_retain_range(self->arena, (const void *)(uintptr_t)host);
    tensor->object = self->arena;
    tensor->host = host;
    tensor->release = release_range;
    return byte_tensor_capsule(tensor, address, bytes, device);
}

static bool parse_range(arena_object *self, PyObject *args, PyObject *kwargs, const char *format,
                        uint64_t *address, uint64_t *bytes) {
    static char *names[] = {"address", "nbytes", NULL};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, format, names, to_u64, address, to_u64, bytes))
        return false;
    if (self->begin && *address >= self->begin && *address <= self->end && *bytes <= self->end - *address)
        return true;
    raise_error(STH_INVALID_ARGUMENT, "arena",
                "the bytes lie outside what this arena has reserved: pass an address from reserve()");
    return false;
}

static PyObject *arena_tensor(PyObject *op, PyObject *args, PyObject *kwargs) {
    arena_object *self = (arena_object *)op;
    uint64_t address, bytes;
    if (!parse_range(self, args, kwargs, "O&O&:tensor", &address, &bytes)) return NULL;
    return tensor_at(self, address, address, bytes, (dl_device){DL_CPU, 0});
}

static sth_devptr alias_of_range(sth_arena *arena, uint64_t address, uint64_t bytes) {
    sth_devptr alias = sth_arena_device_alias(arena, (const void *)(uintptr_t)address);
    if (!alias || bytes < 2) return alias;
    /* Windows have aliases of their own: both ends must lie in the same one. */
    sth_devptr last = sth_arena_device_alias(arena, (const void *)(uintptr_t)(address + bytes - 1));
    return last == alias + bytes - 1 ? alias : 0;
}

static PyObject *arena_mapped_tensor(PyObject *op, PyObject *args, PyObject *kwargs) {
    arena_object *self = (arena_object *)op;
    uint64_t address, bytes;
    sth_devptr alias;
    if (!parse_range(self, args, kwargs, "O&O&:mapped_tensor", &address, &bytes)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    alias = alias_of_range(self->arena, address, bytes);
    Py_END_ALLOW_THREADS
    if (!alias)
        return raise_error(
            STH_INVALID_ARGUMENT, "arena",
            "the device cannot read these bytes in place: they are not pinned (call finish() first and "
            "see pin_error) or the device has no CAP_MAPPED_HOST");
    return tensor_at(self, address, alias, bytes, self->dl);
}

static PyObject *arena_bytes(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(sth_arena_bytes(((arena_object *)op)->arena));
}

static PyObject *arena_pinned_bytes(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(sth_arena_pinned_bytes(((arena_object *)op)->arena));
}

static PyObject *arena_found_bytes(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(sth_arena_found_bytes(((arena_object *)op)->arena));
}

static PyObject *arena_common(PyObject *op, void *closure) {
    (void)closure;
    arena_object *self = (arena_object *)op;
    const void *begin = (const void *)(uintptr_t)self->begin;
    return PyBool_FromLong(begin && sth_arena_image(self->arena, begin) != begin);
}

static PyObject *arena_pin_error(PyObject *op, void *closure) {
    (void)closure;
    return text_or_empty(sth_arena_pin_error(((arena_object *)op)->arena));
}

static PyMethodDef arena_methods[] = {
    {"reserve", (PyCFunction)(void (*)(void))arena_reserve, METH_VARARGS | METH_KEYWORDS,
     "reserve(nbytes)\n--\n\n"
     "Takes the next `nbytes` and returns their host address, a multiple of 512. The memory belongs\n"
     "to the arena. Raises StagehandOOMError past the capacity."},
    {"place", (PyCFunction)(void (*)(void))arena_place, METH_VARARGS | METH_KEYWORDS,
     "place(nbytes, parts, print=None)\n--\n\n"
     "Takes the next `nbytes` of an arena in common and fills them: by memory that another arena of\n"
     "this user's processes holds already, or by copies of the parts, a list of (offset, address,\n"
     "nbytes). print: arena_print(nbytes, parts), where it is known. Returns the address of a private\n"
     "view: a write there is seen by this process alone. Blocks, with the GIL released. Raises\n"
     "StagehandOOMError past the capacity, InvalidArgumentError, InvalidStateTransitionError."},
    {"leave", arena_leave, METH_VARARGS,
     "leave(address, nbytes)\n--\n\n"
     "Nobody uses these bytes of an arena in common any more: no tensor over them is left, and no unit\n"
     "has them as its image."},
    {"image", arena_image, METH_VARARGS,
     "image(address)\n--\n\n"
     "The memory that devices read for an address of the arena's, the same but where it is in common;\n"
     "0: no such address. Not to be written."},
    {"write", (PyCFunction)(void (*)(void))arena_write, METH_VARARGS | METH_KEYWORDS,
     "write(address, source_address, nbytes)\n--\n\n"
     "Copies `nbytes` from `source_address`, which must be readable host memory, into reserved memory\n"
     "with several threads. Blocks until copied, with the GIL released. Raises InvalidArgumentError\n"
     "outside the reserved part."},
    {"finish", arena_finish, METH_NOARGS,
     "finish()\n--\n\n"
     "No more reservations: the rest is pinned too. Blocks until pinning has ended, with the GIL\n"
     "released. Memory that stays pageable is not an error: see pin_error."},
    {"device_alias", (PyCFunction)(void (*)(void))arena_device_alias, METH_VARARGS | METH_KEYWORDS,
     "device_alias(address)\n--\n\n"
     "The device address by which kernels read host `address` in place; 0 where they cannot."},
    {"tensor", (PyCFunction)(void (*)(void))arena_tensor, METH_VARARGS | METH_KEYWORDS,
     "tensor(address, nbytes)\n--\n\n"
     "A DLPack capsule of shape (nbytes,), dtype uint8, on the CPU, over reserved memory. Its\n"
     "consumer keeps those bytes alive. Raises InvalidArgumentError outside the reserved part."},
    {"mapped_tensor", (PyCFunction)(void (*)(void))arena_mapped_tensor, METH_VARARGS | METH_KEYWORDS,
     "mapped_tensor(address, nbytes)\n--\n\n"
     "The same bytes as tensor(), as seen by the device: a capsule on the device (CPU for sim).\n"
     "Raises InvalidArgumentError where the device cannot read them in place."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef arena_properties[] = {
    {"bytes", arena_bytes, NULL, "Bytes reserved so far, each reservation rounded up to 512.", NULL},
    {"pinned_bytes", arena_pinned_bytes, NULL, "Bytes pinned so far.", NULL},
    {"found_bytes", arena_found_bytes, NULL, "Bytes that another arena held already.", NULL},
    {"common", arena_common, NULL, "Whether what it holds is in common with other processes.", NULL},
    {"pin_error", arena_pin_error, NULL, "Why some memory is pageable; \"\" when nothing is wrong.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot arena_slots[] = {
    {Py_tp_doc, (void *)"Arena(device, capacity, pinned_most=18446744073709551615, common=0)\n--\n\n"
                        "Host memory for `capacity` bytes of weights, one exact region, of which at most\n"
                        "`pinned_most` are pinned for `device`, in the background while it is filled.\n"
                        "Life: reserve and write each unit, in order; finish. common: reservations that\n"
                        "processes of this user may hold together; place makes them.\n"
                        "The memory goes when the Arena, its tensors and the\n"
                        "runtimes that read it are gone. Raises StagehandOOMError,\n"
                        "InvalidArgumentError."},
    {Py_tp_new, arena_new},
    {Py_tp_dealloc, arena_dealloc},
    {Py_tp_methods, arena_methods},
    {Py_tp_getset, arena_properties},
    {0, NULL},
};
PyType_Spec arena_spec = {"stagehand._core.Arena", sizeof(arena_object), 0, Py_TPFLAGS_DEFAULT,
                          arena_slots};
