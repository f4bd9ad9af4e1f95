/* State table of units. Pure: no locks, no memory of its own. */
#include "core/unit_state.h"

#include "base/error.h"

static const struct {
    sth_unit_state from, to;
} edges[] = {
#define EDGE(from, to, when) {STH_UNIT_STATE_##from, STH_UNIT_STATE_##to},
    STHI_UNIT_EDGE_LIST(EDGE)
#undef EDGE
};

bool sthi_unit_edge_allowed(sth_unit_state from, sth_unit_state to) {
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++)
        if (edges[i].from == from && edges[i].to == to) return true;
    return false;
}

const char *sthi_unit_state_name(sth_unit_state state) {
    static const char *const names[] = {
#define NAME(name, text) text,
        STH_UNIT_STATE_LIST(NAME)
#undef NAME
    };
    return (unsigned)state < STH_UNIT_STATE_COUNT ? names[state] : "?";
}

sth_status sthi_unit_move(sth_unit_state *state, sth_unit_state to, const char *unit_name) {
    if (!sthi_unit_edge_allowed(*state, to))
        return sthi_fail(STH_INTERNAL, NULL, 0, unit_name, "unit '%s' cannot go from %s to %s", unit_name,
                         sthi_unit_state_name(*state), sthi_unit_state_name(to));
    *state = to;
    return STH_OK;
}
