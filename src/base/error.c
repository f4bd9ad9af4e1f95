/* Thread-local failure records. No locks, no allocation: a failure report must work when memory is out. */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static _Thread_local sthi_error_copy record;
static _Thread_local sth_error view;

/* Formats first: the arguments may point into the record that is being replaced. */
static sth_status record_failure(sth_status status, const char *domain, long native, const char *object,
                                 const char *begins, const char *fmt, va_list args) {
    sthi_error_copy fresh = {.status = status, .native = native};
    int begun = snprintf(fresh.message, sizeof fresh.message, "%s", begins);
    vsnprintf(fresh.message + begun, sizeof fresh.message - (size_t)begun, fmt, args);
    snprintf(fresh.domain, sizeof fresh.domain, "%s", domain ? domain : "stagehand");
    snprintf(fresh.object, sizeof fresh.object, "%s", object ? object : "");
    record = fresh;
    return status;
}

sth_status sthi_fail(sth_status status, const char *domain, long native, const char *object,
                     const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    (void)record_failure(status, domain, native, object, "", fmt, args);
    va_end(args);
    return status;
}

static const char no_memory[] = "no host memory for ";

sth_status sthi_no_memory(const char *object, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    sth_status status = record_failure(STH_OUT_OF_HOST_MEMORY, NULL, 0, object, no_memory, fmt, args);
    va_end(args);
    return status;
}

sth_status sthi_no_memory_in(const char *domain, const char *object, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    sth_status status = record_failure(STH_OUT_OF_HOST_MEMORY, domain, 0, object, no_memory, fmt, args);
    va_end(args);
    return status;
}

sth_status sthi_fail_in_child(const char *object, const char *what) {
    return sthi_fail(STH_INVALID_STATE, NULL, 0, object,
                     "%s belongs to the process that was forked: make a new one in the child", what);
}

void sthi_error_save(sthi_error_copy *out) { *out = record; }

sth_status sthi_error_restore(const sthi_error_copy *saved) {
    record = *saved;
    return record.status;
}

const sth_error *sthi_error_last(void) {
    view = (sth_error){record.status, record.native, record.domain, record.object, record.message};
    return &view;
}
