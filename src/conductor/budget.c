/* Reservations: who was promised how much, and who gives way.
 *
 * Invariants: when a request is granted, what all owners are committed to and what nobody reserved come to at
 * most the cap that it is held against; the hard cap is passed only by growth of `unmanaged`, and then nothing
 * speculative is left above floors. granted <= wanted; only SOFT grants differ from both 0 and wanted.
 * No lock: its caller's. Touches nothing but its struct. */
#include "conductor/budget.h"

#include "base/arith.h"
#include "base/invariant.h"

typedef struct sums {
    uint64_t floors, others, ceiling; /* ceiling: UINT64_MAX where there is none */
} sums;

static sums owner_sums(const sthi_budget *b, sth_resource resource, uint32_t owner) {
    sums s = {.ceiling = UINT64_MAX};
    for (int i = 0; i < STHI_RESERVATIONS; i++) {
        const sthi_reservation *r = &b->table[i];
        if (!r->id || r->resource != resource || r->owner != owner) continue;
        if (r->mode == STH_RESERVE_CEILING) s.ceiling = sthi_min_u64(s.ceiling, r->granted);
        else if (r->mode == STH_RESERVE_FLOOR) s.floors += r->granted;
        else s.others += r->granted;
    }
    return s;
}

uint64_t sthi_budget_committed(const sthi_budget *b, sth_resource resource) {
    uint64_t floors[STHI_OWNERS] = {0}, others[STHI_OWNERS] = {0}, sum = 0;
    for (int i = 0; i < STHI_RESERVATIONS; i++) {
        const sthi_reservation *r = &b->table[i];
        if (!r->id || r->resource != resource || r->mode == STH_RESERVE_CEILING) continue;
        *(r->mode == STH_RESERVE_FLOOR ? &floors[r->owner] : &others[r->owner]) += r->granted;
    }
    for (int i = 0; i < STHI_OWNERS; i++) sum += sthi_max_u64(floors[i], others[i]);
    return sum;
}

static uint64_t in_use(const sthi_budget *b, sth_resource resource) {
    uint64_t sum;
    return sthi_add_u64(sthi_budget_committed(b, resource), b->unmanaged[resource], &sum) ? sum : UINT64_MAX;
}

/* Floors that were asked for and are not there: nothing speculative takes their room. */
static uint64_t floors_wanted(const sthi_budget *b, sth_resource resource, uint32_t but_owner) {
    uint64_t sum = 0;
    for (int i = 0; i < STHI_RESERVATIONS; i++) {
        const sthi_reservation *r = &b->table[i];
        if (r->id && r->resource == resource && r->mode == STH_RESERVE_FLOOR && r->owner != but_owner)
            sum += r->wanted - r->granted;
    }
    return sum;
}

static uint64_t cap_of(const sthi_budget *b, sth_resource resource, sth_reserve_mode mode, sth_priority priority) {
    bool hard = mode == STH_RESERVE_BURST || priority == STH_PRIORITY_CRITICAL;
    return hard ? b->hard[resource] : b->cap[resource];
}

/* How much more of this kind the owner could get below the cap, as things are. */
static uint64_t room_for(const sthi_budget *b, uint32_t owner, sth_resource resource, sth_reserve_mode mode,
                         sth_priority priority) {
    sums s = owner_sums(b, resource, owner);
    uint64_t rest = in_use(b, resource);
    if (rest != UINT64_MAX) rest -= sthi_max_u64(s.floors, s.others);
    uint64_t room = sthi_minus(cap_of(b, resource, mode, priority), rest);
    if (priority >= STH_PRIORITY_SPECULATIVE) room = sthi_minus(room, floors_wanted(b, resource, owner));
    return sthi_minus(room, mode == STH_RESERVE_FLOOR ? s.floors : s.others);
}

/* ---- giving way */

static bool gives_way(const sthi_budget *b, const sthi_reservation *r, sth_resource resource, uint32_t to,
                      sth_priority stronger) {
    return r->id && r->resource == resource && r->owner != to && r->mode == STH_RESERVE_SOFT && r->granted &&
           r->priority >= STH_PRIORITY_SPECULATIVE && r->priority > stronger &&
           owner_sums(b, resource, r->owner).others > owner_sums(b, resource, r->owner).floors;
}

/* The weakest, and of these the newest. */
static sthi_reservation *victim(sthi_budget *b, sth_resource resource, uint32_t to, sth_priority stronger) {
    sthi_reservation *found = NULL;
    for (int i = 0; i < STHI_RESERVATIONS; i++) {
        sthi_reservation *r = &b->table[i];
        if (!gives_way(b, r, resource, to, stronger)) continue;
        if (!found || r->priority > found->priority || (r->priority == found->priority && r->id > found->id))
            found = r;
    }
    return found;
}

/* What all of them together could give. */
static uint64_t could_give(const sthi_budget *b, sth_resource resource, uint32_t to, sth_priority stronger) {
    uint64_t soft[STHI_OWNERS] = {0}, sum = 0;
    for (int i = 0; i < STHI_RESERVATIONS; i++)
        if (gives_way(b, &b->table[i], resource, to, stronger)) soft[b->table[i].owner] += b->table[i].granted;
    for (uint32_t owner = 0; owner < STHI_OWNERS; owner++) {
        if (!soft[owner]) continue;
        sums s = owner_sums(b, resource, owner);
        sum += sthi_min_u64(soft[owner], sthi_minus(s.others, s.floors));
    }
    return sum;
}

static void shrink(sthi_budget *b, sth_resource resource, uint32_t to, sth_priority stronger, uint64_t need) {
    sthi_reservation *r;
    while (need && (r = victim(b, resource, to, stronger))) {
        sums s = owner_sums(b, resource, r->owner);
        uint64_t give = sthi_min_u64(need, sthi_min_u64(r->granted, s.others - s.floors));
        STHI_INVARIANT(give && r->mode == STH_RESERVE_SOFT);
        r->granted -= give;
        r->changed = true;
        need -= give;
        b->shrinks++;
    }
}

/* ---- reserve and release */

void sthi_budget_init(sthi_budget *b, uint64_t soft, uint64_t hard, uint64_t pinned) {
    *b = (sthi_budget){.cap = {soft, pinned ? pinned : UINT64_MAX},
                       .hard = {hard, pinned ? pinned : UINT64_MAX},
                       .next_id = 1};
}

static sthi_reservation *free_entry(sthi_budget *b) {
    for (int i = 0; i < STHI_RESERVATIONS; i++)
        if (!b->table[i].id) return &b->table[i];
    return NULL;
}

static sth_grant denied(sth_denial reason) { return (sth_grant){.status = STH_GRANT_DENIED, .reason = reason}; }

static sth_denial cap_reason(sth_resource resource, sth_reserve_mode mode, sth_priority priority) {
    if (resource == STH_RESOURCE_PINNED) return STH_DENIAL_PINNED_CAP;
    bool hard = mode == STH_RESERVE_BURST || priority == STH_PRIORITY_CRITICAL;
    return hard ? STH_DENIAL_VRAM_HARD_CAP : STH_DENIAL_VRAM_SOFT_CAP;
}

static sth_grant enter(sthi_budget *b, sthi_reservation fresh, sth_denial reason) {
    sthi_reservation *r = free_entry(b);
    STHI_INVARIANT(r && fresh.owner < STHI_OWNERS);
    STHI_INVARIANT(fresh.granted <= fresh.wanted);
    STHI_INVARIANT(fresh.mode == STH_RESERVE_SOFT || !fresh.granted || fresh.granted == fresh.wanted);
    fresh.id = b->next_id++;
    *r = fresh;
    sth_grant_status status = fresh.granted ? STH_GRANT_PARTIAL : STH_GRANT_DENIED;
    if (fresh.granted == fresh.wanted) status = STH_GRANT_GRANTED;
    return (sth_grant){.status = status,
                       .reason = status == STH_GRANT_GRANTED ? STH_DENIAL_NONE : reason,
                       .granted_bytes = fresh.granted,
                       .id = fresh.id};
}

/* What becomes of `ask` where there is `room`: part of it only for a mode that takes parts. */
static uint64_t fitting(uint64_t ask, uint64_t room, bool partial) {
    if (ask <= room) return ask;
    return partial ? room : 0;
}

sth_grant sthi_budget_reserve(sthi_budget *b, uint32_t owner, sth_resource resource, uint64_t bytes,
                              sth_reserve_mode mode, sth_priority priority, sth_phase scope) {
    sthi_reservation fresh = {.owner = owner, .resource = resource, .mode = mode, .priority = priority,
                              .scope = scope, .wanted = bytes};
    if (!free_entry(b)) return denied(STH_DENIAL_TABLE_FULL);
    if (mode == STH_RESERVE_CEILING) {
        fresh.granted = bytes;
        return enter(b, fresh, STH_DENIAL_NONE);
    }
    sums s = owner_sums(b, resource, owner);
    uint64_t below = sthi_minus(s.ceiling, mode == STH_RESERVE_FLOOR ? s.floors : s.others);
    bool partial = mode == STH_RESERVE_SOFT;
    if (!below || (bytes > below && !partial)) return denied(STH_DENIAL_OWNER_CEILING);
    uint64_t ask = sthi_min_u64(bytes, below), room = room_for(b, owner, resource, mode, priority);
    sth_denial reason = ask < bytes ? STH_DENIAL_OWNER_CEILING : cap_reason(resource, mode, priority);
    if (ask > room && (partial || ask - room <= could_give(b, resource, owner, priority))) {
        shrink(b, resource, owner, priority, ask - room);
        room = room_for(b, owner, resource, mode, priority);
    }
    if (ask > room) reason = cap_reason(resource, mode, priority);
    fresh.granted = fitting(ask, room, partial);
    if (!fresh.granted && mode != STH_RESERVE_FLOOR) return denied(reason);
    return enter(b, fresh, reason);
}

static sthi_reservation *find(const sthi_budget *b, uint64_t id) {
    for (int i = 0; id && i < STHI_RESERVATIONS; i++)
        if (b->table[i].id == id) return (sthi_reservation *)&b->table[i];
    return NULL;
}

uint64_t sthi_budget_release(sthi_budget *b, uint64_t id) {
    sthi_reservation *r = find(b, id);
    uint64_t bytes = r ? r->granted : 0;
    if (r) *r = (sthi_reservation){0};
    return bytes;
}

void sthi_budget_release_owner(sthi_budget *b, uint32_t owner) {
    for (int i = 0; i < STHI_RESERVATIONS; i++)
        if (b->table[i].id && b->table[i].owner == owner) b->table[i] = (sthi_reservation){0};
}

void sthi_budget_phase_ended(sthi_budget *b, sth_phase phase) {
    for (int i = 0; i < STHI_RESERVATIONS; i++) {
        sthi_reservation *r = &b->table[i];
        if (!r->id || r->scope != phase) continue;
        if (b->ended_count < STHI_RESERVATIONS) b->ended[b->ended_count++] = r->id;
        *r = (sthi_reservation){0};
    }
}

uint64_t sthi_budget_granted(const sthi_budget *b, uint64_t id) {
    const sthi_reservation *r = find(b, id);
    return r ? r->granted : 0;
}

bool sthi_budget_changed(sthi_budget *b, uint64_t *out_id, uint64_t *out_granted) {
    *out_granted = 0;
    if (b->ended_count) {
        *out_id = b->ended[--b->ended_count];
        return true;
    }
    for (int i = 0; i < STHI_RESERVATIONS; i++) {
        sthi_reservation *r = &b->table[i];
        if (!r->id || !r->changed) continue;
        r->changed = false;
        *out_id = r->id;
        *out_granted = r->granted;
        return true;
    }
    *out_id = 0;
    return false;
}

uint64_t sthi_budget_headroom(const sthi_budget *b, sth_resource resource, bool hard) {
    return sthi_minus(hard ? b->hard[resource] : b->cap[resource], in_use(b, resource));
}

void sthi_budget_set_unmanaged(sthi_budget *b, sth_resource resource, uint64_t bytes) {
    b->unmanaged[resource] = bytes;
    /* Everybody's speculation gives way: to no owner, stronger than all. */
    shrink(b, resource, UINT32_MAX, STH_PRIORITY_CRITICAL, sthi_minus(in_use(b, resource), b->cap[resource]));
}

/* The strongest first, then the oldest. NULL at the end. */
static sthi_reservation *next_to_grow(sthi_budget *b, const sthi_reservation *last) {
    sthi_reservation *found = NULL;
    for (int i = 0; i < STHI_RESERVATIONS; i++) {
        sthi_reservation *r = &b->table[i];
        if (!r->id || r->granted == r->wanted) continue;
        bool behind = !last || r->priority > last->priority || (r->priority == last->priority && r->id > last->id);
        bool before = !found || r->priority < found->priority || (r->priority == found->priority && r->id < found->id);
        if (behind && before) found = r;
    }
    return found;
}

void sthi_budget_grow_back(sthi_budget *b) {
    for (sthi_reservation *r = NULL; (r = next_to_grow(b, r));) {
        uint64_t more = r->wanted - r->granted;
        sums s = owner_sums(b, r->resource, r->owner);
        uint64_t room = sthi_min_u64(room_for(b, r->owner, r->resource, r->mode, r->priority),
                                     sthi_minus(s.ceiling, r->mode == STH_RESERVE_FLOOR ? s.floors : s.others));
        uint64_t grow = fitting(more, room, r->mode == STH_RESERVE_SOFT);
        r->granted += grow;
        STHI_INVARIANT(r->granted <= r->wanted);
        r->changed |= grow > 0;
    }
}
