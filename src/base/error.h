/* Failure reporting: fills the calling thread's error record. */
#ifndef STHI_BASE_ERROR_H
#define STHI_BASE_ERROR_H
#include "stagehand/status.h"

/* Records the failure for sth_last_error() and returns `status`, so that callers can write
 * `return sthi_fail(...)`. `object` may be NULL. */
sth_status sthi_fail(sth_status status, const char *domain, long native, const char *object,
                     const char *fmt, ...) __attribute__((format(printf, 5, 6)));

/* OUT_OF_HOST_MEMORY: "no host memory for ..."; fmt gives the rest, which names the thing that
 * needed the memory. The second is for a device, whose `domain` goes into the record. */
sth_status sthi_no_memory(const char *object, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
sth_status sthi_no_memory_in(const char *domain, const char *object, const char *fmt, ...)
    __attribute__((format(printf, 3, 4)));

/* INVALID_STATE in a child process: what belongs to the process that was forked. what: "the pool". */
sth_status sthi_fail_in_child(const char *object, const char *what);

/* Copies a record made on another thread into this thread's. */
typedef struct sthi_error_copy {
    sth_status status;
    long native;
    char domain[24], object[256], message[768];
} sthi_error_copy;
void sthi_error_save(sthi_error_copy *out);
sth_status sthi_error_restore(const sthi_error_copy *saved);
const sth_error *sthi_error_last(void);

/* status.c */
const char *sthi_status_name(sth_status status); /* "OK"; "UNKNOWN" where there is no such status */
const char *sthi_status_text(sth_status status);

#define STHI_TRY(expr)                          \
    do {                                        \
        sth_status sthi_try_ = (expr);          \
        if (sthi_try_ != STH_OK) return sthi_try_; \
    } while (0)
#endif
