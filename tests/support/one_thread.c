/* Linked with the programs that `one_thread` in tests/meson.build names, in front of pthread_create: the thread
 * sanitizer leaves them out of `make test`, so that none of them may start a thread unseen. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg);

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*start)(void *), void *arg) {
    (void)thread, (void)attr, (void)start, (void)arg;
    fprintf(stderr, "%s starts a thread: take it out of one_thread in tests/meson.build\n",
            program_invocation_short_name);
    _exit(1);
}
