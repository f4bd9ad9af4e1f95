/* Tensors of bytes as DLPack capsules.
 *
 * Life: new -> (set release, object, lease) -> capsule -> a consumer renames the capsule to
 * "used_dltensor" and calls the deleter when its last storage goes; an unconsumed capsule calls it itself.
 * Either way `release` runs exactly once. The record is from malloc, since deleters run without the GIL and
 * after the interpreter's end, where the allocators of Python may not be used. */
#include "core.h"

#include <stdlib.h>
#include <string.h>

static const char capsule_name[] = "dltensor";

byte_tensor *byte_tensor_new(void) {
    byte_tensor *tensor = calloc(1, sizeof *tensor);
    if (!tensor) return (byte_tensor *)PyErr_NoMemory();
    tensor->view.rank = -1;
    return tensor;
}

void byte_tensor_drop(byte_tensor *tensor) { free(tensor); }

static void delete_managed(dl_managed *managed) {
    byte_tensor *tensor = managed->context;
    tensor->release(tensor);
    free(tensor);
}

static void capsule_gone(PyObject *capsule) {
    if (!PyCapsule_IsValid(capsule, capsule_name)) return; /* consumed */
    delete_managed(PyCapsule_GetPointer(capsule, capsule_name));
}

PyObject *byte_tensor_capsule(byte_tensor *tensor, uint64_t address, uint64_t bytes, dl_device device) {
    PyObject *capsule = NULL;
    tensor->length = (int64_t)bytes;
    tensor->stride = 1;
    tensor->managed = (dl_managed){
        .tensor = {.data = (void *)(uintptr_t)address,
                   .device = device,
                   .rank = 1,
                   .dtype = {DL_UINT, 8, 1},
                   .shape = &tensor->length,
                   .strides = &tensor->stride},
        .context = tensor,
        .deleter = delete_managed,
    };
    if (tensor->view.rank >= 0) {
        dl_tensor *seen = &tensor->managed.tensor;
        seen->dtype = tensor->view.dtype;
        seen->rank = tensor->view.rank;
        seen->shape = tensor->view.shape;
        seen->strides = tensor->view.strides;
    }
    if (bytes > INT64_MAX)
        PyErr_Format(PyExc_ValueError, "a tensor of %llu bytes is too large", (unsigned long long)bytes);
    else
        capsule = PyCapsule_New(&tensor->managed, capsule_name, capsule_gone);
    if (!capsule) delete_managed(&tensor->managed);
    return capsule;
}

static bool fill_sizes(PyObject *given, int64_t *sizes, int32_t *out_rank) {
    PyObject *items = PySequence_Tuple(given);
    if (!items) return false;
    Py_ssize_t rank = PyTuple_Size(items);
    if (rank > VIEW_RANK_MAX) PyErr_Format(PyExc_ValueError, "at most %d dimensions", VIEW_RANK_MAX);
    for (Py_ssize_t i = 0; !PyErr_Occurred() && i < rank; i++) {
        sizes[i] = PyLong_AsLongLong(PyTuple_GetItem(items, i));
        if (!PyErr_Occurred() && sizes[i] < 0) PyErr_SetString(PyExc_ValueError, "sizes are not negative");
    }
    Py_DECREF(items);
    *out_rank = (int32_t)rank;
    return !PyErr_Occurred();
}

/* Bytes that the view spans; false with an exception when they are absurd. */
static bool measure(tensor_view *view) {
    uint64_t elements = 1, size = view->dtype.bits / 8;
    for (int32_t i = 0; i < view->rank; i++) {
        uint64_t step = 0;
        if (view->shape[i] == 0) elements = 0;
        if (!elements) break;
        if (__builtin_mul_overflow((uint64_t)view->shape[i] - 1, (uint64_t)view->strides[i], &step) ||
            __builtin_add_overflow(elements, step, &elements) || elements > INT64_MAX / 16) {
            PyErr_SetString(PyExc_ValueError, "the view is too large");
            return false;
        }
    }
    view->bytes = elements * size;
    return true;
}

static bool fill_view(PyObject *shape, PyObject *strides, tensor_view *out) {
    int32_t rank = 0;
    out->dtype.lanes = 1;
    if (!fill_sizes(shape, out->shape, &out->rank) || !fill_sizes(strides, out->strides, &rank)) return false;
    if (rank == out->rank && out->dtype.bits && out->dtype.bits % 8 == 0) return measure(out);
    PyErr_SetString(PyExc_ValueError, "tensor_view: as many strides as sizes, and whole bytes");
    return false;
}

PyObject *make_tensor_view(PyObject *module, PyObject *args) {
    (void)module;
    tensor_view view = {0};
    PyObject *shape, *strides;
    if (!PyArg_ParseTuple(args, "bbOO:tensor_view", &view.dtype.code, &view.dtype.bits, &shape, &strides))
        return NULL;
    return fill_view(shape, strides, &view) ? PyBytes_FromStringAndSize((const char *)&view, sizeof view) : NULL;
}

int tensor_view_of(PyObject *dtypes, PyObject *dtype, PyObject *shape, PyObject *strides, tensor_view *out) {
    PyObject *kind = PyDict_GetItemWithError(dtypes, dtype);
    if (!kind) return PyErr_Occurred() ? -1 : 0;
    *out = (tensor_view){0};
    if (!PyTuple_Check(shape) || PyTuple_Size(shape) > VIEW_RANK_MAX) return 0;
    if (!PyArg_ParseTuple(kind, "bb:dtypes", &out->dtype.code, &out->dtype.bits)) return -1;
    return fill_view(shape, strides, out) ? 1 : -1;
}

bool unpack_tensor_view(PyObject *packed, tensor_view *out) {
    char *data = NULL;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(packed, &data, &length) < 0) return false;
    if (length == (Py_ssize_t)sizeof *out) memcpy(out, data, sizeof *out);
    if (length == (Py_ssize_t)sizeof *out && out->rank >= 0 && out->rank <= VIEW_RANK_MAX) return true;
    PyErr_SetString(PyExc_ValueError, "a view is what tensor_view() returns");
    return false;
}
