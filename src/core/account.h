/* The account of one device: how many bytes each of its runtimes occupies, who is protected, and who gives way
 * to whom. Pure: no lock, no clock, and members are only numbers here; runtime/share/arrive.c is the shell.
 *
 * Invariants: the sum of charges is `charge` and at most `cap`; a claim is part of its member's charge. */
#ifndef STHI_CORE_ACCOUNT_H
#define STHI_CORE_ACCOUNT_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/residency.h"

/* From what gives way first to what never does. */
typedef enum sthi_shield {
    STHI_SHIELD_NONE,
    STHI_SHIELD_GUEST,
    STHI_SHIELD_SECONDARY,
    STHI_SHIELD_KEPT,
    STHI_SHIELD_PRIMARY
} sthi_shield;

typedef struct sthi_member {
    struct sthi_member *next;
    void *owner;
    const char *name;
    uint64_t charge;     /* bytes that it has, or may take any moment */
    uint64_t claim;      /* the part that it may take any moment */
    uint64_t fixed;      /* the part that only its caller can give back */
    uint32_t holds;      /* changes of its plan under way: what it frees becomes claim */
    uint32_t keeps, guests; /* blocks that it is in */
    sth_resident_priority priority;
    bool busy;           /* in a step, on this thread: */
    uint64_t thread;
    bool leaving;        /* its runtime has been shut down: only leases keep the rest */
    uint32_t pins;       /* askers that are about to make its owner give way */
    uint64_t used;       /* the account's clock at its last use */
    uint32_t run;        /* steps since another member had one */
    uint32_t last_run;   /* steps of the run before; 0: there was none */
    uint64_t tried;      /* the last request that asked it to give way */
} sthi_member;

typedef struct sthi_account {
    uint64_t cap, charge, claims; /* sums over the members */
    bool soft;           /* the cap was found for models that take turns: one that needs more may exceed it */
    uint64_t peak;       /* highest charge without claims */
    uint64_t clock;      /* counts uses */
    uint64_t requests;
    uint64_t inside, outside; /* places: bytes from callers' allocators, and from the device itself */
    uint64_t inside_peak;     /* the most of the former since the finder looked */
    sthi_member *first;  /* the newest */
    sthi_member *running; /* had the last step; NULL: none yet */
} sthi_account;

void sthi_account_join(sthi_account *a, sthi_member *m, void *owner, const char *name);
void sthi_account_leave(sthi_account *a, sthi_member *m); /* with its charge; again is fine */

uint64_t sthi_account_free(const sthi_account *a);
/* Raises a soft cap, to `most` at the most, until the member can have `least` beside what the others have. */
void sthi_account_exceed(sthi_account *a, const sthi_member *m, uint64_t least, uint64_t most);
/* Bytes for the member: of its claim first, then free ones. False, and nothing taken, when there are too few. */
bool sthi_account_take(sthi_account *a, sthi_member *m, uint64_t bytes);
void sthi_account_give(sthi_account *a, sthi_member *m, uint64_t bytes);
/* Begins a change of plan: claims free bytes until the charge is `want`, or there are no more. Returns the lesser
 * of want and charge. Each hold needs a settle, which gives back what is left of the claim. */
uint64_t sthi_account_hold(sthi_account *a, sthi_member *m, uint64_t want);
void sthi_account_settle(sthi_account *a, sthi_member *m);

sthi_shield sthi_account_shield(const sthi_member *m);
/* Most that the member could have: all but what others have that never gives way to it. */
uint64_t sthi_account_reach(const sthi_account *a, const sthi_member *m);
void sthi_account_used(sthi_account *a, sthi_member *m);
/* A step of the member begins. */
void sthi_account_ran(sthi_account *a, sthi_member *m);
/* Whether others' bytes are worth more to the member than to them. A run of steps loads a byte that stays once, one
 * that streams once a step; whoever gave it loads it once to have it back. A member of which nothing is known is
 * taken for one of long runs. */
bool sthi_account_stays(const sthi_member *m);
/* What the member asks others for, of `want` bytes: all of it where it stays. Else `flow` bytes, with which a step
 * streams all that it has to, from members that have long runs or because it has less than `least`; members of short
 * runs that take turns would only swap. */
uint64_t sthi_account_asks(const sthi_account *a, const sthi_member *m, uint64_t least, uint64_t flow, uint64_t want);
/* What callers fill themselves, together. */
uint64_t sthi_account_fixed(const sthi_account *a);

/* Who gives way next to `asker`, NULL when nobody does. required: guests and SECONDARY reservations may. Not one
 * that this request has asked already. *out_wait: somebody who could give way is in use by another thread. */
sthi_member *sthi_account_victim(const sthi_account *a, const sthi_member *asker, uint64_t request, bool required,
                                 uint64_t thread, bool *out_wait);
/* Whether the thread is inside a step of some member. */
bool sthi_account_thread_busy(const sthi_account *a, uint64_t thread);

void sthi_account_info(const sthi_account *a, sth_residency_info *out);
/* Who has how much and why, as a part of a sentence; returns `to`. */
const char *sthi_account_describe(const sthi_account *a, const sthi_member *but, char *to, uint64_t size);
bool sthi_account_check(const sthi_account *a, const char **out_why);
#endif
