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

#include "base/half.h"
#include "base/memory.h"
#include "base/random.h"
#include "quant/products.h"
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif

#define MAX_COLUMNS 64u
#define SWEEPS 60
#define TINY 1e-13 /* of a column's length: what is left of it is rounding */

/* ---- orthonormal columns ---- */

/* Eight sums side by side, then together: fast, and in a fixed order. Columns lie LANES apart. */
static double dot(const double *a, const double *b, uint64_t rows) {
    double sums[4] = {0, 0, 0, 0};
    for (uint64_t i = 0; i < rows; i++) sums[i % 4] += a[i * STHI_THIN_LANES] * b[i * STHI_THIN_LANES];
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

static void scale(double *a, uint64_t rows, double factor) {
    for (uint64_t i = 0; i < rows; i++) a[i * STHI_THIN_LANES] *= factor;
}

static void subtract(double *a, const double *b, uint64_t rows, double factor) {
    for (uint64_t i = 0; i < rows; i++) a[i * STHI_THIN_LANES] -= factor * b[i * STHI_THIN_LANES];
}

/* Gram-Schmidt, twice for each column. One that depends on those before it becomes 0. */
static void orthonormalise(sthi_thin *t) {
    for (uint32_t c = 0; c < t->blocks * STHI_THIN_LANES; c++) {
        double *column = sthi_thin_at(t, 0, c), before = sqrt(dot(column, column, t->rows));
        for (int round = 0; round < 2; round++)
            for (uint32_t other = 0; other < c; other++) {
                const double *o = sthi_thin_at(t, 0, other);
                subtract(column, o, t->rows, dot(column, o, t->rows));
            }
        double length = sqrt(dot(column, column, t->rows));
        scale(column, t->rows, length > before * TINY ? 1 / length : 0);
    }
}

/* ---- eigenvectors of a small symmetric matrix ---- */

typedef struct square {
    uint32_t n;
    double at[MAX_COLUMNS][MAX_COLUMNS];
} square;

static void gram(const sthi_thin *t, square *out) {
    out->n = t->blocks * STHI_THIN_LANES;
    for (uint32_t i = 0; i < out->n; i++)
        for (uint32_t j = 0; j <= i; j++)
            out->at[i][j] = out->at[j][i] = dot(sthi_thin_at(t, 0, i), sthi_thin_at(t, 0, j), t->rows);
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

static void write_factors(const sthi_thin *y, const sthi_thin *c, square *m, square *e, uint32_t rank, uint16_t *up,
                          uint16_t *down) {
    uint32_t order[MAX_COLUMNS];
    gram(c, m);
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

static sth_status iterate(sthi_workers *workers, const float *w, const passes *p, sthi_thin *y, sthi_thin *z) {
    STHI_TRY(pass(p, sthi_product(workers, w, y->rows, z->rows, z, y)));
    orthonormalise(y);
    for (uint32_t i = 0; i < STHI_LOWRANK_ITERATIONS; i++) {
        STHI_TRY(pass(p, sthi_product_transposed(workers, w, y->rows, z->rows, y, z)));
        orthonormalise(z);
        STHI_TRY(pass(p, sthi_product(workers, w, y->rows, z->rows, z, y)));
        orthonormalise(y);
    }
    return pass(p, sthi_product_transposed(workers, w, y->rows, z->rows, y, z));
}

sth_status sthi_lowrank(sthi_workers *workers, const float *w, uint64_t rows, uint64_t columns, uint32_t rank,
                        uint64_t seed, sth_status (*passed)(void *context), void *context, uint16_t *up,
                        uint16_t *down) {
    sthi_thin y = {0}, z = {0};
    const passes p = {passed, context};
    uint32_t blocks = (rank + STHI_LOWRANK_EXTRA) / STHI_THIN_LANES;
    square *squares = sthi_zalloc(2, sizeof *squares);
    sth_status status = squares ? sthi_thin_create(rows, blocks, &y)
                                : sthi_fail(STH_OUT_OF_HOST_MEMORY, NULL, 0, NULL, "out of memory for low-rank factors");
    if (status == STH_OK) status = sthi_thin_create(columns, blocks, &z);
    if (status == STH_OK) {
        fill_random(&z, seed);
        status = iterate(workers, w, &p, &y, &z);
    }
    if (status == STH_OK) write_factors(&y, &z, &squares[0], &squares[1], rank, up, down);
    sthi_thin_destroy(&y);
    sthi_thin_destroy(&z);
    sthi_free(squares);
    return status;
}
