/* Following the plan, lap by lap. Lock held. */
#ifndef STHI_RUNTIME_PROGRAM_H
#define STHI_RUNTIME_PROGRAM_H
#include "state/state.h"

void sthi_program_reset(sth_runtime *rt);  /* from the start of a lap, with what is on the device */
void sthi_program_skip(sth_runtime *rt);   /* past loads whose first use has begun */
#endif
