/* Copy intervals: a run of copies that do not wait for a place in between is timed as one, from the
 * event before the first to the event behind the last. The records are those of the open step
 * (state/timing.h). Lock held. */
#include "load/interval.h"

#include "state/state.h"

bool sthi_timing_record(sth_runtime *rt, sth_event **event, sth_stream stream) {
    if (!*event && STHI_DEV(rt, event_create, true, event) != STH_OK) {
        *event = NULL;
        return false;
    }
    return STHI_DEV(rt, event_record, *event, stream) == STH_OK;
}

void sthi_interval_begin(sth_runtime *rt, uint32_t unit, sth_stream stream) {
    sthi_timed_step *t = rt->timing.now;
    if (!t || t->light) return;
    if (t->copies == t->copy_cap) {
        rt->timing.too_short = true;
        return;
    }
    t->copy[t->copies].unit = unit;
    if (t->copies < t->copy_bytes_cap) t->copy_bytes[t->copies] = 0;
    t->copy[t->copies].last = t->copy[t->copies].joined = false;
    t->copy[t->copies].demand = stream == rt->copies.demand_stream;
    t->copy_open = sthi_timing_record(rt, &t->copy[t->copies].begin, stream);
}

void sthi_interval_end(sth_runtime *rt) {
    sthi_timed_step *t = rt->timing.now;
    if (!t || !t->copy_open) return;
    t->copy_open = false;
    sth_stream stream = t->copy[t->copies].demand ? rt->copies.demand_stream : rt->copies.stream;
    if (sthi_timing_record(rt, &t->copy[t->copies].end, stream)) t->copies++;
}

void sthi_interval_join(sth_runtime *rt, uint32_t unit) {
    sthi_timed_step *t = rt->timing.now;
    if (t->copies == t->copy_cap) {
        rt->timing.too_short = true;
        return;
    }
    sthi_timed_copy *c = &t->copy[t->copies++];
    c->unit = unit;
    c->last = c->joined = true;
    c->demand = false;
}
