/* A second planner for tests: tries everything, on whole units of size and time, with a simulation of its
 * own. Written from the model's words in stagehand/plan.h, not from src/core. */
#ifndef TESTS_CORE_PLAN_BRUTE_H
#define TESTS_CORE_PLAN_BRUTE_H
#include <stdbool.h>

#include "stagehand/plan.h"

enum { BRUTE_UNITS = 10, BRUTE_USES = 20, BRUTE_BYTES = 3 * BRUTE_UNITS };

typedef struct brute_case {
    int units, uses;
    int size[BRUTE_UNITS];
    int unit[BRUTE_USES];    /* of each use */
    int compute[BRUTE_USES]; /* in the time that one unit of size takes on the link */
    unsigned packable;       /* bit set of units of 2 or more that may stay in one unit of size less; each use then
                                takes a quarter of the size longer, and a load takes nothing of the link */
    unsigned either;         /* bit set of units of 2 or more that may cross in one unit of size less; the first use of
                                each such load then takes a quarter of the size longer */
    unsigned written;        /* bit set of units whose host images change between steps */
    bool whole;              /* a copy starts only when all of its place is free */
    bool twice;              /* the ring is mapped twice */
} brute_case;

/* best[v]: shortest step with v units of size as the budget, negative if there is none; v up to the sum of
 * all sizes. */
void brute_force(const brute_case *c, double best[BRUTE_BYTES + 1]);

/* Runs a plan, chunk by chunk, looking through all earlier loads for each; the mean step of the last laps in
 * nanoseconds, negative if a chunk waits for a use that waits for it. For short timelines. */
double brute_replay(const sth_plan_input *in, const sth_plan *plan);
#endif
