/* Tables of rows and their pool; stagehand/rows.h is the manual, docs/experts.md the design. */
#ifndef STHI_ROWS_ROWS_H
#define STHI_ROWS_ROWS_H
#include "base/thread.h"
#include "core/rows.h"
#include "device/device.h"
#include "rows/files.h"
#include "rows/order.h"
#include "rows/scratch.h"
#include "stagehand/rows.h"

typedef struct sthi_rows_image {
    char *name;
    sthi_rows_file *file;    /* its rows lie in files; NULL: in host memory, at */
    const uint8_t *parts[STH_ROWS_PARTS_MAX];
    uint64_t print;          /* of the parts, by a sample */
    uint64_t seen;           /* epoch in which it was sampled; 0: it was not */
} sthi_rows_image;

typedef struct sthi_rows_use { /* a lease */
    uint32_t generation;     /* never 0 */
    uint32_t count;
    uint32_t *slots;         /* [slots of a view] while the pool is open; NULL: never used yet */
    bool live;
    sthi_thread thread;      /* that leased it */
} sthi_rows_use;

enum { STHI_ROWS_USES = 64 };

struct sth_rows {
    sth_device *device;
    sth_rows_options options;
    char *name;
    unsigned fork_depth;
    sthi_mutex lock;         /* guards all below; a leaf */
    sthi_rows plan;
    sthi_rows_image *images; /* [plan.table_count] */
    uint32_t image_cap;
    sth_devptr parts[STH_ROWS_PARTS_MAX]; /* of the pool */
    uint64_t epoch;
    sth_stream stream;       /* of the copies */
    sthi_rows_ring fills, calls;
    uint64_t *filled, *used; /* [slots] number in `fills` of its last copy, in `calls` of its last use */
    sthi_rows_use uses[STHI_ROWS_USES];
    sthi_cond ended;         /* a use did */
    uint32_t *counts;        /* [scratch.largest] uses of each row; 0 between calls */
    sthi_rows_scratch scratch;
    sthi_rows_ram ram;       /* what rows in files pass through */
    uint64_t h2d_bytes, copies;
    bool stale_reads;        /* copies were enqueued since host memory was last said to be read */
};

void sthi_rows_options_init(sth_rows_options *options);
sth_status sthi_rows_create(sth_device *device, const sth_rows_options *options, sth_rows **out);
void sthi_rows_destroy(sth_rows *rows);
sth_status sthi_rows_here(const sth_rows *rows); /* INVALID_STATE in a child */
sth_status sthi_rows_known(const sth_rows *rows, uint32_t table); /* that it is one. Lock held */
sth_status sthi_rows_add_table(sth_rows *rows, const char *name, uint32_t row_count, const void *const *parts,
                               uint32_t *out);
sth_status sthi_rows_add_file_table(sth_rows *rows, const char *name, uint32_t row_count, sth_checkpoint *checkpoint,
                                    const sth_file_range *ranges, uint32_t range_count, const uint64_t *part_offsets,
                                    uint32_t *out);
sth_status sthi_rows_set_host(sth_rows *rows, uint32_t table, const void *const *parts);
sth_status sthi_rows_open(sth_rows *rows, uint32_t slots, const sth_devptr *parts, sth_stream stream);
sth_status sthi_rows_close(sth_rows *rows);
sth_status sthi_rows_written(sth_rows *rows, uint32_t table);
sth_status sthi_rows_fence(sth_rows *rows);
sth_status sthi_rows_pass_end(sth_rows *rows);
sth_status sthi_rows_synchronize(sth_rows *rows);
sth_status sthi_rows_stats(sth_rows *rows, sth_rows_stats *out);
sth_status sthi_rows_table_stats(sth_rows *rows, uint32_t table, sth_rows_table_stats *out);

/* call.c */
sth_status sthi_rows_acquire(sth_rows *rows, uint32_t table, const void *ids, uint32_t id_bytes, uint32_t count,
                             uint32_t per_token, sth_stream stream, void *out_ids, sth_rows_lease *out);
sth_status sthi_rows_release(sth_rows *rows, const sth_rows_lease *lease, sth_stream stream);
#endif
