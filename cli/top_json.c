/* One look as JSON. */
#include "json_out.h"
#include "top.h"

static json_t *step(const sth_step_metrics *m) {
    if (m->step_time_ms <= 0) return json_null();
    json_t *o = json_object();
#define SET(field, unit, text) json_out_set(o, #field, json_out_number(m->field));
    STH_STEP_METRICS_LIST(SET)
#undef SET
    return o;
}

static json_t *runtime(const sth_top_runtime *r) {
    const sth_top_figures *f = &r->figures;
    json_t *o = json_object();
    json_out_set(o, "pid", json_out_count((uint64_t)r->pid));
    json_out_set(o, "place", json_out_count(r->place));
    json_out_set(o, "program", json_out_text(r->program));
    json_out_set(o, "age_s", json_out_number(r->age_s));
    json_out_set(o, "name", json_out_text(f->name));
    json_out_set(o, "device", json_out_text(f->device));
    json_out_set(o, "bound_by", f->planned ? json_out_text(sth_bound_name((sth_bound)f->bound_by)) : json_null());
    json_out_set(o, "parked", json_boolean(f->parked));
#define SET(field, unit, text) json_out_set(o, #field, json_out_count(f->field));
    STH_TOP_LIST(SET)
#undef SET
    json_out_set(o, "step", step(&f->step));
    return o;
}

void top_json(const sth_top_list *list) {
    json_t *o = json_object(), *runtimes = json_array();
    for (uint32_t i = 0; i < list->count; i++) json_out_push(runtimes, runtime(&list->runtimes[i]));
    json_out_set(o, "runtimes", runtimes);
    json_out_set(o, "passed_over", json_out_count(list->passed_over));
    json_out_print(o);
}
