/* stagehand/log.h - what the library says while it runs: one callback for the process.
 *
 * Messages are few: one when a runtime has its first plan, one for each plan that takes its place,
 * with the reason. Nothing is formatted while no callback is set. */
#ifndef STAGEHAND_LOG_H
#define STAGEHAND_LOG_H
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum sth_log_level {
    STH_LOG_DEBUG,  /* plans that were looked at and stay */
    STH_LOG_INFO,   /* first plans, and changes of plan */
    STH_LOG_WARNING /* what costs time and can be helped */
} sth_log_level;

/* message: one line, without a newline at its end; the callback's until it returns. Called by a
 * thread inside a call that ends a step, seals a runtime or changes its budget, without any lock of
 * the library's but a runner's. It may call the library, but neither that runner nor the end of
 * that runtime. */
typedef void (*sth_log_fn)(void *context, sth_log_level level, const char *message);

/* Messages from `least` on go to fn; NULL: to nobody, as at first. The one that was set before may
 * still be at work when the call returns. Threads: any. Blocks: no. Allocates: no. */
STH_API void sth_log_set(sth_log_fn fn, void *context, sth_log_level least);

#ifdef __cplusplus
}
#endif
#endif
