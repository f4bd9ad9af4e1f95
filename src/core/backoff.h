/* When to ask again for what was refused: half a second later, and twice as long after each time that it is refused
 * again, up to 64 s. Pure: times are the caller's, on any clock. Zeroed, it is due at once. */
#ifndef STHI_CORE_BACKOFF_H
#define STHI_CORE_BACKOFF_H
#include <stdbool.h>
#include <stdint.h>

typedef struct sthi_backoff {
    bool looked;
    int64_t next_ns, wait_ns;
} sthi_backoff;

/* Whether it is time to look whether there is something to ask for; the next look is a wait later. */
bool sthi_backoff_due(sthi_backoff *b, int64_t now_ns);
/* It was asked. refused: for not all was had. */
void sthi_backoff_asked(sthi_backoff *b, int64_t now_ns, bool refused);
void sthi_backoff_reset(sthi_backoff *b); /* nothing is missing */
#endif
