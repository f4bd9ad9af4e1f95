/* The rolling window, and the file behind it if there is one. Records lie in a ring; `next` is where the
 * coming one goes. No locks: the owner's guards it. It measures nothing itself and knows no clock. */
#include "telemetry/telemetry.h"

#include "base/error.h"
#include "base/memory.h"
#include "telemetry/jsonl.h"

struct sthi_telemetry {
    sth_step_metrics window[STHI_TELEMETRY_WINDOW];
    uint32_t count, next;
    sthi_jsonl *file; /* NULL: none */
};

sth_status sthi_telemetry_create(const char *path, uint64_t max_bytes, sthi_telemetry **out_telemetry) {
    sthi_telemetry *t = sthi_zalloc(1, sizeof *t);
    if (!t) return sthi_no_memory(path, "the window of steps");
    if (path) {
        sth_status status = sthi_jsonl_open(path, max_bytes, &t->file);
        if (status != STH_OK) {
            sthi_free(t);
            return status;
        }
    }
    *out_telemetry = t;
    return STH_OK;
}

void sthi_telemetry_destroy(sthi_telemetry *t, bool flush) {
    if (!t) return;
    sthi_jsonl_close(t->file, flush);
    sthi_free(t);
}

sth_status sthi_telemetry_push(sthi_telemetry *t, const sth_step_metrics *metrics) {
    t->window[t->next] = *metrics;
    t->next = (t->next + 1) % STHI_TELEMETRY_WINDOW;
    if (t->count < STHI_TELEMETRY_WINDOW) t->count++;
    return t->file ? sthi_jsonl_append(t->file, metrics) : STH_OK;
}

sth_status sthi_telemetry_flush(sthi_telemetry *t) { return t->file ? sthi_jsonl_flush(t->file) : STH_OK; }

uint64_t sthi_telemetry_lost(const sthi_telemetry *t) { return t->file ? sthi_jsonl_lost(t->file) : 0; }

static const sth_step_metrics *newest(const sthi_telemetry *t, uint32_t i) {
    return &t->window[(t->next + STHI_TELEMETRY_WINDOW - 1 - i) % STHI_TELEMETRY_WINDOW];
}

sth_status sthi_telemetry_get(const sthi_telemetry *t, uint32_t i, sth_step_metrics *out_metrics) {
    if (i >= t->count)
        return sthi_fail(STH_NOT_FOUND, NULL, 0, NULL,
                         "step %u before the newest is not in the window, which holds %u", i, t->count);
    *out_metrics = *newest(t, i);
    return STH_OK;
}

uint32_t sthi_telemetry_count(const sthi_telemetry *t) { return t->count; }
