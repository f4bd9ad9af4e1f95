/* The kernels of products.c for one width of vectors; included once for each, with
 *   NAME(part)  what they are called    TARGET  the attribute that lets the compiler use such vectors
 *   WIDTH       doubles in a vector     ROWS    rows (columns) of sums that are kept in registers; divides GROUP
 * and forgets these. No include guard. */
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define PARTS (LANES / WIDTH)
#define PART (TILE * ROWS) /* of a panel */

typedef double NAME(vector) __attribute__((vector_size(WIDTH * sizeof(double)), aligned(sizeof(double)), may_alias));

/* Goes on with ROWS times LANES sums over `length` terms; the factor of sum i at step k is panel[k * ROWS + i]. Nothing
 * here has its address taken, so that all sums stay in registers. */
TARGET static void NAME(sums)(const double *panel, uint64_t length, const double *z, double *out) {
    NAME(vector) sum[ROWS][PARTS], term[PARTS], *to = (NAME(vector) *)out;
    UNROLL for (uint32_t i = 0; i < ROWS; i++)
        UNROLL for (uint32_t q = 0; q < PARTS; q++) sum[i][q] = to[i * PARTS + q];
    for (uint64_t k = 0; k < length; k++) {
        const NAME(vector) *from = (const NAME(vector) *)(z + k * LANES);
        UNROLL for (uint32_t q = 0; q < PARTS; q++) term[q] = from[q];
        UNROLL for (uint32_t i = 0; i < ROWS; i++)
            UNROLL for (uint32_t q = 0; q < PARTS; q++) sum[i][q] += term[q] * panel[k * ROWS + i];
    }
    UNROLL for (uint32_t i = 0; i < ROWS; i++)
        UNROLL for (uint32_t q = 0; q < PARTS; q++) to[i * PARTS + q] = sum[i][q];
}

/* The same with one row of sums, for what is left of a group. */
TARGET static void NAME(few)(const double *panel, uint64_t length, const double *z, double *out) {
    NAME(vector) sum[PARTS], *to = (NAME(vector) *)out;
    UNROLL for (uint32_t q = 0; q < PARTS; q++) sum[q] = to[q];
    for (uint64_t k = 0; k < length; k++) {
        const NAME(vector) *from = (const NAME(vector) *)(z + k * LANES);
        UNROLL for (uint32_t q = 0; q < PARTS; q++) sum[q] += from[q] * panel[k * ROWS];
    }
    UNROLL for (uint32_t q = 0; q < PARTS; q++) to[q] = sum[q];
}

/* A tile of the factors, widened, those of ROWS sums together: element i of the group at term k is
 * w[i * between + k * along], where one of the two is 1. Lines of a column are a row apart, which no processor
 * foresees. */
TARGET static void NAME(panel)(const float *w, uint64_t between, uint64_t along, uint64_t n, uint64_t steps,
                               uint64_t left, double *panel) {
    for (uint64_t i = 0; along == 1 && i < n; i++) {
        double *to = panel + i / ROWS * PART + i % ROWS;
        for (uint64_t k = 0; k < steps; k++) to[k * ROWS] = (double)w[i * between + k];
    }
    for (uint64_t k = 0; along != 1 && k < steps; k++, w += along) {
        for (uint64_t i = 0; k + AHEAD < left && i < n; i += LINE) __builtin_prefetch(w + AHEAD * along + i);
        double *to = panel + k * ROWS;
        uint64_t i = 0;
        for (; i + ROWS <= n; i += ROWS, to += PART)
            UNROLL for (uint32_t q = 0; q < ROWS; q++) to[q] = (double)w[i + q];
        for (uint64_t q = 0; i + q < n; q++) to[q] = (double)w[i + q];
    }
}

/* The sums of `n` (at most GROUP) rows (columns) of w, in tiles. */
TARGET static void NAME(group)(const product *p, const float *w, uint64_t between, uint64_t along, uint64_t first,
                               uint64_t n, uint64_t length) {
    double panel[TILE * GROUP];
    for (uint32_t b = 0; b < p->in->blocks; b++)
        memset(p->out->data + (b * p->out->rows + first) * LANES, 0, (size_t)n * LANES * sizeof(double));
    for (uint64_t t = 0; t < length; t += TILE) {
        uint64_t steps = sthi_min_u64(TILE, length - t);
        NAME(panel)(w + t * along, between, along, n, steps, length - t, panel);
        for (uint32_t b = 0; b < p->in->blocks; b++) {
            const double *z = p->in->data + (b * p->in->rows + t) * LANES;
            double *out = p->out->data + (b * p->out->rows + first) * LANES;
            uint64_t i = 0;
            for (; i + ROWS <= n; i += ROWS) NAME(sums)(panel + i / ROWS * PART, steps, z, out + i * LANES);
            for (; i < n; i++) NAME(few)(panel + i / ROWS * PART + i % ROWS, steps, z, out + i * LANES);
        }
    }
}

TARGET static void NAME(rows)(const product *p, uint64_t first) {
    NAME(group)(p, p->w + first * p->columns, p->columns, 1, first, sthi_min_u64(GROUP, p->rows - first), p->columns);
}

TARGET static void NAME(columns)(const product *p, uint64_t first) {
    NAME(group)(p, p->w + first, 1, p->columns, first, sthi_min_u64(GROUP, p->columns - first), p->rows);
}

#undef UNROLL
#undef PARTS
#undef PART
#undef NAME
#undef TARGET
#undef WIDTH
#undef ROWS
