/* Fuzz target for the runtime's event interface: bytes are a small world and what happens to it, in virtual time.
 * Input: units (1-5), budget, options, a size for each unit, then events of two bytes: which, and its argument.
 *
 * Property: after each event all invariants hold; every acquired unit shows its present bytes, also behind a use and
 * under leases that are kept; statuses are those that the event may give; whatever happened, a last step is right, and
 * nothing is left allocated. */
#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "fuzz/files.h"
#include "runtime/budget.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/runtime.h"
#include "runtime/step_calls.h"
#include "runtime/verify.h"
#include "stream/world.h"

enum { MOST_UNITS = 5, MOST_LEASES = 4, MOST_EVENTS = 200, GRAIN = 512 };

typedef struct player {
    world w;
    const uint8_t *at, *end;
    sth_lease kept[MOST_LEASES];
    uint32_t kept_count;
    bool writable, faults;
    uint8_t version;
    uint64_t capacity;
} player;

static uint8_t next(player *p) { return p->at < p->end ? *p->at++ : 0; }

static sth_status check(player *p, sth_status rc) {
    const char *why = "";
    bool may = rc == STH_OK || rc == STH_BUDGET_TOO_SMALL ||
               (p->faults && (rc == STH_DEVICE_ERROR || rc == STH_OUT_OF_DEVICE_MEMORY));
    if (!may) fprintf(stderr, "%s: %s\n", sth_status_name(rc), sth_last_error()->message);
    CHECK(may);
    if (!sthi_runtime_check(p->w.runtime, &why)) fprintf(stderr, "%s\n", why);
    CHECK(!*why);
    return rc;
}

static void use(player *p, uint32_t unit, bool keep) {
    sth_lease lease;
    if (check(p, sthi_unit_acquire(p->w.runtime, unit, 0, &lease)) != STH_OK) return;
    CHECK(world_right(&p->w, &lease));
    (void)p->w.device->ops->sim_compute(p->w.device->self, 0, 1000 * next(p));
    CHECK(world_right(&p->w, &lease));
    if (keep && p->kept_count < MOST_LEASES) p->kept[p->kept_count++] = lease;
    else sthi_lease_release(p->w.runtime, &lease);
}

static void let_go(player *p, uint32_t which) {
    if (!p->kept_count) return;
    which %= p->kept_count;
    CHECK(world_right(&p->w, &p->kept[which]));
    sthi_lease_release(p->w.runtime, &p->kept[which]);
    p->kept[which] = p->kept[--p->kept_count];
}

static void end_step(player *p) {
    if (p->w.runtime->step.open) check(p, sthi_step_end(p->w.runtime));
}

/* Images may be written when no lease and no step is open and nothing reads them. */
static void write_unit(player *p, uint32_t unit) {
    if (!p->writable || p->kept_count) return;
    sthi_fault_disarm_all();
    end_step(p);
    check(p, sthi_runtime_synchronize(p->w.runtime));
    world_fill(&p->w, unit, ++p->version);
    check(p, sthi_unit_mark_written(p->w.runtime, unit));
}

static void change_budget(player *p, uint8_t to) {
    end_step(p);
    uint64_t least = sthi_smallest_budget(p->w.runtime);
    if (least < p->capacity)
        check(p, sthi_runtime_set_budget(p->w.runtime, least + to * (p->capacity - least) / 255));
}

static void verify(player *p, uint32_t unit) {
    bool equal = true;
    if (check(p, sthi_unit_verify(p->w.runtime, unit, &equal, NULL)) == STH_OK) CHECK(equal);
}

static void step(player *p, bool backwards) {
    end_step(p);
    if (p->w.runtime->step.open || check(p, sthi_step_begin(p->w.runtime)) != STH_OK) return;
    for (uint32_t i = 0; i < p->w.units; i++) use(p, backwards ? p->w.units - 1 - i : i, false);
    end_step(p);
}

/* Nothing is leased, and nothing fails any more. */
static void last_steps(player *p) {
    end_step(p);
    p->faults = false;
    for (int i = 0; i < 2; i++) CHECK(world_step(&p->w, (const uint32_t[]){0, 1, 2, 3, 4}, p->w.units, 1000) == STH_OK);
    check(p, sthi_runtime_synchronize(p->w.runtime));
}

static void event(player *p) {
    uint8_t which = next(p), argument = next(p);
    uint32_t unit = argument % p->w.units;
    switch (which % 14) {
    case 0: if (!p->w.runtime->step.open) check(p, sthi_step_begin(p->w.runtime)); break;
    case 1: end_step(p); break;
    case 2: check(p, sthi_step_pause(p->w.runtime)); break;
    case 3: check(p, sthi_runtime_poll(p->w.runtime)); break;
    case 4: use(p, unit, true); break;
    case 5: let_go(p, argument); break;
    case 6: write_unit(p, unit); break;
    case 7: change_budget(p, argument); break;
    case 8: verify(p, unit); break;
    case 9: p->faults = true, sthi_fault_arm(STHI_FAULT_DEVICE_CALL, 1 + argument % 64u, argument > 250); break;
    case 10: p->faults = true, sthi_fault_arm(STHI_FAULT_DEVICE_ALLOC, 1 + argument % 8u, argument > 250); break;
    case 11: sthi_fault_disarm_all(); break;
    case 12: step(p, argument & 1); break;
    default: use(p, unit, false);
    }
}

static bool open_world(player *p) {
    uint64_t bytes[MOST_UNITS], largest = 0, all = 0;
    uint32_t n = 1 + next(p) % MOST_UNITS;
    uint8_t budget = next(p), options = next(p);
    for (uint32_t i = 0; i < n; i++) {
        bytes[i] = (uint64_t)GRAIN * (1 + next(p) % 16u);
        largest = bytes[i] > largest ? bytes[i] : largest;
        all += bytes[i];
    }
    p->capacity = largest + GRAIN * (budget * (all - largest + GRAIN) / 255 / GRAIN);
    world_spec spec = world_default(n, bytes, p->capacity);
    spec.chunk = GRAIN << (options & 3);
    spec.policy = options & 4 ? STH_POLICY_STATIC : STH_POLICY_PLANNED;
    p->writable = spec.writable = options & 8;
    spec.read_only = !spec.writable || options & 16;
    spec.link = UINT64_C(1) << (26 + 4 * (options >> 5 & 1));
    if (options & 64) spec.packed = STH_TRANSFER_INT8;
    spec.no_expand = options & 128;
    return world_open(&p->w, &spec) == STH_OK;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    player p = {.at = data, .end = data + size};
    long live = sthi_alloc_live();
    if (open_world(&p)) {
        for (int i = 0; i < MOST_EVENTS && p.at < p.end; i++) event(&p);
        sthi_fault_disarm_all();
        while (p.kept_count) let_go(&p, 0);
        check(&p, sthi_runtime_poll(p.w.runtime));
        last_steps(&p);
        world_close(&p.w);
    } else CHECK(*sth_last_error()->message);
    CHECK(sthi_alloc_live() == live);
    return 0;
}
