/* stagehand/residency.h - several runtimes on one device: one account of its memory, and who stays.
 *
 *     sth_residency_set_cap -> sth_runtime_create (each) ... seal ...
 *     sth_runtime_reserve(main, PRIMARY) -> guest_begin(other) -> steps of other -> guest_end(other) -> release(main)
 *
 * Runtimes of one sth_device share its account: what their places and `reserved` bytes occupy together is never
 * more than the cap. A runtime that begins a step, is reserved, kept or made a guest while it has no memory asks
 * for its budget: it takes what is free, then idle unprotected runtimes give way, and only where it could not work
 * otherwise idle guests and SECONDARY reservations. PRIMARY reservations and kept runtimes never do. A runtime
 * that gave all of its memory away is parked: its next step brings it back. docs/residency.md says more.
 *
 * Unless a function says otherwise: Threads: any, at once; not from within an allocator. Blocks: for the runtime's
 * lock. Allocates: no. */
#ifndef STAGEHAND_RESIDENCY_H
#define STAGEHAND_RESIDENCY_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/device.h"
#include "stagehand/runtime.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sth_resident_priority {
    STH_PRIORITY_NONE,
    /* gives way only to a load that would fail otherwise, after everything else */
    STH_PRIORITY_SECONDARY,
    STH_PRIORITY_PRIMARY    /* never gives way */
} sth_resident_priority;

typedef struct sth_residency_info {
    uint64_t cap;       /* bytes; UINT64_MAX: none was set on a real device */
    uint64_t occupied;  /* by all runtimes of the device */
    uint64_t free;      /* cap - occupied */
    uint64_t peak;      /* highest value of `occupied` */
    uint64_t primary, secondary; /* the parts of `occupied` that are reserved so */
    uint64_t kept;      /* the part that keep_begin protects and no PRIMARY reservation does */
    uint64_t yielding;  /* the rest: idle runtimes give way with it */
    uint64_t fixed;     /* the part of `occupied` that callers fill themselves (sth_runtime_options.reserved) */
    uint32_t runtimes;  /* on the device or parked */
} sth_residency_info;

/* Sets the cap on the bytes that the device's runtimes occupy together. 0: the default, which is
 * the memory of the simulated device, and no limit but the device's own on others. Returns
 * BUDGET_TOO_SMALL when more is occupied now. */
STH_API sth_status sth_residency_set_cap(sth_device *device, uint64_t bytes);

STH_API sth_status sth_residency_get(sth_device *device, sth_residency_info *out_info);

/* From begin to end the runtime's memory is nobody else's. Counted: each begin needs an end.
 * Begin brings a parked runtime back, and its residents with it, ahead of its next step. Begin
 * returns BUDGET_TOO_SMALL (names who keeps how much; nothing is protected then), SHUT_DOWN,
 * INVALID_STATE before seal, and errors of the device. An end without a begin does nothing.
 * Blocks: begin for the memory of runtimes that give way, and up to 30 s for those that other
 * threads are using, unless this thread is inside a step. Allocates: begin device memory, and
 * scratch. */
STH_API sth_status sth_runtime_keep_begin(sth_runtime *runtime);
STH_API void sth_runtime_keep_end(sth_runtime *runtime);

/* Reserves what the runtime's plan occupies, places and `reserved`, until release or the runtime's
 * end. Brings a parked runtime back. A second call changes the priority and reserves nothing twice.
 * NONE is release. Returns, Blocks, Allocates: as keep_begin; on failure the earlier reservation
 * stands. */
STH_API sth_status sth_runtime_reserve(sth_runtime *runtime, sth_resident_priority priority);
/* Ends the reservation; a second call does nothing. The memory stays the runtime's until another
 * runtime asks for it. */
STH_API void sth_runtime_release(sth_runtime *runtime);

/* The runtime is a guest: it comes if it is parked, and gives all of its places back at the end
 * of the last block, unless it is kept or reserved. *out_left (may be NULL) are bytes that
 * leases which have not ended keep. Begin returns, Blocks, Allocates: as keep_begin. End returns
 * INVALID_STATE inside a step (the guest then stays as an unprotected runtime); it Blocks for
 * the work that uses its places. */
STH_API sth_status sth_runtime_guest_begin(sth_runtime *runtime);
STH_API sth_status sth_runtime_guest_end(sth_runtime *runtime, uint64_t *out_left);

/* Whether the runtime has no places, or never had: its next step will ask others for room. Takes
 * no lock. */
STH_API bool sth_runtime_is_parked(sth_runtime *runtime);

/* The part of the budget that the caller fills itself is `bytes` from now on
 * (sth_runtime_options.reserved). When it grows, call this before the memory is taken; when it
 * shrinks, after it was given back. A parked runtime asks for its smallest plan along with it; one
 * that has places gives some of them up where others leave too little. Bytes reserved by a parked
 * runtime stay charged until its caller frees them. A caller whose request is refused may arrange
 * that and retry. Returns BUDGET_TOO_SMALL when the budget, or what others on the device leave, is
 * too small, and INVALID_STATE inside a step. Blocks, Allocates: as keep_begin. */
STH_API sth_status sth_runtime_set_reserved(sth_runtime *runtime, uint64_t bytes);

/* Makes `bytes` of `reserved` soft: if an acquire would be refused otherwise, the places take all
 * of them, once, and `reserved` is smaller from then on (see sth_runtime_reserved). 0: none are
 * soft. */
STH_API sth_status sth_runtime_soften(sth_runtime *runtime, uint64_t bytes);
STH_API uint64_t sth_runtime_reserved(sth_runtime *runtime); /* bytes; 0 for NULL */

/* Turns of threads that were refused room while other threads bring models to the device or take
 * them away. A thread begins a turn when it is refused. The first of those, in the order in which
 * they began, keeps what it has brought; all others give theirs back, and wait until they are first:
 *
 *     begin -> refused: not is_first? give back -> wait -> bring again, ask again -> ... -> end
 *
 * A turn belongs to the calling thread. Begin is counted: each needs an end. Begin returns
 * OUT_OF_HOST_MEMORY. */
STH_API sth_status sth_residency_turn_begin(sth_device *device);
STH_API bool sth_residency_turn_is_first(sth_device *device);
/* Until the thread is first; where it is, until something has changed on the device, and at most
 * 20 ms. False: the thread has waited for 30 s since it began. Blocks: as said. */
STH_API bool sth_residency_turn_wait(sth_device *device);
STH_API void sth_residency_turn_end(sth_device *device);

/* A budget that is found, for callers that were given none (docs/budget.md).
 * X(name, text): why a runtime has the budget that it has. */
#define STH_BUDGET_WHY_LIST(X)                                                                      \
    X(FIRST, "half of what is there, until two steps have shown what else is needed")              \
    X(FITS, "all of the model fits")                                                                \
    X(FULL, "what the rest of the process and the reserve leave")                                   \
    X(PEAK, "it shrank: the rest of the process needed more")                                       \
    X(NEIGHBOUR, "it shrank: another process took memory")                                          \
    X(FAILED, "it shrank: the rest of the process ran out of memory")                               \
    X(EXPECTED, "it shrank: the inputs are larger than any before")                                 \
    X(LEAST, "the smallest that works: there is no more")

typedef enum sth_budget_why {
#define STH_BUDGET_WHY_NAME(name, text) STH_BUDGET_##name,
    STH_BUDGET_WHY_LIST(STH_BUDGET_WHY_NAME)
#undef STH_BUDGET_WHY_NAME
} sth_budget_why;

/* The caller's measurements before a step. `framework` is what allocates in this process besides
 * the places: an allocator that runtimes may share (sth_allocator), with their `reserved` bytes in
 * it. 0 where there is none. */
typedef struct sth_memory_reading {
    uint64_t total, free;         /* bytes of the device */
    uint64_t framework_reserved;  /* bytes that it has from the device */
    uint64_t framework_allocated; /* bytes of them that are in use */
    /* the most in use since the last reading that said reset_peak, or longer */
    uint64_t framework_peak;
    /* requests that failed, and that succeeded after it gave memory back; ever growing */
    uint64_t failures, retries;
    /* bytes that the user set for all runtimes of the device; 0: none */
    uint64_t limit;
    /* inputs of the step to come, as a multiple of the largest before; <= 1: no larger */
    double growth;
    /* About the runtime that asks: */
    uint64_t budget;              /* bytes in force; 0: it is being made */
    /* bytes with which it has all it can use, and below which it cannot work */
    uint64_t want, least;
    uint64_t steps;               /* that it has run */
    /* For models that take turns, as those of a pipeline: a number for each model, the same each
     * time. The memory of the rest of the process is then tracked separately for each of them. 0:
     * all runtimes of the device together. */
    uint64_t phase;
    bool runs;                    /* its step is about to begin; of use where it has a phase */
    uint64_t ceiling;             /* bytes that the process may have of the device; 0: all */
} sth_memory_reading;

typedef struct sth_budget_verdict {
    /* bytes that the runtime may have: pass it to sth_runtime_set_budget where it differs */
    uint64_t budget;
    sth_budget_why why;
    uint64_t cap;       /* bytes for all runtimes of the device */
    uint64_t capacity;  /* bytes that this process could have */
    uint64_t others;    /* bytes: the most that the rest of the process had */
    uint64_t margin, reserve; /* bytes that are left free on top */
    uint64_t growths, shrinks; /* of the cap, so far */
    bool reset_peak;    /* the framework's peak is to begin again, once the budget is set */
    bool trim;          /* once the budget is set, the framework is to give back what it does not use */
} sth_budget_verdict;

/* Takes a reading of the device's memory and says what the runtime may have. If the reading has no
 * limit, the cap of the device's account follows. Between steps of the runtime. Returns
 * INVALID_ARGUMENT for NULL. Blocks: no. */
STH_API sth_status sth_residency_find_budget(sth_device *device, const sth_memory_reading *reading,
                                             sth_budget_verdict *out_verdict);
/* The same before a step of the runtime that asks, whose budget is then at least the smallest that
 * works, where it had so much, and no larger while it is leased. spare: bytes of its `reserved` that
 * its caller can give up. Returns INVALID_ARGUMENT for NULL, and DEVICE_LOST and the like where the
 * runtime cannot be used. Blocks: for the runtime's lock. */
STH_API sth_status sth_runtime_find_budget(sth_runtime *runtime, const sth_memory_reading *reading,
                                           uint64_t spare, sth_budget_verdict *out_verdict);
/* Whether the runtimes of the device, what the rest of the process needs and what the framework
 * holds unused take more than the reading's ceiling, once the runtime that asks has the reading's
 * `budget`. The framework is to give back what it does not use then. False for NULL. Blocks: no. */
STH_API bool sth_residency_above_ceiling(sth_device *device, const sth_memory_reading *reading);
/* The budget with which an idle runtime gives `bytes` of what it has to others, or as many as it can
 * work without; 0: it has none to give. *out_freed (may be NULL): bytes that others have then.
 * Nothing is changed: pass the budget to sth_runtime_set_budget. spare: as in find_budget. Blocks:
 * for the runtime's lock. */
STH_API uint64_t sth_runtime_budget_without(sth_runtime *runtime, uint64_t bytes, uint64_t spare,
                                            uint64_t *out_freed);

/* When the device's memory is read for one model whose budget is found: before each of its first
 * steps, before a step with larger inputs than any before, and before one that begins a turn; else
 * at most every 50 ms. Zeroed: the model has not run. Plain data of the caller's.
 *
 *     inputs(bytes) -> due(now)? -> find_budget -> looked(now) -> step
 *
 * Threads: one at a time. Blocks: no. A call with NULL does nothing. */
typedef struct sth_budget_pace {
    uint64_t steps;           /* that began with a reading: sth_memory_reading.steps */
    uint64_t coming, largest; /* bytes of inputs: of the pass to come, the most of a pass before */
    int64_t looked_ns;        /* time of the last reading */
} sth_budget_pace;
/* A pass with so many bytes of inputs is about to begin, inside a step that has begun already or
 * before one. */
STH_API void sth_budget_pace_inputs(sth_budget_pace *pace, uint64_t bytes, bool inside_step);
/* Whether a step that begins now is to begin with a reading. turn: another model ran before it.
 * *out_growth is sth_memory_reading.growth. now_ns: on any steady clock. */
STH_API bool sth_budget_pace_due(sth_budget_pace *pace, int64_t now_ns, bool turn,
                                 double *out_growth);
STH_API void sth_budget_pace_looked(sth_budget_pace *pace, int64_t now_ns); /* a reading was taken */
/* The first budgets were too small for what is leased at once: the next step has all. */
STH_API void sth_budget_pace_hurry(sth_budget_pace *pace);
STH_API void sth_budget_pace_renew(sth_budget_pace *pace); /* what was seen counts no more */

/* An idle runtime lends others `bytes` of what it has on the device, as if one of them had asked,
 * or all; it asks for them when it is used. Nothing happens while it is in use. Returns
 * INVALID_ARGUMENT for NULL, and DEVICE_LOST and the like where the runtime cannot be used.
 * Threads: any. Blocks: for the work that uses its places. */
STH_API sth_status sth_runtime_lend(sth_runtime *runtime, uint64_t bytes);
/* Forgets what was observed of the device's memory. Blocks: no. */
STH_API void sth_residency_forget(sth_device *device);
/* A sentence's part, for people; "" for a number that is none. */
STH_API const char *sth_budget_why_text(sth_budget_why why);

#ifdef __cplusplus
}
#endif
#endif
