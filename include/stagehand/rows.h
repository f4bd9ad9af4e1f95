/* stagehand/rows.h - tables of which a call uses some rows: the experts of a mixture of experts.
 *
 * Life:
 *     sth_rows_create -> sth_rows_add_table (each) -> sth_rows_open
 *     every call: sth_rows_acquire -> your kernels -> sth_rows_release
 *     sth_rows_close -> ... -> sth_rows_destroy
 *
 *   host: table 0  part 0 [row 0 | row 1 | ...]   part 1 [row 0 | row 1 | ...]    one row: its part 0 and its part 1
 *         table 1  ...
 *   pool:          part 0 [slot 0 | slot 1 | ...] part 1 [slot 0 | slot 1 | ...]  shared by all tables
 *
 * A row is what is used together: one expert, with its bytes in each of several tensors (parts). Rows of
 * all tables have one size. The pool is device memory of the caller's: for each part an array of slots.
 * A call says which rows it uses; those that are in no slot are copied, over rows that are worth least
 * (how often and how lately they were used; docs/experts.md). Copies run on a stream of the pool's own;
 * order is kept by events on the device, so neither acquire nor release waits for the device.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. In a forked child
 * calls return INVALID_STATE, and those that return nothing do nothing. */
#ifndef STAGEHAND_ROWS_H
#define STAGEHAND_ROWS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/checkpoint.h"
#include "stagehand/device.h"
#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct sth_rows sth_rows;

enum { STH_ROWS_PARTS_MAX = 8 };

typedef struct sth_rows_options {
    size_t size;          /* sizeof(sth_rows_options), set by init */
    uint32_t part_count;  /* 1 to STH_ROWS_PARTS_MAX. Required */
    uint64_t part_bytes[STH_ROWS_PARTS_MAX]; /* of one row in each part, > 0. Required */
    uint32_t view_most;   /* slots that one call may see: a table sees a view of the pool. Default 1023, as many groups
                             as PyTorch's grouped products take on a card */
    bool read_only;       /* the caller will not write host images without sth_rows_written: pass_end does not wait, and
                             a write that was not told is an error */
    uint64_t ram_bytes;   /* host memory for rows of tables in files: those that the pool misses most and last are read
                             once. Default 0: as few as let the disk and the link work at once, some 32 MiB */
    int copy_priority;    /* of the copy stream, lower is more urgent. Default -1 */
    const char *name;     /* of the model, for messages; copied. NULL: "model" */
} sth_rows_options;
STH_API void sth_rows_options_init(sth_rows_options *options);

/* Keeps the device alive. INVALID_ARGUMENT, OUT_OF_HOST_MEMORY, or the device's error when it has no
 * stream or event to give. Allocates: host memory for records. */
STH_API sth_status sth_rows_create(sth_device *device, const sth_rows_options *options,
                                   sth_rows **out_rows);

/* Ends it, the pool closed first; NULL is fine. Threads: one, once. Blocks: as close. */
STH_API void sth_rows_destroy(sth_rows *rows);

/* A table of `row_count` rows, whose part i begins at parts[i] in host memory, rows one behind the
 * other. That memory must outlive `rows`, or the next sth_rows_set_host; pinned (arena.h) it is copied
 * without blocking. While the pool is closed. Tables are numbered 0, 1, 2, ... INVALID_ARGUMENT,
 * INVALID_STATE while it is open, OUT_OF_HOST_MEMORY. Threads: one at a time. Allocates: host memory. */
STH_API sth_status sth_rows_add_table(sth_rows *rows, const char *name, uint32_t row_count,
                                      const void *const *parts, uint32_t *out_table);

/* A table whose rows lie in files: part i of row r begins at part_offsets[i] + r x part_bytes[i] of an
 * image, whose bytes the ranges (copied; place_offset may be any number) name. Every byte of a row is in a
 * range. `checkpoint` must outlive `rows`. A row that is missing is read into host memory and copied from
 * there; acquire blocks for the disk then. A file that was changed since it was opened is CHANGED_DATA
 * there. As sth_rows_add_table otherwise. */
STH_API sth_status sth_rows_add_file_table(sth_rows *rows, const char *name, uint32_t row_count,
                                           sth_checkpoint *checkpoint, const sth_file_range *ranges,
                                           uint32_t range_count, const uint64_t *part_offsets,
                                           uint32_t *out_table);

/* The table's rows are at these addresses from now on, also those of a table in files. */
STH_API sth_status sth_rows_set_host(sth_rows *rows, uint32_t table, const void *const *parts);

/* The pool has `slots` slots (> 0), the caller's: part i is slots x part_bytes[i] bytes at
 * parts[i], device memory that work enqueued on `stream` by now may still use. All slots are free.
 * INVALID_STATE when it is open. OUT_OF_HOST_MEMORY, or the device's error: then it is closed.
 * Allocates: host memory for records. */
STH_API sth_status sth_rows_open(sth_rows *rows, uint32_t slots, const sth_devptr *parts,
                                 sth_stream stream);

/* Returns the pool's memory to the caller; later requests for rows fail. A second call does
 * nothing. INVALID_STATE while the calling thread leases rows, or another one does for longer than a
 * minute: it stays open. Blocks: until other threads have released their rows, and until copies into
 * the pool, and work that releases were enqueued behind, are done. */
STH_API sth_status sth_rows_close(sth_rows *rows);

/* A use of some rows: a small value. */
typedef struct sth_rows_lease {
    uint32_t table;
    uint32_t index, generation;
    uint32_t first, count; /* slots that the table sees: [first, first + count) of the pool */
} sth_rows_lease;

/* Leases the rows that `ids` names: `count` numbers of `id_bytes` (4 or 8) bytes each in host memory,
 * `per_token` (> 0) different ones for each token. `stream` waits until they are in their slots.
 * out_ids (may be `ids`, or NULL): for each id the slot of its row, counted from the view's first;
 * one of row_count and more is no row, and becomes the view's count. Ids below 0 are INVALID_ARGUMENT.
 * BUDGET_TOO_SMALL when the view has not so many slots that nobody leases, with the table and both
 * numbers; INVALID_STATE for a write that was not told (read_only), or when the pool is closed. On a
 * failure nothing is leased. Blocks: on stream 0 of the simulated device, the calling thread, until
 * copies are done; for long where host memory is pageable. */
STH_API sth_status sth_rows_acquire(sth_rows *rows, uint32_t table, const void *ids, uint32_t id_bytes,
                                    uint32_t count, uint32_t per_token, sth_stream stream,
                                    void *out_ids, sth_rows_lease *out_lease);

/* Ends a lease: its slots are filled again behind what `stream` has by now. STALE for one that has
 * ended. */
STH_API sth_status sth_rows_release(sth_rows *rows, const sth_rows_lease *lease, sth_stream stream);

/* Host memory of the table was changed: its rows are copied again before their next use. */
STH_API sth_status sth_rows_written(sth_rows *rows, uint32_t table);

/* Code of the caller's has run that may have written host memory without saying so: each table is
 * compared, by a sample, when it is used next. */
STH_API sth_status sth_rows_fence(sth_rows *rows);

/* Code of the caller's is about to run that may write host memory: waits until copies have read it.
 * Nothing with read_only. Blocks: for copies under way. */
STH_API sth_status sth_rows_pass_end(sth_rows *rows);

/* The same with read_only, too. */
STH_API sth_status sth_rows_synchronize(sth_rows *rows);

typedef struct sth_rows_stats {
    uint32_t tables, slots, views;
    uint64_t row_bytes;    /* of all parts */
    uint64_t asked;        /* distinct rows of calls, since it was made */
    uint64_t hits;         /* of them, in slots, or on their way there */
    uint64_t brought;      /* the rest: copied for a call that waited */
    uint64_t ahead;        /* rows copied before they were asked for */
    uint64_t h2d_bytes;    /* (brought + ahead) x row_bytes, where no copy failed */
    uint64_t copies;       /* by which they came: neighbors in host memory come by one */
    uint32_t ram_slots;    /* rows of files for which there is host memory */
    uint64_t ram_bytes, ram_pinned_bytes; /* of that memory; of it, pinned by now */
    uint64_t ram_hits;     /* rows of files that the pool missed and host memory had */
    uint64_t read_bytes;   /* of files */
} sth_rows_stats;
STH_API sth_status sth_rows_stats_get(sth_rows *rows, sth_rows_stats *out_stats);

typedef struct sth_rows_table_stats {
    const char *name;      /* lives as long as `rows` */
    uint32_t rows, held;   /* in all; in slots now */
    uint64_t asked, hits, brought, ahead; /* as above */
} sth_rows_table_stats;
STH_API sth_status sth_rows_table_stats_get(sth_rows *rows, uint32_t table,
                                            sth_rows_table_stats *out_stats);

/* A pool beside a runtime's units: what its share of a budget follows from. */
typedef struct sth_rows_budget {
    uint32_t part_count;    /* 1 to STH_ROWS_PARTS_MAX */
    uint32_t rows;          /* of all tables */
    uint32_t rows_largest;  /* of the largest */
    uint32_t rows_token;    /* of one table, that one token uses */
    uint64_t part_bytes[STH_ROWS_PARTS_MAX]; /* of one row, > 0 each */
    uint64_t units_all;     /* bytes that the runtime's units take */
    uint64_t units_least;   /* bytes that they need at least */
    uint64_t stays_bytes;   /* of others on the device all the time */
} sth_rows_budget;
/* Bytes that a pool of so many slots takes: each part begins at a multiple of 512. These three return
 * UINT64_MAX for a sum that 64 bits do not hold, and 0 for a pool without parts. */
STH_API uint64_t sth_rows_bytes(const sth_rows_budget *pool, uint32_t slots);
/* Slots with a budget of `bytes`: what the units leave, up to all rows; at least those of the largest
 * table where the least of the units leaves that; never fewer than one token's. */
STH_API uint32_t sth_rows_slots(const sth_rows_budget *pool, uint64_t bytes);
/* The smallest budget with which the pool has `slots`, no more than the largest table has rows. */
STH_API uint64_t sth_rows_smallest(const sth_rows_budget *pool, uint32_t slots);

/* Distinct rows that `tokens` tokens use on average of a table of `row_count`, `per_token` each, where
 * all are as likely: row_count x (1 - (1 - per_token / row_count) ^ tokens). */
STH_API double sth_rows_expected(uint32_t row_count, uint32_t per_token, uint32_t tokens);

#ifdef __cplusplus
}
#endif
#endif
