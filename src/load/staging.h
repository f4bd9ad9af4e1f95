/* Slabs and readers, opened and closed. Lock held unless the line says otherwise. */
#ifndef STHI_LOAD_STAGING_H
#define STHI_LOAD_STAGING_H
#include "state/state.h"

sth_status sthi_staging_open(sth_runtime *rt);
void sthi_staging_stop(sth_runtime *rt);           /* not held: ends the readers */
void sthi_staging_close(sth_runtime *rt);          /* frees the rest, when no copy is under way any more */
#endif
