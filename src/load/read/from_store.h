/* A chunk of a unit from a user's store. Lock not held, but where it says so. */
#ifndef STHI_LOAD_READ_FROM_STORE_H
#define STHI_LOAD_READ_FROM_STORE_H
#include "state/state.h"

sth_status sthi_store_unit_check(const sth_unit_desc *desc); /* its ranges lie in layers */
/* The same unit with ranges of files. *out_ranges is freed by the caller. */
sth_status sthi_store_unit_of_files(const sth_unit_desc *desc, sth_unit_desc *out, sth_file_range **out_ranges);
/* Not held. Part of a range, from the file or the layer; the failure names the unit. */
sth_status sthi_range_read(const sthi_unit *u, const sth_file_range *r, uint64_t offset, uint64_t bytes, void *to);
/* Not held. Bytes [begin, begin + bytes) of the unit's image. */
sth_status sthi_store_chunk(const sthi_unit *u, uint64_t begin, uint64_t bytes, uint8_t *image);
/* Lock held. The layer of the same store that is read after this unit's; false where none is queued. */
bool sthi_store_next(const sth_runtime *rt, uint32_t unit, sth_store **out_store, uint32_t *out_layer);
#endif
