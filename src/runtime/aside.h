/* Units that plans pass by. */
#ifndef STHI_RUNTIME_ASIDE_H
#define STHI_RUNTIME_ASIDE_H
#include "stagehand/runtime.h"

sth_status sthi_runtime_set_aside(sth_runtime *rt, const uint32_t *units, uint32_t count, bool aside);
#endif
