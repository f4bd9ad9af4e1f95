/* Many calls with tables of rows, of one thread or of several: each looks at the rows that it was given. */
#ifndef STAGEHAND_TESTS_ROWS_CALLS_H
#define STAGEHAND_TESTS_ROWS_CALLS_H
#include "device/device.h"
#include "stagehand/rows.h"

enum { CALLS_PARTS = 2, CALLS_BYTES_MOST = 8192 }; /* of a part */

typedef struct rows_calls {
    sth_device *device;
    sth_rows *rows;
    uint32_t tables, row_count; /* of each table */
    const uint64_t *part_bytes; /* [CALLS_PARTS] */
    const sth_devptr *pool;     /* [CALLS_PARTS] */
    const void *world;
    bool (*is_row)(const void *world, uint32_t table, uint32_t row, unsigned part, const uint8_t *bytes);
} rows_calls;

/* On the calling thread. Returns whether all calls succeeded and all rows were right. */
bool make_calls(const rows_calls *calls, unsigned seed, unsigned count);
/* On four threads. */
bool make_calls_of_threads(const rows_calls *calls, unsigned count);
#endif
