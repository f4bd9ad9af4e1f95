/* Names under which a checkpoint may hold a parameter; stagehand/checkpoint.h says which. Pure. */
#ifndef STHI_STORE_CANDIDATES_H
#define STHI_STORE_CANDIDATES_H
#include "stagehand/checkpoint.h"

sth_status sthi_checkpoint_names(const char *name, sth_name_visit *visit, void *context);
#endif
