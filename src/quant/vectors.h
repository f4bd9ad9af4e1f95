/* Vectors that every compiler of ours lowers to what the processor has; at any address of their elements. Lanes are
 * computed like single numbers, so that they change no bit. */
#ifndef STHI_QUANT_VECTORS_H
#define STHI_QUANT_VECTORS_H
#include <stdint.h>

typedef float sthi_f8 __attribute__((vector_size(8 * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef double sthi_d4 __attribute__((vector_size(4 * sizeof(double)), aligned(sizeof(double)), may_alias));
/* Comparisons of wider ones are taken apart where the processor has no such registers. */
typedef float sthi_f4 __attribute__((vector_size(4 * sizeof(float)), aligned(sizeof(float)), may_alias));
typedef int32_t sthi_i4 __attribute__((vector_size(4 * sizeof(int32_t)), aligned(sizeof(int32_t)), may_alias));
#endif
