/* Type AdamW: updates of parameters in host memory by the library's threads. It knows addresses, not tensors:
 * what owns the memory of an update is handed in as `keep` and held until a wait() has seen the update's end,
 * or the AdamW ends, which finishes all of them first. */
#include "convert.h"

#include <string.h>

#include "stagehand/optim.h"

typedef struct adamw_object {
    PyObject ob_base;
    sth_adamw *adamw;
    PyObject *held; /* a list of what updates under way read and write */
    guard guard;
} adamw_object;

static int to_dtype(PyObject *value, void *out_dtype) {
    PyObject *text = PyUnicode_AsUTF8String(value);
    if (!text) return 0;
    int found = -1;
    for (int i = 0; i < STH_DTYPE_COUNT; i++)
        if (!strcmp(sth_dtype_name((sth_dtype)i), PyBytes_AsString(text))) found = i;
    Py_DECREF(text);
    if (found < 0) {
        PyErr_Format(PyExc_ValueError, "%R is not the name of a dtype; see DTYPES", value);
        return 0;
    }
    *(sth_dtype *)out_dtype = (sth_dtype)found;
    return 1;
}

static int to_address(PyObject *value, void *out_pointer) {
    uint64_t address;
    if (!to_u64(value, &address)) return 0;
    *(void **)out_pointer = (void *)(uintptr_t)address;
    return 1;
}

/* ---- life ---- */

static void end_adamw(void *owner) { sth_adamw_destroy(((adamw_object *)owner)->adamw); }
static void adamw_ended(void *owner) { Py_CLEAR(((adamw_object *)owner)->held); }

static PyObject *adamw_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"threads", "state_path", NULL};
    sth_adamw_options options;
    PyObject *given = Py_None, *path = NULL;
    sth_status status = STH_OK;
    sth_adamw_options_init(&options);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O&O:AdamW", names, to_u32, &options.threads, &given))
        return NULL;
    if (given != Py_None) {
        if (!PyUnicode_FSConverter(given, &path)) return NULL;
        options.state_path = PyBytes_AsString(path);
    }
    adamw_object *self = (adamw_object *)PyType_GenericAlloc(type, 0);
    if (self && (self->held = PyList_New(0))) {
        Py_BEGIN_ALLOW_THREADS
        status = sth_adamw_create(&options, &self->adamw);
        Py_END_ALLOW_THREADS
        if (status == STH_OK)
            self->guard =
                (guard){.owner = self, .end = end_adamw, .ended = adamw_ended, .name = "AdamW", .open = true};
        else
            raise_status(status);
    }
    Py_XDECREF(path);
    if (self && !self->guard.open) Py_CLEAR(self);
    return (PyObject *)self;
}

static int adamw_traverse(PyObject *op, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(((adamw_object *)op)->held);
    return 0;
}

/* Ends the updates under way before what they use may go. */
static void adamw_finalize(PyObject *op) { guard_close(&((adamw_object *)op)->guard); }

static int adamw_clear(PyObject *op) {
    adamw_finalize(op);
    return 0;
}

static void adamw_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    adamw_finalize(op);
    adamw_ended(op); /* for one that was never created */
    object_free(op);
}

static PyObject *adamw_close(PyObject *op, PyObject *none) {
    (void)none;
    guard_close(&((adamw_object *)op)->guard);
    Py_RETURN_NONE;
}

/* ---- updates ---- */

/* The GIL stays: the lock inside is held for list operations only, by threads that know nothing of Python. So
 * nobody can take `held` between the two steps. */
static PyObject *hold_and_submit(adamw_object *self, const sth_adamw_update *update, PyObject *keep) {
    uint64_t ticket;
    if (PyList_Append(self->held, keep) < 0) return NULL;
    sth_status status = sth_adamw_submit(self->adamw, update, &ticket);
    if (status == STH_OK) return PyLong_FromUnsignedLongLong(ticket);
    raise_status(status);
    Py_ssize_t last = PyList_Size(self->held) - 1;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyList_SetSlice(self->held, last, last + 1, NULL);
    PyErr_Restore(type, value, traceback);
    return NULL;
}

static PyObject *adamw_submit(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"keep",       "count",        "param",      "param_dtype", "grad",
                            "grad_dtype", "step",         "exp_avg",    "exp_avg_sq",  "moment_dtype",
                            "master",     "state",        "lr",         "beta1",       "beta2",
                            "eps",        "weight_decay", "grad_scale", "maximize",    "stochastic_rounding",
                            "seed",       "stream",       NULL};
    adamw_object *self = (adamw_object *)op;
    sth_adamw_update u;
    PyObject *keep;
    int maximize = 0, at_random = 0;
    sth_adamw_update_init(&u);
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O|$O&O&O&O&O&O&O&O&O&O&O&ddddddppO&O&:submit", names, &keep, to_u64, &u.count,
            to_address, &u.param, to_dtype, &u.param_dtype, to_address, &u.grad, to_dtype, &u.grad_dtype,
            to_u64, &u.step, to_address, &u.exp_avg, to_address, &u.exp_avg_sq, to_dtype, &u.moment_dtype,
            to_address, &u.master, to_u64, &u.state, &u.lr, &u.beta1, &u.beta2, &u.eps, &u.weight_decay,
            &u.grad_scale, &maximize, &at_random, to_u64, &u.seed, to_u64, &u.stream))
        return NULL;
    u.maximize = maximize;
    u.stochastic_rounding = at_random;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *ticket = hold_and_submit(self, &u, keep);
    guard_leave(&self->guard);
    return ticket;
}

static PyObject *adamw_wait(PyObject *op, PyObject *args) {
    adamw_object *self = (adamw_object *)op;
    uint64_t ticket = 0;
    sth_status status;
    if (!PyArg_ParseTuple(args, "|O&:wait", to_u64, &ticket)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *held = NULL, *fresh = ticket ? NULL : PyList_New(0);
    if (!ticket && !fresh) {
        guard_leave(&self->guard);
        return NULL;
    }
    if (fresh) held = self->held, self->held = fresh;
    Py_BEGIN_ALLOW_THREADS
    status = sth_adamw_wait(self->adamw, ticket);
    Py_END_ALLOW_THREADS
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    Py_XDECREF(held);
    return result;
}

/* ---- gradients ---- */

static bool parse_grad(PyObject *item, sth_grad *out) {
    PyObject *tuple = PySequence_Tuple(item);
    if (!tuple) return false;
    int valid = PyArg_ParseTuple(tuple, "O&O&O&;a gradient is (address, count, dtype name)", to_address,
                                 &out->data, to_u64, &out->count, to_dtype, &out->dtype);
    Py_DECREF(tuple);
    return valid;
}

/* From PyMem_Malloc; NULL with an exception. */
static sth_grad *parse_grads(PyObject *given, size_t *out_count) {
    PyObject *items = PySequence_Tuple(given);
    if (!items) return NULL;
    Py_ssize_t count = PyTuple_Size(items);
    sth_grad *grads = PyMem_Malloc((size_t)(count ? count : 1) * sizeof *grads);
    bool valid = grads || PyErr_NoMemory();
    for (Py_ssize_t i = 0; valid && i < count; i++) valid = parse_grad(PyTuple_GetItem(items, i), &grads[i]);
    Py_DECREF(items);
    *out_count = (size_t)count;
    if (valid) return grads;
    PyMem_Free(grads);
    return NULL;
}

static PyObject *adamw_sum_squares(PyObject *op, PyObject *args) {
    adamw_object *self = (adamw_object *)op;
    PyObject *given, *result = NULL;
    size_t count;
    double sum = 0;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O:sum_squares", &given)) return NULL;
    sth_grad *grads = parse_grads(given, &count);
    if (grads && guard_enter(&self->guard)) {
        Py_BEGIN_ALLOW_THREADS
        status = sth_adamw_sum_squares(self->adamw, grads, count, &sum);
        Py_END_ALLOW_THREADS
        result = status == STH_OK ? PyFloat_FromDouble(sum) : raise_status(status);
        guard_leave(&self->guard);
    }
    PyMem_Free(grads);
    return result;
}

static PyObject *adamw_scale(PyObject *op, PyObject *args) {
    adamw_object *self = (adamw_object *)op;
    PyObject *given, *result = NULL;
    size_t count;
    double factor;
    sth_status status;
    if (!PyArg_ParseTuple(args, "Od:scale", &given, &factor)) return NULL;
    sth_grad *grads = parse_grads(given, &count);
    if (grads && guard_enter(&self->guard)) {
        Py_BEGIN_ALLOW_THREADS
        status = sth_adamw_scale(self->adamw, grads, count, factor);
        Py_END_ALLOW_THREADS
        result = none_or_raise(status);
        guard_leave(&self->guard);
    }
    PyMem_Free(grads);
    return result;
}

/* ---- states in the file ---- */

static PyObject *adamw_state_create(PyObject *op, PyObject *args) {
    adamw_object *self = (adamw_object *)op;
    uint64_t count, state;
    sth_dtype dtype;
    int master;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&O&p:state_create", to_u64, &count, to_dtype, &dtype, &master)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_adamw_state_create(self->adamw, count, dtype, master, &state);
    Py_END_ALLOW_THREADS
    PyObject *result = status == STH_OK ? PyLong_FromUnsignedLongLong(state) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static bool to_part(const char *name, sth_adamw_part *out) {
    static const char *const parts[] = {"exp_avg", "exp_avg_sq", "master_param"};
    for (int i = 0; i < 3; i++)
        if (!strcmp(parts[i], name)) {
            *out = (sth_adamw_part)i;
            return true;
        }
    PyErr_Format(PyExc_ValueError, "a state has no part '%s'", name);
    return false;
}

static PyObject *move_state(PyObject *op, PyObject *args, bool write) {
    adamw_object *self = (adamw_object *)op;
    uint64_t state;
    const char *name;
    void *memory;
    sth_adamw_part part;
    sth_status status;
    if (!PyArg_ParseTuple(args, "O&sO&", to_u64, &state, &name, to_address, &memory) || !to_part(name, &part))
        return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = write ? sth_adamw_state_write(self->adamw, state, part, memory)
                   : sth_adamw_state_read(self->adamw, state, part, memory);
    Py_END_ALLOW_THREADS
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}
static PyObject *adamw_state_read(PyObject *op, PyObject *args) { return move_state(op, args, false); }
static PyObject *adamw_state_write(PyObject *op, PyObject *args) { return move_state(op, args, true); }

static PyObject *adamw_file_bytes(PyObject *op, void *closure) {
    (void)closure;
    adamw_object *self = (adamw_object *)op;
    uint64_t bytes;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    bytes = sth_adamw_file_bytes(self->adamw);
    Py_END_ALLOW_THREADS
    guard_leave(&self->guard);
    return PyLong_FromUnsignedLongLong(bytes);
}

static PyObject *adamw_threads(PyObject *op, void *closure) {
    (void)closure;
    adamw_object *self = (adamw_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *result = PyLong_FromUnsignedLong(sth_adamw_threads(self->adamw));
    guard_leave(&self->guard);
    return result;
}

static PyObject *adamw_kernels(PyObject *op, void *closure) {
    (void)closure;
    adamw_object *self = (adamw_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    PyObject *result = PyUnicode_FromString(sth_adamw_kernels(self->adamw));
    guard_leave(&self->guard);
    return result;
}

static PyMethodDef adamw_methods[] = {
    {"submit", (PyCFunction)(void (*)(void))adamw_submit, METH_VARARGS | METH_KEYWORDS,
     "submit(keep, *, count, param, param_dtype, grad, grad_dtype, step, exp_avg=0, exp_avg_sq=0,\n"
     "       moment_dtype=\"F32\", master=0, state=0, lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8,\n"
     "       weight_decay=0.01, grad_scale=1.0, maximize=False, stochastic_rounding=False, seed=0, "
     "stream=0)\n"
     "--\n\n"
     "Hands one update of `count` elements to the threads and returns its ticket at once. Arrays are\n"
     "addresses, dtypes names (\"F32\", \"BF16\", \"F16\", \"F64\"); state: from state_create, in place of\n"
     "exp_avg, exp_avg_sq and master. keep: an object that owns the memory; it is held until wait().\n"
     "Raises InvalidArgumentError; InvalidStateTransitionError in a forked child."},
    {"wait", adamw_wait, METH_VARARGS,
     "wait(ticket=0, /)\n--\n\n"
     "Waits for one update, or with 0 for all, without the GIL. Raises what the first one failed with:\n"
     "TransferError (the state's file); then that parameter and its state are updated in part."},
    {"sum_squares", adamw_sum_squares, METH_VARARGS,
     "sum_squares(grads, /)\n--\n\n"
     "The sum of the squares of all elements as a float; not finite where an element is not. grads: a\n"
     "list of (address, count, dtype name). The same for any number of threads."},
    {"scale", adamw_scale, METH_VARARGS,
     "scale(grads, factor, /)\n--\n\nMultiplies all elements by `factor`, in place. grads: as for "
     "sum_squares."},
    {"state_create", adamw_state_create, METH_VARARGS,
     "state_create(count, moment_dtype, master, /)\n--\n\n"
     "Takes room in the file for a parameter's state and returns its number. Raises TransferError when\n"
     "the disk is full."},
    {"state_read", adamw_state_read, METH_VARARGS,
     "state_read(state, part, address, /)\n--\n\n"
     "Reads all of a state's \"exp_avg\", \"exp_avg_sq\" or \"master_param\" to the address."},
    {"state_write", adamw_state_write, METH_VARARGS,
     "state_write(state, part, address, /)\n--\n\nThe other way. Write all parts of a state."},
    {"close", adamw_close, METH_NOARGS,
     "close()\n--\n\nFinishes what was submitted and ends threads and file. Again is fine."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef adamw_properties[] = {
    {"file_bytes", adamw_file_bytes, NULL, "Bytes of the state's file; 0 without one.", NULL},
    {"threads", adamw_threads, NULL, "Number of threads.", NULL},
    {"kernels", adamw_kernels, NULL, "\"avx512\", \"avx2\" or \"scalar\".", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot adamw_slots[] = {
    {Py_tp_doc, (void *)"AdamW(threads=0, state_path=None)\n--\n\n"
                        "AdamW over parameters in host memory. threads: 0 = one for each core, at most 16.\n"
                        "state_path: a folder, or a file that does not exist, for states on disk.\n"
                        "Raises InvalidArgumentError, NotFoundError, TransferError."},
    {Py_tp_new, adamw_new},
    {Py_tp_dealloc, adamw_dealloc},
    {Py_tp_traverse, adamw_traverse},
    {Py_tp_clear, adamw_clear},
    {Py_tp_finalize, adamw_finalize},
    {Py_tp_methods, adamw_methods},
    {Py_tp_getset, adamw_properties},
    {0, NULL},
};
PyType_Spec adamw_spec = {"stagehand._core.AdamW", sizeof(adamw_object), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, adamw_slots};
