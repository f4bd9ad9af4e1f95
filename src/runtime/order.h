/* The order of uses, as steps show it. Lock held. */
#ifndef STHI_RUNTIME_ORDER_H
#define STHI_RUNTIME_ORDER_H
#include "state/state.h"

static inline bool sthi_in_order(const sthi_unit *u) { return !(u->flags & (STH_UNIT_ON_DEMAND | STH_UNIT_ASIDE)); }

/* The order is this one, but for units on demand. held: uses until each unit was let go, or NULL. */
sth_status sthi_order_set(sth_runtime *rt, const uint32_t *units, const uint32_t *held, uint32_t count);
/* The order is that in which units were added, and nothing of it has been seen yet. */
sth_status sthi_order_guess(sth_runtime *rt);
/* A whole step has ended: units on demand that have come regularly return to the order. */
sth_status sthi_order_regular(sth_runtime *rt);
/* A step that followed the order has ended: how long it held its units. */
void sthi_order_note_held(sth_runtime *rt);
/* The step did not follow the order: decide what the next one follows. */
sth_status sthi_order_learn(sth_runtime *rt);
#endif
