/* What a recording holds, and the file that it becomes. */
#ifndef STHI_TELEMETRY_RECORDED_H
#define STHI_TELEMETRY_RECORDED_H
#include "telemetry/timeline.h"

#define STHI_COUNTER_TRACK STHI_TRACK_COUNT /* in place of a track: the entry is a counter's value */

typedef struct sthi_recorded {
    int64_t begin_ns, duration_ns;
    union {
        uint64_t bytes;
        double value;
    };
    uint64_t arrow_from, arrow_to;
    int64_t step;
    uint32_t source, name; /* in `texts` */
    uint32_t thread;       /* in `threads`, of tracks of threads */
    uint32_t track;
} sthi_recorded;

typedef struct sthi_recorded_thread {
    long id; /* as ps shows it */
    char name[16];
} sthi_recorded_thread;

typedef struct sthi_recording {
    sthi_recorded *ring; /* [cap] */
    uint32_t cap;
    uint64_t count;      /* put so far: the oldest have been overwritten */
    char **texts;        /* [text_count] */
    uint32_t text_count, text_cap;
    uint32_t *index;     /* [2 * text_cap] hash table over texts, number + 1; 0: empty */
    sthi_recorded_thread *threads; /* [thread_count] */
    uint32_t thread_count;
    int64_t begun_ns;
    uint64_t first_arrow; /* earlier ones come from before the recording */
    int fd;
    bool compressed;
    char *path;
} sthi_recording;

/* Writes all of it as a Chrome trace to the file, from its beginning. Returns IO. */
sth_status sthi_chrome_write(const sthi_recording *recording);
#endif
