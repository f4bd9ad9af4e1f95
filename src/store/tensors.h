/* A growing list of tensors, and the checks on where they lie. */
#ifndef STHI_STORE_TENSORS_H
#define STHI_STORE_TENSORS_H
#include "stagehand/checkpoint.h"
#include "store/file.h"

typedef struct sthi_tensors {
    sth_tensor_info *items; /* names and spellings are owned by the list */
    uint64_t count, capacity;
} sthi_tensors;

/* Appends a copy of *tensor with a copy of its name, and of its spelling where the dtype is STH_DTYPE_OTHER. */
sth_status sthi_tensors_add(sthi_tensors *list, const sth_tensor_info *tensor);
void sthi_tensors_drop_name(sth_tensor_info *tensor); /* for an entry that is being left out */
void sthi_tensors_fini(sthi_tensors *list);

/* Sorts `count` tensors of one file by offset and checks that each lies inside the file and that no two
 * share a byte. *out_holes: bytes from data_begin on that belong to no tensor. */
sth_status sthi_tensors_check_extents(sth_tensor_info *tensors, uint64_t count, const sthi_file *file,
                                      uint64_t data_begin, uint64_t *out_holes);
#endif
