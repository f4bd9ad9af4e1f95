/* Weights that were never written: holes in a file where a tensor should be. */
#ifndef STHI_STORE_SPARSE_H
#define STHI_STORE_SPARSE_H
#include <stdbool.h>

#include "stagehand/checkpoint.h"
#include "store/file.h"

/* CORRUPT_DATA when all blocks of a tensor's own lie in a hole, or at least 1 MiB of it does. */
sth_status sthi_sparse_check(const sthi_file *file, const sth_tensor_info *tensors, uint64_t count);

/* True where a hole means that nobody wrote there. */
bool sthi_sparse_is_telling(const sthi_file *file);
#endif
