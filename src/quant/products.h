/* Products of a float32 matrix with a thin float64 one, the same bits on every processor and for every number of
 * threads: each element is one sum in ascending order, without contraction. */
#ifndef STHI_QUANT_PRODUCTS_H
#define STHI_QUANT_PRODUCTS_H
#include <stdbool.h>
#include <stdint.h>

#include "base/workers.h"

#define STHI_THIN_LANES 8u

/* A matrix [rows, lanes * blocks] of float64, in blocks of 8 columns: block b holds its 8 columns row by row. */
typedef struct sthi_thin {
    uint64_t rows;
    uint32_t blocks;
    double *data;
} sthi_thin;

sth_status sthi_thin_create(uint64_t rows, uint32_t blocks, sthi_thin *out);
void sthi_thin_destroy(sthi_thin *thin);
static inline double *sthi_thin_at(const sthi_thin *t, uint64_t row, uint32_t column) {
    return t->data + (column / STHI_THIN_LANES * t->rows + row) * STHI_THIN_LANES + column % STHI_THIN_LANES;
}

/* out [rows, q] = w [rows, columns] * z [columns, q] */
sth_status sthi_product(sthi_workers *workers, const float *w, uint64_t rows, uint64_t columns, const sthi_thin *z,
                        sthi_thin *out);
/* out [columns, q] = w^T * y [rows, q] */
sth_status sthi_product_transposed(sthi_workers *workers, const float *w, uint64_t rows, uint64_t columns,
                                   const sthi_thin *y, sthi_thin *out);
#endif
