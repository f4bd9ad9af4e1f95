/* The files of checkpoints that somebody reads from, each opened for reading once, in the way that suits it (access.h).
 * Lock: the owner's, but for the files that were handed out. */
#ifndef STHI_STORE_OPENED_H
#define STHI_STORE_OPENED_H
#include "store/access.h"
#include "store/checkpoint.h"

typedef struct sthi_opened_checkpoint {
    sth_checkpoint *checkpoint;
    sthi_access *files;      /* [its files]; file NULL: not opened */
} sthi_opened_checkpoint;

typedef struct sthi_opened { /* all zero: none are open */
    sthi_opened_checkpoint *list; /* [count] */
    uint32_t count;
} sthi_opened;

/* Opens the files that the ranges name, which are files of the checkpoint. The checkpoint outlives them.
 * OUT_OF_HOST_MEMORY. */
sth_status sthi_opened_add(sthi_opened *opened, sth_checkpoint *checkpoint, const sth_file_range *ranges,
                           uint32_t range_count);
/* By number in the checkpoint, valid until close; NULL: nothing of the checkpoint was added. */
sthi_access *sthi_opened_files(const sthi_opened *opened, const sth_checkpoint *checkpoint);
/* The n-th of all open files; NULL: there are fewer. */
sthi_access *sthi_opened_nth(const sthi_opened *opened, uint32_t n);
void sthi_opened_close(sthi_opened *opened); /* may be added to again */

/* Sorts ranges by the place that their bytes go to. */
void sthi_ranges_sort(sth_file_range *ranges, uint32_t count);
#endif
