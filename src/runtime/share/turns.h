/* Threads that ask for room again take turns. The account's lock is taken; no runtime's lock is held. */
#ifndef STHI_RUNTIME_SHARE_TURNS_H
#define STHI_RUNTIME_SHARE_TURNS_H
#include "state/state.h"

sth_status sthi_turn_begin(sth_device *device);
bool sthi_turn_is_first(sth_device *device);
bool sthi_turn_wait(sth_device *device);
void sthi_turn_end(sth_device *device);
#endif
