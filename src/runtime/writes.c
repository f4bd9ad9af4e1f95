/* Which units are written between steps. Training writes weights between steps, and a plan for that
 * is another one. A unit counts as written once it was marked before two steps with at most
 * WRITTEN_WITHIN whole ones from one to the other, and until STHI_UNWRITTEN_STEPS whole ones in a
 * row saw no write: a state that is loaded is no reason to plan anew, nor is an evaluation amid
 * training, whose steps are parts of the order. Lock held. */
#include "runtime/writes.h"

#include "state/state.h"

enum { WRITTEN_WITHIN = 4 };

static void set_written(sth_runtime *rt, sthi_unit *u, bool written) {
    if (u->writes.written == written) return;
    u->writes.written = written;
    if (written) rt->writes.units++;
    else rt->writes.units--;
    rt->writes.fresh = true;
}

void sthi_writes_note(sth_runtime *rt) {
    rt->writes.expected = rt->writes.marked || !rt->writes.units;
    if (!rt->writes.marked) return;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (u->writes.changed != u->writes.written) rt->writes.expected = false;
        if (!u->writes.changed) continue;
        if (u->writes.unwritten_steps <= WRITTEN_WITHIN) set_written(rt, u, true);
        u->writes.changed = false;
        u->writes.unwritten_steps = 0;
        rt->writes.age = true;
    }
    rt->writes.marked = false;
}

void sthi_writes_age(sth_runtime *rt) {
    if (!rt->writes.age) return;
    rt->writes.age = false;
    for (uint32_t i = 0; i < rt->unit_count; i++) {
        sthi_unit *u = &rt->units[i];
        if (u->writes.unwritten_steps < STHI_UNWRITTEN_STEPS) u->writes.unwritten_steps++;
        if (u->writes.unwritten_steps == STHI_UNWRITTEN_STEPS) set_written(rt, u, false);
        else rt->writes.age = true;
    }
}
