/* Which vectors this processor has: the one choice among variants of a kernel, which all give the same bits. */
#ifndef STHI_BASE_PROCESSOR_H
#define STHI_BASE_PROCESSOR_H
#include <stdbool.h>

/* From the narrowest to the widest. AVX2: with BMI, FMA and F16C; AVX512: with all of that and AVX512F. */
typedef enum sthi_variant { STHI_SCALAR, STHI_AVX2, STHI_AVX512, STHI_VARIANTS } sthi_variant;

bool sthi_processor_has(sthi_variant variant);
/* The widest that the processor has, of those up to `most`, which the caller has. */
sthi_variant sthi_processor_variant(sthi_variant most);

/* For tests: none wider than this is chosen from now on, in the whole process. False where the processor lacks it. */
bool sthi_processor_limit(sthi_variant widest);
#endif
