/* Ranges for a profiler that is attached: NVTX, as Nsight Systems and others show it. Without a
 * profiler a range costs a load and a branch. */
#ifndef STHI_TELEMETRY_RANGES_H
#define STHI_TELEMETRY_RANGES_H
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

/* What looks on: bits. */
enum { STHI_RECORDED = 1u << 0, STHI_PROFILED = 1u << 1 };
extern atomic_uint sthi_onlooker_bits;

static inline unsigned sthi_onlookers(void) { return atomic_load_explicit(&sthi_onlooker_bits, memory_order_relaxed); }

/* Loads the library that NVTX_INJECTION64_PATH names, as every program with NVTX does; once in a
 * process, at the first runtime or optimizer. Without the variable, or where the library does not
 * work, there are no ranges; nothing is said. Threads: any. Blocks: while the library is loaded. */
void sthi_ranges_attach(void);

/* A range of the calling thread, "stagehand: what name". Each push wants its pop, on the same thread. */
void sthi_range_push(const char *what, const char *name);
void sthi_range_pop(void);
/* A range that may end on another thread; 0: there is none. */
uint64_t sthi_range_start(const char *what, const char *name);
void sthi_range_end(uint64_t range);
#endif
