/* What a pass saved and in which order backward asked for it, and what that says of the next pass. Plain
 * bookkeeping: no device, no lock of its own. */
#ifndef STHI_ACTIVATION_ORDER_H
#define STHI_ACTIVATION_ORDER_H
#include <stdbool.h>
#include <stdint.h>

#include "stagehand/activation.h"

/* What was saved as the n-th of a pass. */
typedef struct sthi_saved {
    uint64_t bytes;
    sth_record record;
    int64_t saved_ns, asked_ns; /* the latter 0 while nobody asked */
    bool passing, recomputable;
    bool gone; /* spilled or dropped */
    bool plan; /* in the next pass it goes as soon as it is saved */
} sthi_saved;

typedef struct sthi_trace {
    sthi_saved *saved;
    uint32_t count, room;
    uint32_t *asked; /* ordinals */
    uint32_t asked_count, asked_room;
    uint64_t spare; /* least bytes that stayed free below the high mark while something was gone */
} sthi_trace;

typedef struct sthi_order {
    sthi_trace now, last; /* last: of the last pass that came to a backward */
    uint32_t cursor;      /* in last.asked: behind what was asked for last */
    uint32_t lowest;      /* ordinal asked for so far: without a last pass the next is below it */
} sthi_order;

void sthi_order_fini(sthi_order *o);
/* Notes a save; false when memory is out. */
bool sthi_order_save(sthi_order *o, sthi_saved saved, uint32_t *out_ordinal);
bool sthi_order_plan_says_go(const sthi_order *o, uint32_t ordinal, uint64_t bytes);
/* Notes that backward asks for an ordinal. Without memory the order is not complete: only speed is lost. */
void sthi_order_ask(sthi_order *o, uint32_t ordinal, int64_t now_ns);
/* The n-th guess (0, 1, ...) at what backward asks for next; false at the end. */
bool sthi_order_next(const sthi_order *o, uint32_t n, uint32_t *out_ordinal);
/* The pass is over: plans the next one. link: bytes per second each way, 0 where it is not known. */
void sthi_order_pass(sthi_order *o, double link);
#endif
