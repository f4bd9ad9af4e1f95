/* The plan in force, and how far steps have followed it. */
#ifndef STHI_STATE_PLAN_H
#define STHI_STATE_PLAN_H
#include "stagehand/plan.h"

/* What the planner is given where some units go in bundles. */
typedef struct sthi_bundles {
    uint32_t *of_unit;       /* [of the input: units] */
    uint32_t *place;         /* [the same] where the unit lies in its bundle's place */
    sth_plan_unit *units;    /* [unit_count] bundles, those of a single unit included */
    sth_plan_use *uses;      /* [use_count] */
    uint32_t *begin;         /* [use_count + 1] the use of the order that each begins with */
    uint32_t unit_count, use_count;
    uint64_t largest;        /* bytes of the largest with more than one unit */
    sth_plan *plan;          /* made for these units and uses */
} sthi_bundles;

/* A plan by units, and the bundles that it was made of; NULL where each unit stands for itself. */
typedef struct sthi_made_plan {
    sth_plan *plan;
    sthi_bundles *bundles;
    uint64_t asked;          /* a number for the input that it was made for (runtime/planning.c) */
    uint64_t room;           /* that the input had for units */
} sthi_made_plan;

/* runtime/geometry.c */
typedef struct sthi_planned {
    sth_plan *plan;          /* by units */
    sthi_bundles *bundles;   /* that it was made of; NULL: each unit stands for itself */
    uint64_t asked, room;    /* as those of sthi_made_plan */
    sthi_made_plan before;   /* in force until the runtime gave way; plan NULL: there is none */
    sth_plan_unit *units;    /* [unit_count] room for the planner's input */
    uint64_t all_bytes;      /* of all units of the runtime */
    uint32_t *load_uses;     /* [plan->load_count] */
    uint32_t kept_end;       /* uses before this one may be served by loads of the lap before */
    bool homes;              /* residents have homes, in extents that are there */
    bool holds;              /* plans count with what was held together: one within the budget can */
    bool hurry;              /* the device waits for the plan: it is looked for shortly, and at length a step later */
    const char *why;         /* why another one is wanted; NULL: `reserved` changed */
    bool again;              /* another one is wanted at the next step's end */
    sth_status refused;      /* why the last plan that was wanted is not there: none fits. OK: it is */
    uint32_t count;          /* plans that were taken */
} sthi_planned;

/* runtime/program.c, load/feed.c */
typedef struct sthi_program {
    bool on;                 /* following the plan */
    bool waits;              /* a graph interrupted the plan: the next ordinary step begins it again */
    uint64_t lap;            /* of the plan: steps begun since it was installed */
    uint64_t next_load;      /* sequence number to queue next */
    uint32_t cursor;         /* next expected use */
    uint32_t kept_next;      /* those before it are served by the lap before, or their units are queued, or past */
    uint32_t *residents;     /* still to load, by first use */
    uint32_t resident_count, resident_next;
    uint32_t max_inflight;   /* static policy: loads ahead under way at once; 0: no limit */
} sthi_program;
#endif
