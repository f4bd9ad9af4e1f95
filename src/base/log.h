/* Messages for the callback of stagehand/log.h. They are made where things are known, mostly under a lock, and handed
 * over where no lock is held: until then they wait in a list of their owner's, whose lock guards it. */
#ifndef STHI_BASE_LOG_H
#define STHI_BASE_LOG_H
#include <stdatomic.h>
#include <stdbool.h>

#include "stagehand/log.h"

typedef struct sthi_message sthi_message;

void sthi_log_set(sth_log_fn fn, void *context, sth_log_level least);

extern atomic_int sthi_log_least; /* what is below it goes to nobody */

static inline bool sthi_logs(sth_log_level level) {
    return (int)level >= atomic_load_explicit(&sthi_log_least, memory_order_relaxed);
}

/* Puts a message behind those in the list, unless it goes to nobody, the list is long or memory is out. */
#if defined(__GNUC__)
__attribute__((format(printf, 3, 4)))
#endif
void sthi_log_keep(sthi_message **list, sth_log_level level, const char *format, ...);

/* Hands the messages over and frees them. NULL is fine. No lock may be held. */
void sthi_log_deliver(sthi_message *list);
/* Frees them unsaid. */
void sthi_log_drop(sthi_message *list);
#endif
