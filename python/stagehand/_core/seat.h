/* What the hot path of a call shares: records.c (what it looks at), seat.c (a module's one weight, leased),
 * call.c (the call), masters.c (its dictionary), handle.c (a weight that autograd saves), saver.c (the hooks that
 * make handles), reading.c (weights that a call reads of other modules). The GIL guards all fields but those of a
 * place. */
#ifndef STAGEHAND_PYTHON_SEAT_H
#define STAGEHAND_PYTHON_SEAT_H
#include <stdatomic.h>

#include "runtime.h"

/* Of one thread and session: what passes, strays and frames of Local are, leases that are held until the function
 * look lets go of them, and in how many masters() it is. */
typedef struct here_object {
    PyObject ob_base;
    PyObject *passes, *strays, *frames, *held, *look;
    PyObject *inside; /* borrowed: the innermost Forward whose module's own forward the thread is in; NULL: none */
    struct reading *reading; /* the innermost call of a reader; NULL: none */
    int saving;
} here_object;

/* Of a weight without memory, where addresses of masters are compared: folded.ADDRESS. */
#define FOLDED_ADDRESS 1

/* What a master looked like when its bytes were last known to be those of the image: the base of Entry. */
typedef struct mark_object {
    PyObject ob_base;
    long long version;
    unsigned long long address;
    char written, cast;
} mark_object;

/* What the calls of one session need: torch's functions, and those of the session. */
#define CALLS_FIELDS(X)                                                                                    \
    X(session) X(runtime) X(steps) X(grad_enabled) X(compiler) X(autocast) X(stream) X(tensor)             \
    X(storage_uses) X(weak_refs) X(frame) X(seen) X(refused) X(hooks_enabled) X(top_hooks) X(push_hooks)   \
    X(pop_hooks) X(unpack) X(stop) X(saver) X(handle) X(kinds) X(strided) X(dtypes) X(kind_of) X(raw)      \
    X(task)
#define CALLS_FIELD(name) PyObject *name;
typedef struct calls_object {
    PyObject ob_base;
    CALLS_FIELDS(CALLS_FIELD)
} calls_object;
#undef CALLS_FIELD

/* How a saved tensor looks: new references. view: the same for the core, where `direct`. */
typedef struct looks {
    PyObject *dtype, *shape, *stride;
    tensor_view view;
    bool direct;
} looks;

/* Where a tensor over a leased place lies: its storage has one reference, and while it may be shown again its
 * seat the other. leased: the lease is still to be released, by whoever takes the flag. gone: the storage has
 * died. */
typedef struct place {
    atomic_int refs;
    atomic_bool leased, gone;
    sth_runtime *runtime;
    sth_lease lease;
} place;

/* Who has a tensor: references to the object and to its storage's, weak ones, those of torch to what is
 * behind the object, and to what is behind the storage. */
typedef struct holders {
    long long refs, storage_refs, weak, uses, sharers;
} holders;

/* A tensor over a place, with what it was made for and who had it when it was new. */
typedef struct shown {
    PyObject *copy, *storage;
    PyObject *number;         /* of the storage, torch's; NULL: the tensor is never kept */
    place *at;
    holders holders;
    long long version;        /* of its master */
    int attributes;           /* that it has */
    bool bare;                /* and its master has none */
    bool plain, grad, autocast;
} shown;

/* A weight that is all that its module has, and all of its unit. Only frame and kept change. */
typedef struct sitter_object {
    PyObject ob_base;
    calls_object *calls;
    PyObject *key, *entry, *unit;
    uint32_t index;  /* of the unit */
    tensor_view view;
    PyObject *frame; /* one that nobody uses */
    shown kept;      /* copy NULL: none */
} sitter_object;

typedef struct seat_object {
    PyObject ob_base;
    PyObject *plan, *local, *managed;
    sitter_object *sitter; /* NULL: the module has no such weight */
    char plain;            /* the module's forward is torch's own */
    here_object *here;     /* borrowed: of the thread that is in a call, whose identity is `thread` */
    unsigned long thread;
} seat_object;

bool is_seat(PyObject *value);
bool is_calls(PyObject *value); /* records.c */
/* records.c: lets go of leases that were held until somebody looks at them. false with an exception. */
bool here_look(const here_object *self);
/* Of the calling thread; a new reference, NULL with an exception. */
here_object *seat_here(const seat_object *self);
/* -1 with an exception. Whether the callable says yes. */
int says(PyObject *callable);
int flag_of(PyObject *object, PyObject *name); /* of an attribute */
/* Whether the master is as the entry knows it. */
int sitter_current(const sitter_object *self, PyObject *master);
/* Leases the weight and fills `out`. plain: the call is torch's own code. false with an exception: nothing is
 * leased. */
bool sitter_lease(sitter_object *self, PyObject *master, bool plain, shown *out);
/* The call is over and has let go of the tensor: it is kept where nobody else has it. `out` is empty then. */
void sitter_return(sitter_object *self, shown *out);
void shown_drop(shown *out);
/* Whether the call gave the tensor no attributes that its master has to get. -1 with an exception. */
int shown_unmarked(const shown *out);

/* The calling thread's current stream on the session's device. false with an exception. */
bool calls_stream(const calls_object *self, uint64_t *out);
/* The exception that is set, a lease that could not be had, as the session says it. */
void calls_refuse(const calls_object *self);

/* handle.c: fills `out`. false with an exception; looks_drop in any case. */
bool looks_of(const calls_object *calls, PyObject *tensor, looks *out);
void looks_drop(looks *self);
/* A Handle of `tensor`, which lies `offset` bytes behind the first of `copy`, the weight `entry` (a Mark) of `unit`
 * as a call sees it. Takes the looks over. NULL with an exception. */
PyObject *handle_new(calls_object *calls, PyObject *unit, PyObject *entry, PyObject *copy, PyObject *tensor,
                     uint64_t offset, looks *seen);
PyObject *unpack_saved(PyObject *module, PyObject *saved);
PyObject *know_unpack(PyObject *module, PyObject *function);
PyObject *watch_unpack(PyObject *module, PyObject *more);

/* saver.c: hooks for a call of the sitter's module that sees `shown`, in force until saver_end. NULL with an
 * exception. saver_outside: for weights that the thread leases from outside their modules' calls, alone. */
PyObject *saver_begin(sitter_object *sitter, const shown *shown);
PyObject *saver_outside(calls_object *calls);
bool saver_is_of(PyObject *value, const calls_object *calls); /* whether it is one, of these calls */
/* false with an exception; the hooks are not in force any more even then. */
bool saver_end(PyObject *self);

/* reading.c: a call of a reader (weights/reading.py), from begin to end, in the caller's memory. */
typedef struct reading {
    struct reading *around;
    calls_object *calls; /* borrowed */
    PyObject *module;    /* borrowed */
    PyObject *top;       /* the pair of hooks in force when it began, or None; NULL: it records no gradients */
    PyObject *saver;     /* NULL: it has read no weight, or hooks may not be put up */
    bool late;           /* they could not: a pair lay on top that ends before the call */
} reading;
/* early: the hooks are put up at once. false with an exception; reading_end in any case, with no exception set. */
bool reading_begin(reading *self, here_object *here, calls_object *calls, PyObject *module, bool early);
bool reading_end(reading *self, here_object *here);
PyObject *here_save_outside(PyObject *here, PyObject *none);
/* Whether the module says that it is to run without hooks. plain: its class is one of PyTorch's. -1 with an
 * exception. */
int opts_out(PyObject *module, bool plain);

/* modes.c: whether any mode of the caller's is active, and whether one sees functions of torch, the reading of
 * attributes among them. -1 with an exception. */
int observed(void);
int functions_are_seen(void);

/* Attributes that are asked for in each call. */
#define SEAT_NAMES(X) \
    X(_version) X(version) X(data_ptr) X(requires_grad) X(__dict__) X(_use_count) X(untyped_storage) X(_cdata) \
    X(here) X(forward) X(is_cpu) X(uploads) X(leave) X(seat) X(shown) X(managed_call) X(param) X(used_quietly) \
    X(layout) X(is_neg) X(dtype) X(shape) X(stride) X(graph) X(held) X(held_ref) X(index) X(cut_off) X(backwards) \
    X(offset) X(after_backward) X(settle) X(pack_other) X(note_copies) X(saver) X(nbytes) X(__module__) X(explain) \
    X(stagehand_saved_handles) X(local)
#define SEAT_NAME(name) extern PyObject *name_##name;
SEAT_NAMES(SEAT_NAME)
#undef SEAT_NAME
bool seat_names(void); /* false with an exception */
#endif
