/* Threads that work jobs off in the order in which they came; a job is a number of pieces. */
#ifndef STHI_BASE_WORKERS_H
#define STHI_BASE_WORKERS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/error.h"

typedef struct sthi_workers sthi_workers;
typedef struct sthi_job sthi_job;

struct sthi_job {
    /* Set by the caller. Pieces run at once, on any threads; `scratch` is the thread's own. */
    sth_status (*run)(sthi_job *job, uint64_t piece, void *scratch);
    uint64_t pieces;
    /* the pool's */
    uint64_t handed, done, ticket;
    sthi_job *queue_next, *previous, *next;
    sthi_error_copy error; /* of the first piece that failed */
    bool waited, finished; /* waited: its caller stands in run and owns it */
};

/* `owner` is what errors call the pool's user, such as "optimiser", and `name` (at most 10 characters) what its
 * threads are called: both live as long as the pool. scratch_bytes: for each thread, 0 for none. Allocates. */
sth_status sthi_workers_create(const char *owner, const char *name, uint32_t threads, size_t scratch_bytes,
                               sthi_workers **out);
/* Runs all that was submitted to its end. Threads: the last user. */
void sthi_workers_destroy(sthi_workers *workers);
/* INVALID_STATE in a child process that was forked after create. */
sth_status sthi_workers_refuse_child(const sthi_workers *workers);
uint32_t sthi_workers_count(const sthi_workers *workers);

/* Takes over `job`, which is one block from sthi_alloc that needs no other clean-up. Never fails but in a
 * child process (INVALID_STATE): then it is the caller's still. */
sth_status sthi_workers_submit(sthi_workers *workers, sthi_job *job, uint64_t *out_ticket);
/* One submitted job, or all with 0: OK, or the first failure, which is forgotten then. */
sth_status sthi_workers_wait(sthi_workers *workers, uint64_t ticket);
/* Submits and waits; `job` stays the caller's. */
sth_status sthi_workers_run(sthi_workers *workers, sthi_job *job);
/* Runs one job by threads that end with it: at most `threads` (0: one for each core), and no more than it has
 * pieces. */
sth_status sthi_workers_once(const char *owner, const char *name, uint32_t threads, size_t scratch_bytes,
                             sthi_job *job);
#endif
