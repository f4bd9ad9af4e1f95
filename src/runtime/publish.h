/* The runtime in the live view (docs/top.md). Lock held throughout. */
#ifndef STHI_RUNTIME_PUBLISH_H
#define STHI_RUNTIME_PUBLISH_H
#include "state/state.h"

void sthi_publish_open(sth_runtime *rt); /* at seal */
void sthi_publish(sth_runtime *rt);      /* figures have changed */
void sthi_publish_close(sth_runtime *rt);
#endif
