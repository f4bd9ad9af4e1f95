/* The inner loops keep four rows (columns) by eight lanes of sums in registers. The same source is compiled for wider
 * vectors; lanes are columns of the thin matrix, so that the width changes no sum. No locks. */
#include "quant/products.h"

#include <stdatomic.h>
#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#define LANES STHI_THIN_LANES
#define TOGETHER 4u
#define GROUP 16u /* rows or columns of one piece: a line of the cache */
#define TILE 512u

typedef double lanes __attribute__((vector_size(LANES * sizeof(double))));

typedef struct product {
    sthi_job job;
    const float *w;
    uint64_t rows, columns;
    const sthi_thin *in;
    sthi_thin *out;
} product;

static uint64_t pieces_of(uint64_t count, uint64_t each) { return count / each + (count % each != 0); }

/* ---- kernels ---- */

#define KERNEL static inline __attribute__((always_inline)) void

/* Goes on with `n` (at most TOGETHER) sums over `length` terms; the factor of sum i at step k is panel[k * GROUP + i]. */
KERNEL sums(const float *panel, uint64_t n, uint64_t length, const double *z, double *out) {
    lanes sum[TOGETHER] = {{0}, {0}, {0}, {0}};
    memcpy(sum, out, (size_t)n * sizeof *sum);
    if (n == TOGETHER) {
        for (uint64_t k = 0; k < length; k++) {
            lanes term;
            memcpy(&term, z + k * LANES, sizeof term);
            for (uint64_t i = 0; i < TOGETHER; i++) sum[i] += term * (double)panel[k * GROUP + i];
        }
    } else {
        for (uint64_t k = 0; k < length; k++) {
            lanes term;
            memcpy(&term, z + k * LANES, sizeof term);
            for (uint64_t i = 0; i < n; i++) sum[i] += term * (double)panel[k * GROUP + i];
        }
    }
    memcpy(out, sum, (size_t)n * sizeof *sum);
}

/* The sums of GROUP rows (columns) of w, in tiles of TILE terms that stay in the cache. Element i of the group at term k
 * is w[i * between + k * along]; it is copied, because columns of a wide matrix lie on few lines of the cache. */
KERNEL group(const product *p, const float *w, uint64_t between, uint64_t along, uint64_t first, uint64_t n,
             uint64_t length) {
    float panel[TILE * GROUP];
    for (uint32_t b = 0; b < p->in->blocks; b++)
        memset(p->out->data + (b * p->out->rows + first) * LANES, 0, (size_t)n * LANES * sizeof(double));
    for (uint64_t t = 0; t < length; t += TILE) {
        uint64_t steps = sthi_min_u64(TILE, length - t);
        for (uint64_t i = 0; along == 1 && i < n; i++)
            for (uint64_t k = 0; k < steps; k++) panel[k * GROUP + i] = w[i * between + t + k];
        for (uint64_t k = 0; along != 1 && k < steps; k++)
            for (uint64_t i = 0; i < n; i++) panel[k * GROUP + i] = w[i * between + (t + k) * along];
        for (uint32_t b = 0; b < p->in->blocks; b++)
            for (uint64_t i = 0; i < n; i += TOGETHER)
                sums(panel + i, sthi_min_u64(TOGETHER, n - i), steps, p->in->data + (b * p->in->rows + t) * LANES,
                     p->out->data + (b * p->out->rows + first + i) * LANES);
    }
}

KERNEL rows_body(const product *p, uint64_t first) {
    group(p, p->w + first * p->columns, p->columns, 1, first, sthi_min_u64(GROUP, p->rows - first), p->columns);
}

KERNEL columns_body(const product *p, uint64_t first) {
    group(p, p->w + first, 1, p->columns, first, sthi_min_u64(GROUP, p->columns - first), p->rows);
}

#define VARIANT(suffix, attribute)                                                                        \
    attribute static void rows_##suffix(const product *p, uint64_t first) { rows_body(p, first); }        \
    attribute static void columns_##suffix(const product *p, uint64_t first) { columns_body(p, first); }

VARIANT(plain, )
#if defined(__x86_64__)
VARIANT(avx2, __attribute__((target("avx2"))))
VARIANT(avx512, __attribute__((target("avx512f"))))
#endif

typedef struct kernels {
    void (*rows)(const product *p, uint64_t first);
    void (*columns)(const product *p, uint64_t first);
} kernels;

/* For tests: none wider than this is chosen. */
static atomic_int limit = STHI_PRODUCTS_WIDEST;

static bool has(int level) {
#if defined(__x86_64__)
    return level == 0 || (level == 1 && __builtin_cpu_supports("avx2")) ||
           (level == 2 && __builtin_cpu_supports("avx512f"));
#else
    return level == 0;
#endif
}

bool sthi_products_limit(int level) {
    atomic_store(&limit, level);
    return has(level);
}

static const kernels *choose(void) {
    static const kernels all[] = {
        {rows_plain, columns_plain},
#if defined(__x86_64__)
        {rows_avx2, columns_avx2},
        {rows_avx512, columns_avx512},
#endif
    };
    int level = atomic_load(&limit);
    while (!has(level)) level--;
    return &all[level];
}

/* ---- jobs ---- */

static sth_status run_rows(sthi_job *job, uint64_t piece, void *scratch) {
    (void)scratch;
    choose()->rows((const product *)job, piece * GROUP);
    return STH_OK;
}

static sth_status run_columns(sthi_job *job, uint64_t piece, void *scratch) {
    (void)scratch;
    choose()->columns((const product *)job, piece * GROUP);
    return STH_OK;
}

sth_status sthi_product(sthi_workers *workers, const float *w, uint64_t rows, uint64_t columns, const sthi_thin *z,
                        sthi_thin *out) {
    product p = {.job = {.run = run_rows, .pieces = pieces_of(rows, GROUP)}, .w = w, .rows = rows, .columns = columns,
                 .in = z, .out = out};
    return sthi_workers_run(workers, &p.job);
}

sth_status sthi_product_transposed(sthi_workers *workers, const float *w, uint64_t rows, uint64_t columns,
                                   const sthi_thin *y, sthi_thin *out) {
    product p = {.job = {.run = run_columns, .pieces = pieces_of(columns, GROUP)}, .w = w, .rows = rows,
                 .columns = columns, .in = y, .out = out};
    return sthi_workers_run(workers, &p.job);
}

/* ---- thin matrices ---- */

sth_status sthi_thin_create(uint64_t rows, uint32_t blocks, sthi_thin *out) {
    uint64_t count;
    double *data = sthi_mul_u64(rows, blocks * LANES, &count) ? sthi_zalloc((size_t)count, sizeof *data) : NULL;
    if (!data)
        return sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, NULL, "out of memory for a factor of %llu rows",
                         (unsigned long long)rows);
    *out = (sthi_thin){.rows = rows, .blocks = blocks, .data = data};
    return STH_OK;
}

void sthi_thin_destroy(sthi_thin *thin) {
    sthi_free(thin->data);
    *thin = (sthi_thin){0};
}
