/* Fault points, atomics only. */
#include "base/fault.h"

#include <stdatomic.h>

typedef struct fault_point {
    atomic_bool armed;
    atomic_bool forever;
    atomic_uint_fast64_t target, seen;
} fault_point;

static fault_point points[STHI_FAULT_KINDS];

bool sthi_fault_hit(sthi_fault_kind kind) {
    fault_point *p = &points[kind];
    if (!atomic_load_explicit(&p->armed, memory_order_relaxed)) return false;
    uint64_t n = atomic_fetch_add(&p->seen, 1) + 1, target = atomic_load(&p->target);
    return n == target || (n > target && atomic_load(&p->forever));
}

void sthi_fault_arm(sthi_fault_kind kind, uint64_t n, bool forever) {
    fault_point *p = &points[kind];
    atomic_store(&p->target, n);
    atomic_store(&p->seen, 0);
    atomic_store(&p->forever, forever);
    atomic_store(&p->armed, true);
}

void sthi_fault_disarm_all(void) {
    for (int k = 0; k < STHI_FAULT_KINDS; k++) atomic_store(&points[k].armed, false);
}

uint64_t sthi_fault_seen(sthi_fault_kind kind) { return atomic_load(&points[kind].seen); }
