/* Neighbours in host memory: what one copy may take. Lock held. */
#ifndef STHI_LOAD_TOGETHER_H
#define STHI_LOAD_TOGETHER_H
#include "state/state.h"

/* Bytes that one copy of neighbours brings at most: the first of them waits for the last. */
uint64_t sthi_most_together(uint64_t budget);
/* b's begins where a's ends, and both are copied as they are. */
bool sthi_images_join(const sthi_unit *a, const sthi_unit *b);
/* All of [from, from + bytes), which the unit's image is a part of, was pinned at once: a driver takes no more. */
bool sthi_one_window(const sth_runtime *rt, const sthi_unit *u, const uint8_t *from, uint64_t bytes);
/* Bytes from the unit's image on that one copy may take, as the longest bundle within such a budget does. */
uint64_t sthi_bytes_in_a_row(const sth_runtime *rt, uint32_t unit, uint64_t room);
#endif
