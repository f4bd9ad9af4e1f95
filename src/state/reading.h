/* Staged sources: files, stores and pageable memory on their way through pinned slabs. */
#ifndef STHI_STATE_READING_H
#define STHI_STATE_READING_H
#include "base/thread.h"
#include "host/arena.h"
#include "stagehand/backend.h"
#include "store/fetch.h"
#include "store/opened.h"
#include "store/pool.h"

enum { STHI_FETCHER_CAP = 32 /* fetchers kept for the next read */ };

/* load/read/source.c; kept_arena: load/read/keep.c */
typedef struct sthi_sources {
    sthi_opened opened;      /* files that units stream from */
    sthi_fetcher *fetchers[STHI_FETCHER_CAP]; /* that no thread uses now */
    uint32_t fetcher_count;
    sth_arena *kept_arena;   /* of units that are kept in host memory; NULL: none are */
} sthi_sources;

/* Reads under way and their rate (load/read/read.c). */
typedef struct sthi_reads {
    double rate;             /* bytes per second that reads bring together; 0: not known */
    uint64_t bytes;          /* read into slabs in this step, and the time in which at least one read was under way */
    int64_t ns, since;
    uint32_t under_way;
    uint32_t masters;        /* of them, of writable images */
    uint32_t images;         /* of any source */
} sthi_reads;

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

/* A slab whose copy to the device is under way. */
typedef struct sthi_flight {
    sth_slab slab;
    sth_stream stream;
    sth_event *emptied;     /* NULL: `stream` itself must be waited for */
    bool lost;               /* the device failed to say whether the copy is done, when it was asked last */
} sthi_flight;

/* load/read/slabs.c, load/read/jobs.c */
typedef struct sthi_slabs {
    sth_pool *pool;          /* options.pool, or own_pool */
    sth_pool *own_pool;
    uint32_t count;
    sthi_job *jobs;          /* [count], history numbers [job_head, job_tail) */
    uint64_t job_head, job_tail;
    sthi_flight *flights;    /* [count], history numbers [flight_head, flight_tail) */
    uint64_t flight_head, flight_tail;
    uint32_t needy;          /* callers that wait for a slab, or for what is to be read into one */
    bool pool_shut;          /* the pool gives no slabs any more */
    uint64_t failures;       /* times that a reader found no slab because the device failed: callers that wait for
                                reads look at it */
} sthi_slabs;

/* load/reader.c */
typedef struct sthi_readers {
    sthi_thread *threads;
    uint32_t count, idle;
    bool stop;
    sthi_cond work;          /* something to read, or room to read it into */
} sthi_readers;
#endif
