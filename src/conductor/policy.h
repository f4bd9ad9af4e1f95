/* The three rules that turn phases, pressure and busy slots into hints. Pure. */
#ifndef STHI_CONDUCTOR_POLICY_H
#define STHI_CONDUCTOR_POLICY_H
#include "stagehand/conductor.h"

typedef struct sthi_policy {
    sth_hints base, now;
    uint32_t busy; /* checks in a row that found every slot taken */
} sthi_policy;

void sthi_policy_init(sthi_policy *p, sth_hints base);
void sthi_policy_step(sthi_policy *p); /* a step begins: the base again */
/* A phase is entered. allocated, soft_cap: bytes. */
void sthi_policy_phase(sthi_policy *p, sth_phase phase, uint64_t allocated, uint64_t soft_cap);
void sthi_policy_check(sthi_policy *p, bool all_busy);
#endif
