/* The Runtime object, shared by runtime.c (life, units, steps) and runtime_stats.c (numbers). */
#ifndef STAGEHAND_PYTHON_RUNTIME_H
#define STAGEHAND_PYTHON_RUNTIME_H
#include "core.h"

typedef struct runtime_object {
    PyObject ob_base;
    sth_runtime *runtime;
    guard guard;
    dl_device dl;
    py_allocator *allocator;        /* NULL: the device's own */
    PyObject *arenas, *checkpoints; /* lists of the objects that units read from; NULL once ended */
    uint64_t *unit_bytes;           /* of each unit, for the shape of its tensor */
    uint32_t unit_count, unit_capacity;
} runtime_object;

static inline sth_runtime *runtime_core(PyObject *op) { return ((runtime_object *)op)->runtime; }
static inline guard *runtime_guard(PyObject *op) { return &((runtime_object *)op)->guard; }

/* A method without arguments: function(runtime) without the GIL. */
static inline PyObject *runtime_call(PyObject *op, sth_status (*function)(sth_runtime *)) {
    guard *g = runtime_guard(op);
    sth_status status;
    if (!guard_enter(g)) return NULL;
    WITHOUT_GIL(status, function(runtime_core(op)));
    PyObject *result = none_or_raise(status);
    guard_leave(g);
    return result;
}

/* Leases a unit behind `stream` and returns a capsule over its place, as `view` sees it; NULL: as bytes. The guard has
 * been entered. */
PyObject *lease_capsule(runtime_object *self, uint32_t unit, uint64_t stream, const tensor_view *view);
PyObject *runtime_unit_stats(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *runtime_stats(PyObject *op, PyObject *none);
PyObject *runtime_files(PyObject *op, PyObject *none);
PyObject *runtime_report(PyObject *op, PyObject *args); /* report.c */
PyObject *runtime_curve(PyObject *op, PyObject *args); /* curve.c */
PyObject *runtime_prediction(PyObject *op, PyObject *none);
PyObject *runtime_metrics(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *runtime_count_guards(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *runtime_count_mapped(PyObject *op, PyObject *bytes);
PyObject *runtime_count_d2h(PyObject *op, PyObject *bytes);
PyObject *runtime_smallest_budget(PyObject *op, PyObject *none);
/* graph.c */
PyObject *runtime_graph_prepare(PyObject *op, PyObject *none);
PyObject *runtime_graph_fork(PyObject *op, PyObject *stream);
PyObject *runtime_graph_join(PyObject *op, PyObject *stream);
PyObject *runtime_graph_settle(PyObject *op, PyObject *none);
PyObject *runtime_graph_replay_begin(PyObject *op, PyObject *args);
PyObject *runtime_graph_replay_end(PyObject *op, PyObject *stream);
/* residency.c */
PyObject *runtime_keep_begin(PyObject *op, PyObject *none);
PyObject *runtime_keep_end(PyObject *op, PyObject *none);
PyObject *runtime_reserve(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *runtime_release(PyObject *op, PyObject *none);
PyObject *runtime_guest_begin(PyObject *op, PyObject *none);
PyObject *runtime_guest_end(PyObject *op, PyObject *none);
PyObject *runtime_set_aside(PyObject *op, PyObject *args);
PyObject *runtime_lend(PyObject *op, PyObject *bytes);
PyObject *runtime_budget_without(PyObject *op, PyObject *args);
PyObject *runtime_set_reserved(PyObject *op, PyObject *bytes);
PyObject *runtime_soften(PyObject *op, PyObject *bytes);
PyObject *runtime_reserved(PyObject *op, void *closure);
PyObject *runtime_parked(PyObject *op, void *closure);
/* A list of (field, unit, meaning), as metrics() has them. */
PyObject *metrics_list(void);
#endif
