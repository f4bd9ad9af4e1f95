/* A runtime has others give way. */
#ifndef STHI_RUNTIME_SHARE_ASK_H
#define STHI_RUNTIME_SHARE_ASK_H
#include "state/state.h"

/* Not held: makes room for `want` bytes of the runtime, or at least for `least`, and begins a hold on it. On failure
 * there is no hold. */
sth_status sthi_request_room(sth_runtime *rt, uint64_t least, uint64_t want);
/* May drop the lock: others give way for `bytes` more than the runtime has. True: look for a place again. */
bool sthi_more_room(sth_runtime *rt, uint64_t bytes);
#endif
