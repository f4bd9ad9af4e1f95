/* What a runtime has to say to the log: its first plan, and plans that take its place. Lock held, but for `unlock`. */
#ifndef STHI_RUNTIME_NEWS_H
#define STHI_RUNTIME_NEWS_H
#include "state/state.h"

void sthi_news_sealed(sth_runtime *rt);
/* A plan came into force; why: the reason, as "the budget changed". */
void sthi_news_plan(sth_runtime *rt, const char *why);
/* A better plan was looked for, for this reason, and the one in force stays. */
void sthi_news_kept(sth_runtime *rt, const char *why);

/* Lets the lock go and hands over what there is to say. In place of sthi_unlock where callers come in. */
static inline void sthi_unlock_and_say(sth_runtime *rt) {
    sthi_message *said = rt->telemetry.news;
    if (said) rt->telemetry.news = NULL;
    sthi_unlock(&rt->lock);
    if (said) sthi_log_deliver(said);
}
#endif
