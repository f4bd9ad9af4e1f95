/* Type Forward: what stands as `forward` of a managed module, as far as its calls are the usual ones: inside
 * a pass, nothing compiled, no TorchFunctionMode active, one weight that is as it was known; where gradients are
 * recorded, one that takes none, no TorchDispatchMode either, and hooks for saved tensors may be set. Everything
 * else goes to the method `managed_call` of the Python class. A usual call leases the weight, puts it into a
 * frame where the module's dictionary finds it, has what autograd saves of it become handles (saver.c), calls
 * the module's own forward, and lets go of all that, with no Python code of ours between. No signal handler runs
 * in these parts, so that nothing of them is left out. What a call wrote, or gave its weight, is for the plan's
 * `leave`. Of a module without weights of its own to lease (a container) a usual call is that of its own forward. */
#include "seat.h"

#include <stddef.h>
#include <structmember.h>

typedef struct forward_object {
    PyObject ob_base;
    PyObject *seat, *module, *inner, *of_class;
    PyObject *calls; /* of a container; NULL: it is none */
    char quick;      /* calls may be usual ones */
    char reads;      /* of a container: NEVER, ONCE_IT_DOES, or EARLY */
} forward_object;

/* When hooks for weights that a module reads of others stand round its forward. */
enum { NEVER, ONCE_IT_DOES, EARLY };

/* One call, with references to all that it needs to end. */
typedef struct call {
    seat_object *seat;
    sitter_object *sitter;
    here_object *here, *here_before;
    PyObject *master, *frame, *frame_before;
    bool records;    /* gradients */
    PyObject *saver; /* NULL: none */
    unsigned long thread_before;
    shown shown;
} call;

/* ---- is it a usual one ---- */

static int is_of_class(const forward_object *self) {
    if (!self->of_class || self->of_class == Py_None) return 1;
    PyObject *now = PyObject_GetAttr((PyObject *)Py_TYPE(self->module), name_forward);
    if (!now) return -1;
    Py_DECREF(now);
    return now == self->of_class;
}

static int on_host(const calls_object *calls, PyObject *value) {
    int tensor = PyObject_IsInstance(value, calls->tensor);
    return tensor > 0 ? flag_of(value, name_is_cpu) : tensor;
}

/* Whether an argument is a tensor on the host; never on a device that is simulated. */
static int some_on_host(const calls_object *calls, PyObject *args, PyObject *kwargs) {
    int found = 0;
    if (calls->stream == Py_None) return 0;
    for (Py_ssize_t i = 0; !found && i < PyTuple_Size(args); i++)
        found = on_host(calls, PyTuple_GetItem(args, i));
    PyObject *value;
    Py_ssize_t at = 0;
    while (!found && kwargs && PyDict_Next(kwargs, &at, NULL, &value)) found = on_host(calls, value);
    return found;
}

/* Of a call that records gradients. */
static int saves_as_usual(const forward_object *self, const call *c) {
    const calls_object *calls = c->sitter->calls;
    if (calls->top_hooks == Py_None) return 0; /* a PyTorch that does not tell which hooks are in force */
    int yes = flag_of(c->master, name_requires_grad);
    if (yes >= 0) yes = !yes;
    if (yes > 0 && (yes = observed()) >= 0) yes = !yes;
    if (yes > 0) yes = says(calls->hooks_enabled);
    if (yes > 0 && (yes = opts_out(self->module, c->seat->plain)) >= 0) yes = !yes;
    return yes;
}

/* 1, 0, or -1 with an exception. Fills what the call holds even then. */
static int usual(const forward_object *self, call *c, PyObject *args, PyObject *kwargs) {
    const calls_object *calls = c->sitter->calls;
    int yes = ((runtime_object *)calls->runtime)->guard.open;
    if (yes) yes = is_of_class(self);
    if (yes > 0 && (yes = says(calls->compiler)) >= 0) yes = !yes;
    if (yes > 0 && (yes = functions_are_seen()) >= 0) yes = !yes;
    if (yes > 0 && (yes = flag_of(calls->steps, name_after_backward)) >= 0) yes = !yes;
    if (yes > 0 && (yes = some_on_host(calls, args, kwargs)) >= 0) yes = !yes;
    if (yes <= 0) return yes;
    c->here = seat_here(c->seat);
    if (!c->here) return -1;
    if (PyList_Size(c->here->strays) || !PyDict_Size(c->here->passes)) return 0;
    if (!(c->master = PyObject_GetAttr(c->sitter->entry, name_param))) return -1;
    if ((yes = says(calls->grad_enabled)) < 0) return -1;
    c->records = yes;
    if (c->records && (yes = saves_as_usual(self, c)) <= 0) return yes;
    if (!here_look(c->here)) return -1;
    return sitter_current(c->sitter, c->master);
}

/* ---- beginning and end ---- */

/* The frame is this thread's for the plan. */
static bool show(call *c) {
    seat_object *seat = c->seat;
    PyObject *before = PyDict_GetItemWithError(c->here->frames, seat->plan);
    if (!before && PyErr_Occurred()) return false;
    Py_XINCREF(before);
    c->frame_before = before;
    if (PyDict_SetItem(c->frame, c->sitter->key, c->shown.copy) < 0) return false;
    return PyDict_SetItem(c->here->frames, seat->plan, c->frame) == 0;
}

/* What autocast makes of the weight has to be the same as before. */
static bool may_cast(const call *c) {
    if (!c->shown.autocast || c->records) return true;
    PyObject *done = PyObject_CallMethodObjArgs(c->seat->plan, name_used_quietly, NULL);
    Py_XDECREF(done);
    return done != NULL;
}

/* What autograd saves of the weight becomes handles from here on. */
static bool save(call *c) {
    if (!c->records) return true;
    c->saver = saver_begin(c->sitter, &c->shown);
    return c->saver && PyObject_SetAttr(c->frame, name_saver, c->saver) == 0;
}

static bool begin(call *c) {
    seat_object *seat = c->seat;
    c->frame = c->sitter->frame;
    c->sitter->frame = NULL;
    if (!c->frame && !(c->frame = PyObject_CallNoArgs(c->sitter->calls->frame))) return false;
    if (!sitter_lease(c->sitter, c->master, seat->plain, &c->shown)) return false;
    if (may_cast(c) && show(c)) {
        unsigned long me = PyThread_get_thread_ident();
        c->thread_before = seat->thread;
        c->here_before = seat->here;
        if (!seat->here || seat->thread == me) seat->here = c->here, seat->thread = me;
        return true;
    }
    shown_drop(&c->shown);
    return false;
}

static bool hide(call *c) {
    seat_object *seat = c->seat;
    if (seat->here == c->here) seat->here = c->here_before, seat->thread = c->thread_before;
    if (c->frame_before) return PyDict_SetItem(c->here->frames, seat->plan, c->frame_before) == 0;
    if (PyDict_GetItemWithError(c->here->frames, seat->plan))
        return PyDict_DelItem(c->here->frames, seat->plan) == 0;
    return !PyErr_Occurred();
}

static int has_uploads(const call *c) {
    PyObject *uploads = PyObject_GetAttr(c->frame, name_uploads);
    if (!uploads) return -1;
    Py_ssize_t count = PyDict_Size(uploads);
    Py_DECREF(uploads);
    return count != 0;
}

/* Whether the call left its weight as it found it. */
static int untouched(const call *c) {
    if (PyDict_Size(c->frame) != 1 || PyDict_GetItemWithError(c->frame, c->sitter->key) != c->shown.copy)
        return PyErr_Occurred() ? -1 : 0;
    int uploads = has_uploads(c);
    if (uploads) return uploads < 0 ? -1 : 0;
    int written = flag_of(c->shown.copy, name__version);
    if (written) return written < 0 ? -1 : 0;
    return shown_unmarked(&c->shown);
}

static bool leave(call *c, bool failed) {
    int same = failed ? 0 : untouched(c);
    if (same > 0) {
        PyDict_Clear(c->frame);
        sitter_return(c->sitter, &c->shown);
    } else if (same == 0) {
        PyObject *how = failed ? Py_True : Py_False;
        PyObject *left = PyObject_CallMethodObjArgs(c->seat->plan, name_leave, c->frame, how, NULL);
        Py_XDECREF(left);
    }
    shown_drop(&c->shown);
    return !PyErr_Occurred();
}

/* The hooks are not in force any more. */
static bool save_no_more(call *c) {
    if (!c->saver) return true;
    bool done = saver_end(c->saver);
    return PyObject_SetAttr(c->frame, name_saver, Py_None) == 0 && done;
}

/* Ended leases make room: what has become possible is issued. */
static bool poll(const calls_object *calls) {
    runtime_object *runtime = (runtime_object *)calls->runtime;
    sth_status status;
    if (!runtime->guard.open || !guard_enter(&runtime->guard)) return true;
    WITHOUT_GIL(status, sth_runtime_poll(runtime->runtime));
    if (status != STH_OK) raise_status(status);
    guard_leave(&runtime->guard);
    return status == STH_OK;
}

/* The exception that is set has come while the one given, whose references are taken over, was on its way. */
static void chain(PyObject *type, PyObject *error, PyObject *trace) {
    PyErr_NormalizeException(&type, &error, &trace);
    if (trace) PyException_SetTraceback(error, trace);
    PyObject *new_type, *new_error, *new_trace;
    PyErr_Fetch(&new_type, &new_error, &new_trace);
    PyErr_NormalizeException(&new_type, &new_error, &new_trace);
    if (new_error && new_error != error) {
        Py_INCREF(error);
        PyException_SetContext(new_error, error);
    }
    PyErr_Restore(new_type, new_error, new_trace);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
}

/* An exception, with references. */
typedef struct raised {
    PyObject *type, *error, *trace;
} raised;

static raised take_raised(void) {
    raised out;
    PyErr_Fetch(&out.type, &out.error, &out.trace);
    return out;
}

/* It is set again; one that has come meanwhile has it as context. */
static void raise_again(raised *first) {
    if (first->type && PyErr_Occurred()) chain(first->type, first->error, first->trace);
    else if (first->type) PyErr_Restore(first->type, first->error, first->trace);
    *first = (raised){0};
}

/* What `who` says of the exception in place of it: hooks for saved tensors, which stood, may be the reason. An
 * exception that is set then has it as its cause. */
static void explain(PyObject *who, raised *failure) {
    if (!failure->type || !PyErr_GivenExceptionMatches(failure->type, PyExc_RuntimeError)) return;
    PyErr_NormalizeException(&failure->type, &failure->error, &failure->trace);
    if (failure->trace) PyException_SetTraceback(failure->error, failure->trace);
    PyObject *said = PyObject_CallMethodObjArgs(who, name_explain, failure->error, NULL);
    Py_XDECREF(said);
    if (!PyErr_Occurred()) return;
    Py_CLEAR(failure->type);
    Py_CLEAR(failure->error);
    Py_CLEAR(failure->trace);
}

/* Ends the call whatever happens. Returns `out`, or NULL with the exception of the call or of its end. */
static PyObject *end(call *c, PyObject *out) {
    raised failure = take_raised(), first = {0};
    /* Checkpointing ends a part that it computes again by an exception, with all that it needs. */
    bool stopped = failure.type && failure.type == c->sitter->calls->stop;
    bool done = hide(c);
    if (!done) first = take_raised();
    if (!save_no_more(c)) done = false, raise_again(&first), first = take_raised();
    done = leave(c, !out && !stopped) && done;
    raise_again(&first);
    if (done) done = poll(c->sitter->calls);
    if (!c->sitter->frame && Py_REFCNT(c->frame) == 1 && !PyDict_Size(c->frame)) {
        c->sitter->frame = c->frame;
        c->frame = NULL;
    }
    if (done && c->saver) explain(c->seat->plan, &failure);
    raise_again(&failure);
    if (PyErr_Occurred()) Py_CLEAR(out);
    return out;
}

/* Calls the module's own forward; meanwhile the thread's `inside` is the wrapper. */
static PyObject *call_inner(forward_object *self, here_object *here, PyObject *inner, PyObject *args,
                            PyObject *kwargs) {
    PyObject *before = here->inside;
    Py_INCREF(inner);
    Py_INCREF(self);
    here->inside = (PyObject *)self;
    PyObject *out = PyObject_Call(inner, args, kwargs);
    here->inside = before;
    Py_DECREF(self);
    Py_DECREF(inner);
    return out;
}

static PyObject *run(forward_object *self, call *c, PyObject *args, PyObject *kwargs) {
    PyObject *out = NULL, *inner = self->inner;
    Py_INCREF(inner);
    if (begin(c)) out = end(c, save(c) ? call_inner(self, c->here, inner, args, kwargs) : NULL);
    Py_DECREF(inner);
    return out;
}

/* ---- containers ---- */

static here_object *here_of(const calls_object *calls) {
    PyObject *local = PyObject_GetAttr(calls->session, name_local);
    PyObject *here = local ? PyObject_GetAttr(local, name_here) : NULL;
    Py_XDECREF(local);
    return (here_object *)here;
}

/* As `usual`, of a container. */
static int passes_on(forward_object *self, const calls_object *calls, const here_object *here) {
    if (!((runtime_object *)calls->runtime)->guard.open) return 0;
    if (PyList_Size(here->strays) || !PyDict_Size(here->passes)) return 0;
    int yes = is_of_class(self);
    if (yes > 0 && (yes = says(calls->compiler)) >= 0) yes = !yes;
    if (yes > 0 && (yes = flag_of(calls->steps, name_after_backward)) >= 0) yes = !yes;
    return yes;
}

/* Calls the own forward of a module that reads weights of modules inside it. */
static PyObject *call_reader(forward_object *self, here_object *here, calls_object *calls, PyObject *inner,
                             PyObject *args, PyObject *kwargs) {
    reading r;
    PyObject *out = NULL, *module = self->module;
    Py_INCREF(module);
    if (reading_begin(&r, here, calls, module, self->reads == EARLY))
        out = call_inner(self, here, inner, args, kwargs);
    raised failure = take_raised();
    bool stood = r.saver != NULL;
    if (r.late) self->reads = EARLY;
    if (reading_end(&r, here) && stood) explain((PyObject *)self, &failure);
    raise_again(&failure);
    if (PyErr_Occurred()) Py_CLEAR(out);
    Py_DECREF(module);
    return out;
}

static PyObject *call_own(forward_object *self, here_object *here, calls_object *calls, PyObject *inner,
                          PyObject *args, PyObject *kwargs) {
    if (self->reads && self->module) return call_reader(self, here, calls, inner, args, kwargs);
    return call_inner(self, here, inner, args, kwargs);
}

static PyObject *other_call(PyObject *op, PyObject *args, PyObject *kwargs) {
    PyObject *method = PyObject_GetAttr(op, name_managed_call);
    PyObject *out = method ? PyObject_Call(method, args, kwargs) : NULL;
    Py_XDECREF(method);
    return out;
}

static PyObject *container_call(forward_object *self, PyObject *args, PyObject *kwargs) {
    calls_object *calls = (calls_object *)self->calls;
    PyObject *out = NULL;
    Py_INCREF(calls);
    here_object *here = here_of(calls);
    int yes = here ? passes_on(self, calls, here) : -1;
    if (yes > 0) out = call_own(self, here, calls, self->inner, args, kwargs);
    Py_XDECREF(here);
    Py_DECREF(calls);
    return yes ? out : other_call((PyObject *)self, args, kwargs);
}

static PyObject *forward_inside(PyObject *op, PyObject *args) {
    PyObject *calls, *inner, *positional, *named;
    if (!PyArg_ParseTuple(args, "OOO!O!:inside", &calls, &inner, &PyTuple_Type, &positional, &PyDict_Type, &named))
        return NULL;
    if (!is_calls(calls)) return PyErr_Format(PyExc_TypeError, "inside: of a Calls");
    calls_object *own = (calls_object *)calls;
    here_object *here = here_of(own);
    PyObject *out = here ? call_own((forward_object *)op, here, own, inner, positional, named) : NULL;
    Py_XDECREF(here);
    return out;
}

static PyObject *forward_call(PyObject *op, PyObject *args, PyObject *kwargs) {
    forward_object *self = (forward_object *)op;
    seat_object *seat = (seat_object *)self->seat;
    bool known = self->quick && self->inner && self->module;
    if (known && self->calls) return container_call(self, args, kwargs);
    if (!known || !seat || !seat->sitter) return other_call(op, args, kwargs);
    call c = {.seat = seat, .sitter = seat->sitter};
    Py_INCREF(c.seat);
    Py_INCREF(c.sitter);
    int yes = usual(self, &c, args, kwargs);
    PyObject *out = yes > 0 ? run(self, &c, args, kwargs) : NULL;
    Py_XDECREF(c.saver);
    Py_XDECREF(c.frame_before);
    Py_XDECREF(c.frame);
    Py_XDECREF(c.master);
    Py_XDECREF(c.here);
    Py_DECREF(c.sitter);
    Py_DECREF(c.seat);
    return yes == 0 ? other_call(op, args, kwargs) : out;
}

/* ---- the type ---- */

static int forward_traverse(PyObject *op, visitproc visit, void *arg) {
    forward_object *self = (forward_object *)op;
    Py_VISIT(Py_TYPE(op));
    Py_VISIT(self->seat);
    Py_VISIT(self->module);
    Py_VISIT(self->inner);
    Py_VISIT(self->of_class);
    Py_VISIT(self->calls);
    return 0;
}

static int forward_clear(PyObject *op) {
    forward_object *self = (forward_object *)op;
    Py_CLEAR(self->seat);
    Py_CLEAR(self->module);
    Py_CLEAR(self->inner);
    Py_CLEAR(self->of_class);
    Py_CLEAR(self->calls);
    return 0;
}

static void forward_dealloc(PyObject *op) {
    PyObject_GC_UnTrack(op);
    forward_clear(op);
    object_free(op);
}

static PyObject *get_seat(PyObject *op, void *closure) {
    (void)closure;
    PyObject *seat = ((forward_object *)op)->seat;
    seat = seat ? seat : Py_None;
    Py_INCREF(seat);
    return seat;
}

static int set_seat(PyObject *op, PyObject *value, void *closure) {
    (void)closure;
    forward_object *self = (forward_object *)op;
    PyObject *before = self->seat;
    if (!value || !is_seat(value)) return PyErr_SetString(PyExc_TypeError, "seat is a Seat"), -1;
    Py_INCREF(value);
    self->seat = value;
    Py_XDECREF(before);
    return 0;
}

static int set_container(PyObject *op, PyObject *value, void *closure) {
    (void)closure;
    forward_object *self = (forward_object *)op;
    PyObject *before = self->calls;
    if (!value || !is_calls(value)) return PyErr_SetString(PyExc_TypeError, "container is a Calls"), -1;
    Py_INCREF(value);
    self->calls = value;
    Py_XDECREF(before);
    return 0;
}

static PyMethodDef methods[] = {
    {"inside", forward_inside, METH_VARARGS,
     "inside(calls, inner, args, kwargs, /)\n--\n\n"
     "inner(*args, **kwargs), the module's own forward; meanwhile `inside` of the thread's Here is this object."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"module", T_OBJECT_EX, offsetof(forward_object, module), 0, "Whose forward it is."},
    {"_inner", T_OBJECT_EX, offsetof(forward_object, inner), 0, "What it stands for."},
    {"_of_class", T_OBJECT_EX, offsetof(forward_object, of_class), 0,
     "The forward of the module's class that `_inner` is; None: it is the instance's own."},
    {"quick", T_BOOL, offsetof(forward_object, quick), 0,
     "Whether calls may be usual ones, which managed_call does not see."},
    {"reads", T_BYTE, offsetof(forward_object, reads), 0,
     "Of a container. 0: its module reads no weights from outside their calls. 1: hooks for saved tensors stand from\n"
     "its first such read in a call on. 2: from the call's begin on."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"seat", get_seat, set_seat, "Where the module's calls see its weight, None: nowhere.", NULL},
    {"container", NULL, set_container, "The Calls of the session, of a module without weights to lease.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot forward_slots[] = {
    {Py_tp_doc, (void *)"The base of ManagedForward: usual calls, without Python code.\n"
                        "managed_call(*args, **kwargs): the others. explain(error): raises what to do about an\n"
                        "error of a call round which hooks for saved tensors stood."},
    {Py_tp_call, forward_call},   {Py_tp_dealloc, forward_dealloc}, {Py_tp_traverse, forward_traverse},
    {Py_tp_clear, forward_clear}, {Py_tp_members, members},         {Py_tp_getset, properties},
    {Py_tp_methods, methods},
    {0, NULL},
};
PyType_Spec forward_spec = {"stagehand._core.Forward", sizeof(forward_object), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, forward_slots};
