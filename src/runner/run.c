/* One pass: acquire a group, run its layers, release it, and so on. The stream orders everything; the host goes ahead
 * of the device as far as the executor lets it. Lock: the runner's, for the whole pass. */
#include "base/error.h"
#include "base/invariant.h"
#include "base/memory.h"
#include "load/reader.h"
#include "runner/runner.h"
#include "runtime/lease.h"
#include "runtime/step_calls.h"

sth_status sthi_runner_check_count(const sth_activations *made, const sth_activations *output) {
    if (output->count == made->count) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "output", "the model has %u outputs; there is room for %u",
                     made->count, output->count);
}

/* Fills in what the model makes, and checks that there is room for it. */
static sth_status check_output(const sth_runner *r, sth_activations *output) {
    const sth_activations *made = &r->layers[r->layer_count - 1].output;
    STHI_TRY(sthi_runner_check_count(made, output));
    for (uint32_t i = 0; i < made->count; i++) {
        const sth_activation_tensor *o = &output->tensors[i];
        if (made->tensors[i].bytes && (!o->address || o->bytes < made->tensors[i].bytes))
            return sthi_fail(
                STH_INVALID_ARGUMENT, NULL, 0, "output", "output %u has %llu bytes; its memory has room for %llu", i,
                (unsigned long long)made->tensors[i].bytes, (unsigned long long)(o->address ? o->bytes : 0));
    }
    for (uint32_t i = 0; i < made->count; i++) {
        sth_devptr address = output->tensors[i].address;
        output->tensors[i] = made->tensors[i];
        output->tensors[i].address = address;
    }
    return STH_OK;
}

static sth_status check_input(const sth_activations *input) {
    for (uint32_t i = 0; i < input->count; i++)
        if (input->tensors[i].bytes && !input->tensors[i].address)
            return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "input", "input %u has no address", i);
    return STH_OK;
}

typedef struct pass {
    sth_activations input, output;
    sth_stream stream;
    sthi_tape *tape; /* NULL: untimed */
    bool timed;      /* every event so far is recorded */
} pass;

static void note(sth_runner *r, pass *p, sth_event **event) {
    if (p->timed) p->timed = sthi_tape_record(r, event, p->stream);
}

static sth_status run_layer(sth_runner *r, pass *p, uint32_t index, sth_devptr place) {
    sthi_runner_layer *l = &r->layers[index];
    sth_activations in, out;
    STHI_INVARIANT(place && r->between_bytes[0] + r->between_bytes[1] + r->scratch_bytes <= r->buffer_bytes);
    sth_devptr scratch = r->buffer + r->between_bytes[0] + r->between_bytes[1];
    for (uint32_t k = 0; k < l->said->tensor_count; k++) l->tensors[k].address = place + l->place_offsets[k];
    sth_layer_spec spec = sthi_runner_spec(r, index);
    sthi_runner_place(r, index, &p->input, &p->output, &in, &out);
    sth_layer_call call = {.device = r->device, .layer = &spec, .input = &in, .output = &out, .stream = p->stream,
                           .scratch = r->scratch_bytes ? scratch : 0, .scratch_bytes = r->scratch_bytes};
    (void)sthi_fail(STH_OK, NULL, 0, NULL, "the executor gives no reason");
    sth_status rc = r->executor->ops.run(r->executor->self, &call);
    return rc == STH_OK ? STH_OK : sthi_runner_name_failure(r, index, rc);
}

static sth_status run_unit(sth_runner *r, pass *p, uint32_t index) {
    const sthi_runner_unit *u = &r->units[index];
    STHI_INVARIANT(u->count && u->first < r->layer_count && u->count <= r->layer_count - u->first);
    sth_lease lease;
    if (p->timed) note(r, p, &p->tape->arrive[index]);
    STHI_TRY(sthi_unit_acquire(r->runtime, index, p->stream, &lease));
    if (p->timed) note(r, p, &p->tape->start[index]);
    if (r->reads_ahead) sthi_read_ahead(r->runtime);
    sth_status rc = STH_OK;
    for (uint32_t i = u->first; rc == STH_OK && i < u->first + u->count; i++) {
        rc = run_layer(r, p, i, lease.address);
        if (rc == STH_OK && p->timed) note(r, p, &p->tape->end[i]);
    }
    sthi_lease_release(r->runtime, &lease);
    return rc;
}

sth_status sthi_runner_run(sth_runner *r, const sth_activations *input, sth_activations *output, sth_stream stream) {
    STHI_TRY(sthi_runner_shape(r, input));
    STHI_INVARIANT(r->shaped && r->input.count == input->count);
    pass p = {.input = r->input, .stream = stream};
    for (uint32_t i = 0; i < input->count; i++) p.input.tensors[i].address = input->tensors[i].address;
    STHI_TRY(check_input(&p.input));
    STHI_TRY(check_output(r, output));
    p.output = *output;
    STHI_TRY(sthi_step_begin(r->runtime));
    p.tape = sthi_tape_begin(r);
    p.timed = p.tape != NULL;
    sth_status rc = STH_OK;
    for (uint32_t u = 0; rc == STH_OK && u < r->unit_count; u++) rc = run_unit(r, &p, u);
    sthi_error_copy why;
    if (rc != STH_OK) sthi_error_save(&why);
    sth_status ended = sthi_step_end(r->runtime); /* notes the releases, too, while the stream is there */
    if (r->reads_ahead && rc == STH_OK && ended == STH_OK) sthi_read_ahead(r->runtime);
    if (p.tape) sthi_tape_end(r, p.tape, p.timed && rc == STH_OK);
    r->runs++;
    return rc == STH_OK ? ended : sthi_error_restore(&why);
}
