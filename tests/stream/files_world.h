/* Eight units of two tensors each in two small files, streamed through a simulated device; every byte that a stream
 * sees is compared. */
#ifndef TESTS_STREAM_FILES_WORLD_H
#define TESTS_STREAM_FILES_WORLD_H
#include "state/state.h"

enum { UNITS = 8, CHUNK = 4096, SLACK = 8192 /* of a slab, at most, for direct reads */ };

typedef struct file_world {
    const char *folder;
    sth_device *device;
    sth_checkpoint *files[2]; /* unit u is in file u % 2 */
    sth_runtime *runtime;
} file_world;

typedef struct setting {
    uint32_t readers, slabs;
    bool virtual_time;
    uint64_t budget;
    sth_pool *pool;
    uint64_t ram;
} setting;

uint64_t file_unit_bytes(uint32_t unit); /* of its place */
void write_model(const char *folder, int half, char *path, size_t path_bytes);
/* The way that files are read in from here on; what is better is taken away, until the faults are disarmed. */
void want_way(const char *folder, sth_read_way way);
/* Opens the two files in `folder`, writing them first if need be. */
sth_status file_world_open(file_world *w, const char *folder, const setting *s);
void file_world_close(file_world *w);
/* One step; the first failure is returned, the others are tried all the same. *bad: bits of failed units. */
sth_status file_step(file_world *w, uint32_t *bad);
void good_steps(file_world *w, int n);
#endif
