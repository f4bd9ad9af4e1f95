/* A chunk of a unit from its files, each read in its way. Lock held unless the line says otherwise.
 * */
#ifndef STHI_LOAD_READ_SOURCE_H
#define STHI_LOAD_READ_SOURCE_H
#include "state/state.h"

sth_status sthi_sources_open(sth_runtime *rt);
uint32_t sthi_sources_count(const sth_runtime *rt);          /* files */
bool sthi_sources_describe(const sth_runtime *rt, uint32_t n, sth_file_way *out);
bool sthi_sources_use(const sth_runtime *rt, sth_read_way way); /* some file is read so */
uint32_t sthi_sources_align(const sth_runtime *rt);          /* of direct reads, bytes; 0: there are none */
void sthi_sources_settle(sth_runtime *rt);                   /* at a step's end */
void sthi_sources_close(sth_runtime *rt);
sthi_fetcher *sthi_fetcher_take(sth_runtime *rt);            /* NULL: memory is out */
void sthi_fetcher_give(sth_runtime *rt, sthi_fetcher *fetcher);
/* Not held. fetcher: NULL for an image in memory. */
sth_status sthi_read_source(sth_runtime *rt, uint32_t unit, sthi_fetcher *fetcher, uint64_t begin, uint64_t bytes,
                            uint8_t *slab, uint32_t *out_shift);
#endif
