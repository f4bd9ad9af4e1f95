/* Rows of a source tensor as float32. */
#ifndef STHI_PACK_ROWS_H
#define STHI_PACK_ROWS_H
#include "pack/job.h"

/* True for F64, F32, F16 and BF16. */
bool sthi_rows_is_float(sth_dtype dtype);
/* The widest tensors of a job are cut so: rows of one chunk, at least 1. */
uint64_t sthi_rows_of_chunk(uint64_t columns, uint64_t row_bytes);
/* `count` values of `dtype` at `bytes` (any address) to float32; F64 is rounded. */
void sthi_rows_widen(sth_dtype dtype, const void *bytes, uint64_t count, float *out);
/* Reads a tensor of one dimension as float32; *out_wide is freed with sthi_free. */
sth_status sthi_rows_read_vector(const sthi_pack_job *job, const sth_tensor_info *t, float **out_wide);
/* UNSUPPORTED by file, tensor and byte where one of w[0..count) is not finite; `first`: its element in the tensor. */
sth_status sthi_rows_check(const sthi_pack_job *job, const sth_tensor_info *t, uint64_t first, const float *w,
                           uint64_t count);
#endif
