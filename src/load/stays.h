#ifndef STHI_LOAD_STAYS_H
#define STHI_LOAD_STAYS_H
#include "stagehand/runtime.h"

/* Bytes of the device that the unit takes where it stays there packed; 0: it cannot. Lock held, as in all. */
uint64_t sthi_stays_bytes(const sth_runtime *rt, uint32_t unit);
/* Bytes of all that the plan leaves packed. */
uint64_t sthi_stays_planned(const sth_runtime *rt, const sth_plan *plan);
/* Whether just the units that the plan leaves packed have memory for it. */
bool sthi_stays_as(const sth_runtime *rt, const sth_plan *plan);
/* Memory for them, without their bytes. There must be none yet. */
sth_status sthi_stays_alloc(sth_runtime *rt, const sth_plan *plan);
/* Waits for what reads it. */
void sthi_stays_free(sth_runtime *rt);
#endif
