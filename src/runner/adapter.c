/* Resident LoRA pairs: copied to the device once, in memory of their own, which is `reserved` of the budget. */
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "runner/runner.h"
#include "store/dtype.h"

static sth_status find(const sth_runner *r, const char *layer, const char *tensor, uint32_t *out_layer,
                       uint32_t *out_tensor) {
    for (uint32_t i = 0; i < r->layer_count; i++) {
        const sth_store_layer *l = r->layers[i].said;
        if (strcmp(l->name, layer)) continue;
        for (uint32_t k = 0; k < l->tensor_count; k++) {
            if (strcmp(l->tensors[k].name, tensor)) continue;
            *out_layer = i;
            *out_tensor = k;
            return STH_OK;
        }
        return sthi_fail(STH_NOT_FOUND, NULL, 0, tensor, "layer '%s' has no tensor '%s'", layer, tensor);
    }
    return sthi_fail(STH_NOT_FOUND, NULL, 0, layer, "the store has no layer '%s'", layer);
}

static sth_status sizes(const sth_layer_tensor *t, const sth_layer_adapter *pair, uint64_t *out_a, uint64_t *out_b) {
    uint64_t each = sthi_dtype_bits(pair->dtype) / 8;
    if (t->rank != 2)
        return sthi_fail(STH_SHAPE_MISMATCH, NULL, 0, t->name,
                         "tensor '%s' is no matrix: an adapter needs [outputs, inputs]", t->name);
    if (!pair->rank || !each || !t->bytes || !sthi_mul_u64(each * pair->rank, t->shape[1], out_a) ||
        !sthi_mul_u64(each * pair->rank, t->shape[0], out_b) || *out_a > UINT64_MAX / 8 || *out_b > UINT64_MAX / 8)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, t->name, "an adapter of rank %u for tensor '%s' is impossible",
                         pair->rank, t->name);
    return STH_OK;
}

/* Copies over a stream of its own, because the default stream is the caller's. */
static sth_status upload(sth_device *d, sth_devptr to, const void *from, uint64_t bytes) {
    sth_stream stream = 0;
    STHI_TRY(d->ops->stream_create(d->self, 0, &stream));
    sth_status rc = d->ops->copy_h2d(d->self, to, from, bytes, stream);
    if (rc == STH_OK) rc = d->ops->stream_synchronize(d->self, stream);
    sthi_error_copy why;
    if (rc != STH_OK) sthi_error_save(&why);
    d->ops->stream_destroy(d->self, stream); /* waits: the caller's memory is not read any more */
    return rc == STH_OK ? STH_OK : sthi_error_restore(&why);
}

static bool make_room(sth_runner *r, sthi_runner_layer *l) {
    sthi_adapter_memory *memory = sthi_realloc(r->adapters, r->adapter_count + 1, sizeof *memory);
    if (memory) r->adapters = memory;
    sth_layer_adapter *pairs = memory ? sthi_realloc(l->adapters, l->adapter_count + 1, sizeof *pairs) : NULL;
    if (pairs) l->adapters = pairs;
    return pairs != NULL;
}

sth_status sthi_runner_add_adapter(sth_runner *r, const char *layer, const char *tensor, const sth_layer_adapter *pair,
                                   const void *a, const void *b) {
    uint32_t at = 0, which = 0;
    uint64_t a_bytes = 0, b_bytes = 0, a_room = 0, bytes = 0;
    STHI_TRY(find(r, layer, tensor, &at, &which));
    STHI_TRY(sizes(&r->layers[at].tensors[which], pair, &a_bytes, &b_bytes));
    sthi_round_up(a_bytes, STHI_ALIGN, &a_room);
    sthi_round_up(a_room + b_bytes, STHI_ALIGN, &bytes);
    if (!make_room(r, &r->layers[at])) return sthi_no_memory(layer, "an adapter");
    STHI_TRY(sthi_runner_reserve_more(r, bytes));
    sth_devptr address = 0;
    sth_status rc = r->device->ops->alloc(r->device->self, bytes, &address);
    if (rc == STH_OK) rc = upload(r->device, address, a, a_bytes);
    if (rc == STH_OK) rc = upload(r->device, address + a_room, b, b_bytes);
    if (rc != STH_OK) {
        sthi_error_copy why;
        sthi_error_save(&why);
        if (address) r->device->ops->free(r->device->self, address, bytes);
        sthi_runner_reserve_exactly(r);
        return sthi_error_restore(&why);
    }
    STHI_INVARIANT(address % STHI_ALIGN == 0 && a_bytes <= a_room && b_bytes <= bytes - a_room);
    sthi_runner_layer *l = &r->layers[at];
    l->adapters[l->adapter_count] = *pair;
    l->adapters[l->adapter_count].tensor = which;
    l->adapters[l->adapter_count].a = address;
    l->adapters[l->adapter_count++].b = address + a_room;
    r->adapters[r->adapter_count++] = (sthi_adapter_memory){address, bytes};
    r->adapter_bytes += bytes;
    r->shaped = false; /* the executor may want more scratch */
    return STH_OK;
}

void sthi_runner_free_adapters(sth_runner *r) {
    for (uint32_t i = 0; i < r->adapter_count; i++)
        r->device->ops->free(r->device->self, r->adapters[i].address, r->adapters[i].bytes);
    sthi_free(r->adapters);
    r->adapters = NULL;
    r->adapter_count = 0;
}
