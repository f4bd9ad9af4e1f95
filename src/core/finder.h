/* What the runtimes of a device may occupy together, and what one of them may have, where nobody said: found from
 * readings of its memory. Pure: no lock, no clock, no device; docs/budget.md has the rules.
 *
 * Invariants: the cap leaves a whole reserve when it is set, and half of one as long as it is left as it is. */
#ifndef STHI_CORE_FINDER_H
#define STHI_CORE_FINDER_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/residency.h"

typedef struct sthi_finder {
    uint64_t cap;
    sth_budget_why why;         /* of the cap: FULL or what made it smaller */
    uint64_t capacity;          /* at the last reading */
    uint64_t inside, outside;   /* ours at the last reading: in the caller's allocator, and not */
    uint64_t peak;              /* of the caller's allocator, at the last reading */
    bool blurred;               /* ours had changed in the time of that peak */
    uint64_t others;            /* highest that the rest of the process had */
    uint64_t others_steady;     /* the part of that which was there between steps */
    uint64_t steady;            /* what it has between steps, at the last reading */
    uint64_t recent[2];         /* the most of that: in this stretch of readings, and in the one before */
    uint64_t lacked;            /* what the rest could have had in the step that failed last; 0: that is explained */
    uint64_t margin, push;      /* added after failures; by how much the next one adds to it */
    uint64_t failures, retries; /* counts at the last reading */
    uint64_t readings, growths, shrinks;
    uint32_t calm, quiet;       /* readings since the last shrink; since the margin changed */
    uint32_t patience, grown;   /* calm that a growth needs; readings since the last growth */
} sthi_finder;

/* One reading. inside, outside: bytes that the device's runtimes occupy in the memory that the reading's
 * `framework` numbers tell of, and elsewhere; inside_peak: the most of the former since the last reading. Sets
 * out_verdict but for budget and why_budget. */
void sthi_finder_observe(sthi_finder *f, const sth_memory_reading *reading, uint64_t inside, uint64_t inside_peak,
                         uint64_t outside, sth_budget_verdict *out_verdict);
/* The runtime of `mine` runs now, behind the one of `ran`, which has just observed the end of its steps: what is known
 * of the device is the same for both. */
void sthi_finder_follow(sthi_finder *mine, const sthi_finder *ran);
/* What the runtime of the reading may have, by the cap in force; completes the verdict. */
void sthi_finder_share(const sthi_finder *f, const sth_memory_reading *reading, sth_budget_verdict *verdict);
/* Completes the verdict for a runtime whose step is about to begin: it never shrinks below `least` bytes, with which it
 * works, and does not grow while leases hold places, which a plan for more would shut. */
void sthi_finder_settle(const sth_memory_reading *reading, uint64_t least, bool leased, sth_budget_verdict *verdict);
/* Whether more than the ceiling would be taken once the runtime of the reading has its budget: by all runtimes, which
 * occupy so many bytes now, by the rest of the process, and by what the allocator holds unused. */
bool sthi_finder_above_ceiling(const sthi_finder *f, const sth_memory_reading *reading, uint64_t occupied);
/* The budget with which an idle runtime that has `has` bytes gives `over` of them to others, or as many as it can and
 * works with: `least`. 0: it has none to give. */
uint64_t sthi_finder_without(uint64_t has, uint64_t over, uint64_t least);
#endif
