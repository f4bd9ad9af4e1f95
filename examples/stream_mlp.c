/* A perceptron that is larger than its budget, streamed from a file, and compared with the same model all on the
 * device.
 *
 *   stream_mlp [DEVICE [BUDGET [WIDTH [HIDDEN [ROWS [LAYERS [DTYPE [LOOKAHEAD [GROUP [FILE]]]]]]]]]]
 *
 * DEVICE: "sim" or "cuda" (cuBLAS); DTYPE: F32, BF16, F16; LOOKAHEAD 0 lets the planner choose. FILE is written first
 * where there is none. Prints the overlap ratio, and fails where results differ by one bit. On a card with 80 GB, for
 * example: stream_mlp cuda 6.5GB 4096 16384 65536 24 BF16 (a file of 6.4 GB; what lies between layers takes 4.3 GB).
 *
 * Build: cc -std=c17 stream_mlp.c $(pkg-config --cflags --libs stagehand) -lm -o stream_mlp */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <stagehand/stagehand.h>

enum { RUNS = 6, MOST_LAYERS = 1000 };

typedef struct model {
    const char *device, *file, *budget;
    uint64_t width, hidden, rows, layers;
    sth_dtype dtype;
    uint32_t lookahead, group;
} model;

/* ---- weights: something like noise, small enough that values neither vanish nor explode */

static uint64_t noise = 88172645463325252u;

static float next_value(void) {
    noise ^= noise << 13;
    noise ^= noise >> 7;
    noise ^= noise << 17;
    return (float)((double)(noise >> 40) / (double)(1 << 23) - 1);
}

static void put(sth_dtype dtype, void *to, float v) {
    uint32_t bits;
    memcpy(&bits, &v, 4);
    if (dtype == STH_DTYPE_F32) memcpy(to, &v, 4);
    else if (dtype == STH_DTYPE_BF16) memcpy(to, &(uint16_t){(uint16_t)(bits >> 16)}, 2);
    else { /* F16: values here are normal or 0 */
        int exponent = (int)(bits >> 23 & 255) - 112;
        uint16_t h =
            exponent <= 0 ? 0 : (uint16_t)((bits >> 16 & 0x8000u) | (uint32_t)exponent << 10 | (bits >> 13 & 0x3ffu));
        memcpy(to, &h, 2);
    }
}

static double value_of(sth_dtype dtype, const void *from, uint64_t i) {
    if (dtype == STH_DTYPE_F32) return (double)((const float *)from)[i];
    uint16_t h = ((const uint16_t *)from)[i];
    uint32_t wide = (uint32_t)h << 16;
    float v;
    memcpy(&v, &wide, 4);
    if (dtype == STH_DTYPE_BF16) return (double)v;
    double part = (h & 0x3ff) / 1024.0, sign = h >> 15 ? -1 : 1;
    int exponent = h >> 10 & 31;
    return sign * (exponent ? ldexp(1 + part, exponent - 15) : ldexp(part, -14));
}

static void fill(sth_dtype dtype, void *to, uint64_t count, float scale) {
    uint64_t each = sth_dtype_bits(dtype) / 8;
    for (uint64_t i = 0; i < count; i++) put(dtype, (char *)to + i * each, next_value() * scale);
}

/* Each layer: width -> hidden -> width. */
static int write_file(const model *m) {
    FILE *f = fopen(m->file, "wb");
    char *header = malloc(m->layers * 4 * 160 + 8), *at = header;
    uint64_t each = sth_dtype_bits(m->dtype) / 8, offset = 0;
    if (!f || !header) return -1;
    *at++ = '{';
    for (uint64_t l = 0; l < m->layers; l++)
        for (int k = 0; k < 4; k++) {
            uint64_t out = k < 2 ? m->hidden : m->width, in = k < 2 ? m->width : m->hidden,
                     bytes = each * out * (k % 2 ? in : 1);
            char shape[48];
            snprintf(shape, sizeof shape, k % 2 ? "%" PRIu64 ",%" PRIu64 : "%" PRIu64, out, in);
            at += sprintf(at, "%s\"blocks.%" PRIu64 ".%s\":{\"dtype\":\"%s\",\"shape\":[%s],"
                          "\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}",
                          offset ? "," : "", l, (const char *[]){"0.bias", "0.weight", "2.bias", "2.weight"}[k],
                          sth_dtype_name(m->dtype), shape, offset, offset + bytes);
            offset += bytes;
        }
    *at++ = '}';
    uint64_t length = (uint64_t)(at - header);
    int good = fwrite(&length, 8, 1, f) == 1 && fwrite(header, length, 1, f) == 1;
    uint64_t most = m->width * m->hidden;
    char *tensor = malloc(most * each);
    good = good && tensor;
    if (good) fill(m->dtype, tensor, most, 1.7f / sqrtf((float)m->width));
    for (uint64_t l = 0; good && l < m->layers; l++)
        for (int k = 0; good && k < 4; k++) {
            uint64_t count = (k < 2 ? m->hidden : m->width) * (k % 2 ? (k < 2 ? m->width : m->hidden) : 1);
            fill(m->dtype, tensor, count < 4096 ? count : 4096,
                 1.7f / sqrtf((float)m->width)); /* no two are the same */
            good = fwrite(tensor, each, count, f) == count;
        }
    free(tensor);
    free(header);
    return fclose(f) == 0 && good ? 0 : -1;
}

/* ---- one runner: some passes over `input`; the output of the last is in `output` */

static sth_status run_model(const model *m, const char *device_name, const char *budget, int runs, uint64_t rows,
                            const void *input, void *output, sth_run_metrics *out_metrics) {
    sth_device *device = NULL;
    sth_store *store = NULL;
    sth_executor *executor = NULL;
    sth_runner *runner = NULL;
    sth_mlp_options mlp;
    sth_runner_options options;
    sth_mlp_options_init(&mlp);
    sth_runner_options_init(&options);
    options.lookahead = strcmp(budget, m->budget) ? 0 : m->lookahead; /* nothing to look ahead for where all is there */
    options.group = m->group;
    mlp.residual = true;
    sth_status rc = sth_parse_size(budget, &options.runtime.budget);
    if (rc == STH_OK) rc = sth_device_open(device_name, NULL, &device);
    if (rc == STH_OK) rc = sth_store_files_open(m->file, NULL, 0, &store);
    if (rc == STH_OK)
        rc = strncmp(device_name, "cuda", 4) ? sth_executor_cpu_create(&mlp, &executor)
                                             : sth_executor_cuda_create(device, &mlp, &executor);
    if (rc == STH_OK) rc = sth_runner_create(device, store, executor, &options, &runner);
    uint64_t each = sth_dtype_bits(m->dtype) / 8;
    sth_activations in = {1, {{m->dtype, 2, {rows, m->width}, (uintptr_t)input, 0}}};
    sth_activations out = {1, {{.address = (uintptr_t)output, .bytes = rows * m->width * each}}};
    for (int i = 0; i < runs && rc == STH_OK; i++) rc = sth_runner_run_host(runner, &in, &out);
    if (rc == STH_OK) rc = sth_runner_metrics(runner, out_metrics);
    sth_runtime_stats stats;
    if (rc == STH_OK) rc = sth_runtime_stats_get(sth_runner_runtime(runner), &stats);
    if (rc == STH_OK)
        printf("%s, budget %s, %" PRIu64 " rows: %.2f ms a run, compute %.2f, stalls %.2f, "
               "%" PRIu64 " bytes copied at %.1f GB/s, "
               "overlap ratio %.3f, at most %" PRIu64 " bytes of weights on the device\n",
               device_name, budget, rows, out_metrics->latency_ms, out_metrics->compute_ms, out_metrics->stall_ms,
               out_metrics->h2d_bytes, out_metrics->bandwidth_gb_s, out_metrics->overlap_ratio, stats.device_peak);
    else fprintf(stderr, "%s: %s\n", sth_status_name(rc), sth_last_error()->message);
    sth_runner_destroy(runner);
    sth_executor_close(executor);
    sth_store_close(store);
    sth_device_close(device);
    return rc;
}

/* The first row against the CPU's: sums there are in another order. */
static int compare_with_cpu(const model *m, const void *input, const void *output) {
    double *want = malloc(m->width * 8), error = 0, size = 0;
    sth_run_metrics metrics;
    if (!want || run_model(m, "sim", "1TB", 1, 1, input, want, &metrics) != STH_OK) return free(want), 1;
    for (uint64_t i = 0; i < m->width; i++) {
        double a = value_of(m->dtype, want, i), b = value_of(m->dtype, output, i);
        error += (a - b) * (a - b);
        size += a * a;
    }
    free(want);
    double relative = sqrt(error / size), allowed = m->dtype == STH_DTYPE_F32   ? 1e-5
                                                    : m->dtype == STH_DTYPE_F16 ? 5e-3
                                                                                : 4e-2;
    printf("relative difference from the CPU's first row: %.2g\n", relative);
    if (relative < allowed) return 0; /* false for NaN */
    fprintf(stderr, "more than the %.2g that roundings explain\n", allowed);
    return 1;
}

static int run_all(const model *m) {
    uint64_t bytes = m->rows * m->width * (sth_dtype_bits(m->dtype) / 8);
    void *input = malloc(bytes), *streamed = calloc(1, bytes), *resident = calloc(1, bytes);
    sth_run_metrics metrics;
    if (!input || !streamed || !resident) return 1;
    fill(m->dtype, input, m->rows * m->width, 1);
    int bad = run_model(m, m->device, m->budget, RUNS, m->rows, input, streamed, &metrics) != STH_OK;
    double overlap = metrics.overlap_ratio;
    const char *all = strncmp(m->device, "cuda", 4) ? "1TB" : "70GB"; /* of the device: the model has to fit */
    bad = bad || run_model(m, m->device, all, 2, m->rows, input, resident, &metrics) != STH_OK;
    if (!bad && memcmp(streamed, resident, bytes)) bad = 1, fprintf(stderr, "the streamed model's output differs\n");
    if (!bad) bad = compare_with_cpu(m, input, streamed);
    if (!bad) printf("equal, bit for bit; overlap ratio %.3f\n", overlap);
    free(input);
    free(streamed);
    free(resident);
    return bad;
}

static sth_dtype dtype_of(const char *name) {
    return !strcmp(name, "BF16") ? STH_DTYPE_BF16 : !strcmp(name, "F16") ? STH_DTYPE_F16 : STH_DTYPE_F32;
}

int main(int argc, char **argv) {
    const char *given[10] = {"sim", "300KB", "64", "128", "8", "24", "F32", "0", "1", "/tmp/stream_mlp.safetensors"};
    for (int i = 1; i < argc && i <= 10; i++) given[i - 1] = argv[i];
    model m = {.device = given[0], .budget = given[1], .width = strtoull(given[2], NULL, 10),
               .hidden = strtoull(given[3], NULL, 10), .rows = strtoull(given[4], NULL, 10),
               .layers = strtoull(given[5], NULL, 10), .dtype = dtype_of(given[6]),
               .lookahead = (uint32_t)strtoul(given[7], NULL, 10), .group = (uint32_t)strtoul(given[8], NULL, 10),
               .file = given[9]};
    if (argc > 11 || !m.width || !m.hidden || !m.rows || !m.layers || m.layers > MOST_LAYERS) {
        fprintf(stderr, "usage: stream_mlp [DEVICE [BUDGET [WIDTH [HIDDEN [ROWS [LAYERS [DTYPE [LOOKAHEAD [GROUP "
                        "[FILE]]]]]]]]]]\n");
        return 2;
    }
    FILE *there = fopen(m.file, "rb");
    if (there) fclose(there);
    else if (write_file(&m) < 0) return perror(m.file), 1;
    return run_all(&m);
}
