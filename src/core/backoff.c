/* When to ask again for what was refused. See backoff.h. */
#include "core/backoff.h"

#define FIRST_NS (INT64_C(500) * 1000000)
#define MOST_NS (INT64_C(64) * 1000000000)

static int64_t wait_of(const sthi_backoff *b) { return b->wait_ns ? b->wait_ns : FIRST_NS; }

bool sthi_backoff_due(sthi_backoff *b, int64_t now_ns) {
    if (b->looked && now_ns < b->next_ns) return false;
    b->looked = true;
    b->next_ns = now_ns + wait_of(b);
    return true;
}

void sthi_backoff_asked(sthi_backoff *b, int64_t now_ns, bool refused) {
    int64_t doubled = 2 * wait_of(b);
    if (!refused) b->wait_ns = FIRST_NS;
    else b->wait_ns = doubled < MOST_NS ? doubled : MOST_NS;
    b->looked = true;
    b->next_ns = now_ns + b->wait_ns;
}

void sthi_backoff_reset(sthi_backoff *b) { b->wait_ns = FIRST_NS; }
