/* Life of a runner: layers of the store become units of a runtime of its own, `group` of them each, every tensor at a
 * multiple of 512 bytes of the unit's place. */
#include "runner/runner.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "load/reader.h"
#include "runtime/runtime.h"
#include "runtime/seal.h"
#include "runtime/units.h"

void sthi_runner_options_init(sth_runner_options *o) {
    *o = (sth_runner_options){.size = sizeof *o, .group = 1};
    sthi_runtime_options_init(&o->runtime);
}

static sth_status no_memory(void) {
    return sthi_no_memory(NULL, "the records of a runner");
}

static sth_status describe_layer(const sth_store_layer *said, sthi_runner_layer *l) {
    l->said = said;
    l->tensors = sthi_zalloc(said->tensor_count, sizeof *l->tensors);
    l->place_offsets = sthi_zalloc(said->tensor_count, sizeof *l->place_offsets);
    if (!l->tensors || !l->place_offsets) return no_memory();
    for (uint32_t i = 0; i < said->tensor_count; i++) {
        const sth_store_tensor *t = &said->tensors[i];
        l->tensors[i] = (sth_layer_tensor){.name = t->name, .dtype = t->dtype, .rank = t->rank, .bytes = t->bytes,
                                           .scale = t->scale};
        memcpy(l->tensors[i].shape, t->shape, sizeof t->shape);
        l->bytes += t->bytes; /* they lie in one layer, whose bytes were checked */
    }
    return STH_OK;
}

static sth_status describe(sth_runner *r, uint32_t group) {
    r->layer_count = r->store->layer_count;
    r->unit_count = (r->layer_count + group - 1) / group;
    r->layers = sthi_zalloc(r->layer_count, sizeof *r->layers);
    r->units = sthi_zalloc(r->unit_count, sizeof *r->units);
    if (!r->layers || !r->units) return no_memory();
    for (uint32_t i = 0; i < r->layer_count; i++) STHI_TRY(describe_layer(&r->store->layers[i], &r->layers[i]));
    for (uint32_t u = 0; u < r->unit_count; u++) {
        r->units[u].first = u * group;
        r->units[u].count = (uint32_t)sthi_min_u64(group, r->layer_count - u * group);
    }
    return STH_OK;
}

/* A range for each tensor; those without bytes have none. */
static uint32_t lay_out(sth_runner *r, sthi_runner_unit *u, sth_file_range *out) {
    uint32_t count = 0;
    for (uint32_t i = u->first; i < u->first + u->count; i++)
        for (uint32_t k = 0; k < r->layers[i].said->tensor_count; k++) {
            const sth_store_tensor *t = &r->layers[i].said->tensors[k];
            r->layers[i].place_offsets[k] = u->bytes;
            if (t->bytes) out[count++] = (sth_file_range){i, t->offset, t->bytes, u->bytes};
            sthi_round_up(u->bytes + t->bytes, STHI_ALIGN, &u->bytes);
        }
    return count;
}

static sth_status add_unit(sth_runner *r, uint32_t index) {
    sthi_runner_unit *u = &r->units[index];
    uint32_t tensors = 0, unit;
    for (uint32_t i = u->first; i < u->first + u->count; i++) tensors += r->layers[i].said->tensor_count;
    sth_file_range *ranges = sthi_zalloc(tensors, sizeof *ranges);
    if (!ranges) return no_memory();
    sth_unit_desc d = {.name = r->layers[u->first].said->name, .group = "layers", .store = r->store, .ranges = ranges};
    d.range_count = lay_out(r, u, ranges);
    d.bytes = sthi_max_u64(u->bytes, STHI_ALIGN);
    sth_status rc = sthi_runtime_add_unit(r->runtime, &d, &unit);
    sthi_free(ranges);
    return rc;
}

static sth_status start(sth_runner *r, const sth_runner_options *o) {
    sth_runtime_options runtime = o->runtime;
    runtime.policy = o->lookahead ? STH_POLICY_STATIC : STH_POLICY_PLANNED;
    runtime.prefetch_window = o->lookahead;
    runtime.read_only = true; /* nothing writes what a store holds */
    STHI_TRY(describe(r, o->group));
    STHI_TRY(sthi_tapes_open(r));
    STHI_TRY(sthi_runtime_create(r->device, &runtime, &r->runtime));
    for (uint32_t u = 0; u < r->unit_count; u++) STHI_TRY(add_unit(r, u));
    STHI_TRY(sthi_runtime_seal(r->runtime));
    r->reads_ahead = !r->runtime->readers.count;
    if (r->reads_ahead) sthi_read_ahead(r->runtime);
    return STH_OK;
}

sth_status sthi_runner_create(sth_device *device, sth_store *store, sth_executor *executor,
                              const sth_runner_options *options, sth_runner **out) {
    if (!options->group || options->group > STH_MAX_GROUP)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "group", "a group of %u layers: give 1 to %d", options->group,
                         STH_MAX_GROUP);
    sth_runner *r = sthi_zalloc(1, sizeof *r);
    if (!r) return no_memory();
    sthi_mutex_init(&r->lock);
    sthi_device_retain(device);
    r->device = device;
    r->store = store;
    r->executor = executor;
    r->reserved = options->runtime.reserved;
    sth_status rc = start(r, options);
    if (rc == STH_OK) {
        *out = r;
        return STH_OK;
    }
    sthi_error_copy why;
    sthi_error_save(&why);
    sthi_runner_destroy(r);
    return sthi_error_restore(&why);
}

void sthi_runner_destroy(sth_runner *r) {
    if (!r || (r->runtime && !sthi_runtime_is_here(r->runtime))) return; /* a child leaves all to its end */
    if (r->buffer)
        r->device->ops->free(r->device->self, r->buffer, r->buffer_bytes); /* waits for the work that uses it */
    if (r->stream) r->device->ops->stream_destroy(r->device->self, r->stream);
    if (r->host_buffer) r->device->ops->free(r->device->self, r->host_buffer, r->host_bytes);
    sthi_free(r->staging); /* no copy reads or writes it any more: its stream has ended */
    sthi_runner_free_adapters(r);
    sthi_runtime_destroy(r->runtime);
    sthi_tapes_close(r);
    for (uint32_t i = 0; r->layers && i < r->layer_count; i++) {
        sthi_free(r->layers[i].tensors);
        sthi_free(r->layers[i].place_offsets);
        sthi_free(r->layers[i].adapters);
    }
    sthi_free(r->layers);
    sthi_free(r->units);
    sthi_device_release(r->device);
    sthi_mutex_fini(&r->lock);
    sthi_free(r);
}
