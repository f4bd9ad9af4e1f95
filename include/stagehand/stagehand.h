/* stagehand/stagehand.h - everything: includes each public header, and says which version this
 * is. */
#ifndef STAGEHAND_STAGEHAND_H
#define STAGEHAND_STAGEHAND_H
#include "stagehand/activation.h"
#include "stagehand/arena.h"
#include "stagehand/backend.h"
#include "stagehand/budget.h"
#include "stagehand/checkpoint.h"
#include "stagehand/conductor.h"
#include "stagehand/curve.h"
#include "stagehand/device.h"
#include "stagehand/download.h"
#include "stagehand/executor.h"
#include "stagehand/graph.h"
#include "stagehand/log.h"
#include "stagehand/lossless.h"
#include "stagehand/optim.h"
#include "stagehand/pack.h"
#include "stagehand/plan.h"
#include "stagehand/pool.h"
#include "stagehand/quant.h"
#include "stagehand/report.h"
#include "stagehand/residency.h"
#include "stagehand/rows.h"
#include "stagehand/runner.h"
#include "stagehand/runtime.h"
#include "stagehand/status.h"
#include "stagehand/store.h"
#include "stagehand/timeline.h"
#include "stagehand/top.h"
#include "stagehand/trainables.h"
#include "stagehand/transfer.h"
#include "stagehand/util.h"

/* The version of these headers. The build, the package and the tool take theirs from here. */
#define STH_VERSION_MAJOR 0
#define STH_VERSION_MINOR 1
#define STH_VERSION_PATCH 0

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the library that runs, such as "0.1.0"; may differ from the macros when a
 * program was built with other headers. Threads: any. Blocks: no. Allocates: no. */
STH_API const char *sth_version(void);

#ifdef __cplusplus
}
#endif
#endif
