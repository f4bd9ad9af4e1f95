/* Readers: staged sources into slabs, ahead of issue. Lock held unless the line says otherwise. */
#ifndef STHI_LOAD_READ_READER_H
#define STHI_LOAD_READ_READER_H
#include "state/state.h"

/* Bytes of the unit's place from its source into a slab, `*out_shift` bytes behind its begin. Dropped meanwhile. */
sth_status sthi_read_slab(sth_runtime *rt, uint32_t unit, uint64_t begin, uint64_t bytes, sth_slab slab,
                          uint32_t *out_shift);
void sthi_read_rate_settle(sth_runtime *rt);       /* at a step's end */
void sthi_readers_wake(sth_runtime *rt);
void sthi_slab_fly(sth_runtime *rt, sth_slab slab, sth_stream stream); /* free once `stream` is past it */
void sthi_need_slabs(sth_runtime *rt, int change);
sth_status sthi_slab_wait(sth_runtime *rt, sth_slab *out);             /* dropped to wait */
void sthi_jobs_trim(sth_runtime *rt);
void sthi_jobs_cancel(sth_runtime *rt, uint64_t before_ticket); /* jobs of requests that left the queue */
void sthi_reads_rewind(sth_runtime *rt);           /* all unissued reads again, in order */
bool sthi_read_one(sth_runtime *rt);               /* dropped to read; false: nothing to do */
/* Not held. Where there are no readers: fills slabs ahead of need, as far as there are free ones. */
void sthi_read_ahead(sth_runtime *rt);
sth_status sthi_staging_open(sth_runtime *rt);
void sthi_staging_stop(sth_runtime *rt);           /* not held: ends the readers */
void sthi_staging_close(sth_runtime *rt);          /* frees the rest, when no copy is under way any more */
#endif
