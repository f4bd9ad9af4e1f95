/* Units, before seal. Lock not held. */
#ifndef STHI_RUNTIME_UNITS_H
#define STHI_RUNTIME_UNITS_H
#include "state/state.h"

sth_status sthi_runtime_add_unit(sth_runtime *rt, const sth_unit_desc *desc, uint32_t *out);
#endif
