/* Types Download and Ticket: gradients on their way from the device to host memory.
 *
 * A Ticket keeps the Python object that owns the memory copied from. It lets go of it as soon as the copy is
 * known to be done: in wait(), or when a later start() looks. A ticket that is dropped instead (its backward
 * died) waits for its copy first, for nobody else can say when the memory may be used again.
 *
 * Invariants, under the GIL: tickets that keep a source are linked from oldest to newest, without a
 * reference of the list's own; a ticket leaves the list before it is taken apart. A live ticket of the
 * library keeps the sth_download alive, also after close(). */
#include "convert.h"

typedef struct ticket_object ticket_object;

typedef struct download_object {
    PyObject ob_base;
    sth_download *download;
    guard guard;
    ticket_object *oldest, *newest;
} download_object;

struct ticket_object {
    PyObject ob_base;
    download_object *owner; /* a reference */
    sth_download *download;
    sth_ticket ticket; /* 0 once it has ended */
    PyObject *source;  /* NULL once it was let go of */
    bool waiting;
    ticket_object *older, *newer;
};

/* ---- the list of tickets */

static void link_ticket(download_object *self, ticket_object *ticket) {
    ticket->older = self->newest;
    if (self->newest) self->newest->newer = ticket;
    else self->oldest = ticket;
    self->newest = ticket;
}

/* Takes the ticket off the list and lets go of its source. Again is fine. */
static void drop_source(ticket_object *ticket) {
    PyObject *source = ticket->source;
    if (!source) return;
    download_object *owner = ticket->owner;
    if (ticket->older) ticket->older->newer = ticket->newer;
    else owner->oldest = ticket->newer;
    if (ticket->newer) ticket->newer->older = ticket->older;
    else owner->newest = ticket->older;
    ticket->older = ticket->newer = NULL;
    ticket->source = NULL;
    Py_DECREF(source); /* last: it may run other code */
}

/* Lets go of what finished copies were made from. Copies end in the order of the list. */
static void sweep(download_object *self) {
    bool done = true;
    for (ticket_object *ticket; done && (ticket = self->oldest) && !ticket->waiting;) {
        sth_ticket handle = ticket->ticket;
        Py_INCREF(ticket);
        Py_BEGIN_ALLOW_THREADS
        if (sth_download_done(self->download, handle, &done) != STH_OK) done = false;
        Py_END_ALLOW_THREADS
        if (done) drop_source(ticket);
        Py_DECREF(ticket);
    }
}

/* ---- Ticket */

static void ticket_dealloc(PyObject *op) {
    ticket_object *self = (ticket_object *)op;
    PyObject *source = self->source, *owner = (PyObject *)self->owner;
    Py_XINCREF(source);
    drop_source(self); /* nobody finds it any more */
    if (self->ticket) {
        Py_BEGIN_ALLOW_THREADS
        sth_download_forget(self->download, self->ticket);
        Py_END_ALLOW_THREADS
    }
    Py_XDECREF(source);
    Py_XDECREF(owner);
    object_free(op);
}

static PyObject *ticket_wait(PyObject *op, PyObject *none) {
    (void)none;
    ticket_object *self = (ticket_object *)op;
    sth_status status;
    if (!self->ticket) Py_RETURN_NONE;
    if (self->waiting) return raise_error(STH_INVALID_STATE, "Ticket", "another thread waits for this copy");
    self->waiting = true;
    Py_BEGIN_ALLOW_THREADS
    status = sth_download_wait(self->download, self->ticket);
    Py_END_ALLOW_THREADS
    self->waiting = false;
    if (status != STH_OK) return raise_status(status);
    self->ticket = 0;
    drop_source(self);
    Py_RETURN_NONE;
}

static PyObject *ticket_done(PyObject *op, void *closure) {
    (void)closure;
    ticket_object *self = (ticket_object *)op;
    sth_status status;
    bool done = true;
    if (!self->ticket) Py_RETURN_TRUE;
    Py_BEGIN_ALLOW_THREADS
    status = sth_download_done(self->download, self->ticket, &done);
    Py_END_ALLOW_THREADS
    if (status != STH_OK && status != STH_STALE) return raise_status(status);
    return PyBool_FromLong(done);
}

static PyMethodDef ticket_methods[] = {
    {"wait", ticket_wait, METH_NOARGS,
     "wait()\n--\n\n"
     "Waits for the copy with the GIL released and lets go of the memory it was made from; again is\n"
     "fine. Raises TransferError when the device fails; then it may be tried again."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef ticket_properties[] = {
    {"done", ticket_done, NULL, "Whether the copy is done.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot ticket_slots[] = {
    {Py_tp_doc, (void *)"A copy under way, from Download.start(). Dropping it waits for the copy."},
    {Py_tp_dealloc, ticket_dealloc},
    {Py_tp_methods, ticket_methods},
    {Py_tp_getset, ticket_properties},
    {0, NULL},
};
PyType_Spec ticket_spec = {"stagehand._core.Ticket", sizeof(ticket_object), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, ticket_slots};

/* ---- Download */

static void end_download(void *owner) { sth_download_destroy(((download_object *)owner)->download); }

static PyObject *download_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device", "region_bytes", "pinned_limit", "chunk_bytes", "priority", NULL};
    core_state *state = PyType_GetModuleState(type);
    sth_download_options options;
    sth_download_options_init(&options);
    device_object *device;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!|$O&O&O&i:Download", names, state->device, &device,
                                     to_u64, &options.region_bytes, to_u64, &options.pinned_limit, to_u64,
                                     &options.chunk_bytes, &options.priority))
        return NULL;
    download_object *self = (download_object *)PyType_GenericAlloc(type, 0);
    if (!self) return NULL;
    if (!guard_enter(&device->guard)) {
        Py_DECREF(self);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = sth_download_create(device->device, &options, &self->download);
    Py_END_ALLOW_THREADS
    guard_leave(&device->guard);
    if (status != STH_OK) {
        raise_status(status);
        Py_DECREF(self);
        return NULL;
    }
    self->guard = (guard){.owner = self, .end = end_download, .name = "Download", .open = true};
    return (PyObject *)self;
}

static void download_dealloc(PyObject *op) { /* tickets hold references, so none is left */
    guard_close(&((download_object *)op)->guard);
    object_free(op);
}

static void release_block(byte_tensor *tensor) { sth_block_release(tensor->object); }

/* A block with the copy enqueued; the block's reference is the caller's. */
static sth_status enqueue(sth_download *download, uint64_t address, uint64_t bytes, uint64_t stream,
                          sth_block **out_block, sth_ticket *out_ticket) {
    sth_block *block;
    sth_status status = sth_download_take(download, bytes, &block);
    if (status != STH_OK) return status;
    status = sth_download_copy(download, block, 0, address, bytes, stream, out_ticket);
    if (status == STH_OK) *out_block = block;
    else sth_block_release(block); /* does not touch the error's record: it calls no device */
    return status;
}

static PyObject *start(download_object *self, ticket_object *ticket, PyObject *source, uint64_t address,
                       uint64_t bytes, uint64_t stream) {
    sth_block *block = NULL;
    sth_status status;
    byte_tensor *tensor = byte_tensor_new();
    if (!tensor) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = enqueue(self->download, address, bytes, stream, &block, &ticket->ticket);
    Py_END_ALLOW_THREADS
    if (status != STH_OK) {
        byte_tensor_drop(tensor);
        return raise_status(status);
    }
    Py_INCREF(source);
    ticket->source = source;
    link_ticket(self, ticket);
    tensor->object = block;
    tensor->release = release_block;
    return byte_tensor_capsule(tensor, (uint64_t)(uintptr_t)sth_block_address(block), bytes,
                               (dl_device){DL_CPU, 0});
}

static PyObject *download_start(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"source", "address", "nbytes", "stream", NULL};
    download_object *self = (download_object *)op;
    PyObject *source, *capsule = NULL;
    uint64_t address, bytes, stream = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO&O&|O&:start", names, &source, to_u64, &address, to_u64,
                                     &bytes, to_u64, &stream))
        return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    sweep(self);
    core_state *state = PyType_GetModuleState(Py_TYPE(op));
    ticket_object *ticket = (ticket_object *)PyType_GenericAlloc(state->ticket, 0);
    if (ticket) {
        Py_INCREF(op);
        ticket->owner = self;
        ticket->download = self->download;
        capsule = start(self, ticket, source, address, bytes, stream);
    }
    PyObject *pair = capsule ? PyTuple_Pack(2, capsule, (PyObject *)ticket) : NULL;
    Py_XDECREF(capsule);
    Py_XDECREF((PyObject *)ticket);
    guard_leave(&self->guard);
    return pair;
}

static PyObject *download_reserve(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"nbytes", NULL};
    download_object *self = (download_object *)op;
    uint64_t bytes;
    sth_status status;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:reserve", names, to_u64, &bytes)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_download_reserve(self->download, bytes);
    Py_END_ALLOW_THREADS
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *download_set_conductor(PyObject *op, PyObject *value) {
    download_object *self = (download_object *)op;
    sth_conductor *conductor;
    sth_status status;
    if (!conductor_or_none(PyType_GetModuleState(Py_TYPE(op)), value, &conductor)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_download_set_conductor(self->download, conductor);
    Py_END_ALLOW_THREADS
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

static const field stats_fields[] = {
    FIELD(sth_download_stats, d2h_bytes, U64),
    FIELD(sth_download_stats, copies, U64),
    FIELD(sth_download_stats, pageable_copies, U64),
    FIELD(sth_download_stats, tickets, U64),
    FIELD(sth_download_stats, blocks_in_use, U64),
    FIELD(sth_download_stats, bytes_in_use, U64),
    FIELD(sth_download_stats, pinned_bytes, U64),
    FIELD(sth_download_stats, pageable_bytes, U64),
    FIELD(sth_download_stats, regions, U64),
    FIELD(sth_download_stats, waits, U64),
    FIELD_END,
};

static PyObject *download_stats(PyObject *op, PyObject *none) {
    (void)none;
    download_object *self = (download_object *)op;
    sth_download_stats stats;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_download_stats_get(self->download, &stats);
    Py_END_ALLOW_THREADS
    PyObject *result = status == STH_OK ? dict_of(&stats, stats_fields) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *download_close(PyObject *op, PyObject *none) {
    (void)none;
    guard_close(&((download_object *)op)->guard);
    Py_RETURN_NONE;
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static PyMethodDef download_methods[] = {
    {"start", KEYWORDS(download_start),
     "start(source, address, nbytes, stream=0)\n--\n\n"
     "Enqueues a copy of `nbytes` at the device address `address` into a host block of its own, behind\n"
     "the work that `stream` (a CUstream as an int) has by now. Returns (capsule, Ticket): the capsule\n"
     "is DLPack, shape (nbytes,), dtype uint8, on the CPU, and holds the block until its tensor's storage\n"
     "dies, on any thread, also after close(). Read it after Ticket.wait(). `source` is kept until the\n"
     "copy is done. Waits only while host memory is taken and pinned. Raises StagehandOOMError,\n"
     "TransferError, StagehandError (SHUT_DOWN)."},
    {"reserve", KEYWORDS(download_reserve),
     "reserve(nbytes)\n--\n\n"
     "Host memory for `nbytes` in all is taken and pinned ahead, on a thread in the background."},
    {"set_conductor", download_set_conductor, METH_O,
     "set_conductor(conductor, /)\n--\n\nCopies pass through a Conductor; None: not any more."},
    {"stats", download_stats, METH_NOARGS,
     "stats()\n--\n\n"
     "A dict: d2h_bytes, copies, pageable_copies since the start; tickets, blocks_in_use,\n"
     "bytes_in_use now; pinned_bytes, pageable_bytes of memory held; regions taken; waits for one."},
    {"close", download_close, METH_NOARGS,
     "close()\n--\n\n"
     "Waits for copies under way. Memory goes now, or with the tensors that hold it. Again is fine."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot download_slots[] = {
    {Py_tp_doc, (void *)"Download(device, *, region_bytes=268435456, pinned_limit=0,\n"
                        "         chunk_bytes=33554432, priority=0)\n--\n\n"
                        "Pinned host blocks of any size, and a stream of copies from the device into\n"
                        "them. region_bytes: memory is taken in pieces that grow up to this. pinned_limit:\n"
                        "bytes, 0 = what the system allows; beyond it memory is pageable. chunk_bytes:\n"
                        "larger copies are enqueued in pieces. priority: of the stream."},
    {Py_tp_new, download_new},
    {Py_tp_dealloc, download_dealloc},
    {Py_tp_methods, download_methods},
    {0, NULL},
};
PyType_Spec download_spec = {"stagehand._core.Download", sizeof(download_object), 0, Py_TPFLAGS_DEFAULT,
                             download_slots};
