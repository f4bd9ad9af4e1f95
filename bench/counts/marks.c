/* What a Python program under callgrind calls: instructions are counted from count() on until dump(), which writes them
 * into a file with a name inside. */
#include <valgrind/callgrind.h>

void count(void);
void dump(const char *name);

void count(void) {
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void dump(const char *name) {
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
