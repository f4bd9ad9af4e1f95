/* Threads that read staged sources into slabs, ahead of issue. Lock held unless the line says
 * otherwise. */
#ifndef STHI_LOAD_READER_H
#define STHI_LOAD_READER_H
#include "state/state.h"

bool sthi_read_one(sth_runtime *rt);               /* dropped to read; false: nothing to do */
/* Not held. Where there are no readers: fills slabs ahead of need, as far as there are free ones. */
void sthi_read_ahead(sth_runtime *rt);
void *sthi_reader_main(void *runtime);             /* a reader's thread; not held */
#endif
