/* A unit's packed image after its master was written. Lock held. */
#ifndef STHI_LOAD_REPACK_H
#define STHI_LOAD_REPACK_H
#include "state/state.h"

sth_status sthi_repack(sth_runtime *rt, uint32_t unit); /* where its master was written */
sth_status sthi_fingerprint_take(sth_runtime *rt, uint32_t unit); /* its copy is about to be issued */
#endif
