/* The simulated device, shared by its own files.
 *
 * One lock per device guards all of it: ranges, streams, operations, fences. In real time each created
 * stream has a worker that lets go of the lock while it sleeps or moves bytes; in virtual time everything
 * happens on the calling thread under the lock.
 *
 *   sim.c       opening, closing, the table of operations
 *   enter.c     the way into a call: forked children, fault points
 *   ops.c       operations and fences: their pools and effects
 *   realtime.c  carries operations out as wall time passes
 *   virtual.c   carries operations out in the order of a computed clock
 *   wait.c      waits for operations, by either way
 *   memory.c    device memory, rings, registered host memory, poison
 *   stream.c    streams and submission
 *   work.c      what is submitted: copies, poison, expansion, computing
 *   event.c     events */
#ifndef STHI_SIM_H
#define STHI_SIM_H
#include "base/thread.h"
#include "stagehand/backend.h"

/* Nothing takes longer than an hour, so that times never overflow. */
#define SIM_LONGEST_NS (INT64_C(3600) * 1000000000)

enum { SIM_H2D, SIM_D2H, SIM_LINKS };

/* One recording of an event. Waits hold the fence and not the event, so that recording again or
 * destroying the event leaves earlier waits alone. */
typedef struct sim_fence {
    struct sim_fence *next; /* in the pool */
    unsigned refs;
    bool done;
    int64_t time_ns; /* valid once done */
} sim_fence;

struct sth_event {
    sim_fence *last; /* the latest recording; NULL: never recorded */
    bool timing;
};

typedef enum sim_op_kind {
    SIM_OP_COPY,
    SIM_OP_COMPUTE,
    SIM_OP_RECORD,
    SIM_OP_WAIT,
    SIM_OP_POISON,
    SIM_OP_EXPAND
} sim_op_kind;

typedef struct sim_op {
    struct sim_op *next; /* in its stream or in the pool */
    sim_op_kind kind;
    int link;            /* COPY */
    void *dst;           /* COPY, POISON */
    const void *src;     /* COPY */
    uint64_t bytes;      /* COPY, POISON */
    int64_t duration_ns; /* COMPUTE, EXPAND */
    sth_expand expand;  /* EXPAND */
    sim_fence *fence;    /* RECORD, WAIT: a counted reference */
    uint64_t seq;        /* order of submission on the device */
    int64_t ready_ns;    /* when it was submitted: it starts no earlier */
    bool started;        /* virtual time */
    int64_t end_ns;      /* virtual time, once started */
} sim_op;

struct sim_device;
typedef struct sim_stream {
    struct sim_stream *next;
    struct sim_device *device;
    sth_stream id;
    sim_op *head, *tail; /* the head stays in place while it is carried out */
    int64_t free_ns;     /* when the previous operation ended */
    bool closing;        /* real time: the worker ends when its queue is empty */
    sthi_cond work;
    sthi_thread worker;
} sim_stream;

/* Memory that is live: device allocations (a ring spans twice its bytes) or registered host memory. */
typedef struct sim_range {
    uintptr_t base;
    uint64_t bytes, span;
    bool ring;
} sim_range;

typedef struct sim_ranges { /* sorted by base, disjoint */
    sim_range *items;
    size_t count, capacity;
} sim_ranges;

/* Freed memory that stays mapped and poisoned for a while, so that late readers see NaN. */
enum { SIM_MORGUE_SLOTS = 64, SIM_MORGUE_BYTES = 64 << 20 };
typedef struct sim_morgue {
    sim_range slots[SIM_MORGUE_SLOTS];
    size_t first, count;
    uint64_t bytes;
} sim_morgue;

typedef struct sim_device {
    uint32_t capabilities; /* STH_CAP_ bits */
    sth_sim_options options;
    unsigned fork_depth;
    sthi_mutex lock;
    sthi_cond done; /* real time: an operation has ended */

    sim_ranges memory, pins;
    sim_morgue morgue;
    uint64_t memory_used, pinned;

    sim_stream caller;   /* sth_stream 0 */
    sim_stream *streams; /* the caller's included */
    sth_stream next_id;
    uint64_t next_seq;
    int64_t link_free_ns[SIM_LINKS];
    int64_t now_ns;          /* virtual time */
    double copy_ns_per_byte; /* real time: what the host's memcpy takes, for a late start */
    sim_op *op_pool;
    sim_fence *fence_pool;
} sim_device;

static inline sim_device *sthi_sim_of(sth_backend_device *d) { return (sim_device *)d; }
static inline int64_t sthi_sim_max(int64_t a, int64_t b) { return a > b ? a : b; }

/* enter.c */
sth_status sthi_sim_check_fork(const sim_device *d);
/* For calls that reach the device: fails in a forked child or when a fault is armed. */
sth_status sthi_sim_enter(const sim_device *d);
sth_status sthi_sim_enter_wait(const sim_device *d); /* of a call that asks whether work has ended */

/* ops.c; all locked */
sim_fence *sthi_sim_fence_take(sim_device *d); /* one reference; NULL: no host memory */
void sthi_sim_fence_drop(sim_device *d, sim_fence *f); /* NULL is fine */
sim_op *sthi_sim_op_take(sim_device *d);               /* not initialized; NULL: no host memory */
/* Takes the head off its stream once it has been carried out. */
void sthi_sim_retire(sim_device *d, sim_stream *s);
/* Time that a copy holds the link. */
int64_t sthi_sim_link_ns(const sim_device *d, uint64_t bytes);
/* Moves the bytes, poisons, marks the fence as done at `at_ns`. No lock is needed. */
void sthi_sim_effect(const sim_op *op, int64_t at_ns);

/* realtime.c; all locked on entry and return, the lock is let go while time passes */
void *sthi_sim_worker(void *stream);
void sthi_sim_real_inline(sim_device *d, sim_op *op); /* on the calling thread */
void sthi_sim_real_wait(sim_device *d, const sim_fence *fence);

/* virtual.c; all locked */
void sthi_sim_advance(sim_device *d, int64_t to_ns); /* everything due up to then happens, in order */
sth_status sthi_sim_step(sim_device *d);             /* the next thing happens; INTERNAL if there is none */
sth_status sthi_sim_virtual_wait(sim_device *d, const sim_fence *fence);

/* wait.c; locked */
/* Waits for the operations enqueued so far: on `only`, or on all streams where it is NULL. */
sth_status sthi_sim_drain(sim_device *d, const sim_stream *only);

/* memory.c; the caller holds no lock unless the line says so */
sth_status sthi_sim_alloc(sth_backend_device *, uint64_t bytes, sth_devptr *out);
void sthi_sim_free(sth_backend_device *, sth_devptr, uint64_t bytes);
uint64_t sthi_sim_ring_granularity(sth_backend_device *);
sth_status sthi_sim_ring_alloc(sth_backend_device *, uint64_t bytes, sth_devptr *out);
void sthi_sim_ring_free(sth_backend_device *, sth_devptr, uint64_t bytes);
sth_status sthi_sim_host_register(sth_backend_device *, void *p, uint64_t bytes, sth_devptr *out_alias);
void sthi_sim_host_unregister(sth_backend_device *, void *p, uint64_t bytes);
sth_status sthi_sim_check_live(const sim_device *d, sth_devptr p, uint64_t bytes); /* locked */
void sthi_sim_memory_fini(sim_device *d);

/* stream.c */
sth_status sthi_sim_stream_create(sth_backend_device *, int priority, sth_stream *out);
void sthi_sim_stream_destroy(sth_backend_device *, sth_stream);
sth_status sthi_sim_stream_synchronize(sth_backend_device *, sth_stream);
void sthi_sim_streams_fini(sim_device *d); /* carries out what is enqueued, ends the workers */
sth_status sthi_sim_stream_find(sim_device *d, sth_stream id, sim_stream **out); /* locked */
/* Locked. Both take over the reference to op.fence, also on failure. */
sth_status sthi_sim_submit(sim_device *d, sim_stream *s, sim_op op);
sth_status sthi_sim_submit_to(sim_device *d, sth_stream id, sim_op op);

/* work.c */
sth_status sthi_sim_copy_h2d(sth_backend_device *, sth_devptr dst, const void *src, uint64_t bytes, sth_stream);
sth_status sthi_sim_copy_d2h(sth_backend_device *, void *dst, sth_devptr src, uint64_t bytes, sth_stream);
sth_status sthi_sim_copy_d2h_foreign(sth_backend_device *, void *dst, sth_devptr src, uint64_t bytes, sth_stream);
sth_status sthi_sim_copy_h2d_foreign(sth_backend_device *, sth_devptr dst, const void *src, uint64_t bytes, sth_stream);
sth_status sthi_sim_expand_ready(sth_backend_device *);
sth_status sthi_sim_expand(sth_backend_device *, const sth_expand *, sth_stream);
void sthi_sim_poison(sth_backend_device *, sth_devptr, uint64_t bytes, sth_stream);
sth_status sthi_sim_compute_on(sth_backend_device *, sth_stream, int64_t ns);

/* event.c */
sth_status sthi_sim_event_create(sth_backend_device *, bool timing, sth_event **out);
void sthi_sim_event_destroy(sth_backend_device *, sth_event *);
sth_status sthi_sim_event_record(sth_backend_device *, sth_event *, sth_stream);
sth_status sthi_sim_stream_wait(sth_backend_device *, sth_stream, sth_event *);
sth_status sthi_sim_event_query(sth_backend_device *, sth_event *, bool *out_done);
sth_status sthi_sim_event_synchronize(sth_backend_device *, sth_event *);
sth_status sthi_sim_event_elapsed_ns(sth_backend_device *, sth_event *a, sth_event *b, int64_t *out);
#endif
