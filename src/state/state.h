/* The weight runtime's state, in parts. One lock (`lock`) guards everything but the stack of ended leases,
 * which is atomic so that destructors can push to it. The lock is dropped while waiting for disk, for slabs
 * and for leases; it is held while waiting for the device where a step ends (copies that read writable
 * images) and where a plan changes (docs/locking.md).
 *
 * Each part stands in a header of this folder, which names the files that write it. The functions are above: src/load
 * fills places, src/runtime decides when. */
#ifndef STHI_STATE_STATE_H
#define STHI_STATE_STATE_H
#include "base/arith.h"
#include "base/error.h"
#include "base/thread.h"
#include "core/places.h"
#include "device/device.h"
#include "stagehand/graph.h"
#include "stagehand/runtime.h"
#include "state/copies.h"
#include "state/graph.h"
#include "state/order.h"
#include "state/plan.h"
#include "state/queue.h"
#include "state/reading.h"
#include "state/sharing.h"
#include "state/slots.h"
#include "state/step.h"
#include "state/timing.h"
#include "state/unit.h"

#define STHI_DEV(rt, op, ...) ((rt)->device->ops->op((rt)->device->self, __VA_ARGS__))

struct sth_runtime {
    sth_device *device;
    sth_runtime_options options;
    char *name;              /* for messages */
    atomic_int refs;         /* 1 for the owner, 1 per lease */
    unsigned fork_depth;     /* of the process that made it: in a child no lock may be taken */
    sthi_mutex lock;
    sthi_cond changed;       /* for callers: a read or a load ended, the queue moved, shut, callers left */
    uint32_t callers;        /* inside acquire, verify or synchronize: destroy waits for them */
    bool seal_tried, sealed, shut;

    sthi_unit *units;        /* [unit_count] */
    uint32_t unit_count, unit_cap;
    uint64_t all_bytes;      /* of all units */

    sthi_places places;      /* which bytes of which extent hold which unit */
    sthi_slot_sync *sync;    /* [places.slot_cap] */
    sthi_events events;
    sthi_traces traces;
    sthi_leases leases;
    sthi_extents extents;

    sthi_copies copies;
    sthi_expansion expand;
    sthi_queue queue;
    sthi_sources sources;
    sthi_reads reads;
    sthi_slabs slabs;
    sthi_readers readers;

    sthi_planned planned;
    sthi_program program;
    sthi_order order;
    sthi_writes writes;
    sthi_link link;
    sthi_graph graph;
    sthi_sharing share;

    sthi_step step;
    sthi_timing timing;
    sth_step_metrics current; /* counters of the open step */
    sthi_step_records telemetry;
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
uint32_t sthi_distance(const sth_runtime *rt, uint32_t unit);
/* A step that was timed took `took_ns`. */
void sthi_link_follow(sth_runtime *rt, const sthi_timed_step *t, double took_ns);

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
/* Held, in a capture: the stream waits for the slot's copy already (sthi_graph_waited). */
bool sthi_graph_has(sth_runtime *rt, uint32_t slot, sth_stream stream);
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
