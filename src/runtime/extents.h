/* Extents of device memory, freed or closed while leases are in them. Lock held. */
#ifndef STHI_RUNTIME_EXTENTS_H
#define STHI_RUNTIME_EXTENTS_H
#include "state/state.h"

sth_status sthi_extent_alloc(sth_runtime *rt, uint64_t bytes, bool wraps, sthi_extent_kind kind, uint32_t *out);
/* Frees the extent, or closes it when something in it is busy. */
void sthi_extent_release(sth_runtime *rt, uint32_t x);
bool sthi_extent_busy(const sth_runtime *rt, const sthi_extent *e); /* a slot in it is */
bool sthi_closing_idle(sth_runtime *rt);    /* an extent that leases kept could be freed now */
void sthi_closing_free(sth_runtime *rt);    /* frees those */
void sthi_extents_free_all(sth_runtime *rt);
#endif
