/* The fast Walsh-Hadamard transform in the order of H_2n = [[H, H], [H, -H]]. Pure. */
#include "quant/hadamard.h"

#include <math.h>

static void transform(double *x, uint64_t size) {
    for (uint64_t half = 1; half < size; half *= 2)
        for (uint64_t begin = 0; begin < size; begin += 2 * half)
            for (uint64_t i = begin; i < begin + half; i++) {
                double a = x[i], b = x[i + half];
                x[i] = a + b;
                x[i + half] = a - b;
            }
}

void sthi_hadamard(double *x, uint64_t count, uint64_t size) {
    double root = sqrt((double)size);
    for (uint64_t begin = 0; begin < count; begin += size) transform(x + begin, size);
    for (uint64_t i = 0; i < count; i++) x[i] /= root;
}
