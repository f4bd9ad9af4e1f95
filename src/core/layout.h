/* Layout: in which extents of device memory residents lie. A plan that follows another one keeps
 * residents where they are as far as it can; the others fill the holes that are left, and what fits
 * into none gets extents of its own. Pure arithmetic over numbers. */
#ifndef STHI_CORE_LAYOUT_H
#define STHI_CORE_LAYOUT_H
#include <stdint.h>

#include "stagehand/status.h"

/* A resident. */
typedef struct sthi_laid {
    uint64_t bytes;
    uint32_t extent; /* in: where it lies now, STH_NONE: nowhere. Out: where it is to lie */
    uint64_t offset;
} sthi_laid;

typedef struct sthi_layout {
    sthi_laid *units;      /* [unit_count]; those that lie in one extent do not overlap */
    uint32_t unit_count;
    /* [extent_count + unit_count] bytes. In: of the extents that there are; 0: not for residents. Out: 0 for those that
     * are to go; behind them come `new_count` new ones. */
    uint64_t *extents;
    uint32_t extent_count, new_count;
    uint64_t room;         /* bytes of all extents together, no less than those of all units */
    uint64_t target;       /* bytes of a new extent, about; larger units have one of their own */
} sthi_layout;

/* Returns OUT_OF_HOST_MEMORY, with the layout as it was but for extents that nothing lies in. */
sth_status sthi_layout_find(sthi_layout *l);
#endif
