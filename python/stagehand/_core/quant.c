/* Type QuantFile: the layers of a quantised model file, and their weights decoded by the CPU. */
#include "convert.h"

#include <string.h>

#include "stagehand/quant.h"

typedef struct quant_object {
    PyObject ob_base;
    sth_quant *quant;
    guard guard;
} quant_object;

static void end_quant(void *owner) { sth_quant_close(((quant_object *)owner)->quant); }

/* A QuantFile over `quant`, which it takes over. */
static PyObject *quant_over(PyTypeObject *type, sth_quant *quant) {
    quant_object *self = (quant_object *)PyType_GenericAlloc(type, 0);
    if (!self) {
        sth_quant_close(quant);
        return NULL;
    }
    self->quant = quant;
    self->guard = (guard){.owner = self, .end = end_quant, .name = "QuantFile", .open = true};
    return (PyObject *)self;
}

static PyObject *open_by(sth_status (*open)(const char *, sth_quant **), PyTypeObject *type, PyObject *path) {
    const char *text = PyBytes_AsString(path);
    sth_quant *quant = NULL;
    sth_status status;
    Py_BEGIN_ALLOW_THREADS
    status = open(text, &quant);
    Py_END_ALLOW_THREADS
    Py_DECREF(path);
    if (status != STH_OK) return raise_status(status);
    if (quant) return quant_over(type, quant);
    Py_RETURN_NONE;
}

static PyObject *quant_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", NULL};
    PyObject *path = NULL;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:QuantFile", names, PyUnicode_FSConverter, &path)) return NULL;
    return open_by(sth_quant_open, type, path);
}

static PyObject *quant_open_if_slab(PyObject *type, PyObject *given) {
    PyObject *path = NULL;
    return PyUnicode_FSConverter(given, &path) ? open_by(sth_quant_open_if_slab, (PyTypeObject *)type, path) : NULL;
}

static void quant_dealloc(PyObject *op) {
    guard_close(&((quant_object *)op)->guard);
    object_free(op);
}

static PyObject *quant_close(PyObject *op, PyObject *none) {
    (void)none;
    guard_close(&((quant_object *)op)->guard);
    Py_RETURN_NONE;
}

static PyObject *quant_format(PyObject *op, PyObject *none) {
    (void)none;
    quant_object *self = (quant_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *name = PyUnicode_FromString(sth_quant_format_name(sth_quant_get_format(self->quant)));
    guard_leave(&self->guard);
    return name;
}

static bool append(PyObject *list, PyObject *item) {
    bool done = item && PyList_Append(list, item) == 0;
    Py_XDECREF(item);
    return done;
}

static PyObject *parts_of(const sth_quant_layer *layer) {
    PyObject *parts = PyDict_New();
    for (int p = 0; parts && p < STH_QUANT_PART_COUNT; p++) {
        if (!layer->parts[p]) continue;
        PyObject *name = text_or_empty(layer->parts[p]->name);
        if (!name || PyDict_SetItemString(parts, sth_quant_part_name((sth_quant_part)p), name) < 0) Py_CLEAR(parts);
        Py_XDECREF(name);
    }
    return parts;
}

/* (dtype, shape) of the tensor that a lossless layer is; None for others. */
static PyObject *tensor_of(const sth_quant_layer *layer) {
    const sth_tensor_info *t = layer->tensor;
    if (!t) Py_RETURN_NONE;
    PyObject *shape = PyTuple_New(t->rank);
    for (int i = 0; shape && i < t->rank; i++) {
        PyObject *extent = PyLong_FromUnsignedLongLong(t->shape[i]);
        if (!extent || PyTuple_SetItem(shape, i, extent) < 0) Py_CLEAR(shape);
    }
    return shape ? Py_BuildValue("(sN)", t->spelling, shape) : NULL;
}

static PyObject *layer_entry(const sth_quant_layer *l) {
    PyObject *name = text_or_empty(l->name), *parts = parts_of(l), *tensor = tensor_of(l);
    if (!name || !parts || !tensor) {
        Py_XDECREF(name);
        Py_XDECREF(parts);
        Py_XDECREF(tensor);
        return NULL;
    }
    return Py_BuildValue("{sNsssKsKsKsKsKsKsNsNss}", "name", name, "encoding", sth_encoding_name(l->encoding), "out",
                         (unsigned long long)l->out, "in", (unsigned long long)l->in, "padded_in",
                         (unsigned long long)l->padded_in, "group", (unsigned long long)l->group, "rank",
                         (unsigned long long)l->rank, "hadamard", (unsigned long long)l->hadamard, "parts", parts,
                         "tensor", tensor, "unfit", sth_quant_unfit(l) ? sth_quant_unfit(l) : "");
}

static PyObject *quant_layers(PyObject *op, PyObject *none) {
    (void)none;
    quant_object *self = (quant_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *list = PyList_New(0);
    uint64_t count = sth_quant_layer_count(self->quant);
    for (uint64_t i = 0; list && i < count; i++)
        if (!append(list, layer_entry(sth_quant_get_layer(self->quant, i)))) Py_CLEAR(list);
    guard_leave(&self->guard);
    return list;
}

static PyObject *quant_plain(PyObject *op, PyObject *none) {
    (void)none;
    quant_object *self = (quant_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *list = PyList_New(0);
    uint64_t count = sth_quant_plain_count(self->quant);
    for (uint64_t i = 0; list && i < count; i++)
        if (!append(list, text_or_empty(sth_quant_plain(self->quant, i)->name))) Py_CLEAR(list);
    guard_leave(&self->guard);
    return list;
}

static bool find_dtype(const char *name, sth_dtype *out) {
    for (int i = 0; i < STH_DTYPE_COUNT; i++) {
        if (strcmp(sth_dtype_name((sth_dtype)i), name) != 0) continue;
        *out = (sth_dtype)i;
        return true;
    }
    raise_error(STH_INVALID_ARGUMENT, "dtype", "no dtype of that name: see _core.DTYPES");
    return false;
}

static PyObject *quant_decode(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"name", "dtype", "address", "threads", NULL};
    quant_object *self = (quant_object *)op;
    const char *name, *dtype_name;
    uint64_t address;
    uint32_t threads = 0;
    sth_dtype dtype;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "ssO&|O&:decode", names, &name, &dtype_name, to_u64, &address,
                                     to_u32, &threads) ||
        !find_dtype(dtype_name, &dtype) || !guard_enter(&self->guard))
        return NULL;
    const sth_quant_layer *layer = sth_quant_find(self->quant, name);
    PyObject *result = NULL;
    if (layer) {
        Py_BEGIN_ALLOW_THREADS
        status = sth_quant_decode(self->quant, layer, dtype, (void *)(uintptr_t)address, threads);
        Py_END_ALLOW_THREADS
        result = none_or_raise(status);
    } else {
        raise_error(STH_NOT_FOUND, name, "there is no layer of that name: see layers()");
    }
    guard_leave(&self->guard);
    return result;
}

/* The checkpoint keeps the file open until it is closed itself. */
static PyObject *quant_checkpoint(PyObject *op, PyObject *none) {
    (void)none;
    quant_object *self = (quant_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    core_state *state = PyType_GetModuleState(Py_TYPE(op));
    PyObject *checkpoint = checkpoint_over(state, sth_quant_checkpoint(self->quant), op, &self->guard);
    if (!checkpoint) guard_leave(&self->guard);
    return checkpoint;
}

/* (segments, [(file, offset, bytes, place offset)], packed end, bytes of the largest segment) */
static PyObject *laid_out(const sth_segment *segments, uint32_t count, const sth_file_range *ranges,
                          uint32_t range_count, uint64_t end) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < range_count; i++)
        if (!append(list,
                    Py_BuildValue("(IKKK)", (unsigned)ranges[i].file, (unsigned long long)ranges[i].file_offset,
                                  (unsigned long long)ranges[i].bytes, (unsigned long long)ranges[i].place_offset)))
            Py_CLEAR(list);
    if (!list) return NULL;
    return Py_BuildValue("(y#NKK)", (const char *)segments, (Py_ssize_t)(count * sizeof *segments), list,
                         (unsigned long long)end, (unsigned long long)largest_segment(segments, count, end));
}

static PyObject *lay_out(sth_quant *quant, const sth_quant_layer *layer, sth_dtype dtype, uint64_t place,
                         uint64_t packed, uint64_t piece) {
    uint32_t count = 0, range_count = 0;
    uint64_t end = 0;
    sth_segment *segments = NULL;
    sth_file_range *ranges = NULL;
    PyObject *result = NULL;
    sth_status status;
    Py_BEGIN_ALLOW_THREADS
    status = sth_quant_segments(quant, layer, dtype, place, packed, piece, NULL, &count, NULL, &range_count, &end);
    Py_END_ALLOW_THREADS
    if (status != STH_OK) return raise_status(status);
    segments = PyMem_Malloc(count * sizeof *segments);
    ranges = PyMem_Malloc(range_count * sizeof *ranges);
    if (segments && ranges) {
        Py_BEGIN_ALLOW_THREADS
        status =
            sth_quant_segments(quant, layer, dtype, place, packed, piece, segments, &count, ranges, &range_count, &end);
        Py_END_ALLOW_THREADS
        result = status == STH_OK ? laid_out(segments, count, ranges, range_count, end) : raise_status(status);
    } else {
        PyErr_NoMemory();
    }
    PyMem_Free(segments);
    PyMem_Free(ranges);
    return result;
}

static PyObject *quant_segment(PyObject *op, PyObject *args) {
    quant_object *self = (quant_object *)op;
    const char *name, *dtype_name;
    sth_dtype dtype;
    sth_segment segment;
    sth_status status;
    if (!PyArg_ParseTuple(args, "ss:segment", &name, &dtype_name) || !find_dtype(dtype_name, &dtype) ||
        !guard_enter(&self->guard))
        return NULL;
    const sth_quant_layer *layer = sth_quant_find(self->quant, name);
    PyObject *result = NULL;
    if (layer) {
        Py_BEGIN_ALLOW_THREADS
        status = sth_quant_segment(self->quant, layer, dtype, &segment);
        Py_END_ALLOW_THREADS
        result = status == STH_OK ? PyBytes_FromStringAndSize((const char *)&segment, (Py_ssize_t)sizeof segment)
                                  : raise_status(status);
    } else {
        raise_error(STH_NOT_FOUND, name, "there is no layer of that name: see layers()");
    }
    guard_leave(&self->guard);
    return result;
}

static PyObject *quant_segments(PyObject *op, PyObject *args) {
    quant_object *self = (quant_object *)op;
    const char *name, *dtype_name;
    uint64_t place, packed, piece;
    sth_dtype dtype;
    if (!PyArg_ParseTuple(args, "ssO&O&O&:segments", &name, &dtype_name, to_u64, &place, to_u64, &packed, to_u64,
                          &piece) ||
        !find_dtype(dtype_name, &dtype) || !guard_enter(&self->guard))
        return NULL;
    const sth_quant_layer *layer = sth_quant_find(self->quant, name);
    PyObject *result = layer ? lay_out(self->quant, layer, dtype, place, packed, piece)
                             : raise_error(STH_NOT_FOUND, name, "there is no layer of that name: see layers()");
    guard_leave(&self->guard);
    return result;
}

static PyMethodDef quant_methods[] = {
    {"open_if_slab", quant_open_if_slab, METH_O | METH_CLASS,
     "open_if_slab(path)\n--\n\nA QuantFile, or None where the path may be a plain checkpoint, or is nothing."},
    {"checkpoint", quant_checkpoint, METH_NOARGS,
     "checkpoint()\n--\n\n"
     "A Checkpoint of all its tensors, for reading and streaming. The files stay open until it is closed."},
    {"segment", quant_segment, METH_VARARGS,
     "segment(name, dtype)\n--\n\n"
     "The layer as one segment, for budget_advice(): opaque bytes. Raises as segments()."},
    {"segments", quant_segments, METH_VARARGS,
     "segments(name, dtype, place_offset, packed_offset, piece_bytes)\n--\n\n"
     "What streams a layer as the file holds it: (segments, ranges, packed end, bytes of the largest segment),\n"
     "the first two for add_unit(). Raises StagehandError (UNSUPPORTED) where layers() says \"unfit\",\n"
     "CheckpointError, TransferError."},
    {"format", quant_format, METH_NOARGS,
     "format()\n--\n\nWhat the file calls its format, such as \"squareq_bp8_v2\"."},
    {"layers", quant_layers, METH_NOARGS,
     "layers()\n--\n\n"
     "A list of dicts in the order on disk: name, encoding, out, in, padded_in, group, rank, hadamard, and\n"
     "parts: {part: tensor name}; unfit: why a device cannot expand it from the file, \"\" where it can; tensor:\n"
     "None, or (dtype, shape) of a tensor that is losslessly packed, whose name is `name`. The weight of any other\n"
     "layer is `name`.weight, [out, in]."},
    {"plain", quant_plain, METH_NOARGS,
     "plain()\n--\n\nNames of the tensors that are part of no layer, a list of str."},
    {"decode", (PyCFunction)(void (*)(void))quant_decode, METH_VARARGS | METH_KEYWORDS,
     "decode(name, dtype, address, threads=0)\n--\n\n"
     "Decodes a layer's weight into out * in elements of \"F32\", \"BF16\" or \"F16\" at `address`, which the\n"
     "caller owns. `threads`: 0 for one on each core; the bytes do not depend on it. Blocks with the GIL\n"
     "released. Raises NotFoundError, CheckpointError, TransferError, InvalidArgumentError."},
    {"close", quant_close, METH_NOARGS,
     "close()\n--\n\n"
     "Closes the files once no call reads from them. Again is fine; other calls then raise StagehandError\n"
     "(SHUT_DOWN)."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot quant_slots[] = {
    {Py_tp_doc, (void *)"QuantFile(path)\n--\n\n"
                        "Opens a quantised model file (.fpk, .slab, .safetensors with its .manifest.json, a folder\n"
                        "of v3 shards) or a losslessly packed one, and checks its headers. `path`: str or\n"
                        "os.PathLike. Raises NotFoundError, CheckpointError naming file, tensor and byte,\n"
                        "TransferError, StagehandError."},
    {Py_tp_new, quant_new},
    {Py_tp_dealloc, quant_dealloc},
    {Py_tp_methods, quant_methods},
    {0, NULL},
};
PyType_Spec quant_spec = {"stagehand._core.QuantFile", sizeof(quant_object), 0, Py_TPFLAGS_DEFAULT, quant_slots};
