/* Type Rows: tables of rows, such as experts, and the pool of slots that they come to. Addresses are the caller's:
 * who opens the pool keeps its memory until close_pool(), who adds a table keeps that of its rows. */
#include "convert.h"
#include "sources.h"
#include "stagehand/rows.h"

typedef struct rows_object {
    PyObject ob_base;
    sth_rows *rows;
    uint32_t part_count;
    PyObject *checkpoints; /* that tables lie in */
    guard guard;
} rows_object;

static void end_rows(void *owner) { sth_rows_destroy(((rows_object *)owner)->rows); }
static void rows_ended(void *owner) { let_checkpoints_go(&((rows_object *)owner)->checkpoints); }

/* `count` numbers of a sequence, or, where `out_count` is given, 1 to `count`. */
static bool parse_numbers(PyObject *given, uint64_t *out, uint32_t count, uint32_t *out_count) {
    PyObject *items = PySequence_Tuple(given);
    if (!items) return false;
    Py_ssize_t size = PyTuple_Size(items);
    bool valid = out_count ? size > 0 && size <= (Py_ssize_t)count : size == (Py_ssize_t)count;
    if (!valid) PyErr_SetString(PyExc_ValueError, "there is one number for each part of a row, and 1 to 8 parts");
    for (Py_ssize_t i = 0; valid && i < size; i++) valid = to_u64(PyTuple_GetItem(items, i), &out[i]);
    Py_DECREF(items);
    if (valid && out_count) *out_count = (uint32_t)size;
    return valid;
}

static bool parse_addresses(const rows_object *self, PyObject *given, const void **out) {
    uint64_t numbers[STH_ROWS_PARTS_MAX];
    if (!parse_numbers(given, numbers, self->part_count, NULL)) return false;
    for (uint32_t i = 0; i < self->part_count; i++) out[i] = (const void *)(uintptr_t)numbers[i];
    return true;
}

static PyObject *rows_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device", "part_bytes", "read_only", "name", "view_most", "ram_bytes", NULL};
    core_state *state = PyType_GetModuleState(type);
    sth_rows_options options;
    device_object *device;
    PyObject *parts;
    int read_only = 0;
    sth_status status;
    sth_rows_options_init(&options);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O|$pzO&O&:Rows", names, state->device, &device, &parts,
                                     &read_only, &options.name, to_u32, &options.view_most, to_u64,
                                     &options.ram_bytes))
        return NULL;
    options.read_only = read_only;
    if (!parse_numbers(parts, options.part_bytes, STH_ROWS_PARTS_MAX, &options.part_count)) return NULL;
    rows_object *self = (rows_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    self->checkpoints = PyList_New(0);
    if (!self->checkpoints || !guard_enter(&device->guard)) {
        Py_CLEAR(self->checkpoints);
        Py_DECREF(self);
        return NULL;
    }
    WITHOUT_GIL(status, sth_rows_create(device->device, &options, &self->rows));
    guard_leave(&device->guard);
    if (status != STH_OK) {
        raise_status(status);
        Py_CLEAR(self->checkpoints);
        Py_DECREF(self);
        return NULL;
    }
    self->part_count = options.part_count;
    self->guard = (guard){.owner = self, .end = end_rows, .ended = rows_ended, .name = "Rows", .open = true};
    return (PyObject *)self;
}

static void rows_dealloc(PyObject *op) {
    guard_close(&((rows_object *)op)->guard);
    object_free(op);
}

static guard *rows_guard(PyObject *op) { return &((rows_object *)op)->guard; }
static sth_rows *rows_of(PyObject *op) { return ((rows_object *)op)->rows; }

static PyObject *rows_add_table(PyObject *op, PyObject *args) {
    rows_object *self = (rows_object *)op;
    const char *name;
    const void *parts[STH_ROWS_PARTS_MAX];
    uint32_t rows, table = 0;
    PyObject *given;
    sth_status status;
    if (!PyArg_ParseTuple(args, "sO&O:add_table", &name, to_u32, &rows, &given)) return NULL;
    if (!parse_addresses(self, given, parts) || !guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_rows_add_table(self->rows, name, rows, parts, &table));
    PyObject *result = status == STH_OK ? PyLong_FromUnsignedLong(table) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *rows_add_file_table(PyObject *op, PyObject *args) {
    rows_object *self = (rows_object *)op;
    core_state *state = PyType_GetModuleState(Py_TYPE(op));
    const char *name;
    uint64_t offsets[STH_ROWS_PARTS_MAX];
    uint32_t rows, range_count, table = 0;
    sth_file_range *ranges;
    PyObject *checkpoint, *given, *parts;
    sth_status status;
    if (!PyArg_ParseTuple(args, "sO&O!OO:add_file_table", &name, to_u32, &rows, state->checkpoint, &checkpoint, &given,
                          &parts))
        return NULL;
    if (!parse_numbers(parts, offsets, self->part_count, NULL) || !parse_ranges(given, &ranges, &range_count))
        return NULL;
    PyObject *result = NULL;
    if (guard_enter(&self->guard)) {
        if (keep_checkpoint(self->checkpoints, checkpoint)) {
            WITHOUT_GIL(status, sth_rows_add_file_table(self->rows, name, rows,
                                                        ((checkpoint_object *)checkpoint)->checkpoint, ranges,
                                                        range_count, offsets, &table));
            result = status == STH_OK ? PyLong_FromUnsignedLong(table) : raise_status(status);
        }
        guard_leave(&self->guard);
    }
    PyMem_Free(ranges);
    return result;
}

static PyObject *rows_set_host(PyObject *op, PyObject *args) {
    rows_object *self = (rows_object *)op;
    const void *parts[STH_ROWS_PARTS_MAX];
    uint32_t table;
    PyObject *given;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O:set_host", to_u32, &table, &given)) return NULL;
    if (!parse_addresses(self, given, parts) || !guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_rows_set_host(self->rows, table, parts));
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *rows_open(PyObject *op, PyObject *args) {
    rows_object *self = (rows_object *)op;
    uint64_t parts[STH_ROWS_PARTS_MAX], stream = 0;
    uint32_t slots;
    PyObject *given;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O|O&:open", to_u32, &slots, &given, to_u64, &stream)) return NULL;
    if (!parse_numbers(given, parts, self->part_count, NULL) || !guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_rows_open(self->rows, slots, parts, stream));
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *rows_acquire(PyObject *op, PyObject *args) {
    rows_object *self = (rows_object *)op;
    uint64_t ids, out, stream;
    uint32_t table, id_bytes, count, per_token;
    sth_rows_lease lease;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O&O&O&O&O&O&:acquire", to_u32, &table, to_u64, &ids, to_u32, &id_bytes, to_u32,
                          &count, to_u32, &per_token, to_u64, &stream, to_u64, &out))
        return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_rows_acquire(self->rows, table, (const void *)(uintptr_t)ids, id_bytes, count, per_token,
                                         stream, (void *)(uintptr_t)out, &lease));
    PyObject *result = status == STH_OK ? Py_BuildValue("IIIII", lease.table, lease.index, lease.generation,
                                                        lease.first, lease.count)
                                        : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *rows_release(PyObject *op, PyObject *args) {
    rows_object *self = (rows_object *)op;
    sth_rows_lease lease;
    uint64_t stream;
    sth_status status;
    if (!PyArg_ParseTuple(args, "(IIIII)O&:release", &lease.table, &lease.index, &lease.generation, &lease.first,
                          &lease.count, to_u64, &stream))
        return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_rows_release(self->rows, &lease, stream));
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static NUMBER_METHOD(rows_written, 32, rows_of, rows_guard, sth_rows_written)

static PyObject *call(PyObject *op, sth_status (*function)(sth_rows *)) {
    rows_object *self = (rows_object *)op;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, function(self->rows));
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *rows_close_pool(PyObject *op, PyObject *none) {
    (void)none;
    return call(op, sth_rows_close);
}

static PyObject *rows_fence(PyObject *op, PyObject *none) {
    (void)none;
    return call(op, sth_rows_fence);
}

static PyObject *rows_pass_end(PyObject *op, PyObject *none) {
    (void)none;
    return call(op, sth_rows_pass_end);
}

static PyObject *rows_synchronize(PyObject *op, PyObject *none) {
    (void)none;
    return call(op, sth_rows_synchronize);
}

#define STATS(member, kind) FIELD(sth_rows_stats, member, kind)
static const field stats_fields[] = {
    STATS(tables, U32), STATS(slots, U32),   STATS(views, U32), STATS(row_bytes, U64), STATS(asked, U64),
    STATS(hits, U64),   STATS(brought, U64), STATS(ahead, U64), STATS(h2d_bytes, U64), STATS(copies, U64),
    STATS(ram_slots, U32), STATS(ram_bytes, U64), STATS(ram_pinned_bytes, U64), STATS(ram_hits, U64),
    STATS(read_bytes, U64), FIELD_END,
};
#undef STATS

#define STATS(member, kind) FIELD(sth_rows_table_stats, member, kind)
static const field table_fields[] = {
    STATS(name, TEXT), STATS(rows, U32),    STATS(held, U32),  STATS(asked, U64),
    STATS(hits, U64),  STATS(brought, U64), STATS(ahead, U64), FIELD_END,
};
#undef STATS

static PyObject *rows_stats(PyObject *op, PyObject *none) {
    (void)none;
    rows_object *self = (rows_object *)op;
    sth_rows_stats stats;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_rows_stats_get(self->rows, &stats));
    PyObject *result = status == STH_OK ? dict_of(&stats, stats_fields) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *rows_table_stats(PyObject *op, PyObject *number) {
    rows_object *self = (rows_object *)op;
    sth_rows_table_stats stats;
    uint32_t table;
    sth_status status;
    if (!to_u32(number, &table) || !guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_rows_table_stats_get(self->rows, table, &stats));
    PyObject *result = status == STH_OK ? dict_of(&stats, table_fields) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *rows_close(PyObject *op, PyObject *none) {
    (void)none;
    guard_close(&((rows_object *)op)->guard);
    Py_RETURN_NONE;
}

static bool parse_pool(PyObject *args, PyObject *kwargs, uint64_t *number, sth_rows_budget *out) {
    static char *names[] = {"", "part_bytes", "rows", "rows_largest", "rows_token", "units_all", "units_least",
                            "stays_bytes", NULL};
    PyObject *parts;
    *out = (sth_rows_budget){0};
    return PyArg_ParseTupleAndKeywords(args, kwargs, "O&$OO&O&O&O&O&O&", names, to_u64, number, &parts, to_u32,
                                       &out->rows, to_u32, &out->rows_largest, to_u32, &out->rows_token, to_u64,
                                       &out->units_all, to_u64, &out->units_least, to_u64, &out->stays_bytes) &&
           parse_numbers(parts, out->part_bytes, STH_ROWS_PARTS_MAX, &out->part_count);
}

static bool parse_pool_of(PyObject *args, PyObject *kwargs, uint32_t *slots, sth_rows_budget *out) {
    uint64_t number;
    if (!parse_pool(args, kwargs, &number, out)) return false;
    *slots = (uint32_t)number;
    if (number <= UINT32_MAX) return true;
    PyErr_SetString(PyExc_OverflowError, "slots are a number of 32 bits");
    return false;
}

static PyObject *bytes_for_slots(PyObject *args, PyObject *kwargs,
                                 uint64_t (*bytes)(const sth_rows_budget *pool, uint32_t slots)) {
    uint32_t slots;
    sth_rows_budget pool;
    return parse_pool_of(args, kwargs, &slots, &pool) ? PyLong_FromUnsignedLongLong(bytes(&pool, slots)) : NULL;
}

PyObject *rows_bytes(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    return bytes_for_slots(args, kwargs, sth_rows_bytes);
}

PyObject *rows_slots(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    uint64_t bytes;
    sth_rows_budget pool;
    return parse_pool(args, kwargs, &bytes, &pool) ? PyLong_FromUnsignedLong(sth_rows_slots(&pool, bytes)) : NULL;
}

PyObject *rows_smallest(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    return bytes_for_slots(args, kwargs, sth_rows_smallest);
}

PyObject *rows_expected(PyObject *module, PyObject *args) {
    (void)module;
    uint32_t rows, per_token, tokens;
    if (!PyArg_ParseTuple(args, "O&O&O&:rows_expected", to_u32, &rows, to_u32, &per_token, to_u32, &tokens))
        return NULL;
    return PyFloat_FromDouble(sth_rows_expected(rows, per_token, tokens));
}

static PyMethodDef rows_methods[] = {
    {"add_table", rows_add_table, METH_VARARGS,
     "add_table(name, row_count, addresses, /)\n--\n\n"
     "A table whose parts begin at these addresses in host memory; its number. While the pool is closed."},
    {"add_file_table", rows_add_file_table, METH_VARARGS,
     "add_file_table(name, row_count, checkpoint, ranges, part_offsets, /)\n--\n\n"
     "The same of rows in files: part i of row r begins at part_offsets[i] + r x part_bytes[i] of an image whose\n"
     "bytes the ranges [(file, offset, bytes, offset in the image)] name."},
    {"set_host", rows_set_host, METH_VARARGS,
     "set_host(table, addresses, /)\n--\n\nThe table's rows are there from now on. Waits for copies under way."},
    {"open", rows_open, METH_VARARGS,
     "open(slots, addresses, stream=0, /)\n--\n\n"
     "The pool: part i has slots x part_bytes[i] bytes of device memory at addresses[i], which what `stream`\n"
     "has by now may still use."},
    {"close_pool", rows_close_pool, METH_NOARGS,
     "close_pool()\n--\n\nThe pool's memory is the caller's again. Waits for calls of other threads, and for\n"
     "its work. A second call does nothing."},
    {"acquire", rows_acquire, METH_VARARGS,
     "acquire(table, ids_address, id_bytes, count, per_token, stream, out_address, /)\n--\n\n"
     "Leases the rows that `count` ids in host memory name; `stream` waits for them. The ids' slots go to\n"
     "out_address (0: nowhere). Returns (table, index, generation, first, count) for release(); the table\n"
     "sees slots [first, first + count). Raises StagehandOOMError when there are not so many slots."},
    {"release", rows_release, METH_VARARGS,
     "release(lease, stream, /)\n--\n\nThe slots are filled anew behind what `stream` has by now."},
    {"written", rows_written, METH_O, "written(table, /)\n--\n\nHost memory of the table was changed."},
    {"fence", rows_fence, METH_NOARGS,
     "fence()\n--\n\nHost memory may have been written: tables are compared when they are used next."},
    {"pass_end", rows_pass_end, METH_NOARGS,
     "pass_end()\n--\n\nHost memory may be written from now on: waits for copies, not with read_only."},
    {"synchronize", rows_synchronize, METH_NOARGS, "synchronize()\n--\n\nWaits for copies in any case."},
    {"stats", rows_stats, METH_NOARGS,
     "stats()\n--\n\nA dict: tables, slots, views, row_bytes; asked, hits, brought, ahead, h2d_bytes, copies."},
    {"table_stats", rows_table_stats, METH_O,
     "table_stats(table, /)\n--\n\nA dict: name, rows, held, asked, hits, brought, ahead."},
    {"close", rows_close, METH_NOARGS, "close()\n--\n\nEnds it, the pool closed first. Again is fine."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot rows_type_slots[] = {
    {Py_tp_doc, (void *)"Rows(device, part_bytes, *, read_only=False, name=None, view_most=1023, ram_bytes=0)\n--\n\n"
                        "Tables of rows, of which calls use some, and a pool of slots (stagehand/rows.h).\n"
                        "part_bytes: of a row in each tensor. read_only: host memory is written after written()\n"
                        "alone. view_most: slots that one call may see. ram_bytes: of host memory for rows of files."},
    {Py_tp_new, rows_new},
    {Py_tp_dealloc, rows_dealloc},
    {Py_tp_methods, rows_methods},
    {0, NULL},
};
PyType_Spec rows_spec = {"stagehand._core.Rows", sizeof(rows_object), 0, Py_TPFLAGS_DEFAULT, rows_type_slots};
