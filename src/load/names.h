/* Names for errors: of the tensor at a byte, of a unit whose file cannot be read. Lock not needed. */
#ifndef STHI_LOAD_NAMES_H
#define STHI_LOAD_NAMES_H
#include "state/state.h"

const char *sthi_tensor_name(const sthi_unit *u, uint64_t place_offset);
sth_status sthi_name_failure(const sthi_unit *u, uint32_t file, uint64_t offset); /* the error with the unit's name */
#endif
