/* Device memory in which packed bytes arrive. Lock held. */
#ifndef STHI_LOAD_STAGES_H
#define STHI_LOAD_STAGES_H
#include "state/state.h"

sth_status sthi_expand_open(sth_runtime *rt);      /* at seal; decides whether the device expands */
sth_status sthi_stages_alloc(sth_runtime *rt);     /* where there are none */
void sthi_stages_free(sth_runtime *rt);
void sthi_expand_close(sth_runtime *rt);
#endif
