/* Numbers of a Runtime as dicts. Each call releases the GIL, because the runtime's lock may be held by a
 * thread that needs the GIL for a Python allocator. */
#include "runtime.h"

#include <string.h>

#include "convert.h"

#define UNIT(member, kind) FIELD(sth_unit_stats, member, kind)
static const field unit_fields[] = {
    UNIT(name, TEXT),         UNIT(group, TEXT),      UNIT(bytes, U64),
    UNIT(transfer_bytes, U64),
    UNIT(resident, BOOL),     UNIT(copies, U64),      UNIT(h2d_ms, DOUBLE),
    UNIT(compute_ms, DOUBLE), UNIT(stall_ms, DOUBLE),
    UNIT(image_hash, U64),    FIELD_END,
};
#undef UNIT

#define STATS(member, kind) FIELD(sth_runtime_stats, member, kind)
static const field stats_fields[] = {
    STATS(budget, U64),
    STATS(device_bytes, U64),
    STATS(device_peak, U64),
    STATS(leased_bytes, U64),
    STATS(resident_bytes, U64),
    STATS(in_flight_bytes, U64),
    STATS(h2d_bytes, U64),
    STATS(mapped_bytes, U64),
    STATS(d2h_bytes, U64),
    STATS(copies, U64),
    STATS(joined_copies, U64),
    STATS(demand_loads, U64),
    STATS(evictions, U64),
    STATS(host_waits, U64),
    STATS(steps, U64),
    STATS(replans, U64),
    STATS(budget_cuts, U64),
    STATS(deviations, U64),
    STATS(ram_bytes, U64),
    STATS(ram_pinned_bytes, U64),
    STATS(disk_bytes_per_s, DOUBLE),
    STATS(file_bytes, U64),
    STATS(file_cached_bytes, U64),
    STATS(limit, U64),
    STATS(yields, U64),
    STATS(parked, BOOL),
    STATS(staging_bytes, U64),
    STATS(stage_bytes, U64),
    STATS(packed_bytes, U64),
    STATS(expand_error, TEXT),
    STATS(staging_pinned, BOOL),
    STATS(planned, BOOL),
    STATS(link_bytes_per_s, DOUBLE),
    STATS(telemetry_lost, U64),
    FIELD_END,
};
#undef STATS

#define PREDICTED(member, kind) FIELD(sth_prediction, member, kind)
static const field prediction_fields[] = {
    PREDICTED(step_ns, I64),
    PREDICTED(compute_ns, I64),
    PREDICTED(link_ns, I64),
    PREDICTED(disk_ns, I64),
    PREDICTED(stall_ns, I64),
    PREDICTED(lower_bound_ns, I64),
    PREDICTED(bytes_per_step, U64),
    PREDICTED(disk_bytes_per_step, U64),
    PREDICTED(resident_bytes, U64),
    PREDICTED(packed_bytes, U64),
    PREDICTED(expand_ns, I64),
    PREDICTED(ring_bytes, U64),
    PREDICTED(streamed_bytes, U64),
    PREDICTED(total_bytes, U64),
    FIELD_END,
};
#undef PREDICTED

/* Fields that count things become int, whatever their type in C. */
static bool is_count(const char *unit) {
    return strcmp(unit, "ms") && strcmp(unit, "MiB") && strcmp(unit, "ratio") && strcmp(unit, "GB/s");
}

/* `dict` with one more text; NULL on failure. Takes over the reference. */
static PyObject *with_text(PyObject *dict, const char *name, const char *text) {
    PyObject *value = dict ? text_or_empty(text) : NULL;
    if (dict && (!value || PyDict_SetItemString(dict, name, value) < 0)) Py_CLEAR(dict);
    Py_XDECREF(value);
    return dict;
}

static const char *state_text(sth_unit_state state) {
    static const char *const texts[] = {
#define TEXT(name, text) text,
        STH_UNIT_STATE_LIST(TEXT)
#undef TEXT
    };
    return (unsigned)state < STH_UNIT_STATE_COUNT ? texts[state] : "unknown";
}

PyObject *runtime_unit_stats(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"unit", NULL};
    runtime_object *self = (runtime_object *)op;
    uint32_t unit;
    sth_unit_stats stats;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:unit_stats", names, to_u32, &unit)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_unit_stats_get(self->runtime, unit, &stats);
    Py_END_ALLOW_THREADS
    PyObject *dict = status == STH_OK
                         ? with_text(dict_of(&stats, unit_fields), "state", state_text(stats.state))
                         : raise_status(status);
    guard_leave(&self->guard);
    return dict;
}

PyObject *runtime_stats(PyObject *op, PyObject *none) {
    (void)none;
    runtime_object *self = (runtime_object *)op;
    sth_runtime_stats stats;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_runtime_stats_get(self->runtime, &stats);
    Py_END_ALLOW_THREADS
    PyObject *dict = status == STH_OK ? dict_of(&stats, stats_fields) : raise_status(status);
    guard_leave(&self->guard);
    return dict;
}

#define WAY(member, kind) FIELD(sth_file_way, member, kind)
static const field way_fields[] = {
    WAY(path, TEXT), WAY(why, CHARS), WAY(align, U32), WAY(read_bytes, U64), WAY(cached_bytes, U64), FIELD_END,
};
#undef WAY

PyObject *runtime_files(PyObject *op, PyObject *none) {
    (void)none;
    runtime_object *self = (runtime_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *list = PyList_New(0);
    uint32_t count;
    Py_BEGIN_ALLOW_THREADS
    count = sth_runtime_file_count(self->runtime);
    Py_END_ALLOW_THREADS
    for (uint32_t i = 0; list && i < count; i++) {
        sth_file_way way;
        sth_status status;
        Py_BEGIN_ALLOW_THREADS
        status = sth_runtime_file_way(self->runtime, i, &way);
        Py_END_ALLOW_THREADS
        PyObject *dict = status == STH_OK ? with_text(dict_of(&way, way_fields), "way", sth_read_way_name(way.way))
                                          : raise_status(status);
        if (!dict || PyList_Append(list, dict) < 0) Py_CLEAR(list);
        Py_XDECREF(dict);
    }
    guard_leave(&self->guard);
    return list;
}

PyObject *runtime_prediction(PyObject *op, PyObject *none) {
    (void)none;
    runtime_object *self = (runtime_object *)op;
    sth_prediction prediction;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_runtime_prediction(self->runtime, &prediction);
    Py_END_ALLOW_THREADS
    PyObject *dict = status == STH_OK ? with_text(dict_of(&prediction, prediction_fields), "bound_by",
                                                  sth_bound_name(prediction.bound_by))
                                      : raise_status(status);
    guard_leave(&self->guard);
    return dict;
}

static PyObject *metrics_dict(const sth_step_metrics *metrics) {
    const field fields[] = {
#define ENTRY(member, unit, text)                                                                          \
    {#member, is_count(unit) ? FIELD_COUNT : FIELD_DOUBLE, offsetof(sth_step_metrics, member)},
        STH_STEP_METRICS_LIST(ENTRY)
#undef ENTRY
            FIELD_END,
    };
    return dict_of(metrics, fields);
}

PyObject *runtime_metrics(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"i", NULL};
    runtime_object *self = (runtime_object *)op;
    uint32_t i = 0;
    sth_step_metrics metrics;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&:metrics", names, to_u32, &i)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_runtime_step_metrics(self->runtime, i, &metrics);
    Py_END_ALLOW_THREADS
    PyObject *result = NULL;
    if (status == STH_OK) {
        result = metrics_dict(&metrics);
    } else if (status == STH_NOT_FOUND) {
        result = Py_None;
        Py_INCREF(result);
    } else {
        raise_status(status);
    }
    guard_leave(&self->guard);
    return result;
}

PyObject *runtime_count_guards(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"promotions", "nans", "infs", NULL};
    runtime_object *self = (runtime_object *)op;
    uint64_t promotions, nans, infs;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&:count_guards", names, to_u64, &promotions,
                                     to_u64, &nans, to_u64, &infs))
        return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    sth_runtime_count_guards(self->runtime, promotions, nans, infs);
    Py_END_ALLOW_THREADS
    guard_leave(&self->guard);
    Py_RETURN_NONE;
}

static sth_status count_mapped(sth_runtime *runtime, uint64_t bytes) {
    return sth_runtime_count_mapped(runtime, bytes), STH_OK;
}
NUMBER_METHOD(runtime_count_mapped, 64, runtime_core, runtime_guard, count_mapped)

static sth_status count_d2h(sth_runtime *runtime, uint64_t bytes) {
    return sth_runtime_count_d2h(runtime, bytes), STH_OK;
}
NUMBER_METHOD(runtime_count_d2h, 64, runtime_core, runtime_guard, count_d2h)

PyObject *runtime_smallest_budget(PyObject *op, PyObject *none) {
    (void)none;
    runtime_object *self = (runtime_object *)op;
    uint64_t bytes;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    bytes = sth_runtime_smallest_budget(self->runtime);
    Py_END_ALLOW_THREADS
    guard_leave(&self->guard);
    return PyLong_FromUnsignedLongLong(bytes);
}

PyObject *metrics_list(void) {
    static const char *const rows[][3] = {
#define ROW(member, unit, text) {#member, unit, text},
        STH_STEP_METRICS_LIST(ROW)
#undef ROW
    };
    Py_ssize_t count = (Py_ssize_t)(sizeof rows / sizeof *rows);
    PyObject *tuple = PyTuple_New(count);
    for (Py_ssize_t i = 0; tuple && i < count; i++) {
        PyObject *row = Py_BuildValue("(sss)", rows[i][0], rows[i][1], rows[i][2]);
        if (!row || PyTuple_SetItem(tuple, i, row) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}
