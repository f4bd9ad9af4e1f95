/* What the files of the extension module share: its state, errors, tensors and guarded objects.
 *
 * Rules: the GIL is released round every call into a runtime, a pool, an arena or a file that may take a
 * lock or wait, because the runtime calls Python allocators with its lock held. Deleters of tensors do C
 * work only. Fields of the Python objects are guarded by the GIL. */
#ifndef STAGEHAND_PYTHON_CORE_H
#define STAGEHAND_PYTHON_CORE_H
#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030a0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/activation.h"
#include "stagehand/arena.h"
#include "stagehand/checkpoint.h"
#include "stagehand/conductor.h"
#include "stagehand/device.h"
#include "stagehand/download.h"
#include "stagehand/residency.h"
#include "stagehand/runtime.h"
#include "stagehand/status.h"

typedef struct core_state {
    PyTypeObject *device, *arena, *runtime, *checkpoint, *pool, *download, *ticket, *adamw, *activations,
        *activation_record, *quant, *conductor, *runner, *here, *calls, *mark, *sitter, *seat, *forward,
        *masters, *mapping, *aside, *handle, *place, *saver, *rows, *pace, *watermark;
} core_state;

extern PyType_Spec device_spec, arena_spec, runtime_spec, checkpoint_spec, pool_spec, download_spec,
    ticket_spec, adamw_spec, activations_spec, activation_record_spec, quant_spec, conductor_spec,
    runner_spec, here_spec, calls_spec, mark_spec, sitter_spec, seat_spec, forward_spec, masters_spec,
    mapping_spec, aside_spec, handle_spec, place_spec, saver_spec, rows_spec, pace_spec, watermark_spec;

/* errors.c */

/* Sets the exception for a failure that this thread has just had. Always returns NULL. */
PyObject *raise_status(sth_status status);
/* Sets the exception for a failure found by the extension itself. Always returns NULL. */
PyObject *raise_error(sth_status status, const char *object, const char *message);
/* None, or NULL with an exception unless `status` is STH_OK. */
PyObject *none_or_raise(sth_status status);

/* guard.c: an object that calls use while the GIL is released, and that may be closed meanwhile. Closing
 * refuses further calls at once; the object ends when the last call under way returns. */
typedef struct guard {
    void *owner;                /* passed to `end` */
    void (*end)(void *owner);   /* called once, without the GIL */
    void (*ended)(void *owner); /* called once after it, with the GIL; may be NULL */
    const char *name;           /* for the error of calls after close */
    Py_ssize_t users;
    bool open;
} guard;
bool guard_enter(guard *g); /* false with an exception when closed */
void guard_leave(guard *g);
void guard_close(guard *g); /* again is fine */
/* Frees an object whose own members are gone already. */
void object_free(PyObject *object);

/* `call` without the GIL, its value in `into`. */
#define WITHOUT_GIL(into, call) \
    do {                        \
        Py_BEGIN_ALLOW_THREADS  \
        (into) = (call);        \
        Py_END_ALLOW_THREADS    \
    } while (0)

/* Defines a method (METH_O) of one number of `bits` bits: call(core_of(op), number) without the GIL; None, or
 * the status as an exception. guard_of(op): the guard of an object that may be closed, or NULL. Wants
 * convert.h. */
#define NUMBER_METHOD(method, bits, core_of, guard_of, call)       \
    PyObject *method(PyObject *op, PyObject *number) {             \
        uint##bits##_t value;                                      \
        sth_status status;                                         \
        guard *guarded = guard_of(op);                             \
        if (!to_u##bits(number, &value)) return NULL;              \
        if (guarded && !guard_enter(guarded)) return NULL;         \
        WITHOUT_GIL(status, call(core_of(op), value));             \
        PyObject *result = none_or_raise(status);                  \
        if (guarded) guard_leave(guarded);                         \
        return result;                                             \
    }
#define NO_GUARD(op) NULL

/* dlpack.c: tensors of bytes, handed out as DLPack capsules. The layout is that of DLPack before 1.0. */
enum {
    DL_CPU = 1,
    DL_CUDA = 2,
    DL_ROCM = 10,
    DL_UINT = 1,
    VIEW_RANK_MAX = 8
};
typedef struct dl_device {
    int32_t type, index;
} dl_device;
typedef struct dl_dtype {
    uint8_t code, bits;
    uint16_t lanes;
} dl_dtype;
typedef struct dl_tensor {
    void *data;
    dl_device device;
    int32_t rank;
    dl_dtype dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;
typedef struct dl_managed {
    dl_tensor tensor;
    void *context;
    void (*deleter)(struct dl_managed *self);
} dl_managed;

/* How a tensor sees the first bytes of a place: what tensor_view() packs into a bytes object. */
typedef struct tensor_view {
    uint64_t bytes; /* from the first element to behind the last */
    dl_dtype dtype;
    int32_t rank;
    int64_t shape[VIEW_RANK_MAX], strides[VIEW_RANK_MAX]; /* in elements */
} tensor_view;
PyObject *make_tensor_view(PyObject *module, PyObject *args);
/* dtypes: a dict of (code, bits). 1; 0: the core cannot make such a tensor; -1 with an exception. */
int tensor_view_of(PyObject *dtypes, PyObject *dtype, PyObject *shape, PyObject *strides, tensor_view *out);

/* modes.c */
PyObject *know_modes(PyObject *module, PyObject *args);
PyObject *find_top_hooks(PyObject *module, PyObject *args);

/* trainables.c */
PyObject *choose_trainables(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *homes_table(void);
/* budget.c */
PyObject *budget_advice(PyObject *module, PyObject *args, PyObject *kwargs);

/* transfer.c */
PyObject *transfer_layout(PyObject *module, PyObject *args);
PyObject *transfer_most(PyObject *module, PyObject *args);
PyObject *lossless_estimate(PyObject *module, PyObject *args);
PyObject *transfer_segments(PyObject *module, PyObject *args);
PyObject *transfer_encode(PyObject *module, PyObject *args);
PyObject *transfer_decode(PyObject *module, PyObject *args);
PyObject *first_residents(PyObject *module, PyObject *args);
/* A copy, from PyMem_Malloc, of the segments in a bytes object; false with an exception for anything else. */
struct sth_segment;
/* Most packed bytes of a segment, with what is between it and the next. */
uint64_t largest_segment(const struct sth_segment *segments, uint32_t count, uint64_t end);
bool unpack_segments(PyObject *packed, struct sth_segment **out, uint32_t *out_count);
/* The view in `packed`, a bytes object from tensor_view(); false with an exception for anything else. */
bool unpack_tensor_view(PyObject *packed, tensor_view *out);

typedef struct byte_tensor {
    dl_managed managed;
    int64_t length, stride;
    tensor_view view; /* unused (rank -1) where it is seen as bytes */
    /* Gives back what the bytes live in: runs once, on any thread, without the GIL, perhaps after the
     * interpreter has ended. Reads `object`, `host` and `lease`. */
    void (*release)(struct byte_tensor *self);
    void *object;
    uint64_t host; /* address of an arena's bytes */
    sth_lease lease;
} byte_tensor;

byte_tensor *byte_tensor_new(void);         /* NULL with MemoryError */
void byte_tensor_drop(byte_tensor *tensor); /* one that owns nothing yet */
/* A new capsule "dltensor" of `bytes` uint8, or as `tensor->view` says. `tensor->release` is set by now: it
 * runs when the consumer, or the capsule if nobody consumed it, goes; here and now on failure. */
PyObject *byte_tensor_capsule(byte_tensor *tensor, uint64_t address, uint64_t bytes, dl_device device);

/* device.c */
typedef struct device_object {
    PyObject ob_base;
    sth_device *device;
    dl_device dl;
    uint32_t capabilities;
    uint64_t budget; /* of all runtimes together, as the user gave it; 0: not given */
    guard guard;
} device_object;
/* residency.c */
bool device_take_budget(device_object *self, PyObject *value); /* false with an exception */
PyObject *device_set_budget(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *device_assume_free(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *device_find_budget(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *device_above_ceiling(PyObject *op, PyObject *args, PyObject *kwargs);
PyObject *budget_why(void); /* name -> text */
PyObject *device_forget(PyObject *op, PyObject *none);
PyObject *device_residency(PyObject *op, PyObject *none);
PyObject *device_turn_begin(PyObject *op, PyObject *none);
PyObject *device_turn_is_first(PyObject *op, PyObject *none);
PyObject *device_turn_wait(PyObject *op, PyObject *none);
PyObject *device_turn_end(PyObject *op, PyObject *none);
PyObject *device_budget(PyObject *op, void *closure);
/* device.c */
PyObject *backends(PyObject *module, PyObject *none);
PyObject *device_count(PyObject *module, PyObject *args);

/* arena.c */
typedef struct arena_object {
    PyObject ob_base;
    sth_arena *arena;
    dl_device dl;
    PyThread_type_lock filling; /* one reserve, write or finish at a time */
    uint64_t begin, end;        /* addresses reserved so far; 0 before the first */
} arena_object;

/* checkpoint.c */
typedef struct checkpoint_object {
    PyObject ob_base;
    sth_checkpoint *checkpoint;
    PyObject *owner; /* whose checkpoint this is, kept by a use of its guard; NULL: it is the object's own */
    guard *owner_guard;
    guard guard;
} checkpoint_object;
/* A Checkpoint over another object's, whose guard the caller has entered: that use ends with the Checkpoint.
 * NULL with an exception: then it does not. */
PyObject *checkpoint_over(core_state *state, sth_checkpoint *checkpoint, PyObject *owner, guard *owner_guard);

/* pack.c */
PyObject *pack_files(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *unpack_files(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *verify_files(PyObject *module, PyObject *args, PyObject *kwargs);

/* lines.c */
PyObject *append_lines(PyObject *module, PyObject *args);

/* timeline.c */
PyObject *timeline_begin(PyObject *module, PyObject *args);
PyObject *timeline_end(PyObject *module, PyObject *none);

/* log.c */
PyObject *set_log(PyObject *module, PyObject *given);

/* mapping.c */
PyObject *refuse_writes(PyObject *module, PyObject *target);
PyObject *anything_mapped(PyObject *module, PyObject *none);

/* pages.c */
PyObject *arena_print(PyObject *module, PyObject *args);
PyObject *tells_writes(PyObject *module, PyObject *none);
PyObject *written_pages(PyObject *module, PyObject *args);
PyObject *exchange_unless(PyObject *module, PyObject *args);
PyObject *same_memory(PyObject *module, PyObject *args);

/* faults.c, for the tests */
PyObject *fault_arm(PyObject *module, PyObject *args);
PyObject *fault_disarm(PyObject *module, PyObject *none);
PyObject *fault_seen(PyObject *module, PyObject *args);
PyObject *live_blocks(PyObject *module, PyObject *none);
PyObject *assume_available(PyObject *module, PyObject *bytes);

/* activation.c */
PyObject *activation_states(void);

/* checkpoint.c */
PyObject *name_ranks(PyObject *module, PyObject *args);

/* rows.c */
PyObject *rows_bytes(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *rows_slots(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *rows_smallest(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *rows_expected(PyObject *module, PyObject *args);

/* conductor.c */
PyObject *conductor_names(void);
/* The core of a Conductor, NULL of None; false with TypeError for anything else. */
bool conductor_or_none(core_state *state, PyObject *value, sth_conductor **out);

/* allocator.c: Python callables as sth_allocator. Lives until its maker and every allocation are gone. */
typedef struct pool_object {
    PyObject ob_base;
    sth_pool *pool;
    sth_device *device; /* a reference; NULL when the memory is not pinned */
    uint32_t slabs;
} pool_object;

typedef struct py_allocator py_allocator;
py_allocator *py_allocator_new(PyObject *alloc, PyObject *free, PyObject *trim); /* NULL with an exception */
void py_allocator_release(py_allocator *allocator);              /* NULL is fine */
int py_allocator_traverse(py_allocator *allocator, visitproc visit, void *arg);
sth_allocator py_allocator_table(py_allocator *allocator);
#endif
