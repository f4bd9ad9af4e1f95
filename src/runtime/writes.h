/* Which units are written between steps. Lock held. */
#ifndef STHI_RUNTIME_WRITES_H
#define STHI_RUNTIME_WRITES_H
#include "state/state.h"

/* A step begins: what was written since the last one did. */
void sthi_writes_note(sth_runtime *rt);
/* A whole step has ended. */
void sthi_writes_age(sth_runtime *rt);
#endif
