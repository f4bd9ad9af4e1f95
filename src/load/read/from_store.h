/* A chunk of a unit from a user's store. Lock not held, but where it says so. */
#ifndef STHI_LOAD_READ_FROM_STORE_H
#define STHI_LOAD_READ_FROM_STORE_H
#include "state/state.h"

sth_status sthi_store_unit_check(const sth_unit_desc *desc); /* its ranges lie in layers */
sth_status sthi_store_unit_of_files(const sth_unit_desc *desc, sth_unit_desc *out, sth_file_range **out_ranges);
sth_status sthi_range_read(const sthi_unit *u, const sth_file_range *r, uint64_t offset, uint64_t bytes, void *to);
sth_status sthi_store_chunk(const sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *image);
bool sthi_store_next(const sth_runtime *rt, uint32_t unit, sth_store **out_store, uint32_t *out_layer);
#endif
