/* How far away the next use of a unit is. Lock held. */
#include "load/distance.h"

#include "state/state.h"

uint32_t sthi_distance(const sth_runtime *rt, uint32_t unit) {
    uint32_t t = rt->units[unit].first_use, whole = rt->order.count + 1;
    if (t == STH_NONE) return whole;
    uint32_t first = t;
    while (t != STH_NONE && t < rt->program.cursor) t = rt->order.next[t];
    return t != STH_NONE ? t - rt->program.cursor + 1 : first + rt->order.count - rt->program.cursor + 1;
}
