/* How a job is carried out; see job.h for what calls it. */
#ifndef STHI_PACK_RUN_H
#define STHI_PACK_RUN_H
#include "pack/job.h"

/* layout.c: gives tensors their places, makes the headers and the job's identity. */
sth_status sthi_job_lay_out(sthi_pack_job *job);

/* state.c: the note of how far the job came. */
#define STHI_JOB_STATE "state.json"
/* Takes over what an earlier call of the same identity noted; job->done_items stays 0 where there is none. What a call
 * of another identity left is removed.
 * *out_publishing: that call had begun to rename. */
sth_status sthi_job_load_state(sthi_pack_job *job, bool *out_publishing);
sth_status sthi_job_save_state(sthi_pack_job *job, bool publishing);
/* Refuses a folder that holds what is not this job's. */
sth_status sthi_job_check_folder(const sthi_pack_job *job);
/* Removes all that this job may have put into the folder, and the folder if it is empty then. */
void sthi_job_clear(sthi_pack_job *job);
#endif
