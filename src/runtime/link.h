/* The link's rate, as steps show it. Lock held. */
#ifndef STHI_RUNTIME_LINK_H
#define STHI_RUNTIME_LINK_H
#include "state/state.h"

/* A step that was timed took `took_ns`. */
void sthi_link_follow(sth_runtime *rt, const sthi_timed_step *t, double took_ns);
#endif
