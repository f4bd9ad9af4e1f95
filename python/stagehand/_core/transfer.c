/* Packed images: layout, encoding, decoding; and which units a first plan would stream. Segments are an opaque bytes
 * object, an array of sth_segment; the caller answers for the addresses, as everywhere in this module. */
#include "convert.h"

#include <string.h>

#include "stagehand/lossless.h"
#include "stagehand/plan.h"
#include "stagehand/transfer.h"

static int to_encoding(const char *name) {
    for (int i = 0; i < STH_TRANSFER_COUNT; i++)
        if (!strcmp(name, sth_transfer_name((sth_transfer)i))) return i;
    PyErr_Format(PyExc_ValueError, "'%s' is no encoding; there are verbatim, int8, fp8, int4 and lossless", name);
    return -1;
}

static int to_dtype(const char *name) {
    for (int i = 0; i < STH_DTYPE_COUNT; i++)
        if (!strcmp(name, sth_dtype_name((sth_dtype)i))) return i;
    PyErr_Format(PyExc_ValueError, "'%s' is no dtype", name);
    return -1;
}

static bool parse_tensor(PyObject *item, sth_segment *out) {
    const char *encoding, *dtype;
    *out = (sth_segment){.scales = STH_TRANSFER_NONE, .zeros = STH_TRANSFER_NONE};
    if (!PyArg_ParseTuple(item, "ssO&O&O&|O&O&O&O&;a tensor is (encoding, dtype, offset in the place, rows, cols)",
                          &encoding, &dtype, to_u64, &out->place_offset, to_u64, &out->rows, to_u64, &out->cols, to_u64,
                          &out->stride, to_u64, &out->codes, to_u64_or_none, &out->scales, to_u64_or_none, &out->zeros))
        return false;
    int e = to_encoding(encoding), d = e < 0 ? -1 : to_dtype(dtype);
    if (d < 0) return false;
    out->encoding = (sth_transfer)e;
    out->dtype = (sth_dtype)d;
    return true;
}

/* From PyMem_Malloc; NULL with an exception. */
static sth_segment *parse_tensors(PyObject *given, uint32_t *out_count) {
    PyObject *items = PySequence_Tuple(given);
    if (!items) return NULL;
    Py_ssize_t count = PyTuple_Size(items);
    sth_segment *tensors = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *tensors);
    if (!tensors) PyErr_NoMemory();
    for (Py_ssize_t i = 0; tensors && i < count; i++)
        if (!PyTuple_Check(PyTuple_GetItem(items, i)) || !parse_tensor(PyTuple_GetItem(items, i), &tensors[i])) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "tensors are tuples");
            PyMem_Free(tensors);
            tensors = NULL;
        }
    Py_DECREF(items);
    *out_count = (uint32_t)count;
    return tensors;
}

uint64_t largest_segment(const sth_segment *segments, uint32_t count, uint64_t end) {
    uint64_t most = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bytes = (i + 1 < count ? segments[i + 1].codes : end) - segments[i].codes;
        if (bytes > most) most = bytes;
    }
    return most;
}

/* place: for the sizes of lossless values; NULL: there are none. */
static PyObject *lay_out(const sth_segment *tensors, uint32_t count, uint64_t piece, const void *place) {
    uint32_t segments = 0;
    uint64_t packed = 0;
    sth_status status = place ? sth_transfer_fit(tensors, count, piece, place, 0, NULL, 0, &segments, &packed)
                              : sth_transfer_layout(tensors, count, piece, NULL, 0, &segments, &packed);
    if (status != STH_OK) return raise_status(status);
    sth_segment *filled = PyMem_Malloc(segments * sizeof *filled);
    if (!filled) return PyErr_NoMemory();
    Py_BEGIN_ALLOW_THREADS
    status = place ? sth_transfer_fit(tensors, count, piece, place, 0, filled, segments, &segments, &packed)
                   : sth_transfer_layout(tensors, count, piece, filled, segments, &segments, &packed);
    Py_END_ALLOW_THREADS
    uint64_t largest = status == STH_OK ? largest_segment(filled, segments, packed) : 0;
    PyObject *result = status != STH_OK ? raise_status(status)
                                        : Py_BuildValue("(y#KK)", (const char *)filled,
                                                        (Py_ssize_t)(segments * sizeof *filled),
                                                        (unsigned long long)packed, (unsigned long long)largest);
    PyMem_Free(filled);
    return result;
}

PyObject *transfer_layout(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given;
    uint64_t piece, place = 0;
    uint32_t count = 0;
    if (!PyArg_ParseTuple(args, "OO&|O&:transfer_layout", &given, to_u64, &piece, to_u64, &place)) return NULL;
    sth_segment *tensors = parse_tensors(given, &count);
    if (!tensors) return NULL;
    PyObject *result = lay_out(tensors, count, piece, (const void *)(uintptr_t)place);
    PyMem_Free(tensors);
    return result;
}

PyObject *transfer_most(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given;
    uint64_t piece, packed = 0;
    uint32_t count = 0, segments = 0;
    if (!PyArg_ParseTuple(args, "OO&:transfer_most", &given, to_u64, &piece)) return NULL;
    sth_segment *tensors = parse_tensors(given, &count);
    if (!tensors) return NULL;
    sth_status status = sth_transfer_fit(tensors, count, piece, NULL, 0, NULL, 0, &segments, &packed);
    uint64_t largest = 0;
    for (uint32_t i = 0; status == STH_OK && i < count; i++) {
        uint64_t bytes = sth_transfer_largest(&tensors[i], piece);
        if (bytes > largest) largest = bytes;
    }
    PyMem_Free(tensors);
    return status == STH_OK ? Py_BuildValue("(KK)", (unsigned long long)packed, (unsigned long long)largest)
                            : raise_status(status);
}

PyObject *lossless_estimate(PyObject *module, PyObject *args) {
    (void)module;
    const char *name;
    uint64_t address, count;
    if (!PyArg_ParseTuple(args, "sO&O&:lossless_estimate", &name, to_u64, &address, to_u64, &count)) return NULL;
    int dtype = to_dtype(name);
    if (dtype < 0) return NULL;
    return PyLong_FromUnsignedLongLong(
        sth_lossless_estimate((sth_dtype)dtype, (const void *)(uintptr_t)address, count));
}

PyObject *transfer_segments(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given;
    uint32_t count = 0;
    if (!PyArg_ParseTuple(args, "O:transfer_segments", &given)) return NULL;
    sth_segment *tensors = parse_tensors(given, &count);
    if (!tensors) return NULL;
    PyObject *result = PyBytes_FromStringAndSize((const char *)tensors, (Py_ssize_t)(count * sizeof *tensors));
    PyMem_Free(tensors);
    return result;
}

bool unpack_segments(PyObject *packed, sth_segment **out, uint32_t *out_count) {
    char *bytes;
    Py_ssize_t size;
    if (PyBytes_AsStringAndSize(packed, &bytes, &size) < 0) return false;
    if (!size || size % (Py_ssize_t)sizeof **out) {
        PyErr_SetString(PyExc_ValueError, "segments come from transfer_layout() or transfer_segments()");
        return false;
    }
    *out = PyMem_Malloc((size_t)size); /* a bytes object is not aligned to a segment's members */
    if (!*out) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(*out, bytes, (size_t)size);
    *out_count = (uint32_t)((size_t)size / sizeof **out);
    return true;
}

PyObject *transfer_encode(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *packed;
    uint64_t place, image;
    sth_segment *segments;
    uint32_t count;
    sth_transfer_error error = {0};
    sth_status status;
    if (!PyArg_ParseTuple(args, "OO&O&:transfer_encode", &packed, to_u64, &place, to_u64, &image)) return NULL;
    if (!unpack_segments(packed, &segments, &count)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_transfer_encode(segments, count, (const void *)(uintptr_t)place, (void *)(uintptr_t)image, 0, &error);
    Py_END_ALLOW_THREADS
    PyMem_Free(segments);
    return status == STH_OK ? Py_BuildValue("(dd)", error.error, error.reference) : raise_status(status);
}

/* Leaves the segments that begin in [begin, end) of the place, which begins at `begin` then. Returns their number. */
static uint32_t cut_out(sth_segment *segments, uint32_t count, uint64_t begin, uint64_t end) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < count; i++) {
        if (segments[i].place_offset < begin || segments[i].place_offset >= end) continue;
        segments[kept] = segments[i];
        segments[kept++].place_offset -= begin;
    }
    return kept;
}

PyObject *transfer_decode(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *packed;
    uint64_t image, place, begin = 0, end = UINT64_MAX;
    sth_segment *segments;
    uint32_t count;
    sth_status status = STH_OK;
    if (!PyArg_ParseTuple(args, "OO&O&|O&O&:transfer_decode", &packed, to_u64, &image, to_u64, &place, to_u64, &begin,
                          to_u64, &end))
        return NULL;
    if (!unpack_segments(packed, &segments, &count)) return NULL;
    count = cut_out(segments, count, begin, end);
    Py_BEGIN_ALLOW_THREADS
    if (count)
        status = sth_transfer_decode(segments, count, (const void *)(uintptr_t)image, (void *)(uintptr_t)place);
    Py_END_ALLOW_THREADS
    PyMem_Free(segments);
    if (status != STH_OK) return raise_status(status);
    Py_RETURN_NONE;
}

/* ---- the first plan ---- */

static bool parse_unit(PyObject *item, sth_plan_unit *out) {
    *out = (sth_plan_unit){0};
    return PyTuple_Check(item) && PyArg_ParseTuple(item, "O&O&O&O&;a unit is (bytes, flags, over the link, packed)",
                                                   to_u64, &out->bytes, to_u32, &out->flags, to_u64,
                                                   &out->transfer_bytes, to_u64, &out->packed_bytes);
}

static PyObject *residents(sth_plan_unit *units, sth_plan_use *uses, uint32_t count, uint64_t budget) {
    sth_plan_input in;
    sth_plan *plan = NULL;
    sth_status status;
    sth_plan_input_init(&in);
    in.units = units;
    in.uses = uses;
    in.unit_count = in.use_count = count;
    in.budget = budget;
    in.link_bytes_per_s = 1e10;
    in.copy_overhead_ns = 0;
    for (uint32_t i = 0; i < count; i++) uses[i] = (sth_plan_use){.unit = i};
    Py_BEGIN_ALLOW_THREADS
    status = sth_plan_create(&in, &plan);
    Py_END_ALLOW_THREADS
    if (status != STH_OK) return raise_status(status);
    PyObject *list = PyList_New(count);
    for (uint32_t i = 0; list && i < count; i++) PyList_SetItem(list, i, PyBool_FromLong(plan->resident[i]));
    sth_plan_destroy(plan);
    return list;
}

PyObject *first_residents(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *given, *result = NULL;
    uint64_t budget, stages, less, sum = 0;
    if (!PyArg_ParseTuple(args, "OO&O&O&:first_residents", &given, to_u64, &budget, to_u64, &stages, to_u64, &less))
        return NULL;
    PyObject *items = PySequence_Tuple(given);
    if (!items) return NULL;
    Py_ssize_t count = PyTuple_Size(items);
    sth_plan_unit *units = PyMem_Malloc((size_t)(count + 1) * sizeof *units);
    sth_plan_use *uses = PyMem_Malloc((size_t)(count + 1) * sizeof *uses);
    bool valid = units && uses;
    if (!valid) PyErr_NoMemory();
    for (Py_ssize_t i = 0; valid && i < count; i++) valid = parse_unit(PyTuple_GetItem(items, i), &units[i]);
    for (Py_ssize_t i = 0; valid && i < count; i++) sum += units[i].bytes;
    if (sum > budget) { /* else all stay, and nothing is expanded */
        budget = budget > stages ? budget - stages : 0;
        budget -= less ? budget / less : 0;
    }
    if (valid) result = residents(units, uses, (uint32_t)count, budget);
    else if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "units are tuples");
    PyMem_Free(units);
    PyMem_Free(uses);
    Py_DECREF(items);
    return result;
}
