/* The recording of stagehand/timeline.h: slices and counters, from any thread, into a ring. While nothing is recorded
 * each place that could say something costs a load and a branch.
 *
 * Times are nanoseconds of the system's clock (CLOCK_REALTIME), which torch.profiler's traces use too. */
#ifndef STHI_TELEMETRY_TIMELINE_H
#define STHI_TELEMETRY_TIMELINE_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/timeline.h"

/* X(name, text, of a thread): tracks. Those of threads have one line for each thread. */
#define STHI_TRACK_LIST(X)                       \
    X(STEPS, "steps", false)                     \
    X(COMPUTE, "compute", false)                 \
    X(COPY_UP, "copies up", false)               \
    X(COPY_DEMAND, "copies up, on demand", false) \
    X(EXPAND, "decoding on the device", false)   \
    X(COPY_DOWN, "copies down", false)           \
    X(SPILL, "spills", false)                    \
    X(RESTORE, "restores", false)                \
    X(READ, "disk", true)                        \
    X(STAGE, "staging", true)                    \
    X(DECODE, "decoding", true)                  \
    X(CALL, "host call", true)                   \
    X(OPTIMIZER, "optimizer", true)
typedef enum sthi_track {
#define STHI_TRACK_ENUM(name, text, thread) STHI_TRACK_##name,
    STHI_TRACK_LIST(STHI_TRACK_ENUM)
#undef STHI_TRACK_ENUM
        STHI_TRACK_COUNT
} sthi_track;

typedef struct sthi_slice {
    sthi_track track;
    const char *source;  /* whose: a model's name, or what else has tracks of its own; copied */
    const char *name;    /* copied */
    int64_t begin_ns, end_ns;
    uint64_t bytes;      /* 0: none */
    uint64_t arrow_from, arrow_to; /* numbers of arrows that begin and end here; 0: none */
    int64_t step;        /* -1: of none */
} sthi_slice;

extern atomic_bool sthi_timeline_active;

static inline bool sthi_timeline_on(void) {
    return atomic_load_explicit(&sthi_timeline_active, memory_order_relaxed);
}

int64_t sthi_timeline_now(void);
uint64_t sthi_timeline_arrow(void); /* a number that no other arrow has */

/* What began before the recording is left out. Threads: any, also under a lock. */
void sthi_timeline_slice(const sthi_slice *slice);
/* A counter's value from a time on. */
void sthi_timeline_counter(const char *source, const char *name, int64_t at_ns, double value);

/* A slice of the calling thread: 0 while nothing is recorded. */
static inline int64_t sthi_timeline_mark(void) { return sthi_timeline_on() ? sthi_timeline_now() : 0; }
/* Its end; nothing where it began with 0. */
void sthi_timeline_since(int64_t begin_ns, sthi_track track, const char *source, const char *name, uint64_t bytes);

void sthi_timeline_options_init(sth_timeline_options *options);
sth_status sthi_timeline_begin(const sth_timeline_options *options);
sth_status sthi_timeline_end(uint64_t *out_lost);
#endif
