/* When the caller's code may have written images. */
#ifndef STHI_RUNTIME_EPOCH_H
#define STHI_RUNTIME_EPOCH_H
#include "state/state.h"

void sthi_epoch_begin(sth_runtime *rt);            /* lock held */
sth_status sthi_runtime_fence(sth_runtime *rt);    /* not held */
#endif
