/* The fast Walsh-Hadamard transform in the order of H_2n = [[H, H], [H, -H]]. Pure. */
#include "quant/hadamard.h"

#include <math.h>
#include <stdbool.h>

#include "quant/vectors.h"

static void pairs(double *x, uint64_t size, uint64_t half) {
    for (uint64_t begin = 0; begin < size; begin += 2 * half)
        for (uint64_t i = begin; i < begin + half; i++) {
            double a = x[i], b = x[i + half];
            x[i] = a + b;
            x[i + half] = a - b;
        }
}

/* Pairs at distance 1 and then 2. */
static void fours(double *x, uint64_t size) {
    for (uint64_t i = 0; i < size; i += 4) {
        double a = x[i] + x[i + 1], b = x[i] - x[i + 1], c = x[i + 2] + x[i + 3], d = x[i + 2] - x[i + 3];
        x[i] = a + c;
        x[i + 1] = b + d;
        x[i + 2] = a - c;
        x[i + 3] = b - d;
    }
}

/* half: 4 or more. */
static void wide_pairs(double *x, uint64_t size, uint64_t half) {
    for (uint64_t begin = 0; begin < size; begin += 2 * half)
        for (uint64_t i = begin; i < begin + half; i += 4) {
            sthi_d4 *low = (sthi_d4 *)(x + i), *high = (sthi_d4 *)(x + i + half), a = *low, b = *high;
            *low = a + b;
            *high = a - b;
        }
}

static void transform(double *x, uint64_t size) {
    if (size < 4) {
        for (uint64_t half = 1; half < size; half *= 2) pairs(x, size, half);
        return;
    }
    fours(x, size);
    for (uint64_t half = 4; half < size; half *= 2) wide_pairs(x, size, half);
}

/* By a power of two it is the same to multiply by its inverse. */
static void divide(double *x, uint64_t count, double root) {
    int exponent;
    bool exact = frexp(root, &exponent) == 0.5;
    double inverse = 1 / root;
    uint64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        sthi_d4 *four = (sthi_d4 *)(x + i);
        if (exact) *four *= inverse;
        else *four /= root;
    }
    for (; i < count; i++) x[i] /= root;
}

void sthi_hadamard(double *x, uint64_t count, uint64_t size) {
    for (uint64_t begin = 0; begin < count; begin += size) transform(x + begin, size);
    divide(x, count, sqrt((double)size));
}
