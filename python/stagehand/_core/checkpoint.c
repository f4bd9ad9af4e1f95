/* Type Checkpoint: what is in a model file, and its bytes. Runtimes that read from one count as its users,
 * so that close() takes effect when the last of them has ended. */
#include "convert.h"

static void end_checkpoint(void *owner) { sth_checkpoint_close(((checkpoint_object *)owner)->checkpoint); }

static void end_nothing(void *owner) { (void)owner; }

static void let_go_of_owner(void *op) {
    checkpoint_object *self = op;
    guard_leave(self->owner_guard);
    Py_CLEAR(self->owner);
}

PyObject *checkpoint_over(core_state *state, sth_checkpoint *checkpoint, PyObject *owner, guard *owner_guard) {
    checkpoint_object *self = (checkpoint_object *)PyType_GenericAlloc((PyTypeObject *)state->checkpoint, 0);
    if (!self) return NULL;
    self->checkpoint = checkpoint;
    self->owner = Py_NewRef(owner);
    self->owner_guard = owner_guard;
    self->guard = (guard){.owner = self, .end = end_nothing, .ended = let_go_of_owner, .name = "Checkpoint",
                          .open = true};
    return (PyObject *)self;
}

static PyObject *checkpoint_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", NULL};
    PyObject *path = NULL;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:Checkpoint", names, PyUnicode_FSConverter, &path))
        return NULL;
    checkpoint_object *self = (checkpoint_object *)PyType_GenericAlloc(type, 0);
    if (self) {
        const char *text = PyBytes_AsString(path);
        Py_BEGIN_ALLOW_THREADS
        status = sth_checkpoint_open(text, &self->checkpoint);
        Py_END_ALLOW_THREADS
        if (status == STH_OK) {
            self->guard = (guard){.owner = self, .end = end_checkpoint, .name = "Checkpoint", .open = true};
        } else {
            raise_status(status);
            Py_CLEAR(self);
        }
    }
    Py_DECREF(path);
    return (PyObject *)self;
}

static void checkpoint_dealloc(PyObject *op) {
    guard_close(&((checkpoint_object *)op)->guard);
    object_free(op);
}

static PyObject *checkpoint_close(PyObject *op, PyObject *none) {
    (void)none;
    guard_close(&((checkpoint_object *)op)->guard);
    Py_RETURN_NONE;
}

static PyObject *shape_of(const sth_tensor_info *info) {
    PyObject *shape = PyTuple_New(info->rank);
    for (int i = 0; shape && i < info->rank; i++) {
        PyObject *length = PyLong_FromUnsignedLongLong(info->shape[i]);
        if (!length || PyTuple_SetItem(shape, i, length) < 0) Py_CLEAR(shape);
    }
    return shape;
}

static PyObject *tensor_entry(const sth_tensor_info *info) {
    PyObject *name = text_or_empty(info->name), *shape = shape_of(info), *dtype = text_or_empty(info->spelling);
    if (!name || !shape || !dtype) {
        Py_XDECREF(name);
        Py_XDECREF(shape);
        Py_XDECREF(dtype);
        return NULL;
    }
    return Py_BuildValue("(NNNIKK)", name, dtype, shape, (unsigned)info->file,
                         (unsigned long long)info->offset, (unsigned long long)info->bytes);
}

static bool append(PyObject *list, PyObject *item) {
    bool done = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return done;
}

static PyObject *checkpoint_tensors(PyObject *op, PyObject *none) {
    (void)none;
    checkpoint_object *self = (checkpoint_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *list = PyList_New(0);
    uint64_t count = sth_checkpoint_tensor_count(self->checkpoint);
    for (uint64_t i = 0; list && i < count; i++)
        if (!append(list, tensor_entry(sth_checkpoint_tensor(self->checkpoint, i)))) Py_CLEAR(list);
    guard_leave(&self->guard);
    return list;
}

static void add_name(void *lists, uint32_t rank, const char *name) {
    PyObject **ranks = lists;
    if (ranks[rank] && !append(ranks[rank], PyUnicode_FromString(name))) Py_CLEAR(ranks[rank]);
}

PyObject *name_ranks(PyObject *module, PyObject *args) {
    (void)module;
    const char *name;
    if (!PyArg_ParseTuple(args, "s:name_ranks", &name)) return NULL;
    PyObject *ranks[3] = {PyList_New(0), PyList_New(0), PyList_New(0)};
    sth_status status = sth_checkpoint_names(name, add_name, ranks);
    if (status == STH_OK && ranks[0] && ranks[1] && ranks[2])
        return Py_BuildValue("(NNN)", ranks[0], ranks[1], ranks[2]);
    for (int i = 0; i < 3; i++) Py_XDECREF(ranks[i]);
    return status == STH_OK ? NULL : raise_status(status);
}

static PyObject *checkpoint_scales(PyObject *op, PyObject *none) {
    (void)none;
    checkpoint_object *self = (checkpoint_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *dict = PyDict_New();
    uint64_t count = sth_checkpoint_tensor_count(self->checkpoint);
    for (uint64_t i = 0; dict && i < count; i++) {
        const sth_tensor_info *info = sth_checkpoint_tensor(self->checkpoint, i);
        if (info->scale == 1) continue;
        PyObject *scale = PyFloat_FromDouble(info->scale);
        if (!scale || PyDict_SetItemString(dict, info->name, scale) < 0) Py_CLEAR(dict);
        Py_XDECREF(scale);
    }
    guard_leave(&self->guard);
    return dict;
}

static PyObject *checkpoint_files(PyObject *op, PyObject *none) {
    (void)none;
    checkpoint_object *self = (checkpoint_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *list = PyList_New(0);
    uint32_t count = sth_checkpoint_file_count(self->checkpoint);
    for (uint32_t i = 0; list && i < count; i++)
        if (!append(list, PyUnicode_DecodeFSDefault(sth_checkpoint_file_path(self->checkpoint, i))))
            Py_CLEAR(list);
    guard_leave(&self->guard);
    return list;
}

static PyObject *checkpoint_descriptor(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"file", NULL};
    checkpoint_object *self = (checkpoint_object *)op;
    uint32_t file;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:descriptor", names, to_u32, &file)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    int fd = sth_checkpoint_file_descriptor(self->checkpoint, file);
    PyObject *result = fd >= 0
                           ? PyLong_FromLong(fd)
                           : raise_error(STH_INVALID_ARGUMENT, "file", "there is no file of that index: see files()");
    guard_leave(&self->guard);
    return result;
}

static PyObject *checkpoint_hole_bytes(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"file", NULL};
    checkpoint_object *self = (checkpoint_object *)op;
    uint32_t file;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:hole_bytes", names, to_u32, &file)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *result =
        file < sth_checkpoint_file_count(self->checkpoint)
            ? PyLong_FromUnsignedLongLong(sth_checkpoint_hole_bytes(self->checkpoint, file))
            : raise_error(STH_INVALID_ARGUMENT, "file", "there is no file of that index: see files()");
    guard_leave(&self->guard);
    return result;
}

static PyObject *checkpoint_read(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"file", "offset", "nbytes", "address", NULL};
    checkpoint_object *self = (checkpoint_object *)op;
    uint32_t file;
    uint64_t offset, bytes, address;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&:read", names, to_u32, &file, to_u64, &offset,
                                     to_u64, &bytes, to_u64, &address))
        return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_checkpoint_read(self->checkpoint, file, offset, bytes, (void *)(uintptr_t)address);
    Py_END_ALLOW_THREADS
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static PyMethodDef checkpoint_methods[] = {
    {"tensors", checkpoint_tensors, METH_NOARGS,
     "tensors()\n--\n\n"
     "A list of (name, dtype name, shape, file index, offset, bytes), in the order on disk. Offsets\n"
     "count from the start of the file."},
    {"scales", checkpoint_scales, METH_NOARGS,
     "scales()\n--\n\n"
     "{tensor name: scale} of a layer index: a value is the stored number times this. Scales of 1, as\n"
     "everywhere else, are left out."},
    {"files", checkpoint_files, METH_NOARGS,
     "files()\n--\n\nPaths of the files, in the order of their indices."},
    {"descriptor", (PyCFunction)(void (*)(void))checkpoint_descriptor, METH_VARARGS | METH_KEYWORDS,
     "descriptor(file)\n--\n\nThe descriptor that a file is read through. The checkpoint's: not to be closed."},
    {"hole_bytes", (PyCFunction)(void (*)(void))checkpoint_hole_bytes, METH_VARARGS | METH_KEYWORDS,
     "hole_bytes(file)\n--\n\nBytes of a file that no tensor covers (headers not counted)."},
    {"read", (PyCFunction)(void (*)(void))checkpoint_read, METH_VARARGS | METH_KEYWORDS,
     "read(file, offset, nbytes, address)\n--\n\n"
     "Reads bytes of a file into host memory at `address`, which the caller owns. Blocks for the disk\n"
     "with the GIL released. Raises TransferError on a short read, and when the file has changed\n"
     "since it was opened."},
    {"close", checkpoint_close, METH_NOARGS,
     "close()\n--\n\n"
     "Closes the files once no runtime and no call reads from them. Again is fine; other calls then\n"
     "raise StagehandError (SHUT_DOWN)."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot checkpoint_slots[] = {
    {Py_tp_doc, (void *)"Checkpoint(path)\n--\n\n"
                        "Opens a .safetensors file, an index of shards or of layers, or a folder with\n"
                        "one of these, and checks its headers. `path`: str or os.PathLike. Raises\n"
                        "NotFoundError (a FileNotFoundError), CheckpointError (a ValueError) naming\n"
                        "file, tensor and byte, TransferError, StagehandError."},
    {Py_tp_new, checkpoint_new},
    {Py_tp_dealloc, checkpoint_dealloc},
    {Py_tp_methods, checkpoint_methods},
    {0, NULL},
};
PyType_Spec checkpoint_spec = {"stagehand._core.Checkpoint", sizeof(checkpoint_object), 0,
                               Py_TPFLAGS_DEFAULT, checkpoint_slots};
