/* What the parts of the fuzz target `calls` share: arguments made of the input's bytes, the check of every status, and
 * the objects that are there.
 *
 * Arguments: mostly ones that a program would give, now and then an extreme one, and NULL for a pointer. Memory behind
 * a pointer is as large as the call says, or the size is one that no memory has: the library cannot check it. */
#ifndef TESTS_FUZZ_CALLS_H
#define TESTS_FUZZ_CALLS_H
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "fuzz/files.h"
#include "stagehand/graph.h"
#include "stagehand/stagehand.h"

enum {
    CALLS_DEVICES = 2,
    CALLS_ALLOCS = 4,
    CALLS_ARENAS = 2,
    CALLS_PIECES = 6,  /* reservations of an arena */
    CALLS_RUNTIMES = 3,
    CALLS_LEASES = 4,
    CALLS_SLABS = 8,
    CALLS_RECORDS = 8,
    CALLS_BLOCKS = 4,
    CALLS_STATES = 3,
    CALLS_MEMORY = 1 << 20 /* bytes of calls_memory, and the most that a device in the world has */
};

typedef struct calls_device {
    sth_device *device;
    uint64_t memory;
    bool virtual_time;
    sth_devptr at[CALLS_ALLOCS];
    uint64_t bytes[CALLS_ALLOCS];
} calls_device;

typedef struct calls_arena {
    sth_arena *arena;
    void *at[CALLS_PIECES];
    uint64_t bytes[CALLS_PIECES];
    uint32_t count;
} calls_arena;

typedef struct calls_runtime {
    sth_runtime *runtime;
    calls_device *on;
    sth_lease leases[CALLS_LEASES];
    uint32_t leased, keeps;
} calls_runtime;

typedef struct calls_record {
    sth_record record;
    uint64_t offset, bytes; /* in the store's device memory */
} calls_record;

typedef struct calls {
    const uint8_t *at, *end;
    calls_device devices[CALLS_DEVICES];
    calls_arena arenas[CALLS_ARENAS];
    calls_runtime runtimes[CALLS_RUNTIMES];

    sth_pool *pool;
    bool pool_lent; /* to a runtime, which waits for slabs: nobody else holds some then */
    sth_slab slabs[CALLS_SLABS];
    uint32_t slab_count;
    uint32_t packed; /* images of packed units that are in use: the library writes them when it encodes again */

    sth_checkpoint *checkpoint;
    sth_store *store;
    sth_executor *executor;
    sth_runner *runner;
    sth_quant *quant;

    sth_conductor *conductor;
    uint64_t reservation, token;

    calls_device *spill_on;
    sth_activation *activation;
    sth_devptr spilled; /* CALLS_MEMORY / 2 bytes on spill_on */
    calls_record records[CALLS_RECORDS];

    calls_device *download_on;
    sth_download *download;
    sth_block *blocks[CALLS_BLOCKS];
    sth_ticket tickets[CALLS_BLOCKS];
    sth_devptr source; /* CALLS_MEMORY / 4 bytes on download_on */

    sth_adamw *adamw;
    sth_adamw_state states[CALLS_STATES];
    uint64_t state_counts[CALLS_STATES];
    sth_dtype state_dtypes[CALLS_STATES];
    bool state_masters[CALLS_STATES];
} calls;

/* Host memory that any thread may read at any time: images and sources. Zeros. */
extern const uint8_t calls_images[CALLS_MEMORY];
/* Host memory for results, written by the thread that calls. */
extern uint8_t calls_memory[CALLS_MEMORY];

/* ---- arguments */

uint8_t calls_byte(calls *c);
bool calls_once_in(calls *c, uint32_t n);
/* 0, 1, powers, and the ends of signed and unsigned numbers. */
uint64_t calls_extreme(calls *c);
/* At most `most` and mostly in multiples of 512 bytes; now and then what no memory has, or 0. */
uint64_t calls_bytes(calls *c, uint64_t most);
uint32_t calls_number(calls *c, uint32_t most); /* below `most`, now and then any */
int calls_choice(calls *c, int count);          /* of an enum with `count` values, now and then none of them */
double calls_real(calls *c);                    /* now and then negative, infinite or not a number */
const char *calls_text(calls *c);               /* a name; now and then "" or long */
const char *calls_file(calls *c);               /* a path: of a model file, of something else, of nothing */
sth_stream calls_stream(calls *c);              /* 0, now and then one that there is not */
void *calls_or_null(calls *c, void *pointer);
const void *calls_or_null_const(calls *c, const void *pointer);

/* ---- statuses */

/* Call it as CALLS_TRY(sth_...(...)): the record of failures is empty before and tells of this one after. */
void calls_begin(void);
sth_status calls_said(sth_status rc, const char *call);
#define CALLS_TRY(call) (calls_begin(), calls_said((call), #call))

/* ---- one call each, of the functions of some headers; ends in the order in which objects hold on to each other */

void calls_on_device(calls *c);   /* device.h, backend.h, util.h, status.h */
void calls_on_memory(calls *c);   /* arena.h, pool.h */
void calls_on_runtime(calls *c);  /* runtime.h, residency.h, graph.h */
void calls_on_plan(calls *c);     /* plan.h, transfer.h */
void calls_on_files(calls *c);    /* checkpoint.h, store.h, quant.h, pack.h */
void calls_on_runner(calls *c);   /* executor.h, runner.h */
void calls_on_conductor(calls *c);
void calls_on_spills(calls *c);   /* activation.h */
void calls_on_downloads(calls *c);
void calls_on_updates(calls *c);  /* optim.h */

void calls_end_runner(calls *c);
void calls_end_runtimes(calls *c);
void calls_end_files(calls *c);
void calls_end_conductor(calls *c);
void calls_end_spills(calls *c);
void calls_end_downloads(calls *c);
void calls_end_updates(calls *c);
void calls_end_memory(calls *c);
void calls_end_devices(calls *c);

calls_device *calls_any_device(calls *c); /* NULL: there is none */
/* Makes the model files once: a checkpoint, and its quantised forms. */
void calls_make_files(void);
#endif
