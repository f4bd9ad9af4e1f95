/* Life of a runtime. Lock not held. */
#ifndef STHI_RUNTIME_RUNTIME_H
#define STHI_RUNTIME_RUNTIME_H
#include "state/state.h"

void sthi_runtime_options_init(sth_runtime_options *options);
sth_status sthi_runtime_create(sth_device *device, const sth_runtime_options *options, sth_runtime **out);
sth_status sthi_runtime_not_here(const sth_runtime *rt); /* the error */
/* A child has none of the threads, locks in any state, and a file that is the parent's: nothing is touched there. */
void sthi_runtime_destroy(sth_runtime *rt);
sth_status sthi_runtime_synchronize(sth_runtime *rt);
sth_status sthi_runtime_set_budget(sth_runtime *rt, uint64_t budget);
uint64_t sthi_runtime_missing_budget(sth_runtime *rt, int64_t now_ns);
sth_status sthi_runtime_ask_again(sth_runtime *rt, int64_t now_ns);
static inline bool sthi_runtime_is_here(const sth_runtime *rt) { return rt && !sthi_is_child(rt->fork_depth); }
/* Of every public call but destroy and the release of leases: not NULL, and not a forked child's. */
static inline sth_status sthi_runtime_usable(const sth_runtime *rt) {
    return sthi_runtime_is_here(rt) ? STH_OK : sthi_runtime_not_here(rt);
}
#endif
