/* A runtime takes what has become free. Lock held. */
#ifndef STHI_RUNTIME_SHARE_GROW_H
#define STHI_RUNTIME_SHARE_GROW_H
#include "state/state.h"

/* What it would use if it could: all of its units, within its budget. */
uint64_t sthi_wanted(const sth_runtime *rt);
void sthi_grow(sth_runtime *rt);                     /* before a step: into what has become free */
#endif
