/* See rig.h. */
#include "support/check.h"

#include "runner/rig.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/half.h"
#include "store/tempfiles.h"

float rig_value(uint32_t seed, uint64_t i) {
    uint64_t h = (i + 1) * 0x9E3779B97F4A7C15u + seed * 0xD1B54A32D192ED03u;
    h ^= h >> 29;
    h *= 0xBF58476D1CE4E5B9u;
    return (float)((double)(h >> 40) / (double)(1 << 23) - 1);
}

float rig_load(sth_dtype dtype, const void *p, uint64_t i) {
    if (dtype == STH_DTYPE_F32) return ((const float *)p)[i];
    uint16_t h = ((const uint16_t *)p)[i];
    return dtype == STH_DTYPE_BF16 ? sthi_from_bf16(h) : sthi_from_f16(h);
}

void rig_store(sth_dtype dtype, void *p, uint64_t i, float v) {
    if (dtype == STH_DTYPE_F32) ((float *)p)[i] = v;
    else ((uint16_t *)p)[i] = dtype == STH_DTYPE_BF16 ? sthi_to_bf16(v) : sthi_to_f16(v);
}

rig_spec rig_default(void) {
    return (rig_spec){.source = RIG_MEMORY, .dtype = STH_DTYPE_F32, .width = 24, .hidden = 40, .layers = 6,
                      .rows = RIG_ROWS, .group = 1, .virtual_time = true, .f = STH_NONLINEARITY_GELU,
                      .link = 1000000000};
}

static uint64_t up(uint64_t n) { return (n + 511) / 512 * 512; }

static uint64_t tensor_bytes(const rig_spec *s, int k) {
    uint64_t each = sth_dtype_bits(s->dtype) / 8;
    return k % 2 ? s->width * s->hidden * each : (k ? s->width : s->hidden) * each;
}

uint64_t rig_layer_bytes(const rig *g) {
    uint64_t bytes = 0;
    for (int k = 0; k < 4; k++) bytes += up(tensor_bytes(&g->spec, k));
    return bytes;
}

/* Tensors in natural order, as a store of files has them: bias before weight, a layer without a gap. */
static void make_layers(rig *g) {
    static const char *const names[] = {"0.bias", "0.weight", "2.bias", "2.weight"};
    const rig_spec *s = &g->spec;
    for (uint32_t i = 0; i < s->layers; i++) {
        uint64_t at = 0;
        snprintf(g->names[i], sizeof g->names[i], "blocks.%u", i % 1000);
        for (int k = 0; k < 4; k++) {
            uint64_t outputs = k < 2 ? s->hidden : s->width, inputs = k < 2 ? s->width : s->hidden;
            g->tensors[i][k] = (sth_store_tensor){.name = names[k], .dtype = s->dtype, .rank = k % 2 + 1,
                                                  .shape = {outputs, k % 2 ? inputs : 0}, .offset = at,
                                                  .bytes = tensor_bytes(s, k)};
            at += tensor_bytes(s, k);
        }
        g->layers[i] = (sth_store_layer){g->names[i], at, g->tensors[i], 4};
        g->data[i] = malloc(at);
        for (int k = 0; k < 4; k++) {
            uint8_t *to = (uint8_t *)g->data[i] + g->tensors[i][k].offset;
            uint64_t count = g->tensors[i][k].bytes / (sth_dtype_bits(s->dtype) / 8);
            /* So that values neither vanish nor explode. */
            float scale = k % 2 ? 1.7f / sqrtf((float)(k < 2 ? s->width : s->hidden)) : 0.1f;
            if (s->residual && k == 3) scale /= 4;
            for (uint64_t n = 0; n < count; n++) rig_store(s->dtype, to, n, rig_value(i * 4 + (uint32_t)k, n) * scale);
        }
    }
}

static sth_status write_file(rig *g, char *path, size_t room) {
    char *header = malloc(RIG_LAYERS * 4 * 128);
    uint64_t at = 0;
    strcpy(header, "{");
    for (uint32_t i = 0; i < g->spec.layers; i++)
        for (int k = 0; k < 4; k++) {
            const sth_store_tensor *t = &g->tensors[i][k];
            char shape[48];
            if (t->rank == 2)
                snprintf(shape, sizeof shape, "%llu,%llu", (unsigned long long)t->shape[0],
                         (unsigned long long)t->shape[1]);
            else snprintf(shape, sizeof shape, "%llu", (unsigned long long)t->shape[0]);
            sprintf(header + strlen(header),
                    "%s\"%s.%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%llu,%llu]}", at ? "," : "",
                    g->names[i], t->name, sth_dtype_name(t->dtype), shape, (unsigned long long)at,
                    (unsigned long long)(at + t->bytes));
            at += t->bytes;
        }
    strcat(header, "}");
    uint64_t n = strlen(header);
    uint8_t *file = malloc(8 + n + at), *to = file + 8 + n;
    memcpy(file, &n, 8);
    memcpy(file + 8, header, n);
    for (uint32_t i = 0; i < g->spec.layers; to += g->layers[i++].bytes) memcpy(to, g->data[i], g->layers[i].bytes);
    snprintf(path, room, "%s", temp_path(g->spec.folder, "mlp.safetensors"));
    write_bytes(path, file, 8 + n + at);
    free(file);
    free(header);
    return STH_OK;
}

/* ---- a store of the user's: request and get serve from memory, and fail when they are told to */

static uint32_t own_count(void *self) { return ((rig *)self)->spec.layers; }
static sth_status own_layer(void *self, uint32_t i, sth_store_layer *out) {
    return *out = ((rig *)self)->layers[i], STH_OK;
}
static sth_status own_request(void *self, uint32_t i) {
    rig *g = self;
    int n = ++g->own_reads, fails = g->own_fails;
    if (fails && n >= fails) return sth_error_set(STH_IO, "test", 5, g->names[i], "the line is dead");
    return STH_OK;
}
static sth_status own_wait(void *self, uint32_t i) { return (void)self, (void)i, STH_OK; }
static const void *own_get(void *self, uint32_t i) { return ((rig *)self)->data[i]; }
static void own_release(void *self, uint32_t i) { (void)self, (void)i; }

static sth_status open_store(rig *g) {
    char path[512];
    sth_store_ops own = {.struct_size = sizeof own, .version = STH_STORE_VERSION, .kind = "own",
                         .layer_count = own_count, .layer = own_layer, .request = own_request, .wait = own_wait,
                         .get = own_get, .release = own_release};
    switch (g->spec.source) {
    case RIG_FILE:
        STHI_TRY(write_file(g, path, sizeof path));
        return sth_store_files_open(path, NULL, 0, &g->store);
    case RIG_OWN: return sth_store_create(&own, g, &g->store);
    default: return sth_store_memory_create(g->layers, (const void *const *)g->data, g->spec.layers, &g->store);
    }
}

static sth_status open_runner(rig *g) {
    const rig_spec *s = &g->spec;
    sth_mlp_options mlp;
    sth_mlp_options_init(&mlp);
    mlp.nonlinearity = s->f;
    mlp.after_last = s->after_last;
    mlp.residual = s->residual;
    mlp.sim_flops_per_s = s->flops_per_s;
    STHI_TRY(s->cuda ? sth_executor_cuda_create(g->device, &mlp, &g->executor)
                     : sth_executor_cpu_create(&mlp, &g->executor));
    sth_runner_options o;
    sth_runner_options_init(&o);
    o.group = s->group;
    o.lookahead = s->lookahead;
    o.runtime.budget = s->budget ? s->budget : UINT64_C(64) << 20;
    o.runtime.reader_threads = s->readers;
    o.runtime.staging_bytes = s->staging;
    o.runtime.ram_budget = s->ram;
    if (!s->cuda) o.runtime.link_bytes_per_s = s->link ? (double)s->link : 1e10;
    return sth_runner_create(g->device, g->store, g->executor, &o, &g->runner);
}

static sth_status start(rig *g) {
    sth_sim_options sim;
    sth_sim_options_init(&sim);
    sim.virtual_time = g->spec.virtual_time;
    sim.link_bytes_per_s = g->spec.link;
    sim.copy_latency_ns = 500;
    STHI_TRY(sth_device_open(g->spec.cuda ? "cuda" : "sim", &sim, &g->device));
    STHI_TRY(open_store(g));
    STHI_TRY(open_runner(g));
    g->in_bytes = g->spec.rows * g->spec.width * (sth_dtype_bits(g->spec.dtype) / 8);
    if (g->spec.cuda) {
        g->in = (uintptr_t)malloc(g->in_bytes);
        g->out = (uintptr_t)malloc(g->in_bytes);
    } else {
        STHI_TRY(sth_device_alloc(g->device, up(g->in_bytes), &g->in));
        STHI_TRY(sth_device_alloc(g->device, up(g->in_bytes), &g->out));
    }
    for (uint64_t i = 0; i < g->spec.rows * g->spec.width; i++)
        rig_store(g->spec.dtype, (void *)(uintptr_t)g->in, i, rig_value(999, i));
    return STH_OK;
}

void rig_close(rig *g) {
    sth_runner_destroy(g->runner);
    sth_executor_close(g->executor);
    if (g->spec.cuda) {
        free((void *)(uintptr_t)g->in);
        free((void *)(uintptr_t)g->out);
    } else {
        if (g->in) sth_device_free(g->device, g->in, up(g->in_bytes));
        if (g->out) sth_device_free(g->device, g->out, up(g->in_bytes));
    }
    sth_store_close(g->store);
    sth_device_close(g->device);
    for (uint32_t i = 0; i < g->spec.layers; i++) free(g->data[i]);
    memset(g, 0, sizeof *g);
}

sth_status rig_open(rig *g, const rig_spec *spec) {
    memset(g, 0, sizeof *g);
    g->spec = *spec;
    make_layers(g);
    sth_status rc = start(g);
    if (rc == STH_OK) return STH_OK;
    sthi_error_copy why;
    sthi_error_save(&why);
    rig_close(g);
    return sthi_error_restore(&why);
}

sth_status rig_run(rig *g, void *to) {
    sth_activations in = {1, {{g->spec.dtype, 2, {g->spec.rows, g->spec.width}, g->in, 0}}}, out = {.count = 1};
    out.tensors[0].address = g->out;
    out.tensors[0].bytes = g->in_bytes;
    memset((void *)(uintptr_t)g->out, 0xFF, g->in_bytes);
    STHI_TRY(g->spec.cuda ? sth_runner_run_host(g->runner, &in, &out) : sth_runner_run(g->runner, &in, &out, 0));
    memcpy(to, (const void *)(uintptr_t)g->out, g->in_bytes);
    return STH_OK;
}
