/* Messages that wait for the callback, and the callback. Its lock is held to read and write what was set, never while
 * it runs. */
#include "base/log.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/memory.h"
#include "base/thread.h"

enum { NOBODY = STH_LOG_WARNING + 1, LONGEST = 512, MOST = 16 };

struct sthi_message {
    sthi_message *next;
    sth_log_level level;
    char text[LONGEST];
};

atomic_int sthi_log_least = NOBODY;

static sthi_mutex lock = {PTHREAD_MUTEX_INITIALIZER};
static sth_log_fn callback;
static void *callback_context;

void sthi_log_set(sth_log_fn fn, void *context, sth_log_level least) {
    sthi_lock(&lock);
    callback = fn;
    callback_context = context;
    atomic_store_explicit(&sthi_log_least, fn ? (int)least : NOBODY, memory_order_relaxed);
    sthi_unlock(&lock);
}

void sthi_log_keep(sthi_message **list, sth_log_level level, const char *format, ...) {
    if (!sthi_logs(level)) return;
    int count = 0;
    for (; *list; list = &(*list)->next)
        if (++count == MOST) return;
    sthi_message *m = sthi_zalloc(1, sizeof *m);
    if (!m) return;
    va_list args;
    va_start(args, format);
    vsnprintf(m->text, sizeof m->text, format, args);
    va_end(args);
    m->level = level;
    *list = m;
}

static void say(const sthi_message *m) {
    sthi_lock(&lock);
    sth_log_fn fn = sthi_logs(m->level) ? callback : NULL;
    void *context = callback_context;
    sthi_unlock(&lock);
    if (fn) fn(context, m->level, m->text);
}

static void end(sthi_message *list, bool said) {
    while (list) {
        sthi_message *next = list->next;
        if (said) say(list);
        sthi_free(list);
        list = next;
    }
}

void sthi_log_deliver(sthi_message *list) { end(list, true); }
void sthi_log_drop(sthi_message *list) { end(list, false); }
