/* The shipped executors: a layer as linear maps, one after the other (stagehand/executor.h says exactly what). Decides
 * which tensor is what and what lies where in the scratch; a sthi_dense computes. Keeps nothing between calls, so that
 * one executor may serve several runners. */
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "runner/runner.h"
#include "store/dtype.h"

typedef struct mlp {
    sthi_dense *dense;
    sth_mlp_options options;
} mlp;

/* One linear map of a layer. */
typedef struct stage {
    const sth_layer_tensor *weight, *bias; /* bias: NULL for none */
    uint32_t tensor;                       /* index of the weight */
    uint64_t inputs, outputs;
    bool last;
} stage;

void sthi_mlp_options_init(sth_mlp_options *o) {
    *o = (sth_mlp_options){.size = sizeof *o, .nonlinearity = STH_NONLINEARITY_GELU};
}

static bool ends_in(const char *name, const char *word) {
    size_t n = strlen(name), w = strlen(word);
    return n >= w && !strcmp(name + n - w, word) && (n == w || name[n - w - 1] == '.');
}

static sth_status unsupported(const sth_layer_tensor *t, const char *why) {
    return sthi_fail(STH_UNSUPPORTED, NULL, 0, t->name,
                     "tensor '%s' %s; layers of another kind need an executor of your own (stagehand/executor.h)",
                     t->name, why);
}

/* The bias that goes with a weight: "fc.bias" with "fc.weight". */
static const sth_layer_tensor *bias_of(const sth_layer_spec *l, const sth_layer_tensor *w) {
    size_t stem = strlen(w->name) - strlen("weight");
    for (uint32_t i = 0; i < l->tensor_count; i++)
        if (!strncmp(l->tensors[i].name, w->name, stem) && !strcmp(l->tensors[i].name + stem, "bias"))
            return &l->tensors[i];
    return NULL;
}

static bool is_weight(const sth_layer_tensor *t) { return t->rank == 2 && ends_in(t->name, "weight"); }

static bool has_weight(const sth_layer_spec *l, const sth_layer_tensor *bias) {
    for (uint32_t i = 0; i < l->tensor_count; i++)
        if (is_weight(&l->tensors[i]) && bias_of(l, &l->tensors[i]) == bias) return true;
    return false;
}

/* The stage of the next weight from tensor *at on; false when there is none. */
static bool next_stage(const sth_layer_spec *l, uint32_t *at, stage *out) {
    while (*at < l->tensor_count && !is_weight(&l->tensors[*at])) ++*at;
    if (*at == l->tensor_count) return false;
    const sth_layer_tensor *w = &l->tensors[*at];
    *out = (stage){w, bias_of(l, w), *at, w->shape[1], w->shape[0], true};
    for (uint32_t i = ++*at; i < l->tensor_count; i++) out->last = out->last && !is_weight(&l->tensors[i]);
    return true;
}

static sth_status check_dtype(const sth_layer_tensor *t, sth_dtype dtype) {
    if (t->dtype == dtype) return STH_OK;
    return sthi_fail(STH_DTYPE_MISMATCH, NULL, 0, t->name, "tensor '%s' is %s and the input %s", t->name,
                     sthi_dtype_name(t->dtype), sthi_dtype_name(dtype));
}

static sth_status check_tensors(const sth_layer_spec *l, sth_dtype dtype) {
    for (uint32_t i = 0; i < l->tensor_count; i++) {
        const sth_layer_tensor *t = &l->tensors[i];
        bool bias = t->rank == 1 && ends_in(t->name, "bias");
        if (!is_weight(t) && !bias) return unsupported(t, "is neither a weight of two dimensions nor a bias");
        if (bias && !has_weight(l, t)) return unsupported(t, "is a bias without a weight");
        STHI_TRY(check_dtype(t, dtype));
    }
    for (uint32_t i = 0; i < l->adapter_count; i++)
        if (l->adapters[i].dtype != dtype || !is_weight(&l->tensors[l->adapters[i].tensor]))
            return sthi_fail(STH_DTYPE_MISMATCH, NULL, 0, l->name,
                             "adapter %u is not of a weight, or is %s and the input %s", i,
                             sthi_dtype_name(l->adapters[i].dtype), sthi_dtype_name(dtype));
    return STH_OK;
}

static sth_status check_stage(const stage *s, uint64_t width) {
    if (s->inputs != width)
        return sthi_fail(STH_SHAPE_MISMATCH, NULL, 0, s->weight->name, "weight '%s' takes %llu inputs and gets %llu",
                         s->weight->name, (unsigned long long)s->inputs, (unsigned long long)width);
    if (s->bias && s->bias->shape[0] != s->outputs)
        return sthi_fail(STH_SHAPE_MISMATCH, NULL, 0, s->bias->name, "bias '%s' has %llu elements for %llu outputs",
                         s->bias->name, (unsigned long long)s->bias->shape[0], (unsigned long long)s->outputs);
    return STH_OK;
}

static uint64_t rows_of(const sth_activation_tensor *a) {
    uint64_t rows = 1;
    for (int i = 0; i + 1 < a->rank; i++) rows *= a->shape[i]; /* their product with more was checked to fit */
    return rows;
}

/* Scratch: | what lies between stages | the same, where it alternates | x A^T of adapters | */
typedef struct scratch {
    uint64_t between, adapter, slots, bytes;
} scratch;

static bool room(uint64_t rows, uint64_t cols, uint64_t each, uint64_t *inout_most) {
    uint64_t bytes;
    if (!sthi_mul_u64(rows, cols, &bytes) || !sthi_mul_u64(bytes, each, &bytes) ||
        !sthi_round_up(bytes, STHI_ALIGN, &bytes) || bytes > UINT64_MAX / 4)
        return false;
    *inout_most = sthi_max_u64(*inout_most, bytes);
    return true;
}

static bool scratch_of(const sth_layer_spec *l, const sth_activation_tensor *x, scratch *out) {
    uint64_t rows = rows_of(x), each = sthi_dtype_bits(x->dtype) / 8;
    bool fits = true;
    uint32_t at = 0;
    *out = (scratch){0};
    for (stage s; next_stage(l, &at, &s);) {
        if (s.last) break;
        fits = fits && room(rows, s.outputs, each, &out->between);
        if (out->slots < 2) out->slots++;
    }
    for (uint32_t i = 0; i < l->adapter_count; i++) fits = fits && room(rows, l->adapters[i].rank, each, &out->adapter);
    out->bytes = out->slots * out->between + out->adapter;
    return fits;
}

static sth_status prepare(void *self, const sth_layer_spec *l, const sth_activations *input, sth_activations *output,
                          uint64_t *out_scratch) {
    const mlp *m = self;
    const sth_activation_tensor *x = &input->tensors[0];
    if (input->count != 1 || x->rank < 1)
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, l->name, "this executor takes one input of at least one dimension");
    if (x->dtype != STH_DTYPE_F32 && x->dtype != STH_DTYPE_BF16 && x->dtype != STH_DTYPE_F16)
        return sthi_fail(STH_DTYPE_MISMATCH, NULL, 0, l->name,
                         "the input is %s; this executor computes in F32, BF16 and F16", sthi_dtype_name(x->dtype));
    STHI_TRY(check_tensors(l, x->dtype));
    uint64_t width = x->shape[x->rank - 1];
    uint32_t at = 0;
    stage s;
    while (next_stage(l, &at, &s)) {
        STHI_TRY(check_stage(&s, width));
        width = s.outputs;
    }
    if (m->options.residual && width != x->shape[x->rank - 1])
        return sthi_fail(STH_SHAPE_MISMATCH, NULL, 0, l->name,
                         "the layer has %llu outputs for %llu inputs: nothing to add up", (unsigned long long)width,
                         (unsigned long long)x->shape[x->rank - 1]);
    scratch need;
    if (!scratch_of(l, x, &need))
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, l->name, "the activations are too large");
    output->tensors[0].shape[x->rank - 1] = width;
    *out_scratch = need.bytes;
    return STH_OK;
}

static sth_status adapt(const mlp *m, const sth_layer_call *c, const stage *s, sthi_product p, sth_devptr t) {
    for (uint32_t i = 0; i < c->layer->adapter_count; i++) {
        const sth_layer_adapter *a = &c->layer->adapters[i];
        if (a->tensor != s->tensor) continue;
        sthi_product down = {p.dtype, p.m, a->rank, p.k, p.x, a->a, t, 1, false};
        sthi_product up = {p.dtype, p.m, p.n, a->rank, t, a->b, p.y, a->scale, true};
        STHI_TRY(m->dense->product(m->dense, c->device, &down, c->stream));
        STHI_TRY(m->dense->product(m->dense, c->device, &up, c->stream));
    }
    return STH_OK;
}

static sth_status run_stage(const mlp *m, const sth_layer_call *c, const stage *s, uint64_t rows, sth_devptr x,
                            sth_devptr y, sth_devptr t) {
    const sth_activation_tensor *in = &c->input->tensors[0];
    sthi_product p = {in->dtype, rows, s->outputs, s->inputs, x, s->weight->address, y, s->weight->scale, false};
    sthi_finish f = {.dtype = in->dtype, .rows = rows, .cols = s->outputs, .y = y, .f = STH_NONLINEARITY_NONE};
    if (!s->last || m->options.after_last) f.f = m->options.nonlinearity;
    if (s->bias) f.bias = s->bias->address, f.bias_scale = s->bias->scale;
    if (s->last && m->options.residual) f.residual = in->address;
    STHI_TRY(m->dense->product(m->dense, c->device, &p, c->stream));
    STHI_TRY(adapt(m, c, s, p, t));
    if (!f.bias && !f.residual && f.f == STH_NONLINEARITY_NONE) return STH_OK;
    return m->dense->finish(m->dense, c->device, &f, c->stream);
}

static sth_status run(void *self, const sth_layer_call *c) {
    const mlp *m = self;
    const sth_activation_tensor *in = &c->input->tensors[0];
    scratch have;
    if (!scratch_of(c->layer, in, &have) || have.bytes > c->scratch_bytes)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, c->layer->name, "the scratch is smaller than was asked for");
    sth_devptr x = in->address, between[2] = {c->scratch, c->scratch + have.between},
               t = c->scratch + have.slots * have.between;
    uint64_t rows = rows_of(in);
    uint32_t at = 0, n = 0;
    for (stage s; next_stage(c->layer, &at, &s); n++) {
        sth_devptr y = s.last ? c->output->tensors[0].address : between[n % 2];
        if (rows && s.outputs) STHI_TRY(run_stage(m, c, &s, rows, x, y, t));
        x = y;
    }
    return STH_OK;
}

static void end(void *self) {
    mlp *m = self;
    m->dense->close(m->dense);
    sthi_free(m);
}

sth_status sthi_mlp_create(const char *name, const sth_mlp_options *options, sthi_dense *dense, sth_executor **out) {
    mlp *m = sthi_zalloc(1, sizeof *m);
    if (!m) {
        dense->close(dense);
        return sthi_no_memory(name, "an executor");
    }
    *m = (mlp){dense, *options};
    sth_executor_ops ops = {sizeof ops, STH_EXECUTOR_VERSION, name, prepare, run, end};
    sth_status rc = sthi_executor_create(&ops, m, out);
    if (rc != STH_OK) end(m);
    return rc;
}
