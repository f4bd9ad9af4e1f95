/* The inner loops (products_kernel.h) keep some rows (columns) by eight lanes of sums in registers. The same source is
 * compiled for wider vectors; lanes are columns of the thin matrix, and each sum is taken in the order of its terms, so
 * that neither the width nor the tiles change a bit. No locks. */
#include "quant/products.h"

#include <string.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/processor.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#define LANES STHI_THIN_LANES
#define GROUP 64u /* rows or columns of one piece, for each of which all of the thin matrix comes by */
#define TILE 128u /* terms whose part of the thin matrix, 8 KiB, stays in the first cache; their panel, 64, in the
                     next */
#define AHEAD 8u /* terms: how far ahead columns are asked for */
#define LINE 16u /* floats in a line of the cache */

typedef struct product {
    sthi_job job;
    const float *w;
    uint64_t rows, columns;
    const sthi_thin *in;
    sthi_thin *out;
} product;

static uint64_t pieces_of(uint64_t count, uint64_t each) { return count / each + (count % each != 0); }

/* ---- kernels ---- */

#define NAME(part) part##_plain
#define TARGET
#define WIDTH 2
#define ROWS 2
#include "quant/products_kernel.h"
#if defined(__x86_64__)
#define NAME(part) part##_avx2
#define TARGET __attribute__((target("avx2")))
#define WIDTH 4
#define ROWS 4
#include "quant/products_kernel.h"
#define NAME(part) part##_avx512
#define TARGET __attribute__((target("avx512f")))
#define WIDTH 8
#define ROWS 8
#include "quant/products_kernel.h"
#endif

typedef struct kernels {
    void (*rows)(const product *p, uint64_t first);
    void (*columns)(const product *p, uint64_t first);
} kernels;

static const kernels *choose(void) {
    static const kernels all[] = {
        {rows_plain, columns_plain},
#if defined(__x86_64__)
        {rows_avx2, columns_avx2},
        {rows_avx512, columns_avx512},
#endif
    };
    return &all[sthi_processor_variant(sizeof all / sizeof *all - 1)];
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
    if (!data) return sthi_no_memory(NULL, "a factor of %llu rows", (unsigned long long)rows);
    *out = (sthi_thin){.rows = rows, .blocks = blocks, .data = data};
    return STH_OK;
}

void sthi_thin_destroy(sthi_thin *thin) {
    sthi_free(thin->data);
    *thin = (sthi_thin){0};
}
