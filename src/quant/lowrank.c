/* Randomised subspace iteration (Halko, Martinsson, Tropp 2011), in float64:
 *
 *   Z = random [columns, q];  Y = orth(W Z);  6 times: Z = orth(W^T Y), Y = orth(W Z);  C = W^T Y
 *   C^T C = E L E^T;  sigma = sqrt(L);  up = Y E sigma, down = C E / sigma
 *
 * up down^T = Y E (C E)^T is the projection of W on the first columns of Y E whatever the accuracy of L, because E is
 * orthogonal to the last digits. Only +, -, *, / and square roots are used, in a fixed order, so that the bits depend
 * neither on the C library nor on the number of threads. Random numbers are sums of four uniform ones. */
#include "quant/lowrank.h"

#include <math.h>
#include <string.h>

#include "base/arith.h"
#include "base/half.h"
#include "base/memory.h"
#include "base/random.h"
#include "quant/products.h"
#include "quant/vectors.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#define MAX_COLUMNS 64u
#define SWEEPS 60
#define TINY 1e-13 /* of a column's length: what is left of it is rounding */

/* ---- orthonormal columns ---- */

/* Four sums side by side, then together: fast, and in a fixed order. */
static double dot(const double *a, const double *b, uint64_t rows) {
    sthi_d4 wide = {0, 0, 0, 0};
    uint64_t i = 0;
    for (; i + 4 <= rows; i += 4) wide += *(const sthi_d4 *)(a + i) * *(const sthi_d4 *)(b + i);
    double sums[4] = {wide[0], wide[1], wide[2], wide[3]};
    for (; i < rows; i++) sums[i % 4] += a[i] * b[i];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

static void scale(double *a, uint64_t rows, double factor) {
    for (uint64_t i = 0; i < rows; i++) a[i] *= factor;
}

static void subtract(double *a, const double *b, uint64_t rows, double factor) {
    uint64_t i = 0;
    for (; i + 4 <= rows; i += 4) *(sthi_d4 *)(a + i) -= factor * *(const sthi_d4 *)(b + i);
    for (; i < rows; i++) a[i] -= factor * b[i];
}

static uint32_t width(const sthi_thin *t) { return t->blocks * STHI_THIN_LANES; }

/* Whole columns, one behind the other. */
static void to_columns(const sthi_thin *t, double *columns) {
    for (uint32_t c = 0; c < width(t); c++)
        for (uint64_t i = 0; i < t->rows; i++) columns[c * t->rows + i] = *sthi_thin_at(t, i, c);
}

static void from_columns(const double *columns, const sthi_thin *t) {
    for (uint32_t c = 0; c < width(t); c++)
        for (uint64_t i = 0; i < t->rows; i++) *sthi_thin_at(t, i, c) = columns[c * t->rows + i];
}

/* Gram-Schmidt, twice for each column. One that depends on those before it becomes 0. columns: room for all. */
static void orthonormalise(const sthi_thin *t, double *columns) {
    to_columns(t, columns);
    for (uint32_t c = 0; c < width(t); c++) {
        double *column = columns + c * t->rows, before = sqrt(dot(column, column, t->rows));
        for (int round = 0; round < 2; round++)
            for (uint32_t other = 0; other < c; other++) {
                const double *o = columns + other * t->rows;
                subtract(column, o, t->rows, dot(column, o, t->rows));
            }
        double length = sqrt(dot(column, column, t->rows));
        scale(column, t->rows, length > before * TINY ? 1 / length : 0);
    }
    from_columns(columns, t);
}

/* ---- eigenvectors of a small symmetric matrix ---- */

typedef struct square {
    uint32_t n;
    double at[MAX_COLUMNS][MAX_COLUMNS];
} square;

static void gram(const sthi_thin *t, double *columns, square *out) {
    out->n = width(t);
    to_columns(t, columns);
    for (uint32_t i = 0; i < out->n; i++)
        for (uint32_t j = 0; j <= i; j++)
            out->at[i][j] = out->at[j][i] = dot(columns + i * t->rows, columns + j * t->rows, t->rows);
}

/* One rotation of Jacobi's method, which makes m[p][q] zero. */
static void rotate(square *m, square *e, uint32_t p, uint32_t q) {
    double theta = (m->at[q][q] - m->at[p][p]) / (2 * m->at[p][q]);
    double t = (theta < 0 ? -1 : 1) / (fabs(theta) + sqrt(theta * theta + 1)), c = 1 / sqrt(t * t + 1), s = t * c;
    for (uint32_t k = 0; k < m->n; k++) {
        double a = m->at[k][p], b = m->at[k][q];
        m->at[k][p] = c * a - s * b;
        m->at[k][q] = s * a + c * b;
    }
    for (uint32_t k = 0; k < m->n; k++) {
        double a = m->at[p][k], b = m->at[q][k];
        m->at[p][k] = c * a - s * b;
        m->at[q][k] = s * a + c * b;
    }
    for (uint32_t k = 0; k < m->n; k++) {
        double a = e->at[k][p], b = e->at[k][q];
        e->at[k][p] = c * a - s * b;
        e->at[k][q] = s * a + c * b;
    }
}

/* Columns of *e: eigenvectors of *m, whose diagonal holds the eigenvalues afterwards. */
static void diagonalise(square *m, square *e) {
    memset(e, 0, sizeof *e);
    e->n = m->n;
    for (uint32_t i = 0; i < m->n; i++) e->at[i][i] = 1;
    for (int sweep = 0, more = 1; more && sweep < SWEEPS; sweep++) {
        more = 0;
        for (uint32_t p = 0; p + 1 < m->n; p++)
            for (uint32_t q = p + 1; q < m->n; q++) {
                double size = sqrt(fabs(m->at[p][p]) * fabs(m->at[q][q]));
                if (m->at[p][q] == 0 || fabs(m->at[p][q]) <= size * 1e-16) continue;
                rotate(m, e, p, q);
                more = 1;
            }
    }
}

/* order[]: the columns by falling eigenvalue, equal ones by their place. */
static void sort_values(const square *m, uint32_t *order) {
    for (uint32_t i = 0; i < m->n; i++) {
        uint32_t at = i;
        for (; at > 0 && m->at[order[at - 1]][order[at - 1]] < m->at[i][i]; at--) order[at] = order[at - 1];
        order[at] = i;
    }
}

/* ---- the whole ---- */

static void fill_random(sthi_thin *z, uint64_t seed) {
    for (uint64_t i = 0; i < z->rows * z->blocks * STHI_THIN_LANES; i++) {
        uint64_t r = sthi_random64(seed, i);
        int64_t sum = (int64_t)((r & 0xffff) + (r >> 16 & 0xffff) + (r >> 32 & 0xffff) + (r >> 48)) - 2 * 0xffff;
        z->data[i] = (double)sum / 65536;
    }
}

/* thin [rows, q] times a column of E, times `factor`, as bfloat16 into out[row * rank + at]. */
static void project(const sthi_thin *thin, const square *e, uint32_t column, double factor, uint32_t rank, uint32_t at,
                    uint16_t *out) {
    for (uint64_t i = 0; i < thin->rows; i++) {
        double sum = 0;
        for (uint32_t k = 0; k < e->n; k++) sum += *sthi_thin_at(thin, i, k) * e->at[k][column];
        out[i * rank + at] = sthi_to_bf16((float)(sum * factor));
    }
}

static void write_factors(const sthi_thin *y, const sthi_thin *c, double *columns, square *m, square *e, uint32_t rank,
                          uint16_t *up, uint16_t *down) {
    uint32_t order[MAX_COLUMNS];
    gram(c, columns, m);
    diagonalise(m, e);
    sort_values(m, order);
    for (uint32_t r = 0; r < rank; r++) {
        double value = m->at[order[r]][order[r]], sigma = value > 0 ? sqrt(value) : 0;
        project(y, e, order[r], sigma, rank, r, up);
        project(c, e, order[r], sigma > 0 ? 1 / sigma : 0, rank, r, down);
    }
}

typedef struct passes {
    sth_status (*passed)(void *context);
    void *context;
} passes;

static sth_status pass(const passes *p, sth_status status) {
    STHI_TRY(status);
    return p->passed ? p->passed(p->context) : STH_OK;
}

static sth_status iterate(sthi_workers *workers, const float *w, const passes *p, sthi_thin *y, sthi_thin *z,
                          double *columns) {
    STHI_TRY(pass(p, sthi_product(workers, w, y->rows, z->rows, z, y)));
    orthonormalise(y, columns);
    for (uint32_t i = 0; i < STHI_LOWRANK_ITERATIONS; i++) {
        STHI_TRY(pass(p, sthi_product_transposed(workers, w, y->rows, z->rows, y, z)));
        orthonormalise(z, columns);
        STHI_TRY(pass(p, sthi_product(workers, w, y->rows, z->rows, z, y)));
        orthonormalise(y, columns);
    }
    return pass(p, sthi_product_transposed(workers, w, y->rows, z->rows, y, z));
}

static sth_status out_of_memory(void) {
    return sthi_no_memory(NULL, "low-rank factors");
}

sth_status sthi_lowrank(sthi_workers *workers, const float *w, uint64_t rows, uint64_t columns, uint32_t rank,
                        uint64_t seed, sth_status (*passed)(void *context), void *context, uint16_t *up,
                        uint16_t *down) {
    sthi_thin y = {0}, z = {0};
    const passes p = {passed, context};
    uint32_t blocks = (rank + STHI_LOWRANK_EXTRA) / STHI_THIN_LANES;
    square *squares = sthi_zalloc(2, sizeof *squares);
    sth_status status = squares ? sthi_thin_create(rows, blocks, &y)
                                : out_of_memory();
    if (status == STH_OK) status = sthi_thin_create(columns, blocks, &z);
    double *scratch =
        status == STH_OK ? sthi_zalloc((size_t)sthi_max_u64(rows, columns), width(&y) * sizeof *scratch) : NULL;
    if (status == STH_OK && !scratch) status = out_of_memory();
    if (status == STH_OK) {
        fill_random(&z, seed);
        status = iterate(workers, w, &p, &y, &z, scratch);
    }
    if (status == STH_OK) write_factors(&y, &z, scratch, &squares[0], &squares[1], rank, up, down);
    sthi_free(scratch);
    sthi_thin_destroy(&y);
    sthi_thin_destroy(&z);
    sthi_free(squares);
    return status;
}
