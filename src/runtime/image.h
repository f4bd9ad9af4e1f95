/* Another host image for a unit. Lock not held. */
#ifndef STHI_RUNTIME_IMAGE_H
#define STHI_RUNTIME_IMAGE_H
#include "state/state.h"

sth_status sthi_unit_set_host(sth_runtime *rt, uint32_t unit, const void *host, sth_arena *arena);
#endif
