/* Which trained weights live on the device: a price for each, small ones first. Pure: no lock, no clock, no device. */
#ifndef STHI_CORE_TRAINABLES_H
#define STHI_CORE_TRAINABLES_H
#include "stagehand/trainables.h"

sth_status sthi_trainables_choose(const sth_trainables_input *in, sth_home *homes, uint64_t *out_bytes);
#endif
