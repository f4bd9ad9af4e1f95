/* Sums, protections and the order in which members of a device's account give way. See account.h. */
#include "core/account.h"

#include <stdio.h>

#include "base/arith.h"
#include "base/invariant.h"

enum { LONG_RUN = 3 }; /* steps: two loads are saved for the one that somebody else pays */

void sthi_account_join(sthi_account *a, sthi_member *m, void *owner, const char *name) {
    *m = (sthi_member){.owner = owner, .name = name, .next = a->first, .used = ++a->clock};
    a->first = m;
}

static void add(sthi_account *a, sthi_member *m, uint64_t bytes) {
    m->charge += bytes;
    a->charge += bytes;
}

static void claim(sthi_account *a, sthi_member *m, uint64_t bytes) {
    STHI_INVARIANT(m->holds);
    STHI_INVARIANT(bytes <= m->charge - m->claim);
    m->claim += bytes;
    a->claims += bytes;
}

static void unclaim(sthi_account *a, sthi_member *m, uint64_t bytes) {
    STHI_INVARIANT(bytes <= m->claim && m->claim <= a->claims);
    m->claim -= bytes;
    a->claims -= bytes;
}

void sthi_account_leave(sthi_account *a, sthi_member *m) {
    for (sthi_member **at = &a->first; *at; at = &(*at)->next) {
        if (*at != m) continue;
        if (a->running == m) a->running = NULL;
        STHI_INVARIANT(m->charge <= a->charge && m->claim <= m->charge);
        *at = m->next;
        a->charge -= m->charge;
        unclaim(a, m, m->claim);
        m->charge = 0;
        return;
    }
}

uint64_t sthi_account_free(const sthi_account *a) { return a->cap > a->charge ? a->cap - a->charge : 0; }

void sthi_account_exceed(sthi_account *a, const sthi_member *m, uint64_t least, uint64_t most) {
    if (a->soft) a->cap = sthi_max_u64(a->cap, sthi_min_u64(sthi_plus(a->charge - m->charge, least), most));
}

bool sthi_account_take(sthi_account *a, sthi_member *m, uint64_t bytes) {
    STHI_INVARIANT(m->claim <= m->charge && m->charge <= a->charge && a->claims <= a->charge);
    uint64_t claimed = sthi_min_u64(bytes, m->claim);
    if (bytes - claimed > sthi_account_free(a)) return false;
    unclaim(a, m, claimed);
    add(a, m, bytes - claimed);
    a->peak = sthi_max_u64(a->peak, a->charge - a->claims);
    return true;
}

void sthi_account_give(sthi_account *a, sthi_member *m, uint64_t bytes) {
    if (m->holds) {
        claim(a, m, bytes);
        return;
    }
    STHI_INVARIANT(bytes <= m->charge && m->charge <= a->charge);
    m->charge -= bytes;
    a->charge -= bytes;
}

uint64_t sthi_account_hold(sthi_account *a, sthi_member *m, uint64_t want) {
    m->holds++;
    if (want > m->charge) {
        uint64_t bytes = sthi_min_u64(want - m->charge, sthi_account_free(a));
        add(a, m, bytes);
        claim(a, m, bytes);
    }
    return sthi_min_u64(want, m->charge);
}

void sthi_account_settle(sthi_account *a, sthi_member *m) {
    STHI_INVARIANT(m->holds);
    STHI_INVARIANT(m->claim <= m->charge && m->charge <= a->charge);
    if (--m->holds) return;
    m->charge -= m->claim;
    a->charge -= m->claim;
    unclaim(a, m, m->claim);
}

sthi_shield sthi_account_shield(const sthi_member *m) {
    if (m->leaving) return STHI_SHIELD_NONE;
    if (m->priority == STH_PRIORITY_PRIMARY) return STHI_SHIELD_PRIMARY;
    if (m->keeps) return STHI_SHIELD_KEPT;
    if (m->priority == STH_PRIORITY_SECONDARY) return STHI_SHIELD_SECONDARY;
    return m->guests ? STHI_SHIELD_GUEST : STHI_SHIELD_NONE;
}

/* What of the member nobody else can ever have. `fixed` bytes are not among it: the caller of a runtime that has
 * parked can give them back, and whoever asked then asks again. */
static uint64_t immovable(const sthi_member *m) {
    return sthi_account_shield(m) >= STHI_SHIELD_KEPT || m->leaving ? m->charge : 0;
}

uint64_t sthi_account_reach(const sthi_account *a, const sthi_member *m) {
    uint64_t others = 0;
    for (const sthi_member *o = a->first; o; o = o->next)
        if (o != m) others += immovable(o);
    return a->cap > others ? a->cap - others : 0;
}

uint64_t sthi_account_fixed(const sthi_account *a) {
    uint64_t sum = 0;
    for (const sthi_member *m = a->first; m; m = m->next) sum += m->fixed;
    return sum;
}

void sthi_account_used(sthi_account *a, sthi_member *m) { m->used = ++a->clock; }

void sthi_account_ran(sthi_account *a, sthi_member *m) {
    if (a->running != m) {
        if (a->running) a->running->last_run = a->running->run;
        m->run = 0;
        a->running = m;
    }
    m->run++;
}

bool sthi_account_stays(const sthi_member *m) {
    return sthi_account_shield(m) != STHI_SHIELD_NONE || !m->last_run || m->last_run >= LONG_RUN || m->run >= LONG_RUN;
}

static bool before(const sthi_member *a, const sthi_member *b) {
    sthi_shield sa = sthi_account_shield(a), sb = sthi_account_shield(b);
    return sa != sb ? sa < sb : a->used < b->used;
}

sthi_member *sthi_account_victim(const sthi_account *a, const sthi_member *asker, uint64_t request, bool required,
                                 uint64_t thread, bool *out_wait) {
    sthi_member *best = NULL;
    *out_wait = false;
    for (sthi_member *m = a->first; m; m = m->next) {
        sthi_shield shield = sthi_account_shield(m);
        if (m == asker || m->leaving || m->charge <= m->fixed) continue;
        if (shield >= STHI_SHIELD_KEPT || (shield != STHI_SHIELD_NONE && !required)) continue;
        if (m->pins || m->holds || (m->busy && m->thread != thread)) *out_wait = true;
        if (m->pins || m->holds || m->busy || m->tried == request) continue;
        if (!best || before(m, best)) best = m;
    }
    return best;
}

bool sthi_account_thread_busy(const sthi_account *a, uint64_t thread) {
    for (const sthi_member *m = a->first; m; m = m->next)
        if (m->busy && m->thread == thread) return true;
    return false;
}

static bool lender(const sthi_account *a, const sthi_member *but) {
    for (const sthi_member *m = a->first; m; m = m->next)
        if (m != but && m->charge > m->fixed && (m->last_run >= LONG_RUN || m->run >= LONG_RUN)) return true;
    return false;
}

uint64_t sthi_account_asks(const sthi_account *a, const sthi_member *m, uint64_t least, uint64_t flow, uint64_t want) {
    if (sthi_account_stays(m)) return want;
    if (m->charge >= least && !lender(a, m)) return sthi_min_u64(m->charge, want);
    return sthi_min_u64(want, sthi_max_u64(sthi_max_u64(m->charge, flow), least));
}

void sthi_account_info(const sthi_account *a, sth_residency_info *out) {
    *out = (sth_residency_info){.cap = a->cap, .occupied = a->charge, .free = sthi_account_free(a), .peak = a->peak,
                               .fixed = sthi_account_fixed(a)};
    for (const sthi_member *m = a->first; m; m = m->next) {
        sthi_shield shield = sthi_account_shield(m);
        out->runtimes += !m->leaving;
        if (shield == STHI_SHIELD_PRIMARY) out->primary += m->charge;
        if (shield == STHI_SHIELD_KEPT) out->kept += m->charge;
        if (shield == STHI_SHIELD_SECONDARY) out->secondary += m->charge;
    }
    out->yielding = out->occupied - out->primary - out->secondary - out->kept;
}

static const char *why(const sthi_member *m) {
    switch (sthi_account_shield(m)) {
    case STHI_SHIELD_PRIMARY: return "reserved as PRIMARY";
    case STHI_SHIELD_KEPT: return "kept resident";
    case STHI_SHIELD_SECONDARY: return m->busy ? "reserved as SECONDARY, in use" : "reserved as SECONDARY";
    case STHI_SHIELD_GUEST: return m->busy ? "a guest in use" : "a guest";
    case STHI_SHIELD_NONE: break;
    }
    if (m->leaving) return "shut down, but held by tensors";
    return m->busy ? "in use" : "which tensors hold";
}

const char *sthi_account_describe(const sthi_account *a, const sthi_member *but, char *to, uint64_t size) {
    uint64_t at = 0;
    to[0] = 0;
    for (const sthi_member *m = a->first; m && at < size; m = m->next) {
        char bytes[32];
        if (m == but || !m->charge) continue;
        int n = snprintf(to + at, size - at, "%s'%s' has %s (%llu bytes), %s", at ? "; " : "", m->name,
                         sthi_format_size(m->charge, bytes, sizeof bytes), (unsigned long long)m->charge, why(m));
        at += n > 0 ? (uint64_t)n : 0;
    }
    return to;
}

bool sthi_account_check(const sthi_account *a, const char **out_why) {
    uint64_t sum = 0, claims = 0;
    for (const sthi_member *m = a->first; m; m = m->next) {
        *out_why = "a claim is larger than its member's charge";
        if (m->claim > m->charge) return false;
        *out_why = "a claim without a change of plan";
        if (m->claim && !m->holds) return false;
        *out_why = "a member has reserved more than it is charged";
        if (m->fixed > m->charge) return false;
        sum += m->charge;
        claims += m->claim;
    }
    *out_why = "the account's charge is not the sum of its members'";
    if (sum != a->charge || claims != a->claims) return false;
    *out_why = "more is charged than the cap";
    return a->charge <= a->cap;
}
