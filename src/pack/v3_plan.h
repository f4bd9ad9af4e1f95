/* The JSON files of a v3 folder. */
#ifndef STHI_PACK_V3_PLAN_H
#define STHI_PACK_V3_PLAN_H
#include "pack/job.h"

#define STHI_V3_RANK 32u
#define STHI_V3_GROUP 64u
#define STHI_V3_HADAMARD 256u

/* Sums over a row: of squared differences, of squares, of products. */
typedef struct sthi_v3_error {
    double squares, original, decoded, product;
} sthi_v3_error;

/* Names the files, says what stands in the shards' metadata, and sets `finish`. */
sth_status sthi_v3_prepare(sthi_pack_job *job);
/* Notes a layer's error for the plan; kept across calls. */
sth_status sthi_v3_note_error(sthi_pack_job *job, const char *key, const sthi_v3_error *rows, uint64_t count);
#endif
