/* The pool of threads.
 *
 * Invariants, under `lock`: a job is in the queue while it has pieces that were not handed out, at its head
 * the oldest; it is among the live ones from submit until its last piece that was handed out is done; after
 * that a submitted job is freed, or stands among the failed until somebody waits. A job that failed hands out
 * no more. Lock: `lock` guards all of it, for list operations only: pieces run without it. No other lock is
 * taken under it. A child made by fork has none of the threads, and perhaps a lock that is held for ever: it
 * touches nothing. */
#include "base/workers.h"

#include <fenv.h>
#include <stdio.h>

#include "base/memory.h"
#include "base/thread.h"

typedef struct worker {
    sthi_workers *pool;
    sthi_thread thread;
    void *scratch;
} worker;

typedef struct job_list {
    sthi_job *first, *last;
} job_list;

struct sthi_workers {
    const char *owner, *name;
    unsigned fork_depth; /* when it was made */
    uint32_t count, started;
    worker *workers;

    sthi_mutex lock;
    sthi_cond work, finished;
    sthi_job *queue_first, *queue_last;
    job_list live, failed;
    uint64_t last_ticket;
    bool ending;
};

static void push(job_list *list, sthi_job *job) {
    job->previous = list->last;
    job->next = NULL;
    *(list->last ? &list->last->next : &list->first) = job;
    list->last = job;
}
static void take_out(job_list *list, sthi_job *job) {
    *(job->previous ? &job->previous->next : &list->first) = job->next;
    *(job->next ? &job->next->previous : &list->last) = job->previous;
}
static sthi_job *find(const job_list *list, uint64_t ticket) {
    sthi_job *job = list->first;
    while (job && ticket && job->ticket != ticket) job = job->next;
    return job;
}

/* ---- the threads ---- */

static void leave_queue(sthi_workers *pool, sthi_job *job) {
    sthi_job **link = &pool->queue_first, *before = NULL;
    while (*link && *link != job) before = *link, link = &before->queue_next;
    if (!*link) return;
    *link = job->queue_next;
    if (pool->queue_last == job) pool->queue_last = before;
}

static void finish(sthi_workers *pool, sthi_job *job) {
    take_out(&pool->live, job);
    job->finished = true;
    if (!job->waited) {
        if (job->error.status == STH_OK)
            sthi_free(job);
        else
            push(&pool->failed, job);
    }
    sthi_cond_broadcast(&pool->finished);
}

/* One piece of the oldest job. Called with the lock, which it lets go meanwhile. */
static void work(worker *self, sthi_job *job) {
    sthi_workers *pool = self->pool;
    uint64_t piece = job->handed++;
    if (job->handed == job->pieces) leave_queue(pool, job);
    sthi_unlock(&pool->lock);
    sthi_error_copy error = {.status = STH_OK};
    if (job->run(job, piece, self->scratch) != STH_OK) sthi_error_save(&error);
    sthi_lock(&pool->lock);
    job->done++;
    if (error.status != STH_OK && job->error.status == STH_OK) {
        job->error = error;
        leave_queue(pool, job);
        job->pieces = job->handed;
    }
    if (job->done == job->pieces) finish(pool, job);
}

static void *run_worker(void *arg) {
    worker *self = arg;
    sthi_workers *pool = self->pool;
    fesetenv(FE_DFL_ENV); /* not the caller's rounding mode, nor flushing of denormals to 0 */
    sthi_lock(&pool->lock);
    for (;;) {
        if (pool->queue_first)
            work(self, pool->queue_first);
        else if (pool->ending)
            break;
        else
            sthi_cond_wait(&pool->work, &pool->lock);
    }
    sthi_unlock(&pool->lock);
    return NULL;
}

/* ---- life ---- */

static sth_status start(sthi_workers *pool, size_t scratch_bytes) {
    for (; pool->started < pool->count; pool->started++) {
        worker *w = &pool->workers[pool->started];
        w->pool = pool;
        if (scratch_bytes && !(w->scratch = sthi_alloc(scratch_bytes)))
            return sthi_no_memory(pool->owner, "the buffers of %u threads of the %s", pool->count, pool->owner);
        char name[16];
        snprintf(name, sizeof name, "%.10s-%u", pool->name, pool->started % 1000);
        STHI_TRY(sthi_thread_start(&w->thread, name, run_worker, w));
    }
    return STH_OK;
}

sth_status sthi_workers_create(const char *owner, const char *name, uint32_t threads, size_t scratch_bytes,
                               sthi_workers **out) {
    sthi_workers *pool = sthi_zalloc(1, sizeof *pool);
    worker *workers = sthi_zalloc(threads, sizeof *workers);
    if (!pool || !workers) {
        sthi_free(pool);
        sthi_free(workers);
        return sthi_no_memory(owner, "%u threads of the %s", threads, owner);
    }
    pool->owner = owner;
    pool->name = name;
    pool->count = threads;
    pool->workers = workers;
    pool->fork_depth = sthi_fork_depth();
    sthi_mutex_init(&pool->lock);
    sthi_cond_init(&pool->work);
    sthi_cond_init(&pool->finished);
    sth_status status = start(pool, scratch_bytes);
    if (status == STH_OK) {
        *out = pool;
        return STH_OK;
    }
    sthi_error_copy first;
    sthi_error_save(&first);
    sthi_workers_destroy(pool);
    return sthi_error_restore(&first);
}

static bool is_child(const sthi_workers *pool) { return sthi_fork_depth() != pool->fork_depth; }

static void free_jobs(job_list *list) {
    while (list->first) {
        sthi_job *job = list->first;
        take_out(list, job);
        sthi_free(job);
    }
}

void sthi_workers_destroy(sthi_workers *pool) {
    if (!pool || is_child(pool)) return;
    sthi_lock(&pool->lock);
    pool->ending = true;
    sthi_cond_broadcast(&pool->work);
    sthi_unlock(&pool->lock);
    for (uint32_t i = 0; i < pool->started; i++) sthi_thread_join(pool->workers[i].thread);
    for (uint32_t i = 0; i < pool->count; i++) sthi_free(pool->workers[i].scratch);
    free_jobs(&pool->failed);
    sthi_cond_fini(&pool->finished);
    sthi_cond_fini(&pool->work);
    sthi_mutex_fini(&pool->lock);
    sthi_free(pool->workers);
    sthi_free(pool);
}

uint32_t sthi_workers_count(const sthi_workers *pool) { return pool->count; }

/* ---- callers ---- */

sth_status sthi_workers_refuse_child(const sthi_workers *pool) {
    if (!is_child(pool)) return STH_OK;
    return sthi_fail(
        STH_INVALID_STATE, NULL, 0, pool->owner,
        "this process was forked from the one that made the %s, and has none of its threads: "
        "make a new %s here", pool->owner, pool->owner);
}

/* With the lock. A job without pieces is finished at once. */
static void enter(sthi_workers *pool, sthi_job *job) {
    job->handed = job->done = 0;
    job->finished = false;
    job->error.status = STH_OK;
    job->ticket = ++pool->last_ticket;
    push(&pool->live, job);
    if (!job->pieces) {
        finish(pool, job);
        return;
    }
    job->queue_next = NULL;
    *(pool->queue_last ? &pool->queue_last->queue_next : &pool->queue_first) = job;
    pool->queue_last = job;
    if (job->pieces == 1)
        sthi_cond_signal(&pool->work);
    else
        sthi_cond_broadcast(&pool->work);
}

sth_status sthi_workers_submit(sthi_workers *pool, sthi_job *job, uint64_t *out_ticket) {
    STHI_TRY(sthi_workers_refuse_child(pool));
    job->waited = false;
    sthi_lock(&pool->lock);
    enter(pool, job);
    if (out_ticket) *out_ticket = pool->last_ticket;
    sthi_unlock(&pool->lock);
    return STH_OK;
}

sth_status sthi_workers_wait(sthi_workers *pool, uint64_t ticket) {
    STHI_TRY(sthi_workers_refuse_child(pool));
    sthi_error_copy error = {.status = STH_OK};
    sthi_lock(&pool->lock);
    while (find(&pool->live, ticket)) sthi_cond_wait(&pool->finished, &pool->lock);
    sthi_job *job = find(&pool->failed, ticket);
    if (job) {
        error = job->error;
        take_out(&pool->failed, job);
        sthi_free(job);
        if (!ticket) free_jobs(&pool->failed);
    }
    sthi_unlock(&pool->lock);
    return error.status == STH_OK ? STH_OK : sthi_error_restore(&error);
}

sth_status sthi_workers_run(sthi_workers *pool, sthi_job *job) {
    STHI_TRY(sthi_workers_refuse_child(pool));
    job->waited = true;
    sthi_lock(&pool->lock);
    enter(pool, job);
    while (!job->finished) sthi_cond_wait(&pool->finished, &pool->lock);
    sthi_unlock(&pool->lock);
    return job->error.status == STH_OK ? STH_OK : sthi_error_restore(&job->error);
}

sth_status sthi_workers_once(const char *owner, const char *name, uint32_t threads, size_t scratch_bytes,
                             sthi_job *job) {
    sthi_workers *pool = NULL;
    if (!threads) threads = (uint32_t)sthi_core_count();
    if (threads > job->pieces) threads = job->pieces ? (uint32_t)job->pieces : 1;
    STHI_TRY(sthi_workers_create(owner, name, threads, scratch_bytes, &pool));
    sth_status status = sthi_workers_run(pool, job);
    sthi_workers_destroy(pool);
    return status;
}
