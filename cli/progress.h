/* A bar on stderr for work that is counted in bytes, and Ctrl-C as a request to stop. */
#ifndef CLI_PROGRESS_H
#define CLI_PROGRESS_H
#include <stdbool.h>
#include <stdint.h>

#define CLI_STOPPED 130

typedef struct progress_bar {
    const char *verb; /* "packed" */
    bool terminal, quiet;
    int64_t begun_ns, shown_ns;
    int shown_tenth; /* lines for a log: one for each tenth */
} progress_bar;

/* Takes over SIGINT and SIGTERM: progress_show then says that the work is to stop. */
progress_bar progress_begin(const char *verb, bool quiet);
/* An sth_progress_function; `context` is the bar. */
bool progress_show(void *context, const char *tensor, uint64_t done, uint64_t total);
void progress_end(progress_bar *bar);
bool progress_stopped(void);
#endif
