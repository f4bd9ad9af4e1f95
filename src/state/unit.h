/* A unit: weights that come to the device together, and what the runtime knows of them. Added by
 * runtime/units.c; each group of fields has its writer in its line. */
#ifndef STHI_STATE_UNIT_H
#define STHI_STATE_UNIT_H
#include "core/places.h"
#include "core/unit_state.h"
#include "host/arena.h"
#include "stagehand/runtime.h"
#include "stagehand/transfer.h"
#include "store/checkpoint.h"

/* No memory has more; sums of a few such sizes fit 64 bits. */
#define STHI_BYTES_MOST (UINT64_C(1) << 60)

enum { STHI_UNWRITTEN_STEPS = 16 /* without a write, after which a unit is not one that is written any more */ };

/* An image in host memory of a unit that comes from files (load/read/keep.c). */
typedef struct sthi_kept {
    uint8_t *image;          /* where its bytes are kept, or are going to be; NULL: nowhere */
    uint8_t *chunks;         /* [chunks] states, see keep.c */
    uint64_t left;           /* chunks that are not there yet */
} sthi_kept;

/* Whether a packed unit's master is to go (runtime/plain_image.c). */
typedef enum sthi_drop { STHI_DROP_NOT, STHI_DROP_ASKED, STHI_DROP_COMPARED, STHI_DROP_GONE } sthi_drop;

/* A packed image, beside the master that it was encoded from (load/repack.c). */
typedef struct sthi_encoded {
    uint64_t print;          /* the master's fingerprint then */
    bool stale;              /* the master was written since */
    bool plain;              /* the image has no room for what was written: the master crosses as it is */
    bool crosses_plain;      /* the plan's choice: the master is copied into the place, as it is */
    sthi_drop drop;
    uint8_t tries;           /* to drop it, since that was asked for */
} sthi_encoded;

/* The packed image on the device, from which loads are expanded (load/stays.c, load/expand.c). */
typedef struct sthi_stays {
    sth_devptr at;           /* 0: it does not stay there */
    uint64_t here;           /* bytes of it that were copied, from its first piece on; all: wire_bytes */
} sthi_stays;

/* Whether the caller writes its image (runtime/writes.c). */
typedef struct sthi_unit_writes {
    bool changed;            /* marked written since the last step began, and not copied since */
    bool written;            /* between steps, as a rule: plans count with it */
    uint8_t unwritten_steps; /* whole ones since it was found changed; no further than STHI_UNWRITTEN_STEPS */
} sthi_unit_writes;

/* Sums over the counts (runtime/timing.c). */
typedef struct sthi_unit_times {
    double h2d_ns, compute_ns, stall_ns;
    uint64_t h2d_count, use_count;
} sthi_unit_times;

typedef struct sthi_unit {
    char *name, *group;
    uint64_t bytes;
    uint32_t flags;
    sth_unit_state state;
    int32_t slot;            /* STHI_NO_SLOT when not on the device */
    const uint8_t *host;
    uint64_t host_bytes;     /* of the image; zeros follow up to `bytes` */
    uint64_t fingerprint;    /* of the image, when the copy on the device was issued */
    uint64_t seen_epoch;     /* when the image was last sampled */
    sth_arena *arena;
    sth_checkpoint *checkpoint;
    sth_store *store;        /* whose layers the ranges name; NULL: they name files of `checkpoint` */
    sth_file_range *ranges;
    uint32_t range_count;
    sth_segment *segments;   /* [segment_count] of the packed image that `host` or the ranges are; NULL: not packed */
    uint32_t segment_count;
    uint64_t packed_bytes;
    uint64_t wire_bytes;     /* sum of its pieces, once it is known that the device expands */
    const uint8_t *master;   /* that the packed image was encoded from; NULL: unknown */
    sthi_encoded encoded;
    sthi_stays stays;
    sth_unit_tensor *tensors; /* [tensor_count], names behind them; for errors and samples */
    uint32_t tensor_count;
    bool direct;             /* the host image is pinned: copied from where it is */
    sthi_kept kept;
    bool in_ram;             /* all chunks of `kept` are there: `host` is that image */
    uint32_t bundle;         /* of the plan in force, whose units are loaded together; STH_NONE: it is in none */
    bool resident;           /* by plan, at this home: */
    sthi_place home;
    uint32_t first_use;      /* position in the order, STH_NONE if not in it */
    uint64_t last_step;      /* step of its last use + 1; 0 = never */
    bool used_before;        /* in the step before the open one */
    sthi_unit_writes writes;
    uint32_t regular_steps;  /* steps in a row that used it, while it counts as on demand */
    uint32_t regular_again;  /* of them, after which it returns to the order; 0: it has not left */
    float heat;              /* at heat_step, of a unit in no order (runtime/spare.c) */
    uint32_t heat_step;      /* the low bits of a step's number */
    uint64_t copies;
    sthi_unit_times times;
} sthi_unit;

static inline bool sthi_used_in_step(const sthi_unit *u, uint64_t step) { return u->last_step == step + 1; }
#endif
