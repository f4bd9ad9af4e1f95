/* What steps have shown: the order of uses, which units are written, the link's rate. */
#ifndef STHI_STATE_ORDER_H
#define STHI_STATE_ORDER_H
#include "stagehand/plan.h"

/* runtime/order.c */
typedef struct sthi_order {
    sth_plan_use *uses;      /* [count] the order that the plan is made for */
    uint32_t *next;          /* next use of the same unit, within the step */
    uint32_t *held;          /* uses, from each one on, until its unit was let go; 0: not seen */
    uint32_t count, cap;
    bool recorded;           /* not the first guess */
    uint64_t epoch;          /* counts changes of the order */
    uint64_t last_trace;     /* hash of the last deviating step's order */
    uint32_t deviations;     /* in a row */
} sthi_order;

/* runtime/writes.c */
typedef struct sthi_writes {
    bool marked;             /* some unit is `changed` */
    bool age;                /* some unit's `unwritten_steps` is below its most */
    uint32_t units;          /* that are `written` */
    bool expected;           /* what was written before the open step is what plans count with */
    bool fresh;              /* units have become written, or are no more, since the plan was looked at */
    uint64_t look_at;        /* step at whose end it is looked at for that, at the earliest */
} sthi_writes;

/* Whether steps take what the plan says. */
typedef struct sthi_link_watch {
    bool changed;            /* the rate did, since the plan was looked at */
    uint32_t steps;          /* in a row that took longer, or that took less */
    double took_ns;          /* all of them together */
    uint32_t patience, calm; /* steps to leave alone after one that no rate explains; of them left */
} sthi_link_watch;

/* runtime/link.c, runtime/measure.c */
typedef struct sthi_link {
    double rate;             /* bytes/s: of copies at seal, then of the steps' */
    sthi_link_watch watch;
} sthi_link;
#endif
