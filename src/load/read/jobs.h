/* Slabs that are being filled for the queue. Lock held. */
#ifndef STHI_LOAD_READ_JOBS_H
#define STHI_LOAD_READ_JOBS_H
#include "state/state.h"

void sthi_readers_wake(sth_runtime *rt);
/* Gives up the newest slab that was filled for a load not yet issued; it will be read again. */
bool sthi_jobs_give_newest(sth_runtime *rt);
void sthi_jobs_trim(sth_runtime *rt);              /* cancelled ones at the head, as far as they are read */
void sthi_jobs_cancel(sth_runtime *rt, uint64_t before_ticket); /* jobs of requests that left the queue */
void sthi_reads_rewind(sth_runtime *rt);           /* all unissued reads again, in order */
#endif
