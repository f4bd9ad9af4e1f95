/* Exported function of stagehand/log.h over base/. */
#include "stagehand/log.h"

#include "base/log.h"

void sth_log_set(sth_log_fn fn, void *context, sth_log_level least) { sthi_log_set(fn, context, least); }
