/* Runs from and to host memory, on a stream of the runner's own. The caller's memory is not touched any more when the call
 * returns, also when it fails. Lock: the runner's. */
#include "base/error.h"
#include "runner/runner.h"

#define DEV(r, op, ...) ((r)->device->ops->op((r)->device, __VA_ARGS__))

static const void *host_of(const sth_activation *a) { return (const void *)(uintptr_t)a->address; }

static sth_status check(const sth_activations *given, const sth_activations *made, const char *what, bool has_room) {
    for (uint32_t i = 0; i < made->count; i++)
        if (made->tensors[i].bytes && (!given->tensors[i].address || (has_room && given->tensors[i].bytes < made->tensors[i].bytes)))
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, what, "%s %u has %llu bytes, and no memory for them was given", what,
                             i, (unsigned long long)made->tensors[i].bytes);
    return STH_OK;
}

static sth_status there_and_back(sth_runner *r, const sth_activations *input, const sth_activations *output,
                                 sth_activations *in, sth_activations *out) {
    for (uint32_t i = 0; i < in->count; i++)
        STHI_TRY(DEV(r, copy_h2d, in->tensors[i].address, host_of(&input->tensors[i]), in->tensors[i].bytes, r->stream));
    STHI_TRY(sthi_runner_run(r, in, out, r->stream));
    for (uint32_t i = 0; i < out->count; i++)
        STHI_TRY(DEV(r, copy_d2h, (void *)(uintptr_t)output->tensors[i].address, out->tensors[i].address,
                     out->tensors[i].bytes, r->stream));
    return STH_OK;
}

sth_status sthi_runner_run_host(sth_runner *r, const sth_activations *input, sth_activations *output) {
    STHI_TRY(sthi_runner_shape(r, input));
    const sth_activations *made = &r->layers[r->layer_count - 1].output;
    if (output->count != made->count)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "output", "the model has %u outputs; there is room for %u", made->count,
                         output->count);
    STHI_TRY(check(input, &r->input, "input", false));
    STHI_TRY(check(output, made, "output", true));
    sth_activations in = r->input, out = *made;
    uint64_t in_bytes = sthi_activations_bytes(&in);
    STHI_TRY(sthi_runner_grow(r, &r->host_buffer, &r->host_bytes, in_bytes + sthi_activations_bytes(&out)));
    sthi_activations_lay_out(&in, r->host_buffer);
    sthi_activations_lay_out(&out, r->host_buffer + in_bytes);
    if (!r->stream) STHI_TRY(DEV(r, stream_create, 0, &r->stream));
    sth_status rc = there_and_back(r, input, output, &in, &out);
    sthi_error_copy why;
    if (rc != STH_OK) sthi_error_save(&why);
    sth_status waited = DEV(r, stream_synchronize, r->stream);
    for (uint32_t i = 0; rc == STH_OK && i < made->count; i++) {
        out.tensors[i].address = output->tensors[i].address;
        output->tensors[i] = out.tensors[i];
    }
    return rc == STH_OK ? waited : sthi_error_restore(&why);
}
