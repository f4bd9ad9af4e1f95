/* Type Runner: a model of files, run layer by layer through Python callables (stagehand/executor.py makes them).
 *
 * Device memory crosses as DLPack capsules of bytes that are valid inside one call of the executor: a tensor that is
 * kept would show another layer's bytes later, so each is counted, and a call that leaves one behind is an error.
 * Calls come one at a time (executor.py sees to it). The GIL is released in calls of the library and taken in
 * callbacks, which the library makes on the calling thread. An exception of a callback is kept and raised by the call
 * that led to it. */
#include "convert.h"

#include <stdlib.h>
#include <string.h>

#include "stagehand/runner.h"

typedef struct runner_object {
    PyObject ob_base;
    sth_store *store;
    sth_executor *executor;
    sth_runner *runner;
    dl_device dl;
    guard guard;
    PyObject *prepare, *run;               /* callables */
    PyObject *type, *value, *traceback;    /* of a callback; NULL: none */
    int *lent;                             /* uses of this count: 1 of the runner, 1 of each tensor that is alive */
} runner_object;

/* ---- from C to Python */

static PyObject *shape_of(const uint64_t *shape, int rank) {
    PyObject *tuple = PyTuple_New(rank);
    for (int i = 0; tuple && i < rank; i++) {
        PyObject *size = PyLong_FromUnsignedLongLong(shape[i]);
        if (!size || PyTuple_SetItem(tuple, i, size) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

static PyObject *described(const sth_activations *a) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < a->count; i++) {
        PyObject *shape = shape_of(a->tensors[i].shape, a->tensors[i].rank);
        PyObject *item = shape ? Py_BuildValue("(sN)", sth_dtype_name(a->tensors[i].dtype), shape) : NULL;
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
    }
    return list;
}

/* The count is from malloc, and the last user frees it: a tensor may outlive its runner, and goes without the GIL. */
static void leave_count(int *lent) {
    if (lent && __atomic_fetch_sub(lent, 1, __ATOMIC_ACQ_REL) == 1) free(lent);
}

static void give_back(byte_tensor *tensor) { leave_count(tensor->object); }

/* A capsule over `bytes` at `address`, of which the runner counts one more until it is gone. */
static PyObject *lend(runner_object *self, sth_devptr address, uint64_t bytes) {
    byte_tensor *tensor = byte_tensor_new();
    if (!tensor) return NULL;
    __atomic_fetch_add(self->lent, 1, __ATOMIC_RELAXED);
    tensor->object = self->lent;
    tensor->release = give_back;
    return byte_tensor_capsule(tensor, address, bytes, self->dl);
}

static PyObject *lend_all(runner_object *self, const sth_activations *a) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < a->count; i++) {
        PyObject *capsule = lend(self, a->tensors[i].address, a->tensors[i].bytes);
        if (!capsule || PyList_Append(list, capsule) < 0) Py_CLEAR(list);
        Py_XDECREF(capsule);
    }
    return list;
}

static PyObject *lend_weights(runner_object *self, const sth_layer_spec *l) {
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < l->tensor_count; i++) {
        PyObject *capsule = lend(self, l->tensors[i].address, l->tensors[i].bytes);
        if (!capsule || PyList_Append(list, capsule) < 0) Py_CLEAR(list);
        Py_XDECREF(capsule);
    }
    return list;
}

/* ---- from Python to C */

static bool parse_dtype(const char *name, sth_dtype *out) {
    for (int i = 0; i < STH_DTYPE_COUNT; i++)
        if (!strcmp(sth_dtype_name((sth_dtype)i), name)) return *out = (sth_dtype)i, true;
    PyErr_Format(PyExc_ValueError, "there is no dtype %s", name);
    return false;
}

/* One (dtype name, shape[, address, bytes]). */
static bool parse_one(PyObject *item, sth_activation_tensor *out) {
    const char *dtype;
    PyObject *shape;
    PyObject *tuple = PySequence_Tuple(item), *sizes = NULL;
    bool good = tuple &&
                PyArg_ParseTuple(tuple, "sO|O&O&;a tensor is (dtype, shape, address, bytes)", &dtype, &shape, to_u64,
                                 &out->address, to_u64, &out->bytes) &&
                parse_dtype(dtype, &out->dtype) && (sizes = PySequence_Tuple(shape));
    Py_ssize_t rank = good ? PyTuple_Size(sizes) : 0;
    if (good && rank > STH_MAX_RANK) {
        PyErr_Format(PyExc_ValueError, "at most %d dimensions", STH_MAX_RANK);
        good = false;
    }
    for (Py_ssize_t i = 0; good && i < rank; i++) good = to_u64(PyTuple_GetItem(sizes, i), &out->shape[i]);
    out->rank = (int)rank;
    Py_XDECREF(sizes);
    Py_XDECREF(tuple);
    return good;
}

static bool parse_activations(PyObject *given, sth_activations *out) {
    PyObject *items = PySequence_Tuple(given);
    memset(out, 0, sizeof *out);
    if (!items) return false;
    Py_ssize_t count = PyTuple_Size(items);
    bool good = count > 0 && count <= STH_MAX_ACTIVATIONS;
    if (!good) PyErr_Format(PyExc_ValueError, "1 to %d tensors", STH_MAX_ACTIVATIONS);
    for (Py_ssize_t i = 0; good && i < count; i++) good = parse_one(PyTuple_GetItem(items, i), &out->tensors[i]);
    out->count = (uint32_t)count;
    Py_DECREF(items);
    return good;
}

/* ---- the executor */

/* Keeps the exception that is set, for the call that led here. */
static sth_status keep_exception(runner_object *self) {
    Py_CLEAR(self->type);
    Py_CLEAR(self->value);
    Py_CLEAR(self->traceback);
    PyErr_Fetch(&self->type, &self->value, &self->traceback);
    return sth_error_set(STH_INVALID_STATE, "python", 0, "executor", "the callable raised");
}

static sth_status call_prepare(runner_object *self, const sth_layer_spec *l, const sth_activations *input,
                               sth_activations *out) {
    PyObject *inputs = described(input);
    PyObject *made = inputs ? PyObject_CallFunction(self->prepare, "IO", (unsigned)l->index, inputs) : NULL;
    bool good = made && parse_activations(made, out);
    Py_XDECREF(made);
    Py_XDECREF(inputs);
    return good ? STH_OK : keep_exception(self);
}

static sth_status prepare(void *context, const sth_layer_spec *l, const sth_activations *input, sth_activations *out,
                          uint64_t *out_scratch) {
    (void)out_scratch; /* torch has memory of its own */
    PyGILState_STATE gil = PyGILState_Ensure();
    sth_status rc = call_prepare(context, l, input, out);
    PyGILState_Release(gil);
    return rc;
}

static sth_status call_run(runner_object *self, const sth_layer_call *c) {
    int before = __atomic_load_n(self->lent, __ATOMIC_RELAXED); /* the traceback of an earlier failure may keep some */
    PyObject *weights = lend_weights(self, c->layer), *inputs = lend_all(self, c->input);
    PyObject *outputs = lend_all(self, c->output);
    PyObject *in = described(c->input), *out = described(c->output), *done = NULL;
    if (weights && inputs && outputs && in && out)
        done = PyObject_CallFunction(self->run, "IOOOOO", (unsigned)c->layer->index, weights, inputs, in, outputs, out);
    bool good = done != NULL;
    Py_XDECREF(done);
    sth_status rc = good ? STH_OK : keep_exception(self);
    Py_XDECREF(weights);
    Py_XDECREF(inputs);
    Py_XDECREF(outputs);
    Py_XDECREF(in);
    Py_XDECREF(out);
    if (!good || __atomic_load_n(self->lent, __ATOMIC_RELAXED) <= before) return rc;
    return sth_error_set(
        STH_INVALID_STATE, "python", 0, c->layer->name,
        "the callable kept a tensor of its weights, input or output (or a view of one), which shows other "
        "bytes once the layer has run: clone what is to stay");
}

static sth_status run(void *context, const sth_layer_call *c) {
    PyGILState_STATE gil = PyGILState_Ensure();
    sth_status rc = call_run(context, c);
    PyGILState_Release(gil);
    return rc;
}

/* The exception of a callback, or that of the status. */
static PyObject *raise_failure(runner_object *self, sth_status status) {
    if (!self->type) return raise_status(status);
    PyErr_Restore(self->type, self->value, self->traceback);
    self->type = self->value = self->traceback = NULL;
    return NULL;
}

/* ---- life */

static void end_runner(void *owner) {
    runner_object *self = owner;
    sth_runner_destroy(self->runner);
    sth_executor_close(self->executor);
    sth_store_close(self->store);
    self->runner = NULL;
    self->executor = NULL;
    self->store = NULL;
}

static sth_status open_all(runner_object *self, sth_device *device, const char *path, const char *const *layers,
                           uint32_t count, const sth_runner_options *options) {
    sth_executor_ops ops = {.struct_size = sizeof ops, .version = STH_EXECUTOR_VERSION, .name = "python",
                            .prepare = prepare, .run = run};
    sth_status rc = sth_store_files_open(path, layers, count, &self->store);
    if (rc == STH_OK) rc = sth_executor_create(&ops, self, &self->executor);
    if (rc == STH_OK) rc = sth_runner_create(device, self->store, self->executor, options, &self->runner);
    return rc;
}

/* *out is from PyMem_Malloc; its texts live as long as `tuple`. */
static bool layer_names(PyObject *tuple, const char ***out, uint32_t *out_count) {
    Py_ssize_t count = PyTuple_Size(tuple);
    const char **names = PyMem_Malloc((size_t)(count + 1) * sizeof *names);
    if (!names) return PyErr_NoMemory() != NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        names[i] = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(tuple, i), NULL);
        if (names[i]) continue;
        PyMem_Free(names);
        return false;
    }
    *out = names;
    *out_count = (uint32_t)count;
    return true;
}

static bool start(runner_object *self, device_object *device, const char *path, PyObject *layers,
                  const sth_runner_options *options) {
    const char **names = NULL;
    uint32_t count = 0;
    PyObject *tuple = layers == Py_None ? NULL : PySequence_Tuple(layers);
    if (layers != Py_None && (!tuple || !layer_names(tuple, &names, &count))) {
        Py_XDECREF(tuple);
        return false;
    }
    sth_status status = STH_SHUT_DOWN;
    bool open = guard_enter(&device->guard);
    if (open) {
        Py_BEGIN_ALLOW_THREADS
        status = open_all(self, device->device, path, names, count, options);
        Py_END_ALLOW_THREADS
        if (status != STH_OK) {
            raise_status(status); /* before the record is another failure's */
            Py_BEGIN_ALLOW_THREADS
            end_runner(self);
            Py_END_ALLOW_THREADS
        }
        guard_leave(&device->guard);
    }
    PyMem_Free(names);
    Py_XDECREF(tuple);
    return status == STH_OK;
}

static PyObject *runner_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *keys[] = {"device", "path", "prepare", "run", "budget", "layers", "lookahead", "group", "ram_budget",
                           "readers", NULL};
    core_state *state = PyType_GetModuleState(type);
    device_object *device;
    PyObject *path = NULL, *layers = Py_None, *prepare_call, *run_call;
    sth_runner_options o;
    sth_runner_options_init(&o);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O&OOO&|$OO&O&O&O&:Runner", keys, state->device, &device,
                                     PyUnicode_FSConverter, &path, &prepare_call, &run_call, to_u64, &o.runtime.budget,
                                     &layers, to_u32, &o.lookahead, to_u32, &o.group, to_u64, &o.runtime.ram_budget,
                                     to_u32, &o.runtime.reader_threads)) {
        Py_XDECREF(path);
        return NULL;
    }
    runner_object *self = (runner_object *)PyType_GenericAlloc(type, 0);
    if (self) {
        self->prepare = Py_NewRef(prepare_call);
        self->run = Py_NewRef(run_call);
        self->dl = device->dl;
        self->lent = malloc(sizeof *self->lent);
        if (!self->lent) PyErr_NoMemory();
        else *self->lent = 1;
        if (self->lent && start(self, device, PyBytes_AsString(path), layers, &o))
            self->guard = (guard){.owner = self, .end = end_runner, .name = "Runner", .open = true};
        else Py_CLEAR(self);
    }
    Py_DECREF(path);
    return (PyObject *)self;
}

static int runner_traverse(PyObject *op, visitproc visit, void *arg) {
    runner_object *self = (runner_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->prepare);
    Py_VISIT(self->run);
    Py_VISIT(self->type);
    Py_VISIT(self->value);
    Py_VISIT(self->traceback);
    return 0;
}

static int runner_clear(PyObject *op) {
    runner_object *self = (runner_object *)op;
    guard_close(&self->guard);
    Py_CLEAR(self->prepare);
    Py_CLEAR(self->run);
    Py_CLEAR(self->type);
    Py_CLEAR(self->value);
    Py_CLEAR(self->traceback);
    return 0;
}

static void runner_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    (void)runner_clear(op);
    leave_count(((runner_object *)op)->lent);
    object_free(op);
}

/* ---- calls */

static PyObject *runner_layers(PyObject *op, PyObject *none) {
    (void)none;
    runner_object *self = (runner_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list && i < sth_store_layer_count(self->store); i++) {
        const sth_store_layer *l = sth_store_layer_at(self->store, i);
        PyObject *tensors = PyList_New(0), *item = NULL;
        for (uint32_t k = 0; tensors && k < l->tensor_count; k++) {
            const sth_store_tensor *t = &l->tensors[k];
            PyObject *shape = shape_of(t->shape, t->rank), *name = text_or_empty(t->name), *one = NULL;
            if (shape && name) one = Py_BuildValue("(OsOd)", name, sth_dtype_name(t->dtype), shape, t->scale);
            if (!one || PyList_Append(tensors, one) < 0) Py_CLEAR(tensors);
            Py_XDECREF(one);
            Py_XDECREF(name);
            Py_XDECREF(shape);
        }
        PyObject *name = text_or_empty(l->name);
        if (name && tensors) item = Py_BuildValue("(OO)", name, tensors);
        if (!item || PyList_Append(list, item) < 0) Py_CLEAR(list);
        Py_XDECREF(item);
        Py_XDECREF(name);
        Py_XDECREF(tensors);
    }
    guard_leave(&self->guard);
    return list;
}

static PyObject *runner_output(PyObject *op, PyObject *given) {
    runner_object *self = (runner_object *)op;
    sth_activations input, output;
    sth_status status;
    if (!parse_activations(given, &input) || !guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_runner_output(self->runner, &input, &output);
    Py_END_ALLOW_THREADS
    PyObject *result = status == STH_OK ? described(&output) : raise_failure(self, status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *runner_run(PyObject *op, PyObject *args) {
    runner_object *self = (runner_object *)op;
    sth_activations input, output;
    PyObject *in, *out;
    uint64_t stream;
    sth_status status;
    if (!PyArg_ParseTuple(args, "OOO&:run", &in, &out, to_u64, &stream) || !parse_activations(in, &input) ||
        !parse_activations(out, &output) || !guard_enter(&self->guard))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_runner_run(self->runner, &input, &output, stream);
    Py_END_ALLOW_THREADS
    PyObject *result = status == STH_OK ? described(&output) : raise_failure(self, status);
    guard_leave(&self->guard);
    return result;
}

static const field layer_fields[] = {
    FIELD(sth_layer_metrics, name, TEXT),          FIELD(sth_layer_metrics, bytes, U64),
    FIELD(sth_layer_metrics, runs, U64),           FIELD(sth_layer_metrics, h2d_ms, DOUBLE),
    FIELD(sth_layer_metrics, compute_ms, DOUBLE),  FIELD(sth_layer_metrics, stall_ms, DOUBLE),
    FIELD_END,
};

static const field run_fields[] = {
    FIELD(sth_run_metrics, run, U64),              FIELD(sth_run_metrics, latency_ms, DOUBLE),
    FIELD(sth_run_metrics, compute_ms, DOUBLE),    FIELD(sth_run_metrics, stall_ms, DOUBLE),
    FIELD(sth_run_metrics, h2d_bytes, U64),        FIELD(sth_run_metrics, copy_ms, DOUBLE),
    FIELD(sth_run_metrics, bandwidth_gb_s, DOUBLE), FIELD(sth_run_metrics, overlap_ratio, DOUBLE),
    FIELD(sth_run_metrics, file_bytes, U64),       FIELD_END,
};

static PyObject *runner_layer_metrics(PyObject *op, PyObject *value) {
    runner_object *self = (runner_object *)op;
    uint32_t layer;
    sth_layer_metrics m;
    sth_status status;
    if (!to_u32(value, &layer) || !guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_runner_layer_metrics(self->runner, layer, &m);
    Py_END_ALLOW_THREADS
    PyObject *result = status == STH_OK ? dict_of(&m, layer_fields) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *runner_metrics(PyObject *op, PyObject *none) {
    (void)none;
    runner_object *self = (runner_object *)op;
    sth_run_metrics m;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_runner_metrics(self->runner, &m);
    Py_END_ALLOW_THREADS
    PyObject *result = status == STH_OK ? dict_of(&m, run_fields) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *runner_close(PyObject *op, PyObject *none) {
    (void)none;
    guard_close(&((runner_object *)op)->guard);
    Py_RETURN_NONE;
}

static PyMethodDef runner_methods[] = {
    {"layers", runner_layers, METH_NOARGS,
     "layers()\n--\n\nA list of (name, [(tensor, dtype name, shape, scale)]), in the order of use."},
    {"output", runner_output, METH_O,
     "output(inputs, /)\n--\n\n"
     "What the model makes of inputs [(dtype name, shape)]: a list of the same kind. Asks `prepare`."},
    {"run", runner_run, METH_VARARGS,
     "run(inputs, outputs, stream, /)\n--\n\n"
     "One pass. Each tensor is (dtype name, shape, address, bytes), contiguous, on the device. Returns what the\n"
     "outputs are: [(dtype name, shape)]. Raises what a callable raised, or StagehandError. One call at a time."},
    {"layer_metrics", runner_layer_metrics, METH_O,
     "layer_metrics(layer, /)\n--\n\n"
     "A dict: name, bytes, runs, h2d_ms, compute_ms, stall_ms, means. Blocks for the last run."},
    {"metrics", runner_metrics, METH_NOARGS,
     "metrics()\n--\n\n"
     "A dict of the newest run: run, latency_ms, compute_ms, stall_ms, h2d_bytes, copy_ms, bandwidth_gb_s,\n"
     "overlap_ratio, file_bytes. Blocks for it. Raises NotFoundError before the first."},
    {"close", runner_close, METH_NOARGS, "close()\n--\n\nEnds the runner. Blocks for its work. Again is fine."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot runner_slots[] = {
    {Py_tp_doc,
     "Runner(device, path, prepare, run, budget, *, layers=None, lookahead=0, group=1, ram_budget=0, readers=AUTO)\n"
     "--\n\n"
     "A model of files run layer by layer: see stagehand/runner.h and stagehand.executor.\n"
     "prepare(layer, inputs): what the layer makes of [(dtype name, shape)], a list of the same kind.\n"
     "run(layer, weights, inputs, in, outputs, out): capsules of bytes, and what they are; writes the outputs."},
    {Py_tp_new, runner_new},
    {Py_tp_dealloc, runner_dealloc},
    {Py_tp_traverse, runner_traverse},
    {Py_tp_clear, runner_clear},
    {Py_tp_methods, runner_methods},
    {0, NULL},
};

PyType_Spec runner_spec = {"stagehand._core.Runner", sizeof(runner_object), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
                           runner_slots};
