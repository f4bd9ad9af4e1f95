/* Transfer tokens and the measured rate of the link. Pure: no lock, no clock, no device. */
#ifndef STHI_CONDUCTOR_TOKENS_H
#define STHI_CONDUCTOR_TOKENS_H
#include "stagehand/conductor.h"

enum { STHI_TOKENS = STH_SLOTS_MOST };

typedef struct sthi_token_slot {
    uint32_t generation; /* never 0 */
    uint32_t owner;
    bool live;
    sth_direction direction;
} sthi_token_slot;

typedef struct sthi_tokens {
    uint32_t slots[STH_DIRECTIONS]; /* configured */
    uint32_t used[STH_DIRECTIONS];
    double rate[STH_DIRECTIONS]; /* bytes per second; 0: not known */
    sthi_token_slot table[2 * STHI_TOKENS];
} sthi_tokens;

void sthi_tokens_init(sthi_tokens *t, uint32_t h2d, uint32_t d2h);
/* NONE, or why not. hints: in force. */
sth_denial sthi_tokens_acquire(sthi_tokens *t, const sth_hints *hints, uint32_t owner, sth_direction direction,
                               sth_priority priority, sth_token *out);
bool sthi_tokens_alive(const sthi_tokens *t, sth_token token, sth_direction *out_direction);
bool sthi_tokens_release(sthi_tokens *t, sth_token token); /* false: it was free */
void sthi_tokens_release_owner(sthi_tokens *t, uint32_t owner);
void sthi_tokens_measured(sthi_tokens *t, sth_direction direction, uint64_t bytes, double ns);
/* No token of any priority could be had now. */
bool sthi_tokens_busy(const sthi_tokens *t);
#endif
