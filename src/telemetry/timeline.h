/* The recording of stagehand/timeline.h: slices and counters, from any thread, into a ring. While nothing is recorded
 * each place that could say something costs a load and a branch.
 *
 * Times are nanoseconds of the system's clock (CLOCK_REALTIME), which torch.profiler's traces use too. */
#ifndef STHI_TELEMETRY_TIMELINE_H
#define STHI_TELEMETRY_TIMELINE_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/timeline.h"
#include "telemetry/ranges.h"
#include "telemetry/tracks.h"

typedef struct sthi_slice {
    sthi_track track;
    const char *source;  /* whose: a model's name, or what else has tracks of its own; copied */
    const char *name;    /* copied */
    int64_t begin_ns, end_ns;
    uint64_t bytes;      /* 0: none */
    uint64_t arrow_from, arrow_to; /* numbers of arrows that begin and end here; 0: none */
    int64_t step;        /* -1: of none */
} sthi_slice;

static inline bool sthi_timeline_on(void) { return sthi_onlookers() & STHI_RECORDED; }

int64_t sthi_timeline_now(void);
uint64_t sthi_timeline_arrow(void); /* a number that no other arrow has */

/* What began before the recording is left out. Threads: any, also under a lock. */
void sthi_timeline_slice(const sthi_slice *slice);
/* A counter's value from a time on. */
void sthi_timeline_counter(const char *source, const char *name, int64_t at_ns, double value);

/* What the calling thread does: a slice of a recording, and a range of a profiler. */
typedef struct sthi_mark {
    int64_t begin_ns; /* 0: nothing was recorded then */
    bool pushed;      /* a range has begun */
} sthi_mark;

sthi_mark sthi_timeline_mark_watched(const char *what, const char *name);
/* what: "acquire", "disk"; with the name it is the range's text. */
static inline sthi_mark sthi_timeline_mark(const char *what, const char *name) {
    return sthi_onlookers() ? sthi_timeline_mark_watched(what, name) : (sthi_mark){0, false};
}

void sthi_timeline_since_watched(sthi_mark mark, sthi_track track, const char *source, const char *name,
                                 uint64_t bytes);
/* Its end, on the same thread. */
static inline void sthi_timeline_since(sthi_mark mark, sthi_track track, const char *source, const char *name,
                                       uint64_t bytes) {
    if (mark.begin_ns || mark.pushed) sthi_timeline_since_watched(mark, track, source, name, bytes);
}

void sthi_timeline_options_init(sth_timeline_options *options);
sth_status sthi_timeline_begin(const sth_timeline_options *options);
sth_status sthi_timeline_end(uint64_t *out_lost);
#endif
