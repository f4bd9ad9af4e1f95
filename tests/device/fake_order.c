/* Which work of the stand-in is behind which, and who touched which bytes.
 *
 * Each stream's work is numbered. A clock says how far each stream has come: a stream's own is what its next work is
 * behind (what it waited for, and what the host knew when it enqueued), the host's is what it has seen to be done. Two
 * pieces of work that touch the same bytes, one of them writing, must be ordered by these clocks, however the threads
 * happened to run. The host's clock is one for all of its threads: they have locks of their own. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_parts.h"

typedef struct record {
    uint64_t begin, end; /* numbers of device bytes, or addresses of the host */
    uint64_t index;
    unsigned slot;
    bool device, writes;
} record;

static fake_clock host;
static record *records;
static size_t count, room;

void fake_clock_join(fake_clock *c, const fake_clock *other) {
    for (int i = 0; i < FAKE_SLOTS; i++)
        if (other->at[i] > c->at[i]) c->at[i] = other->at[i];
}

const fake_clock *fake_order_host(void) { return &host; }

void fake_order_seen(const fake_clock *clock) {
    size_t kept = 0;
    fake_clock_join(&host, clock);
    for (size_t i = 0; i < count; i++) /* all that comes is behind what the host has seen */
        if (records[i].index > host.at[records[i].slot]) records[kept++] = records[i];
    count = kept;
}

static void append(record r) {
    if (count == room) {
        room = room ? 2 * room : 256;
        records = realloc(records, room * sizeof *records);
        if (!records) abort();
    }
    records[count++] = r;
}

typedef struct visit {
    record what;
    const fake_clock *clock;
    const char *name;
} visit;

static bool overlap(const record *a, const record *b) {
    return a->device == b->device && a->begin < b->end && b->begin < a->end;
}

static void enqueue_run(uint64_t at, uint64_t n, void *context) {
    visit *v = context;
    record *w = &v->what;
    w->begin = at;
    w->end = at + n;
    size_t kept = 0;
    for (size_t i = 0; i < count; i++) {
        record *r = &records[i];
        bool behind = v->clock->at[r->slot] >= r->index;
        if (overlap(r, w) && (r->writes || w->writes) && !behind)
            fake_complain("%s: %s %llu bytes of %s which stream %u %s, without an event between", v->name,
                          w->writes ? "writes" : "reads", (unsigned long long)n,
                          w->device ? "device memory" : "host memory", r->slot, r->writes ? "writes" : "reads");
        /* What is wholly covered by a write behind it is of no interest any more. */
        if (behind && w->writes && r->device == w->device && w->begin <= r->begin && r->end <= w->end) continue;
        records[kept++] = *r;
    }
    count = kept;
    append(*w);
}

void fake_order_enqueue(unsigned slot, uint64_t index, const fake_clock *clock, const fake_touch *touches, int n,
                        const char *what) {
    for (int i = 0; i < n; i++) {
        const fake_touch *t = &touches[i];
        visit v = {.what = {.slot = slot, .index = index, .device = t->device, .writes = t->writes},
                   .clock = clock, .name = what};
        if (t->device) fake_each_run(t->p, t->bytes, enqueue_run, &v);
        else enqueue_run((uint64_t)(uintptr_t)t->p, t->bytes, &v);
    }
}

typedef struct gone {
    record bytes;
    const char *name; /* NULL: the host waited for what touches them */
    fake_clock done;
} gone;

static void gone_run(uint64_t at, uint64_t n, void *context) {
    gone *g = context;
    size_t kept = 0;
    g->bytes.begin = at;
    g->bytes.end = at + n;
    for (size_t i = 0; i < count; i++) {
        const record *r = &records[i];
        if (!overlap(r, &g->bytes)) records[kept++] = *r;
        else if (g->name)
            fake_complain("%s goes while stream %u %s it", g->name, r->slot, r->writes ? "writes" : "reads");
        else if (r->index > g->done.at[r->slot]) g->done.at[r->slot] = r->index;
    }
    count = kept;
}

void fake_order_gone(fake_touch t, bool waited, const char *what) {
    gone g = {.bytes = {.device = t.device}, .name = waited ? NULL : what};
    if (t.device) fake_each_run(t.p, t.bytes, gone_run, &g);
    else gone_run((uint64_t)(uintptr_t)t.p, t.bytes, &g);
    fake_order_seen(&g.done);
}

void fake_order_reset(void) { count = 0; }
