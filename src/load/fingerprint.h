/* Host images that were written without a word. Lock held. */
#ifndef STHI_LOAD_FINGERPRINT_H
#define STHI_LOAD_FINGERPRINT_H
#include "state/state.h"

/* Of the whole image, or of sampled lines. */
uint64_t sthi_fingerprint(const uint8_t *image, uint64_t bytes);
/* Of each tensor in the unit's image. */
uint64_t sthi_fingerprint_place(const sthi_unit *u, const uint8_t *image, uint64_t bytes);
bool sthi_watched(const sthi_unit *u);                /* it has an image that somebody may write */
uint64_t sthi_fingerprint_master(const sthi_unit *u); /* 0: it is not watched */
/* Of a unit that has a slot, once in an epoch: a difference makes the slot stale. Fails where options.read_only. */
sth_status sthi_fingerprint_compare(sth_runtime *rt, uint32_t unit);
#endif
