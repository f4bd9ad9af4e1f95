/* Names for errors: of the tensor at a byte, of a unit whose file cannot be read. Lock not needed.
 * */
#ifndef STHI_LOAD_NAMES_H
#define STHI_LOAD_NAMES_H
#include "state/state.h"

/* Of the tensor that a byte of the place belongs to; the unit's where none was given. */
const char *sthi_tensor_name(const sthi_unit *u, uint64_t place_offset);
/* The store's failure, said with the names that the user knows. */
sth_status sthi_name_failure(const sthi_unit *u, uint32_t file, uint64_t offset);
#endif
