/* Threads, locks and conditions over pthreads. Lock and wait never fail here: they are initialised
 * before use, and a failure would be a bug of ours. */
#ifndef STHI_BASE_THREAD_H
#define STHI_BASE_THREAD_H
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/status.h"

typedef struct sthi_mutex { pthread_mutex_t m; } sthi_mutex;
typedef struct sthi_cond { pthread_cond_t c; } sthi_cond;
typedef pthread_t sthi_thread;

void sthi_mutex_init(sthi_mutex *m);
void sthi_mutex_fini(sthi_mutex *m);
void sthi_lock(sthi_mutex *m);
void sthi_unlock(sthi_mutex *m);
void sthi_cond_init(sthi_cond *c);
void sthi_cond_fini(sthi_cond *c);
void sthi_cond_wait(sthi_cond *c, sthi_mutex *m);
/* False when the time ran out. */
bool sthi_cond_wait_for(sthi_cond *c, sthi_mutex *m, int64_t ns);
void sthi_cond_signal(sthi_cond *c);
void sthi_cond_broadcast(sthi_cond *c);
/* `name`: at most 15 characters, shown by ps and gdb. All signals are blocked in the new thread, so
 * that Ctrl-C reaches the caller's threads only. */
sth_status sthi_thread_start(sthi_thread *out, const char *name, void *(*fn)(void *), void *arg);
void sthi_thread_join(sthi_thread t);
/* Forks between the first caller of this function and the calling process: a value that differs from one
 * read earlier means that the process is a child, in which the other threads do not exist. */
unsigned sthi_fork_depth(void);
extern atomic_uint sthi_forks;
/* Whether the process is a child of the one that read `depth`. Costs one load. */
static inline bool sthi_is_child(unsigned depth) {
    return atomic_load_explicit(&sthi_forks, memory_order_relaxed) != depth;
}
/* Processors this process may use, at least 1. */
int sthi_cpu_count(void);
/* The cores that these processors are parts of, at least 1: threads of one core count once. */
int sthi_core_count(void);
#endif
