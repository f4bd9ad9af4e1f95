/* What packing, unpacking and verifying of losslessly packed files share: the checksums. */
#ifndef STHI_PACK_LOSSLESS_H
#define STHI_PACK_LOSSLESS_H
#include "pack/job.h"

enum { STHI_SUM_BYTES = 16 };

/* A checksum as 32 hexadecimal digits, as jobs have it, to 16 bytes. False where it is none. */
bool sthi_sum_of_text(const char *text, uint8_t out[STHI_SUM_BYTES]);
/* As hexadecimal digits: a checksum, and that of so many bytes. */
void sthi_sum_digits(uint64_t high, uint64_t low, char out[33]);
void sthi_sum_text(const void *bytes, uint64_t count, char out[33]);
/* The checksums of a losslessly packed file, a row each; freed with sthi_free. */
sth_status sthi_sums_read(const sth_quant *slab, uint8_t **out);
/* What a row is of: the tensor `tensor` of original `file`; a header where tensor is NULL, the index where file is the
 * number of originals. */
typedef struct sthi_sum_row {
    const sth_tensor_info *tensor;
    uint32_t file;
} sthi_sum_row;
/* Calls `each` for every row in their order. */
typedef sth_status (*sthi_sum_function)(void *context, uint64_t row, const sthi_sum_row *what);
sth_status sthi_sums_each(const sth_quant *slab, sthi_sum_function each, void *context);
#endif
