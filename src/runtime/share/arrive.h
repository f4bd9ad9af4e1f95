/* A runtime among others comes to the device. Lock not held. */
#ifndef STHI_RUNTIME_SHARE_ARRIVE_H
#define STHI_RUNTIME_SHARE_ARRIVE_H
#include "state/state.h"

/* Brings a runtime that is parked, or has not had its budget yet, onto the device. */
sth_status sthi_arrive(sth_runtime *rt);
#endif
