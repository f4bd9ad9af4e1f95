/* Reservations of device memory and pinned host memory. Pure: no lock, no clock, no device. */
#ifndef STHI_CONDUCTOR_BUDGET_H
#define STHI_CONDUCTOR_BUDGET_H
#include "stagehand/conductor.h"

enum { STHI_OWNERS = 64, STHI_RESERVATIONS = 256 };

typedef struct sthi_reservation {
    uint64_t id; /* 0: free; grows, so that a later one is newer */
    uint32_t owner;
    sth_resource resource;
    sth_reserve_mode mode;
    sth_priority priority;
    sth_phase scope;
    uint64_t wanted, granted;
    bool changed; /* since it was last told */
} sthi_reservation;

typedef struct sthi_budget {
    uint64_t cap[STH_RESOURCES], hard[STH_RESOURCES]; /* UINT64_MAX: none */
    uint64_t unmanaged[STH_RESOURCES];                /* bytes in use that no reservation covers */
    sthi_reservation table[STHI_RESERVATIONS];
    uint64_t next_id;
    uint64_t ended[STHI_RESERVATIONS]; /* ids that a phase ended and nobody was told of */
    uint32_t ended_count;
    uint64_t shrinks; /* since creation */
} sthi_budget;

void sthi_budget_init(sthi_budget *b, uint64_t soft, uint64_t hard, uint64_t pinned);
sth_grant sthi_budget_reserve(sthi_budget *b, uint32_t owner, sth_resource resource, uint64_t bytes,
                              sth_reserve_mode mode, sth_priority priority, sth_phase scope);
uint64_t sthi_budget_release(sthi_budget *b, uint64_t id); /* its bytes; 0 when it has ended */
void sthi_budget_release_owner(sthi_budget *b, uint32_t owner);
void sthi_budget_phase_ended(sthi_budget *b, sth_phase phase);
void sthi_budget_set_unmanaged(sthi_budget *b, sth_resource resource, uint64_t bytes);
void sthi_budget_grow_back(sthi_budget *b);
uint64_t sthi_budget_granted(const sthi_budget *b, uint64_t id);
bool sthi_budget_changed(sthi_budget *b, uint64_t *out_id, uint64_t *out_granted);
uint64_t sthi_budget_headroom(const sthi_budget *b, sth_resource resource, bool hard);
/* What owners are committed to together: of each the larger of its floors and its other grants. */
uint64_t sthi_budget_committed(const sthi_budget *b, sth_resource resource);
#endif
