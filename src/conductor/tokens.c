/* Slots of each direction of the link, as tokens with generations.
 *
 * Invariants: used[d] is the number of live slots of direction d, and at most slots[d]; a token is live from the
 * acquire that gave it to the first release, and means nothing after it. The last free slot of several is not
 * given to BACKGROUND. No lock: its caller's. */
#include "conductor/tokens.h"

#include "base/arith.h"
#include "base/invariant.h"

static const double NEW_SHARE = 0.2; /* of a measurement in the estimate */

void sthi_tokens_init(sthi_tokens *t, uint32_t h2d, uint32_t d2h) {
    *t = (sthi_tokens){.slots = {h2d, d2h}};
    for (int i = 0; i < 2 * STHI_TOKENS; i++) t->table[i].generation = 1;
}

static uint32_t limit_of(const sthi_tokens *t, const sth_hints *hints, sth_direction direction) {
    uint32_t hinted = direction == STH_DIRECTION_H2D ? hints->max_inflight_h2d : hints->max_inflight_d2h;
    return hinted < t->slots[direction] ? hinted : t->slots[direction];
}

sth_denial sthi_tokens_acquire(sthi_tokens *t, const sth_hints *hints, uint32_t owner, sth_direction direction,
                               sth_priority priority, sth_token *out) {
    STHI_INVARIANT(t->used[direction] <= t->slots[direction]);
    uint32_t limit = limit_of(t, hints, direction);
    *out = 0;
    if (priority >= STH_PRIORITY_SPECULATIVE && hints->suppress_speculative)
        return STH_DENIAL_PHASE_RULE_SUPPRESSED_SPECULATIVE;
    if (t->used[direction] >= limit)
        return direction == STH_DIRECTION_H2D ? STH_DENIAL_H2D_SLOTS_EXHAUSTED : STH_DENIAL_D2H_SLOTS_EXHAUSTED;
    if (priority == STH_PRIORITY_BACKGROUND && limit > 1 && t->used[direction] + 1 == limit)
        return STH_DENIAL_PRIORITY_TOO_LOW;
    for (uint32_t i = 0; i < 2 * STHI_TOKENS; i++) {
        sthi_token_slot *s = &t->table[i];
        if (s->live) continue;
        STHI_INVARIANT(s->generation);
        *s = (sthi_token_slot){.generation = s->generation, .owner = owner, .live = true, .direction = direction};
        t->used[direction]++;
        *out = (uint64_t)s->generation << 32 | i;
        return STH_DENIAL_NONE;
    }
    return STH_DENIAL_TABLE_FULL;
}

static const sthi_token_slot *find(const sthi_tokens *t, sth_token token) {
    uint32_t index = (uint32_t)token;
    if (index >= 2 * STHI_TOKENS) return NULL;
    const sthi_token_slot *s = &t->table[index];
    return s->live && s->generation == (uint32_t)(token >> 32) ? s : NULL;
}

bool sthi_tokens_alive(const sthi_tokens *t, sth_token token, sth_direction *out_direction) {
    const sthi_token_slot *s = find(t, token);
    if (s) *out_direction = s->direction;
    return s != NULL;
}

static void end(sthi_tokens *t, sthi_token_slot *s) {
    STHI_INVARIANT(s->live && t->used[s->direction]);
    s->live = false;
    if (!++s->generation) s->generation = 1;
    t->used[s->direction]--;
}

bool sthi_tokens_release(sthi_tokens *t, sth_token token) {
    if (!find(t, token)) return false;
    end(t, &t->table[(uint32_t)token]);
    return true;
}

void sthi_tokens_release_owner(sthi_tokens *t, uint32_t owner) {
    for (int i = 0; i < 2 * STHI_TOKENS; i++)
        if (t->table[i].live && t->table[i].owner == owner) end(t, &t->table[i]);
}

void sthi_tokens_measured(sthi_tokens *t, sth_direction direction, uint64_t bytes, double ns) {
    if (!bytes || !(ns > 0)) return;
    double rate = (double)bytes * 1e9 / ns, *known = &t->rate[direction];
    *known = *known > 0 ? *known + NEW_SHARE * (rate - *known) : rate;
}

bool sthi_tokens_busy(const sthi_tokens *t) {
    return t->used[STH_DIRECTION_H2D] >= t->slots[STH_DIRECTION_H2D] &&
           t->used[STH_DIRECTION_D2H] >= t->slots[STH_DIRECTION_D2H];
}
