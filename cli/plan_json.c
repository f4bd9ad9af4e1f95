/* A plan as one JSON object. */
#include <jansson.h>

#include "forecast.h"
#include "json_out.h"

static json_t *units_json(const forecast *f) {
    json_t *list = json_array();
    for (uint32_t i = 0; i < f->units.count; i++) {
        const unit *u = &f->units.unit[i];
        json_t *o = json_object();
        json_out_set(o, "name", json_out_text(u->name));
        json_out_set(o, "block", json_out_text(u->block));
        json_out_set(o, "bytes", json_out_count(u->bytes));
        if (f->plan) json_out_set(o, "resident", json_boolean(f->plan->resident[i]));
        json_out_push(list, o);
    }
    return list;
}

static json_t *model_json(const forecast *f) {
    json_t *o = json_object();
    json_out_set(o, "path", json_out_text(f->request->path));
    json_out_set(o, "name", json_out_text(f->request->model ? model_name(f->request->model) : NULL));
    json_out_set(o, "pass", json_out_text(f->request->model ? model_pass(f->request->model) : NULL));
    json_out_set(o, "bytes", json_out_count(f->units.bytes));
    json_out_set(o, "blocks", json_out_count(f->units.block_count));
    json_out_set(o, "left_out_tensors", json_out_count(f->units.left_out_tensors));
    json_out_set(o, "left_out_bytes", json_out_count(f->units.left_out_bytes));
    json_out_set(o, "units", units_json(f));
    return o;
}

static json_t *link_json(const forecast *f) {
    static const char *const sources[] = {"given", "measured", "assumed", "predicted"};
    json_t *o = json_object();
    json_out_set(o, "gb_s", json_out_number(f->input.link_bytes_per_s / 1e9));
    json_out_set(o, "source", json_string(sources[f->link_from]));
    json_out_set(o, "device", json_out_text(f->link_device));
    json_out_set(o, "pinned", json_boolean(f->link_pinned));
    return o;
}

static json_t *compute_json(const forecast *f) {
    static const char *const sources[] = {"unknown", "given", "telemetry", "predicted"};
    json_t *o = json_object();
    json_out_set(o, "ms", json_out_number(f->compute_ms));
    json_out_set(o, "source", json_string(sources[f->compute_from]));
    return o;
}

static json_t *curve_json(const forecast *f) {
    char *text = NULL;
    if (sth_curve_write(f->curve, f->curve_count, f->input.budget, STH_CURVE_JSON, &text) != STH_OK) return json_null();
    json_t *list = json_loads(text, 0, NULL);
    sth_text_free(text);
    return list ? list : json_null();
}

static json_t *card_json(const card *c) {
    if (!c) return json_null();
    json_t *o = json_object();
    json_out_set(o, "name", json_out_text(c->name));
    json_out_set(o, "title", json_out_text(c->title));
    json_out_set(o, "vram", json_out_count((uint64_t)c->vram));
    json_out_set(o, "pcie", json_out_count((uint64_t)c->pcie));
    json_out_set(o, "lanes", json_out_count((uint64_t)c->lanes));
    json_out_set(o, "tflops", json_out_number(c->flops / 1e12));
    json_out_set(o, "link_share", json_out_number(card_link_share));
    json_out_set(o, "flops_share", json_out_number(card_flops_share));
    return o;
}

static json_t *disk_json(const forecast *f) {
    if (f->disk_gb_s < 0) return json_null();
    json_t *o = json_object();
    json_out_set(o, "gb_s", json_out_number(f->disk_gb_s));
    json_out_set(o, "source", json_out_text(f->disk_assumed ? "assumed" : "given"));
    json_out_set(o, "ram_bytes", json_out_count(f->ram_bytes));
    return o;
}

json_t *plan_json(const forecast *f) {
    json_t *o = json_object();
    json_out_set(o, "predicted", json_boolean(f->request->card != NULL));
    json_out_set(o, "card", card_json(f->request->card));
    json_out_set(o, "model", model_json(f));
    json_out_set(o, "passes", json_string(f->request->passes));
    if (f->plan) json_out_set(o, "budget", json_out_count(f->input.budget));
    json_out_set(o, "link", link_json(f));
    json_out_set(o, "disk", disk_json(f));
    json_out_set(o, "compute", compute_json(f));
    if (f->plan) {
        json_out_set(o, "prediction", json_out_prediction(&f->plan->prediction));
        json_out_set(o, "transfer", json_string(f->request->transfer));
        json_out_set(o, "host_bytes", json_out_count(f->host_bytes));
        json_out_set(o, "hit_share", json_out_number(forecast_hit_share(f)));
        json_out_set(o, "with_1_gib_more", f->more_helps ? json_out_prediction(&f->more) : json_null());
    }
    if (f->curve) json_out_set(o, "curve", curve_json(f));
    return o;
}

void plan_print_json(const forecast *f) { json_out_print(plan_json(f)); }
