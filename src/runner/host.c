/* Runs from and to host memory, on a stream of the runner's own, by way of host memory of the runner's: the caller's is
 * not touched any more when the call returns, also when the device does not say that its copies are done. Lock: the
 * runner's. */
#include <string.h>

#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "runner/runner.h"

#define DEV(r, op, ...) ((r)->device->ops->op((r)->device->self, __VA_ARGS__))

static const void *host_of(const sth_activation_tensor *a) { return (const void *)(uintptr_t)a->address; }

static sth_status check(const sth_activations *given, const sth_activations *made, const char *what, bool has_room) {
    for (uint32_t i = 0; i < made->count; i++)
        if (made->tensors[i].bytes &&
            (!given->tensors[i].address || (has_room && given->tensors[i].bytes < made->tensors[i].bytes)))
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, what,
                             "%s %u has %llu bytes, and no memory for them was given", what, i,
                             (unsigned long long)made->tensors[i].bytes);
    return STH_OK;
}

static sth_status grow_staging(sth_runner *r, uint64_t bytes) {
    if (bytes <= r->staging_bytes) return STH_OK;
    STHI_TRY(DEV(r, stream_synchronize, r->stream)); /* an earlier call may have left copies behind */
    uint8_t *fresh = sthi_alloc(bytes);
    if (!fresh) return sthi_no_memory(NULL, "the input and output of a run");
    sthi_free(r->staging);
    r->staging = fresh;
    r->staging_bytes = bytes;
    return STH_OK;
}

/* Where the staging memory has what the device has at the activation's address. */
static uint8_t *staged(const sth_runner *r, const sth_activation_tensor *a) {
    STHI_INVARIANT(!a->bytes || (a->address >= r->host_buffer && a->bytes <= r->staging_bytes &&
                                 a->address - r->host_buffer <= r->staging_bytes - a->bytes));
    return a->bytes ? r->staging + (a->address - r->host_buffer) : r->staging; /* which is NULL where nothing is */
}

static sth_status there_and_back(sth_runner *r, const sth_activations *input, sth_activations *in,
                                 sth_activations *out) {
    for (uint32_t i = 0; i < in->count; i++) {
        const sth_activation_tensor *a = &in->tensors[i];
        if (a->bytes) memcpy(staged(r, a), host_of(&input->tensors[i]), a->bytes);
        STHI_TRY(DEV(r, copy_h2d, a->address, staged(r, a), a->bytes, r->stream));
    }
    STHI_TRY(sthi_runner_run(r, in, out, r->stream));
    for (uint32_t i = 0; i < out->count; i++)
        STHI_TRY(
            DEV(r, copy_d2h, staged(r, &out->tensors[i]), out->tensors[i].address, out->tensors[i].bytes, r->stream));
    return DEV(r, stream_synchronize, r->stream);
}

sth_status sthi_runner_run_host(sth_runner *r, const sth_activations *input, sth_activations *output) {
    STHI_TRY(sthi_runner_shape(r, input));
    const sth_activations *made = &r->layers[r->layer_count - 1].output;
    STHI_TRY(sthi_runner_check_count(made, output));
    STHI_TRY(check(input, &r->input, "input", false));
    STHI_TRY(check(output, made, "output", true));
    sth_activations in = r->input, out = *made;
    uint64_t in_bytes = sthi_activations_bytes(&in), bytes = in_bytes + sthi_activations_bytes(&out);
    if (!r->stream) STHI_TRY(DEV(r, stream_create, 0, &r->stream));
    STHI_TRY(grow_staging(r, bytes));
    STHI_TRY(sthi_runner_grow(r, &r->host_buffer, &r->host_bytes, bytes));
    sthi_activations_lay_out(&in, r->host_buffer);
    sthi_activations_lay_out(&out, r->host_buffer + in_bytes);
    STHI_TRY(there_and_back(r, input, &in, &out));
    for (uint32_t i = 0; i < made->count; i++) {
        sth_activation_tensor *to = &output->tensors[i];
        sth_devptr address = to->address;
        if (out.tensors[i].bytes) memcpy((void *)(uintptr_t)address, staged(r, &out.tensors[i]), out.tensors[i].bytes);
        *to = out.tensors[i];
        to->address = address;
    }
    return STH_OK;
}
