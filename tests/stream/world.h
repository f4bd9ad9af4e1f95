/* A small world for runtime tests: a simulated device, an arena with units of recognisable bytes, and a
 * runtime over them; every use checks that the place holds the right bytes at that moment. */
#ifndef TESTS_STREAM_WORLD_H
#define TESTS_STREAM_WORLD_H
#include <stdbool.h>
#include <stdint.h>

#include "quant/segment.h"
#include "state/state.h"

typedef struct world_spec {
    uint32_t units;
    const uint64_t *bytes; /* [units] */
    uint64_t budget, capacity; /* capacity: of the device; 0 = budget */
    bool virtual_time;
    uint64_t link;
    int64_t latency_ns;    /* of each copy; 0: 500 */
    uint64_t pin_limit;
    uint32_t readers, stages; /* stages 0: the default */
    sth_policy policy;
    bool writable, read_only;
    uint32_t flags; /* of every unit, beside STH_UNIT_WRITABLE */
    uint64_t chunk;
    sth_pool *pool;        /* shared with other worlds; NULL: one of its own */
    sth_device *device;    /* shared with other worlds; NULL: one of its own */
    const char *name;
    uint64_t reserved, least_room;
    uint64_t high_watermark, low_watermark;
    sth_transfer packed;   /* how every second unit crosses the link; 0: as it is */
    bool either;           /* packed units may cross as they are, too */
    bool no_expand;        /* the device cannot expand: the host does */
} world_spec;

typedef struct world {
    sth_device *device;
    sth_arena *arena;
    sth_runtime *runtime;
    uint8_t **image; /* [units], in the arena; of packed units the master */
    uint8_t **packed; /* [units], in the arena; NULL: as it is */
    uint8_t **shown;  /* [units] what a packed unit expands to; NULL */
    sth_segment **segments;
    uint32_t *segment_count;
    uint64_t *bytes;
    uint8_t *version; /* what the image holds now */
    uint32_t units;
    bool lossless; /* packed units are so */
} world;

/* A version whose bytes do not pack without loss. */
enum { WORLD_WILD = 255 };

/* Fills spec with usable values for the tests. */
world_spec world_default(uint32_t units, const uint64_t *bytes, uint64_t budget);
sth_status world_open(world *w, const world_spec *spec);
void world_close(world *w);
void world_fill(world *w, uint32_t unit, uint8_t version);
/* True when the bytes are those of the unit's image of that version. */
bool world_shows(const world *w, uint32_t unit, uint8_t version, const uint8_t *bytes);
/* True when the leased place holds the unit's present version. */
bool world_right(const world *w, const sth_lease *lease);
/* acquire, check, compute, release; aborts the test with a message if the bytes are wrong. */
sth_status world_use(world *w, uint32_t unit, int64_t compute_ns);
sth_status world_step(world *w, const uint32_t *order, uint32_t count, int64_t compute_ns);
#endif
