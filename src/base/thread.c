/* Thin wrappers over pthreads; conditions use the monotonic clock. */
#define _GNU_SOURCE
#include "base/thread.h"

#include <errno.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

#include "base/error.h"
#include "base/fault.h"

void sthi_mutex_init(sthi_mutex *m) { pthread_mutex_init(&m->m, NULL); }
void sthi_mutex_fini(sthi_mutex *m) { pthread_mutex_destroy(&m->m); }
void sthi_lock(sthi_mutex *m) { pthread_mutex_lock(&m->m); }
void sthi_unlock(sthi_mutex *m) { pthread_mutex_unlock(&m->m); }

void sthi_cond_init(sthi_cond *c) {
    pthread_condattr_t attr;
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&c->c, &attr);
    pthread_condattr_destroy(&attr);
}
void sthi_cond_fini(sthi_cond *c) { pthread_cond_destroy(&c->c); }
void sthi_cond_wait(sthi_cond *c, sthi_mutex *m) { pthread_cond_wait(&c->c, &m->m); }

bool sthi_cond_wait_for(sthi_cond *c, sthi_mutex *m, int64_t ns) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += ns / 1000000000;
    t.tv_nsec += ns % 1000000000;
    if (t.tv_nsec >= 1000000000) t.tv_sec++, t.tv_nsec -= 1000000000;
    return pthread_cond_timedwait(&c->c, &m->m, &t) != ETIMEDOUT;
}
void sthi_cond_signal(sthi_cond *c) { pthread_cond_signal(&c->c); }
void sthi_cond_broadcast(sthi_cond *c) { pthread_cond_broadcast(&c->c); }

sth_status sthi_thread_start(sthi_thread *out, const char *name, void *(*fn)(void *), void *arg) {
    if (sthi_fault_hit(STHI_FAULT_THREAD))
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, "errno", EAGAIN, name, "could not start thread %s", name);
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(out, NULL, fn, arg);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (rc)
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, "errno", rc, name, "could not start thread %s", name);
    pthread_setname_np(*out, name);
    return STH_OK;
}

void sthi_thread_join(sthi_thread t) { pthread_join(t, NULL); }

atomic_uint sthi_forks;
static void count_fork(void) { atomic_fetch_add_explicit(&sthi_forks, 1, memory_order_relaxed); }
static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

unsigned sthi_fork_depth(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    return atomic_load_explicit(&sthi_forks, memory_order_relaxed);
}

int sthi_cpu_count(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return 1;
    int n = CPU_COUNT(&set);
    return n > 0 ? n : 1;
}

/* The first processor of the core that `cpu` is a part of; `cpu` itself where the system does not say. */
static int first_of_core(int cpu) {
    char path[96];
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    FILE *file = fopen(path, "re");
    int first = cpu;
    if (file) {
        if (fscanf(file, "%d", &first) != 1 || first < 0 || first >= CPU_SETSIZE) first = cpu;
        fclose(file);
    }
    return first;
}

int sthi_core_count(void) {
    cpu_set_t set, cores;
    if (sched_getaffinity(0, sizeof set, &set)) return 1;
    CPU_ZERO(&cores);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &set)) CPU_SET(first_of_core(cpu), &cores);
    int n = CPU_COUNT(&cores);
    return n > 0 ? n : 1;
}
