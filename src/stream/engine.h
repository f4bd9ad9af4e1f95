/* The weight runtime from the inside: the shell round core/. One lock (rt->lock) guards everything but the
 * stack of ended leases, which is atomic so that destructors can push to it. The lock is dropped while
 * waiting for disk, for slabs and for leases; it is held while waiting for the device where a step ends
 * (copies that read writable images) and where a plan changes (docs/locking.md).
 *
 *   fingerprint.c  host images that were written without a word
 *   feed.c     what to load next (plan, residents, static lookahead) -> queue of requests
 *   slots.c    a place's life: events, eviction, what is ordered behind what
 *   bundle.c   neighbouring small units, planned as one
 *   issue.c    requests and demand loads -> places, copies
 *   reader.c   staged sources: disk or pageable memory -> pinned slabs, ahead of issue
 *   source.c   a chunk of a unit from its files, each read in its way
 *   from_store.c  a chunk of a unit from a user's store
 *   expand.c   units that cross the link packed
 *   keep.c     units of files that stay in host memory
 *   lease.c    acquire, release, what a use counts as
 *   watermarks.c  static policy: when units are evicted, and which
 *   step.c     begin, end, the recorded order, when to plan anew
 *   geometry.c plan -> extents of device memory
 *   timing.c   timing events -> compute times, metrics
 *   image.c    another host image for a unit
 *   link.c     the link's rate, as steps show it
 *   lanes.c    the conductor: when copies are due, and who else is on the link
 *   graph.c    a step inside a graph of the device's
 *   residency.c  a runtime among others on its device: asking for room, giving way, parking, coming back
 *   protect.c  who stays: keeping, reservations, guests
 *   runtime.c  life, units, options; report.c statistics; verify.c read-back */
#ifndef STHI_STREAM_ENGINE_H
#define STHI_STREAM_ENGINE_H
#include <stdatomic.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/thread.h"
#include "conductor/arbiter.h"
#include "core/places.h"
#include "core/residency.h"
#include "device/device.h"
#include "stagehand/graph.h"
#include "stagehand/runtime.h"
#include "store/checkpoint.h"
#include "store/fetch.h"
#include "store/pool.h"
#include "stream/arena.h"
#include "stagehand/transfer.h"
#include "telemetry/telemetry.h"

enum {
    STHI_SLOT_STREAMS = 8,   /* different streams that may use one place before it is refilled */
    STHI_REQUEST_CAP = 64,   /* loads queued ahead of issue */
    STHI_TOGETHER_MOST = 8 << 20, /* bytes of neighbouring units that are copied together */
    STHI_PEAK_STEPS = 8,     /* steps whose leases say what the next one needs at once */
    STHI_UNWRITTEN_STEPS = 16, /* without a write, after which a unit is not one that is written any more */
    STHI_TIMED_STEPS = 4,    /* steps whose timing events may be outstanding */
    STHI_EXTENT_CAP = 4096,
    STHI_FETCHER_CAP = 32,   /* fetchers kept for the next read */
    STHI_STAGES = 3,         /* two for planned loads, one for those on demand */
    STHI_WRITERS = 3,        /* streams that fill places */
    STHI_TRACE_CAP = 64      /* ranges that were let go and that one copy stream is not behind yet */
};

#define STHI_DEV(rt, op, ...) ((rt)->device->ops->op((rt)->device->self, __VA_ARGS__))

typedef struct sthi_unit {
    char *name, *group;
    uint64_t bytes;
    uint32_t flags;
    sth_unit_state state;
    int32_t slot;            /* STHI_NO_SLOT when not on the device */
    const uint8_t *host;
    uint64_t host_bytes;     /* of the image; zeros follow up to `bytes` */
    uint64_t fingerprint;    /* of the image, when the copy on the device was issued */
    uint64_t seen_epoch;     /* when the image was last sampled */
    sth_arena *arena;
    sth_checkpoint *checkpoint;
    sth_store *store;        /* whose layers the ranges name; NULL: they name files of `checkpoint` */
    sth_file_range *ranges;
    uint32_t range_count;
    sth_segment *segments;   /* [segment_count] of the packed image that `host` or the ranges are; NULL: not packed */
    uint32_t segment_count;
    uint64_t packed_bytes;
    uint64_t wire_bytes;     /* sum of its pieces, once it is known that the device expands */
    const uint8_t *master;   /* that the packed image was encoded from; NULL: unknown */
    uint64_t packed_print;   /* its fingerprint then */
    bool repack;             /* it was written since */
    sth_unit_tensor *tensors; /* [tensor_count], names behind them; for errors and samples */
    uint32_t tensor_count;
    bool direct;             /* the host image is pinned: copied from where it is */
    uint8_t *kept;           /* where its bytes are kept in host memory, or are going to be; NULL: nowhere */
    uint8_t *kept_chunks;    /* [chunks] states, see keep.c */
    uint64_t kept_left;      /* chunks that are not there yet */
    bool in_ram;             /* all are: `host` is that image */
    uint32_t bundle;         /* of the plan in force, whose units are loaded together; STH_NONE: it is in none */
    bool resident;           /* by plan, at this home: */
    uint32_t home_extent;
    uint64_t home_offset;
    uint32_t first_use;      /* position in the order, STH_NONE if not in it */
    uint64_t last_step;      /* step of its last use + 1; 0 = never */
    bool used_before;        /* in the step before the open one */
    bool changed;            /* marked written since the last step began, and not copied since */
    bool written;            /* between steps, as a rule: plans count with it. See step.c */
    uint8_t unwritten_steps; /* whole ones since it was found changed; no further than STHI_UNWRITTEN_STEPS */
    uint32_t regular_steps;  /* steps in a row that used it, while it counts as on demand */
    uint64_t copies;
    double h2d_ns, compute_ns, stall_ns; /* sums over the counts below */
    uint64_t h2d_count, use_count;
} sthi_unit;

/* Events of a slot, beside its record in places. */
typedef struct sthi_slot_sync {
    sth_event *ready;       /* recorded behind its copy */
    bool arrived;            /* and it was seen that the device has passed it */
    bool awaited;            /* a use of the pass is enqueued behind the copy, which reads its image */
    uint64_t fill;           /* number of the load, in the order in which slots were opened */
    sth_stream filled_by;
    sth_event *released[STHI_SLOT_STREAMS]; /* recorded behind the last use on users[i] */
    sth_stream users[STHI_SLOT_STREAMS];
    bool using_now[STHI_SLOT_STREAMS]; /* has a use that has not ended */
    uint32_t user_count, last_user;
    uint32_t copy_number, use_number; /* in a capture: of its last copy, of the event behind its last use */
    atomic_uint drops;       /* ended leases not handled yet */
    int32_t next_dropped;
    uint32_t timed_use;      /* in the current step's timing, STH_NONE if none */
    uint64_t timed_step;
    uint32_t use;            /* of the order, for which it is leased; STH_NONE: none that is expected */
    uint64_t use_step;
    uint64_t lap;            /* of the load that filled it: whose uses `uses_left` counts */
} sthi_slot_sync;

typedef struct sthi_request {
    uint32_t unit;
    uint32_t extent;         /* STH_NONE: chosen when it is issued */
    uint64_t offset;
    uint64_t sequence, lap;  /* sequence: lap x loads + index of the load; planned loads only */
    uint32_t uses;           /* planned uses that it serves */
    int32_t slot;            /* opened when its first chunk is issued */
    bool resident, planned, kept, staged, failed;
    uint64_t read;           /* bytes handed to readers */
} sthi_request;

/* A range that was let go: only the writers in `behind` are ordered behind whoever had it. */
typedef struct sthi_trace {
    uint32_t extent;
    uint64_t offset, bytes;
    sth_stream by;
    uint32_t behind;         /* bits of writers; `by` is one */
    sth_event *event;       /* recorded on `by` when it was let go */
} sthi_trace;

/* Copies on one stream that read host images which the caller may write after the step. */
typedef struct sthi_master_reads {
    bool pending;
    sth_event *event;       /* behind the newest of them; NULL: the stream itself must be waited for */
} sthi_master_reads;

/* A copy of a slot that is gone, behind which a use of the pass is enqueued: the newest on its stream. */
typedef struct sthi_awaited {
    sth_event *event;
    uint64_t fill;
} sthi_awaited;
enum { STHI_AWAITED = 3 }; /* of the copy stream, of the demand stream, of others */

/* A slab being filled for the queue's staged requests, in the order of issue. */
typedef enum sthi_job_state { STHI_JOB_READING, STHI_JOB_READY, STHI_JOB_FAILED } sthi_job_state;
typedef struct sthi_job {
    uint64_t ticket;         /* of the request: its number in the queue's history */
    uint32_t unit;
    sth_slab slab;
    uint64_t begin, bytes;   /* range of the place */
    uint32_t shift;          /* bytes of the slab in front of it */
    sthi_job_state state;
    bool cancelled;
} sthi_job;

/* A checkpoint that units stream from, opened for reading as its files suit it. */
typedef struct sthi_source {
    sth_checkpoint *checkpoint;
    sthi_access *files;      /* [file_count]; .file is NULL where no unit needs the file */
} sthi_source;

/* A slab whose copy to the device is under way. */
typedef struct sthi_flight {
    sth_slab slab;
    sth_stream stream;
    sth_event *emptied;     /* NULL: `stream` itself must be waited for */
    bool lost;               /* the device failed to say whether the copy is done, when it was asked last */
} sthi_flight;

/* Whether steps take what the plan says, see link.c. */
typedef struct sthi_link_watch {
    bool changed;            /* the rate did, since the plan was looked at */
    uint32_t steps;          /* in a row that took longer, or that took less */
    double took_ns;          /* all of them together */
    uint32_t patience, calm; /* steps to leave alone after one that no rate explains; of them left */
} sthi_link_watch;

typedef struct sthi_timed_copy {
    uint32_t unit;
    bool last;               /* the unit's copy ends with it */
    bool demand;             /* on the demand stream, else the copy stream */
    bool joined;             /* the unit's bytes were in the interval of the record before it; no events of its own */
    sth_event *begin, *end;
} sthi_timed_copy;

typedef struct sthi_timed_use {
    uint32_t unit;
    bool started, waited;    /* it has begun; `start` is recorded, else it began as it arrived */
    bool finished, late;     /* `done` is recorded; behind the step's `end` */
    sth_event *arrive, *start, *done; /* before the wait for its copy, behind it, behind its work */
    sth_stream done_on;
} sthi_timed_use;

typedef struct sthi_timed_step {
    uint64_t epoch;          /* of the order that was followed */
    uint32_t uses, copies, use_cap, copy_cap;
    sthi_timed_use *use;     /* [use_cap] */
    sthi_timed_copy *copy;   /* [copy_cap] */
    uint64_t copied_bytes;   /* in `copy`: not those that were issued between steps */
    sth_event *end;
    sth_stream end_on;
    bool ended;              /* `end` is recorded, and no use has come since */
    bool copy_open;          /* copy[copies] has begun */
    bool waiting;            /* closed, its events are not all done yet */
    bool whole;              /* followed the order from end to end */
    bool writes_expected;    /* as of the runtime */
    uint32_t plan;           /* the runtime's plan_count then */
    sth_step_metrics metrics;
} sthi_timed_step;

/* Device memory in which packed bytes arrive. */
typedef struct sthi_stage {
    sth_event *full;        /* behind the copy into it */
    sth_event *emptied;     /* behind the expansion out of it */
    bool used, unsure;       /* unsure: `emptied` is not recorded behind its last expansion */
} sthi_stage;

/* What is copied at once: [begin, begin + bytes) of a place from [from, from + from_bytes) of its source. */
typedef struct sthi_piece_of {
    uint64_t begin, bytes, from, from_bytes;
    uint32_t segment, segments; /* packed: these are expanded */
} sthi_piece_of;

/* What the planner is given where some units go in bundles. */
typedef struct sthi_bundles {
    uint32_t *of_unit;       /* [of the input: units] */
    uint32_t *place;         /* [the same] where the unit lies in its bundle's place */
    sth_plan_unit *units;    /* [unit_count] bundles, those of a single unit included */
    sth_plan_use *uses;      /* [use_count] */
    uint32_t *begin;         /* [use_count + 1] the use of the order that each begins with */
    uint32_t unit_count, use_count;
    uint64_t largest;        /* bytes of the largest with more than one unit */
    sth_plan *plan;          /* made for these units and uses */
} sthi_bundles;

/* Up to which number a stream waits for what another one does, inside a capture: there handles do not change hands. */
typedef struct sthi_behind {
    sth_stream stream;       /* of the two the caller's */
    uint32_t number;
} sthi_behind;

/* How far the request at the queue's head got. */
typedef enum sthi_issue {
    STHI_ISSUE_DONE,
    STHI_ISSUE_NO_PLACE,
    STHI_ISSUE_NOT_READ,
    STHI_ISSUE_FAILED
} sthi_issue;

typedef enum sthi_graph_state { STHI_GRAPH_IDLE, STHI_GRAPH_CAPTURING, STHI_GRAPH_REPLAYING } sthi_graph_state;

struct sth_runtime {
    sth_device *device;
    sth_runtime_options options;
    char *name;               /* for messages */
    sthi_member member;       /* of the device's account; guarded by the account's lock */
    uint64_t limit;           /* bytes that the account left for the plan in force, `reserved` included */
    atomic_bool parked;       /* no places: whoever begins a step, or acquires, brings the runtime back first */
    bool settled;             /* it has asked for its budget since it was sealed or parked */
    bool arriving;            /* a thread is about to bring it back */
    atomic_int refs;          /* 1 for the owner, 1 per lease */
    unsigned fork_depth;      /* of the process that made it: in a child no lock may be taken */
    sthi_mutex lock;
    sthi_cond changed;        /* for callers: a read or a load ended, the queue moved, shut, callers left */
    sthi_cond work;           /* for readers: something to read, or room to read it into */
    uint32_t idle_readers;
    uint32_t callers;         /* inside acquire, verify or synchronize: destroy waits for them */
    bool seal_tried, sealed, shut;

    sthi_unit *units;
    uint32_t unit_count, unit_cap;
    uint64_t all_bytes;       /* of all units */

    sthi_places places;
    sthi_slot_sync *sync;
    atomic_int dropped;       /* stack of slots with ended leases, -1 = empty */
    uint64_t leased_bytes;
    uint64_t leased_peak[STHI_PEAK_STEPS]; /* at once, in the last steps; [step % STHI_PEAK_STEPS] */
    uint32_t ring_extent;     /* STH_NONE if none */
    uint32_t demand_extent;   /* STH_NONE if none */
    uint64_t *extent_key;     /* hash of what the plan put there; 0 = nothing */
    uint64_t device_peak;
    uint64_t chunk;
    uint32_t max_inflight; /* static policy: loads ahead under way at once; 0: no limit */
    sthi_trace traces[STHI_TRACE_CAP];      /* oldest first */
    uint32_t trace_ranges;
    bool unordered;           /* a trace could not be kept: wait for both copy streams before the next copy */

    sth_event **events;      /* free events without timing */
    uint32_t event_count, event_cap;
    sth_stream copy_stream, demand_stream;
    sth_stream expand_stream; /* 0: nothing is expanded on the device */
    bool expands;             /* packed units are */
    char expand_error[512];   /* why they are not */
    sth_devptr stages;        /* STHI_STAGES of stage_bytes each; 0: not allocated now */
    uint64_t stage_bytes;
    sthi_stage stage[STHI_STAGES];
    uint32_t next_stage;
    sthi_lane *copy_lane, *demand_lane; /* NULL without a conductor */

    /* plan */
    sth_plan *plan;           /* by units */
    sthi_bundles *bundles;    /* that it was made of; NULL: each unit stands for itself */
    sth_plan_unit *plan_units;
    sth_plan_use *order;      /* the order that the plan is made for */
    uint32_t *order_next;     /* next use of the same unit, within the step */
    uint32_t *order_held;     /* uses, from each one on, until its unit was let go; 0: not seen */
    bool plan_holds;          /* plans count with `order_held`: one within the budget can */
    uint32_t order_count, order_cap;
    uint32_t *load_uses;      /* [plan->load_count] */
    uint32_t kept_end;        /* uses before this one may be served by loads of the lap before */
    uint32_t kept_next;       /* those before it are, or their units are queued, or past */
    bool order_recorded;      /* not the first guess */
    uint64_t order_epoch;     /* counts changes of `order` */
    uint64_t last_trace;      /* hash of the last deviating step's order */
    uint32_t deviations_in_a_row;
    bool program_on;          /* following the plan */
    uint64_t lap;             /* of the plan: steps begun since it was installed */
    uint64_t next_load;       /* sequence number to queue next */
    uint32_t cursor;          /* next expected use */
    uint32_t *residents;      /* still to load, by first use */
    uint32_t resident_count, resident_next;
    bool timings_new;         /* compute times changed since the plan was made */
    uint32_t timings_seen;    /* steps whose times went into `order` */
    bool marked;              /* some unit is `changed` */
    bool writes_age;          /* some unit's `unwritten_steps` is below its most */
    uint32_t written_units;
    bool writes_expected;     /* what was written before the open step is what plans count with */
    bool writes_new;          /* units have become written, or are no more, since the plan was looked at */
    uint64_t writes_next;     /* step at whose end it is looked at for that, at the earliest */
    uint32_t strays;          /* loads on demand in this step that the plan should have made */
    uint32_t stray_steps;     /* steps in a row that had some */
    uint32_t odd_steps;       /* in a row, whose compute was unlike that in `order` */
    bool replan;              /* wanted at the next step's end */
    sth_status plan_refused;  /* why the last plan that was wanted is not there: none fits. OK: it is */
    double link;              /* bytes/s: of copies at seal, then of the steps' */
    sthi_link_watch link_watch;
    uint32_t plan_count;      /* plans that were taken */
    uint64_t zombie_bytes;    /* extents kept only by leases */

    /* graphs */
    uint64_t edition;         /* counts changes of extents and images, from 1: what a graph's addresses depend on */
    bool program_waits;       /* a graph interrupted the plan: the next ordinary step begins it again */
    sthi_graph_state graph;
    uint64_t graph_thread;    /* which captures or replays */
    bool graph_forked, graph_joined;
    uint32_t copy_number, use_number; /* in this capture: copies on the copy stream, events behind uses */
    sthi_behind user_behind, copies_behind; /* of copies; of uses */
    sth_runtime_stats before_graph; /* a capture counts for nothing: nothing is copied */

    /* queue of requests: history numbers [queue_head, queue_tail) */
    sthi_request queue[STHI_REQUEST_CAP];
    uint64_t queue_head, queue_tail;
    sthi_issue head_state;

    /* staging */
    sth_arena *kept_arena;    /* of units that are kept in host memory; NULL: none are */
    double read_rate;         /* bytes per second that reads bring together; 0: not known */
    uint64_t read_bytes;      /* read into slabs in this step, and the time in which at least one read was under way */
    int64_t read_ns, reads_since;
    uint32_t reads_under_way;
    sthi_source *sources;     /* [source_count] checkpoints that units stream from */
    uint32_t source_count;
    sthi_fetcher *fetchers[STHI_FETCHER_CAP]; /* that no thread uses now */
    uint32_t fetcher_count;
    sth_pool *pool;           /* options.pool, or own_pool */
    sth_pool *own_pool;
    uint32_t slab_count;
    sthi_job *jobs;           /* [slab_count], history numbers [job_head, job_tail) */
    uint64_t job_head, job_tail;
    sthi_flight *flights;     /* [slab_count], history numbers [flight_head, flight_tail) */
    uint64_t flight_head, flight_tail;
    sthi_thread *readers;
    uint32_t reader_count;
    uint32_t needy;           /* callers that wait for a slab, or for what is to be read into one */
    bool stop_readers;
    bool pool_shut;           /* the pool gives no slabs any more */
    uint64_t slab_failures;   /* times that a reader found no slab because the device failed: callers that wait for
                                 reads look at it */

    /* step */
    bool step_open;
    bool step_implicit;
    bool step_deviated;
    bool step_paused;         /* the caller may write images; the next acquire goes on with the step */
    uint64_t step;            /* number of the current or next step */
    uint64_t epoch;           /* counts the times when the caller's code may have written images */
    uint32_t *trace;
    uint32_t trace_count, trace_cap;
    bool trace_overflow;
    sth_stream last_stream;
    sthi_timed_step timed[STHI_TIMED_STEPS];
    bool timing_short;       /* a step had more uses or copies than records */
    uint64_t timed_head, timed_tail; /* closed ones not yet read, oldest first */
    sthi_timed_step *timing;  /* of the open step, NULL when none is free */
    sth_step_metrics current; /* counters of the open step */
    sthi_master_reads masters[2]; /* of the copy stream and of the demand stream */
    sthi_awaited awaited[STHI_AWAITED];
    bool awaiting;                /* a use of the pass may be behind a copy that reads its image */
    uint64_t fills;               /* slots opened so far */
    uint32_t masters_in_read;     /* reads of writable images under way on the host */
    uint32_t images_in_read;      /* reads of any source under way there */

    sthi_telemetry *telemetry;
    sthi_error_copy telemetry_error; /* of its file; the end of the step says it */
    sth_runtime_stats stats;
};

/* slots.c. Lock held throughout */
sth_status sthi_event_take(sth_runtime *rt, sth_event **out);
void sthi_event_give(sth_runtime *rt, sth_event *event);
sth_status sthi_open_slot(sth_runtime *rt, uint32_t unit, uint32_t extent, uint64_t offset, sth_stream by,
                          int32_t *out);
/* Makes stream `behind` wait for all that touches the slot: its copy and the uses that have ended. */
sth_status sthi_wait_for_slot(sth_runtime *rt, int32_t slot, sth_stream behind);
void sthi_forget_users(sth_runtime *rt, int32_t slot);
sth_status sthi_evict(sth_runtime *rt, int32_t slot, sth_stream behind);
void sthi_abandon_slot(sth_runtime *rt, int32_t slot);       /* a load that will not be finished */
void sthi_retire_slot(sth_runtime *rt, int32_t slot);        /* waits for all that touches it */
void sthi_forget_slot(sth_runtime *rt, int32_t slot);        /* nothing touches it */
bool sthi_slot_busy(const sthi_slot *slot);                  /* leased, or being filled */
bool sthi_slot_idle(sth_runtime *rt, int32_t slot);          /* nothing touches it any more */
bool sthi_slot_arrived(sth_runtime *rt, int32_t slot);       /* its bytes are there, as far as the host has seen */
/* Evicts whoever has the range and makes the slot's stream wait for all that touches it. */
sth_status sthi_claim_range(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes);
bool sthi_range_takeable(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes);
bool sthi_place_takeable(const sth_runtime *rt, uint32_t extent, uint64_t offset, uint64_t bytes);
/* Takeable, and the slot's stream need not wait for it. */
bool sthi_range_free(sth_runtime *rt, int32_t slot, uint64_t begin, uint64_t bytes);
void sthi_forget_traces(sth_runtime *rt, uint32_t extent);   /* of an extent that is freed; STH_NONE: all */
/* A copy of the unit's image is enqueued on the stream. */
void sthi_master_read(sth_runtime *rt, uint32_t unit, sth_stream stream);
sth_status sthi_masters_wait(sth_runtime *rt);               /* may drop the lock */

/* issue.c */
/* Issues what is possible; nothing up to the wanted unit waits for others. STH_NONE: nobody waits for any. Lock held */
void sthi_pump_for(sth_runtime *rt, uint32_t wanted);
static inline void sthi_pump(sth_runtime *rt) { sthi_pump_for(rt, STH_NONE); }
sth_status sthi_demand_load(sth_runtime *rt, uint32_t unit); /* lock held; may drop it to read */
sth_status sthi_refresh(sth_runtime *rt, int32_t slot);      /* copies a stale slot again. The same */
sth_status sthi_load_home(sth_runtime *rt, uint32_t unit);   /* a resident that is not there. The same */
void sthi_cancel_queue(sth_runtime *rt);           /* lock held */
/* Enqueues a copy to the device, through the conductor where there is one. */
sth_status sthi_copy_bytes(sth_runtime *rt, uint32_t unit, sth_devptr to, const uint8_t *from, uint64_t bytes,
                           sth_stream stream);
sth_stream sthi_copies_on(const sth_runtime *rt, int32_t slot); /* the stream on which its source is read */
void sthi_interval_end(sth_runtime *rt);           /* closes the copy interval that is being timed */
/* Distance in uses from now until the unit is used next; a whole step if it is not in the order. */
/* A step that was timed took `took_ns`. */
void sthi_link_follow(sth_runtime *rt, const sthi_timed_step *t, double took_ns);
uint32_t sthi_distance(const sth_runtime *rt, uint32_t unit);

/* runtime.c: the name of the tensor that a byte of the place belongs to; the unit's where none was given */
const char *sthi_tensor_name(const sthi_unit *u, uint64_t place_offset);

/* expand.c */
bool sthi_packed_on_link(const sth_runtime *rt, const sthi_unit *u);
uint64_t sthi_source_bytes(const sth_runtime *rt, const sthi_unit *u); /* that cross the link */
sthi_piece_of sthi_next_piece(const sth_runtime *rt, const sthi_unit *u, uint64_t begin);
uint64_t sthi_stages_bytes(const sth_runtime *rt);
uint64_t sthi_held_bytes(const sth_runtime *rt);   /* of the device, now, without `reserved` */
sth_status sthi_expand_open(sth_runtime *rt);      /* at seal; decides whether the device expands */
void sthi_expand_close(sth_runtime *rt);
sth_status sthi_stages_alloc(sth_runtime *rt);     /* where there are none */
void sthi_stages_free(sth_runtime *rt);
/* Copies a piece's packed bytes and expands them; its range is claimed. */
sth_status sthi_expand_piece(sth_runtime *rt, int32_t slot, const sthi_piece_of *piece, const uint8_t *from);
/* Not held. The expanded bytes [begin, begin + bytes) of a packed unit. */
sth_status sthi_expand_on_host(const sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *out);
sth_status sthi_repack(sth_runtime *rt, uint32_t unit); /* where its master was written */

/* bundle.c. Lock held */
/* *out is NULL where there are none. `in` is by units. */
sth_status sthi_bundles_make(const sth_runtime *rt, const sth_plan_input *in, sthi_bundles **out);
void sthi_bundles_destroy(sthi_bundles *b);          /* NULL is fine */
/* The same input by bundles, as long as they are there; what the uses take is what `in` says. */
void sthi_bundles_input(sthi_bundles *b, const sth_plan_input *in, sth_plan_input *out);
/* Their plan by units. */
sth_status sthi_bundles_part(const sthi_bundles *b, const sth_plan_input *in, sth_plan **out);
/* Bytes that one copy of neighbours brings at most: the first of them waits for the last. */
uint64_t sthi_most_together(uint64_t budget);
/* b's begins where a's ends, and both are copied as they are. */
bool sthi_images_join(const sthi_unit *a, const sthi_unit *b);
/* All of [from, from + bytes), which the unit's image is a part of, was pinned at once: a driver takes no more. */
bool sthi_one_window(const sth_runtime *rt, const sthi_unit *u, const uint8_t *from, uint64_t bytes);
/* Bytes from the unit's image on that one copy may take, as the longest bundle within such a budget does. */
uint64_t sthi_bytes_in_a_row(const sth_runtime *rt, uint32_t unit, uint64_t room);

/* feed.c */
void sthi_feed(sth_runtime *rt);
sthi_request *sthi_queued(sth_runtime *rt, uint32_t unit); /* its request in the queue, or NULL */
bool sthi_may_prefetch(const sth_runtime *rt, uint32_t unit, uint64_t lap);

/* reader.c. Lock held unless the line says otherwise */
sth_status sthi_staging_open(sth_runtime *rt);
void sthi_staging_stop(sth_runtime *rt);           /* not held: ends the readers */
void sthi_staging_close(sth_runtime *rt);          /* frees the rest, when no copy is under way any more */
bool sthi_read_one(sth_runtime *rt);               /* dropped to read; false: nothing to do */
/* Not held. Where there are no readers: fills slabs ahead of need, as far as there are free ones. */
void sthi_read_ahead(sth_runtime *rt);
/* Bytes of the unit's place from its source into a slab, `*out_shift` bytes behind its begin. Dropped meanwhile. */
sth_status sthi_read_slab(sth_runtime *rt, uint32_t unit, uint64_t begin, uint64_t bytes, sth_slab slab,
                          uint32_t *out_shift);
void sthi_jobs_cancel(sth_runtime *rt, uint64_t before_ticket); /* jobs of requests that left the queue */
void sthi_jobs_trim(sth_runtime *rt);
void sthi_reads_rewind(sth_runtime *rt);           /* all unissued reads again, in order */
sth_status sthi_slab_wait(sth_runtime *rt, sth_slab *out);             /* dropped to wait */
void sthi_slab_fly(sth_runtime *rt, sth_slab slab, sth_stream stream); /* free once `stream` is past it */
void sthi_need_slabs(sth_runtime *rt, int change);
void sthi_readers_wake(sth_runtime *rt);
void sthi_read_rate_settle(sth_runtime *rt);       /* at a step's end */

/* keep.c. Lock held */
void sthi_keep_choose(sth_runtime *rt);              /* at seal, with the first plan */
/* A chunk has been read: it is copied to the unit's image where it has one. Dropped meanwhile. */
void sthi_keep_chunk(sth_runtime *rt, sthi_unit *u, uint64_t begin, uint64_t bytes, const uint8_t *from);
void sthi_keep_settle(sth_runtime *rt);              /* at a step's end: what has been pinned since */
void sthi_keep_close(sth_runtime *rt);               /* no copy is under way any more */

/* source.c. Lock held unless the line says otherwise */
sth_status sthi_sources_open(sth_runtime *rt);
void sthi_sources_close(sth_runtime *rt);
uint32_t sthi_sources_count(const sth_runtime *rt);          /* files */
bool sthi_sources_describe(const sth_runtime *rt, uint32_t n, sth_file_way *out);
bool sthi_sources_use(const sth_runtime *rt, sth_read_way way); /* some file is read so */
uint32_t sthi_sources_align(const sth_runtime *rt);          /* of direct reads, bytes; 0: there are none */
void sthi_sources_settle(sth_runtime *rt);                   /* at a step's end */
sthi_fetcher *sthi_fetcher_take(sth_runtime *rt);            /* NULL: memory is out */
void sthi_fetcher_give(sth_runtime *rt, sthi_fetcher *fetcher);
/* Not held. fetcher: NULL for an image in memory. */
sth_status sthi_read_source(sth_runtime *rt, uint32_t unit, sthi_fetcher *fetcher, uint64_t begin, uint64_t bytes,
                            uint8_t *slab, uint32_t *out_shift);
sth_status sthi_name_failure(const sthi_unit *u, uint32_t file, uint64_t offset); /* the error with the unit's name */

/* from_store.c. Lock not held, but where it says so */
sth_status sthi_store_unit_check(const sth_unit_desc *desc); /* its ranges lie in layers */
sth_status sthi_store_unit_of_files(const sth_unit_desc *desc, sth_unit_desc *out, sth_file_range **out_ranges);
sth_status sthi_range_read(const sthi_unit *u, const sth_file_range *r, uint64_t offset, uint64_t bytes, void *to);
sth_status sthi_store_chunk(const sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *image);
bool sthi_store_next(const sth_runtime *rt, uint32_t unit, sth_store **out_store, uint32_t *out_layer);

/* fingerprint.c; lock held */
uint64_t sthi_fingerprint(const uint8_t *image, uint64_t bytes);
uint64_t sthi_fingerprint_place(const sthi_unit *u, const uint8_t *image, uint64_t bytes); /* of each tensor in it */
sth_status sthi_fingerprint_take(sth_runtime *rt, uint32_t unit); /* its copy is about to be issued */
uint64_t sthi_fingerprint_master(const sthi_unit *u); /* 0: it is not watched */
/* Of a unit that has a slot, once in an epoch: a difference makes the slot stale. Fails where options.read_only. */
sth_status sthi_fingerprint_compare(sth_runtime *rt, uint32_t unit);
void sthi_epoch_begin(sth_runtime *rt);

/* image.c */
sth_status sthi_unit_set_host(sth_runtime *rt, uint32_t unit, const void *host, sth_arena *arena);

/* watermarks.c. Static policy; lock held. */
bool sthi_above_high(const sth_runtime *rt);
void sthi_watermark_evictions(sth_runtime *rt);

/* lease.c */
void sthi_drain_drops(sth_runtime *rt);            /* lock held */

/* step.c */
sth_status sthi_step_begin_locked(sth_runtime *rt, bool implicit);
sth_status sthi_step_end_locked(sth_runtime *rt);
void sthi_step_resume(sth_runtime *rt);            /* a use has come: the step is not paused any more */
sth_status sthi_order_set(sth_runtime *rt, const uint32_t *units, uint32_t count);
/* What became of a plan. Where leases, or others, hold the memory for one: on demand until they let go, and a plan at
 * the next step's end. */
sth_status sthi_without_plan(sth_runtime *rt, sth_status rc);

/* graph.c. The lock is not held unless the line says otherwise. */
bool sthi_graph_others(const sth_runtime *rt);       /* held: another thread captures or replays: wait on `changed` */
sth_status sthi_graph_free(const sth_runtime *rt);   /* held: nobody does, or the error */
sth_status sthi_graph_use(sth_runtime *rt, uint32_t unit); /* held: the next use in a capture is of the unit */
/* Held, in a capture: a wait would say nothing new, for one for a number as high comes before it. Else it is noted. */
bool sthi_graph_waited(sthi_behind *behind, sth_stream stream, uint32_t number);
bool sthi_graph_has(sth_runtime *rt, uint32_t slot, sth_stream stream); /* the same for the slot's copy and a use */
sth_status sthi_graph_prepare(sth_runtime *rt);
sth_status sthi_graph_fork(sth_runtime *rt, sth_stream stream);
sth_status sthi_graph_join(sth_runtime *rt, sth_stream stream);
sth_status sthi_graph_settle(sth_runtime *rt, sth_graph_info *out);
sth_status sthi_graph_replay_begin(sth_runtime *rt, uint64_t edition, sth_stream stream, bool *out_current);
sth_status sthi_graph_replay_end(sth_runtime *rt, sth_stream stream);

/* residency.c, protect.c. The lock is held unless the line says otherwise. */
uint64_t sthi_hold(sth_runtime *rt, uint64_t want);  /* see sthi_account_hold; sets `limit` */
void sthi_settle(sth_runtime *rt);
uint64_t sthi_account_cap(sth_runtime *rt);          /* of the device */
sth_status sthi_charge(sth_runtime *rt, uint64_t bytes);
void sthi_uncharge(sth_runtime *rt, uint64_t bytes);
uint64_t sthi_this_thread(void);                     /* which is never 0 */
void sthi_note_step(sth_runtime *rt, bool busy);     /* this thread is in a step of it from now on, or no more */
/* Not held: brings a runtime that is parked, or has not had its budget yet, onto the device. */
sth_status sthi_arrive(sth_runtime *rt);
void sthi_grow(sth_runtime *rt);                     /* before a step: into what has become free */
/* May drop the lock: others give way for `bytes` more than the runtime has. True: look for a place again. */
bool sthi_more_room(sth_runtime *rt, uint64_t bytes);
static inline void sthi_account_lock(sth_runtime *rt) { sthi_lock(&rt->device->account_lock); }
static inline void sthi_account_unlock(sth_runtime *rt) { sthi_unlock(&rt->device->account_lock); }
/* Others may go on: memory was given back, a protection or a step has ended. */
static inline void sthi_account_unlock_changed(sth_runtime *rt) {
    sthi_cond_broadcast(&rt->device->account_changed);
    sthi_unlock(&rt->device->account_lock);
}
bool sthi_stepping(const sth_runtime *rt);           /* a step is open that says where it ends, and goes on */
/* No step that goes on, no lease, and no more than `known` callers inside. */
bool sthi_idle(const sth_runtime *rt, uint32_t known);
/* Other threads may be in a call, or have yet to drop the last tensor: lets the lock go for a moment. False: it is
 * *until already; 0 at first. */
bool sthi_wait_inside(sth_runtime *rt, int64_t *until);
void sthi_park(sth_runtime *rt);                     /* all places go, but those that leases are in */
/* Plans for `bytes` less than it has, or parks, where it is idle. False: nothing was given because a thread is inside a
 * call of it, or holds a lease: perhaps not for long. */
bool sthi_give_way(sth_runtime *rt, uint64_t bytes);
/* Not held: makes room for `want` bytes of the runtime, or at least for `least`, and begins a hold on it. On failure
 * there is no hold. */
sth_status sthi_request_room(sth_runtime *rt, uint64_t least, uint64_t want);
sth_status sthi_residency_join(sth_runtime *rt);     /* not held */
void sthi_residency_retire(sth_runtime *rt);         /* not held: shut; waits for askers */
void sthi_residency_leave(sth_runtime *rt);          /* the last use of it */
sth_status sthi_runtime_keep_begin(sth_runtime *rt); /* these are not held, as all public calls */
void sthi_runtime_keep_end(sth_runtime *rt);
sth_status sthi_runtime_reserve(sth_runtime *rt, sth_resident_priority priority);
void sthi_runtime_release(sth_runtime *rt);
sth_status sthi_runtime_guest_begin(sth_runtime *rt);
sth_status sthi_runtime_guest_end(sth_runtime *rt, uint64_t *out_left);
sth_status sthi_runtime_set_reserved(sth_runtime *rt, uint64_t bytes);
sth_status sthi_residency_set_cap(sth_device *device, uint64_t bytes);
void sthi_residency_get(sth_device *device, sth_residency_info *out);
void sthi_residency_find_budget(sth_device *device, const sth_memory_reading *reading, sth_budget_verdict *out);
void sthi_residency_forget(sth_device *device);

/* geometry.c */
void sthi_plan_input(const sth_runtime *rt, sth_plan_input *out);
void sthi_plan_map_once(sth_plan_input *in);      /* the ring is ordinary memory, of any size */
void sthi_plan_hold(sth_runtime *rt, bool holds); /* whether plans count with what was seen held together */
/* Plans for the order and the budget in force, and lays device memory out for it. */
sth_status sthi_geometry_install(sth_runtime *rt);
/* The same with no more than `bytes` of the device, `reserved` included. */
sth_status sthi_geometry_install_within(sth_runtime *rt, uint64_t bytes);
void sthi_plan_drop(sth_runtime *rt);      /* there is none in force */
/* What the plan in force promises with the times that are known now, at such a rate of the link; 0: it is not known. */
sth_status sthi_plan_price(sth_runtime *rt, double link, sth_prediction *out);
/* The same if it would pay now that times are known better. */
sth_status sthi_geometry_improve(sth_runtime *rt, bool *out_changed);
sth_status sthi_rearrange(sth_runtime *rt, uint64_t bytes); /* all memory that is not leased, in one piece */
bool sthi_closing_idle(sth_runtime *rt);    /* an extent that leases kept could be freed now */
void sthi_closing_free(sth_runtime *rt);    /* frees those */
void sthi_program_reset(sth_runtime *rt);  /* from the start of a lap, with what is on the device */
void sthi_program_skip(sth_runtime *rt);   /* past loads whose first use has begun */
uint64_t sthi_budget_for_units(const sth_runtime *rt);
uint64_t sthi_units_within(const sth_runtime *rt, uint64_t bytes); /* what units may take of so much of the budget */
void sthi_extents_free_all(sth_runtime *rt);
/* Device memory that is no extent: not charged. */
sth_status sthi_place_alloc(sth_runtime *rt, uint64_t bytes, sth_devptr *out);
void sthi_place_free(sth_runtime *rt, sth_devptr base, uint64_t bytes);

/* timing.c */
sth_status sthi_timing_open(sth_runtime *rt);
void sthi_timing_close(sth_runtime *rt);
/* Records a timing event, making it first if need be; false when that failed: the figure is dropped. */
bool sthi_timing_record(sth_runtime *rt, sth_event **event, sth_stream stream);
void sthi_timing_begin(sth_runtime *rt);
void sthi_timing_pause(sth_runtime *rt); /* the step's work ends here, unless another use comes */
void sthi_timing_end(sth_runtime *rt);
/* At shutdown: the callers' streams may be gone, so the step ends behind its last use, on a stream of ours. */
void sthi_timing_end_late(sth_runtime *rt);
void sthi_timing_harvest(sth_runtime *rt, bool wait);
void sthi_runtime_settle_times(sth_runtime *rt); /* not held: waits for the copies of steps that have ended */
/* A use in the step's timing: reserved when it arrives, so that threads do not share a record. */
typedef struct sthi_use_ticket {
    uint32_t index;          /* STH_NONE: not timed */
    uint64_t step;
} sthi_use_ticket;
sthi_use_ticket sthi_timing_arrive(sth_runtime *rt, uint32_t unit, sth_stream stream);
/* `waited`: the stream waits for something since it arrived, else the use begins at once. */
void sthi_timing_start(sth_runtime *rt, sthi_use_ticket ticket, int32_t slot, sth_stream stream, bool waited);

/* lanes.c */
/* Before a copy of a unit's bytes on the stream: how it may go. lane: not NULL. */
sthi_way sthi_ask_lane(sth_runtime *rt, sthi_lane *lane, uint32_t unit, uint64_t bytes);
void sthi_lanes_close(sth_runtime *rt);            /* lock held */
sth_status sthi_runtime_set_conductor(sth_runtime *rt, sth_conductor *c);
sth_status sthi_runtime_set_prefetch_window(sth_runtime *rt, uint32_t units);
sth_status sthi_runtime_set_max_inflight(sth_runtime *rt, uint32_t units);

/* runtime.c */
void sthi_leave(sth_runtime *rt);         /* a caller counted in `callers` leaves. Lock held */
void sthi_records_grow(sth_runtime *rt);   /* room for longer orders, where there is memory */
void sthi_runtime_options_init(sth_runtime_options *options);
sth_status sthi_runtime_create(sth_device *device, const sth_runtime_options *options, sth_runtime **out);
void sthi_runtime_destroy(sth_runtime *rt);
static inline bool sthi_runtime_is_here(const sth_runtime *rt) { return rt && !sthi_is_child(rt->fork_depth); }
sth_status sthi_runtime_not_here(const sth_runtime *rt); /* the error */
/* Of every public call but destroy and the release of leases: not NULL, and not a forked child's. */
static inline sth_status sthi_runtime_usable(const sth_runtime *rt) {
    return sthi_runtime_is_here(rt) ? STH_OK : sthi_runtime_not_here(rt);
}
void sthi_runtime_unref(sth_runtime *rt);
sth_status sthi_runtime_add_unit(sth_runtime *rt, const sth_unit_desc *desc, uint32_t *out);
sth_status sthi_runtime_seal(sth_runtime *rt);
sth_status sthi_runtime_fence(sth_runtime *rt);

/* ---- pass.c */

/* A use of the slot is enqueued behind its copy. */
void sthi_awaits_copy(sth_runtime *rt, int32_t slot);
/* Before a slot's events are given back. */
void sthi_keep_awaited(sth_runtime *rt, int32_t slot);
sth_status sthi_awaited_wait(sth_runtime *rt);
sth_status sthi_pass_end(sth_runtime *rt);
sth_status sthi_runtime_synchronize(sth_runtime *rt);
sth_status sthi_runtime_set_budget(sth_runtime *rt, uint64_t budget);
sth_status sthi_budget_error(sth_runtime *rt, uint32_t unit);
/* The unit finds no place beside what is leased. enough: bytes for units in which it would. */
sth_status sthi_no_place_error(sth_runtime *rt, uint32_t unit, uint64_t enough);
/* Budgets, with `reserved` and the stages; each is at least as large as the next. */
uint64_t sthi_smallest_budget(sth_runtime *rt);     /* what users are told: steps go on as the last ones went */
uint64_t sthi_least_to_plan(sth_runtime *rt);       /* there is a plan, whatever was leased at once before */
uint64_t sthi_least_to_load(const sth_runtime *rt); /* the largest unit has a place, be it used or not */
uint64_t sthi_run_bytes(const sth_runtime *rt); /* the most of a pinned image that one copy takes */
sth_status sthi_measure_link(sth_runtime *rt);  /* once there is room to measure with */
sth_status sthi_name_refusal(sth_runtime *rt, sth_status rc); /* a plan's refusal, said with the unit's name */
sth_status sthi_step_begin(sth_runtime *rt);
sth_status sthi_step_pause(sth_runtime *rt);
sth_status sthi_step_end(sth_runtime *rt);
sth_status sthi_runtime_flush_telemetry(sth_runtime *rt);
sth_status sthi_check_unit(const sth_runtime *rt, uint32_t unit); /* not held: there is one of that number */
sth_status sthi_unit_acquire(sth_runtime *rt, uint32_t unit, sth_stream stream, sth_lease *out);
void sthi_lease_release(sth_runtime *rt, const sth_lease *lease);
sth_status sthi_runtime_poll(sth_runtime *rt);
sth_status sthi_runtime_gather(sth_runtime *rt, uint64_t bytes);
sth_status sthi_unit_mark_written(sth_runtime *rt, uint32_t unit);
sth_status sthi_unit_verify(sth_runtime *rt, uint32_t unit, bool *out_equal, uint64_t *out_hash);

/* report.c */
void sthi_unit_stats(sth_runtime *rt, uint32_t unit, sth_unit_stats *out);
void sthi_runtime_stats(sth_runtime *rt, sth_runtime_stats *out);
uint32_t sthi_runtime_file_count(sth_runtime *rt);
sth_status sthi_runtime_file_way(sth_runtime *rt, uint32_t i, sth_file_way *out);
sth_status sthi_runtime_prediction(sth_runtime *rt, sth_prediction *out);
sth_status sthi_runtime_step_metrics(sth_runtime *rt, uint32_t i, sth_step_metrics *out);

/* check.c: every invariant that must hold between calls; used by tests. */
bool sthi_runtime_check(sth_runtime *rt, const char **out_why);
#endif
