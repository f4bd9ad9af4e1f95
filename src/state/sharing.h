/* A runtime among others on its device. */
#ifndef STHI_STATE_SHARING_H
#define STHI_STATE_SHARING_H
#include <stdatomic.h>

#include "core/account.h"
#include "core/backoff.h"

#define STHI_INSIDE_NS (INT64_C(200) * 1000000) /* for threads that are in a call, or have yet to drop a tensor */
#define STHI_WAIT_NS (INT64_C(30) * 1000000000) /* for runtimes that other threads use, bring or take away */
#define STHI_LOOK_NS (INT64_C(20) * 1000000)    /* nobody says when they are through */

/* runtime/share/; charges: load/charge.c */
typedef struct sthi_sharing {
    sthi_member member;      /* of the device's account; guarded by the account's lock */
    uint64_t limit;          /* bytes that the account left for the plan in force, `reserved` included */
    uint64_t asked;          /* budget that the caller set; options.budget is less where the device refused a part */
    sthi_backoff again;      /* when that part is asked for again */
    atomic_bool parked;      /* whoever begins a step, or acquires, brings the runtime back first */
    atomic_bool lent;        /* it is parked, and has the places that nobody has asked for yet */
    uint64_t soft;           /* of `reserved`: places get it rather than that a lease is refused */
    bool settled;            /* it has asked for its budget since it was sealed or parked */
    bool arriving;           /* a thread is about to bring it back */
} sthi_sharing;
#endif
