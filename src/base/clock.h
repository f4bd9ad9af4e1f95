#ifndef STHI_BASE_CLOCK_H
#define STHI_BASE_CLOCK_H
#include <stdint.h>
/* Monotonic wall time in nanoseconds. */
int64_t sthi_now_ns(void);
/* Sleeps; ends early never. */
void sthi_sleep_ns(int64_t ns);
#endif
