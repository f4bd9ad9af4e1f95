/* Steps inside graphs: methods of Runtime. The GIL is released in all of them. */
#include "runtime.h"

#include "convert.h"
#include "stagehand/graph.h"

PyObject *runtime_graph_prepare(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_graph_prepare);
}
NUMBER_METHOD(runtime_graph_fork, 64, runtime_core, runtime_guard, sth_graph_fork)
NUMBER_METHOD(runtime_graph_join, 64, runtime_core, runtime_guard, sth_graph_join)
NUMBER_METHOD(runtime_graph_replay_end, 64, runtime_core, runtime_guard, sth_graph_replay_end)

static const field info_fields[] = {
    FIELD(sth_graph_info, edition, U64),
    FIELD(sth_graph_info, h2d_bytes, U64),
    FIELD(sth_graph_info, copies, U64),
    FIELD(sth_graph_info, read_bytes, U64),
    FIELD_END,
};

PyObject *runtime_graph_settle(PyObject *op, PyObject *none) {
    (void)none;
    runtime_object *self = (runtime_object *)op;
    sth_graph_info info;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_graph_settle(self->runtime, &info));
    PyObject *result = status == STH_OK ? dict_of(&info, info_fields) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

PyObject *runtime_graph_replay_begin(PyObject *op, PyObject *args) {
    runtime_object *self = (runtime_object *)op;
    uint64_t edition, stream;
    bool current = false;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O&:graph_replay_begin", to_u64, &edition, to_u64, &stream)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_graph_replay_begin(self->runtime, edition, stream, &current));
    PyObject *result = status == STH_OK ? PyBool_FromLong(current) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}
