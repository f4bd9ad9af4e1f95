/* Neighbouring small units, planned as one. Lock held. */
#ifndef STHI_RUNTIME_BUNDLE_H
#define STHI_RUNTIME_BUNDLE_H
#include "state/state.h"

/* *out is NULL where there are none. `in` is by units. */
sth_status sthi_bundles_make(const sth_runtime *rt, const sth_plan_input *in, sthi_bundles **out);
/* The same input by bundles, as long as they are there; what the uses take is what `in` says. */
void sthi_bundles_input(sthi_bundles *b, const sth_plan_input *in, sth_plan_input *out);
/* Their plan by units. */
sth_status sthi_bundles_part(const sthi_bundles *b, const sth_plan_input *in, sth_plan **out);
void sthi_bundles_destroy(sthi_bundles *b);          /* NULL is fine */
#endif
