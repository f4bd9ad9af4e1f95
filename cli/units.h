/* The units of a checkpoint: its tensors by module, in the order in which a model most likely uses them. */
#ifndef CLI_UNITS_H
#define CLI_UNITS_H
#include <stdint.h>

#include "stagehand/checkpoint.h"
#include "stagehand/runtime.h"

typedef struct unit {
    char *name;         /* of the module: the tensors' name without its last part */
    const char *block;  /* name of the block that it lies in; NULL when no pattern was given */
    uint64_t bytes;     /* of its place: every tensor at a multiple of 512 */
    uint64_t packed;    /* that it takes losslessly packed, as weights usually do */
    uint64_t first_range;
    uint32_t range_count;
} unit;

typedef struct units {
    unit *unit;
    uint32_t count;
    sth_file_range *ranges;
    char **blocks; /* names, by first unit */
    uint32_t block_count;
    uint64_t bytes, largest;     /* of all units, and of the largest */
    uint64_t left_out_tensors, left_out_bytes; /* not under a block that the pattern matches */
} units;

/* Units in natural order of their names (block 10 follows block 9). `pattern`, POSIX extended, is searched
 * for in the names of modules: only units under a match are kept, and the match is their block. NULL keeps
 * all. Says on stderr what is wrong. Returns an exit code. */
int units_load(const sth_checkpoint *checkpoint, const char *pattern, units *out);
void units_free(units *u);
/* What a tensor of weights usually takes losslessly packed; its own bytes where it crosses as it is. */
uint64_t units_packed_bytes(sth_dtype dtype, uint64_t bytes);
#endif
