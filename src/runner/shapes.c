/* What lies between layers. When a run brings an input of another shape, the executor is asked layer by layer what it
 * makes of it, and one piece of device memory is taken that holds two alternating outputs and the scratch. It is
 * `reserved` of the runtime's budget, which plans anew for the rest. Whatever fails, the shapes and the memory that
 * were in force stay. */
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "runner/runner.h"
#include "runtime/lease.h"
#include "runtime/share/reserved.h"
#include "store/dtype.h"

sth_layer_spec sthi_runner_spec(const sth_runner *r, uint32_t layer) {
    const sthi_runner_layer *l = &r->layers[layer];
    return (sth_layer_spec){layer, l->said->name, l->tensors, l->said->tensor_count, l->adapters, l->adapter_count};
}

sth_status sthi_runner_name_failure(const sth_runner *r, uint32_t layer, sth_status status) {
    sthi_error_copy why;
    sthi_error_save(&why);
    return sthi_fail(status, why.domain, why.native, why.object, "layer '%s', executor '%s': %s",
                     r->layers[layer].said->name, r->executor->name, why.message);
}

/* Checks what an executor, or a caller, says of tensors, and sets their bytes. */
static sth_status measure(sth_activations *a, const char *what) {
    if (!a->count || a->count > STH_MAX_ACTIVATIONS)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, what, "%s: %u tensors; give 1 to %d", what, a->count,
                         STH_MAX_ACTIVATIONS);
    for (uint32_t i = 0; i < a->count; i++) {
        sth_activation_tensor *t = &a->tensors[i];
        uint64_t bytes = sthi_dtype_bits(t->dtype) / 8;
        bool fits = bytes && t->rank >= 0 && t->rank <= STH_MAX_RANK;
        for (int k = 0; fits && k < t->rank; k++) fits = sthi_mul_u64(bytes, t->shape[k], &bytes);
        if (!fits || bytes > UINT64_MAX / 64)
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, what,
                             "%s: the dtype, rank or shape of tensor %u is impossible", what, i);
        t->bytes = bytes;
    }
    return STH_OK;
}

uint64_t sthi_activations_bytes(const sth_activations *a) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < a->count; i++) {
        uint64_t bytes = 0;
        sthi_round_up(a->tensors[i].bytes, STHI_ALIGN, &bytes); /* each is at most 1/64 of the range */
        sum += bytes;
    }
    return sum;
}

static void forget_addresses(sth_activations *a) {
    for (uint32_t i = 0; i < a->count; i++) a->tensors[i].address = 0;
}

static sth_status ask_layer(sth_runner *r, uint32_t i, const sth_activations *in, sth_activations *out,
                            uint64_t *scratch) {
    sth_layer_spec spec = sthi_runner_spec(r, i);
    for (uint32_t k = 0; k < spec.tensor_count; k++) r->layers[i].tensors[k].address = 0;
    *out = *in;
    *scratch = 0;
    if (r->executor->ops.prepare) {
        (void)sthi_fail(STH_OK, NULL, 0, NULL, "the executor gives no reason");
        sth_status rc = r->executor->ops.prepare(r->executor->self, &spec, in, out, scratch);
        if (rc == STH_OK) rc = measure(out, "the output");
        if (rc == STH_OK && *scratch > UINT64_MAX / 64)
            rc = sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "it asks for %llu bytes of scratch",
                           (unsigned long long)*scratch);
        if (rc != STH_OK) return sthi_runner_name_failure(r, i, rc);
    }
    forget_addresses(out);
    return STH_OK;
}

sth_status sthi_runner_ask(sth_runner *r, const sth_activations *input, sth_activations *out) {
    sth_activations at = *input;
    STHI_TRY(measure(&at, "the input"));
    forget_addresses(&at);
    for (uint32_t i = 0; i < r->layer_count; i++) {
        sth_activations next;
        uint64_t scratch;
        STHI_TRY(ask_layer(r, i, &at, &next, &scratch));
        at = next;
    }
    *out = at;
    return STH_OK;
}

static bool same_shapes(const sth_activations *a, const sth_activations *b) {
    bool same = a->count == b->count;
    for (uint32_t i = 0; same && i < a->count; i++) {
        const sth_activation_tensor *x = &a->tensors[i], *y = &b->tensors[i];
        same = x->dtype == y->dtype && x->rank == y->rank;
        for (int k = 0; same && k < x->rank; k++) same = x->shape[k] == y->shape[k];
    }
    return same;
}

static uint64_t taken(const sth_runner *r) { return r->adapter_bytes + r->buffer_bytes + r->host_bytes; }

static sth_status too_small(const sth_runner *r, uint64_t reserved) {
    sthi_error_copy why;
    sthi_error_save(&why);
    return sthi_fail(
        STH_BUDGET_TOO_SMALL, NULL, 0, "budget",
        "of the budget of %llu bytes, %llu go to what lies between layers and to adapters, which leaves too little "
        "for the weights: %s",
        (unsigned long long)r->runtime->options.budget, (unsigned long long)reserved, why.message);
}

/* Weights give way where the budget is too small for both. */
static sth_status set_reserved(sth_runner *r, uint64_t bytes) {
    uint64_t want = r->reserved + bytes;
    if (want == r->runtime->options.reserved) return STH_OK;
    STHI_TRY(sthi_runtime_poll(r->runtime)); /* what the runs before used is given back first */
    sth_status rc = sthi_runtime_set_reserved(r->runtime, want);
    return rc == STH_BUDGET_TOO_SMALL ? too_small(r, want) : rc;
}

sth_status sthi_runner_reserve_more(sth_runner *r, uint64_t bytes) { return set_reserved(r, taken(r) + bytes); }

void sthi_runner_reserve_exactly(sth_runner *r) {
    sthi_error_copy before;
    sthi_error_save(&before);
    if (set_reserved(r, taken(r)) != STH_OK) (void)sthi_error_restore(&before); /* more than needed: nothing is wrong */
}

sth_status sthi_runner_grow(sth_runner *r, sth_devptr *address, uint64_t *bytes, uint64_t want) {
    STHI_INVARIANT(!*address == !*bytes);
    if (want <= *bytes) return STH_OK;
    sth_devptr fresh = 0;
    STHI_TRY(sthi_runner_reserve_more(r, want));
    sth_status rc = r->device->ops->alloc(r->device->self, want, &fresh);
    if (rc == STH_OK) {
        if (*address) r->device->ops->free(r->device->self, *address, *bytes); /* waits for the work that uses it */
        *address = fresh;
        *bytes = want;
    }
    sthi_runner_reserve_exactly(r);
    return rc;
}

sth_status sthi_runner_shape(sth_runner *r, const sth_activations *input) {
    sth_activations in = *input;
    STHI_TRY(measure(&in, "the input"));
    if (r->shaped && same_shapes(&in, &r->input)) return STH_OK;
    sth_activations *outputs = sthi_zalloc(r->layer_count, sizeof *outputs);
    if (!outputs) return sthi_no_memory(NULL, "the shapes of the layers");
    forget_addresses(&in);
    uint64_t between[2] = {0, 0}, scratch_most = 0, scratch;
    sth_status rc = STH_OK;
    for (uint32_t i = 0; rc == STH_OK && i < r->layer_count; i++) {
        rc = ask_layer(r, i, i ? &outputs[i - 1] : &in, &outputs[i], &scratch);
        if (rc != STH_OK) break;
        if (i + 1 < r->layer_count) between[i % 2] = sthi_max_u64(between[i % 2], sthi_activations_bytes(&outputs[i]));
        scratch_most = sthi_max_u64(scratch_most, scratch);
    }
    sthi_round_up(scratch_most, STHI_ALIGN, &scratch_most);
    if (rc == STH_OK) rc = sthi_runner_grow(r, &r->buffer, &r->buffer_bytes, between[0] + between[1] + scratch_most);
    if (rc == STH_OK) {
        for (uint32_t i = 0; i < r->layer_count; i++) r->layers[i].output = outputs[i];
        memcpy(r->between_bytes, between, sizeof between);
        r->scratch_bytes = scratch_most;
        r->input = in;
        r->shaped = true;
    }
    sthi_free(outputs);
    return rc;
}

void sthi_activations_lay_out(sth_activations *a, sth_devptr at) {
    for (uint32_t i = 0; i < a->count; i++) {
        uint64_t bytes = 0;
        a->tensors[i].address = at;
        sthi_round_up(a->tensors[i].bytes, STHI_ALIGN, &bytes);
        at += bytes;
    }
}

void sthi_runner_place(sth_runner *r, uint32_t i, const sth_activations *input, const sth_activations *output,
                       sth_activations *out_in, sth_activations *out_out) {
    STHI_INVARIANT(r->shaped && i < r->layer_count);
    STHI_INVARIANT(r->between_bytes[0] + r->between_bytes[1] <= r->buffer_bytes);
    sth_devptr between[2] = {r->buffer, r->buffer + r->between_bytes[0]};
    *out_in = i ? r->layers[i - 1].output : *input;
    if (i) sthi_activations_lay_out(out_in, between[(i - 1) % 2]);
    *out_out = i + 1 < r->layer_count ? r->layers[i].output : *output;
    if (i + 1 < r->layer_count) sthi_activations_lay_out(out_out, between[i % 2]);
}
