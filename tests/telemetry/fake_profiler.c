/* A profiler's library, as NVTX_INJECTION64_PATH names one: notes the ranges that it is told of. */
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHOWN __attribute__((visibility("default")))

enum { MOST = 4096 };
SHOWN char fake_profiler_text[MOST][160]; /* of ranges as they began; those that end elsewhere begin with "~" */
SHOWN atomic_int fake_profiler_count, fake_profiler_ended, fake_profiler_deepest;
static _Thread_local int depth;

static void begin(const char *mark, const char *text) {
    int i = atomic_fetch_add(&fake_profiler_count, 1);
    if (i < MOST) snprintf(fake_profiler_text[i], sizeof fake_profiler_text[i], "%s%s", mark, text);
}

static int push(const char *text) {
    begin("", text);
    if (++depth > fake_profiler_deepest) fake_profiler_deepest = depth;
    return depth - 1;
}

static int pop(void) {
    if (depth == 0) abort(); /* one that did not begin here */
    atomic_fetch_add(&fake_profiler_ended, 1);
    return --depth;
}

static uint64_t start(const char *text) {
    begin("~", text);
    return (uint64_t)fake_profiler_count;
}

static void end(uint64_t range) {
    if (range == 0) abort();
    atomic_fetch_add(&fake_profiler_ended, 1);
}

typedef void (*slot)(void);
typedef struct tables {
    size_t size;
    int (*table_of)(uint32_t module, slot ***out_table, unsigned *out_size);
} tables;
typedef struct client {
    size_t size;
    uint32_t version, reserved;
    void (*told)(uint32_t version);
} client;

static void need(int fine) {
    if (!fine) abort();
}

SHOWN int InitializeInjectionNvtx2(const void *(*exports)(uint32_t));
SHOWN int InitializeInjectionNvtx2(const void *(*exports)(uint32_t)) {
    static const unsigned sizes[] = {0, 16, 9, 15, 7, 16, 7};
    const char *how = getenv("STH_TEST_PROFILER");
    if (how && strcmp(how, "refuses") == 0) return 0;
    const client *who = exports(3);
    const tables *t = exports(1);
    need(who && who->size == sizeof *who && who->version >= 2 && t && t->size == sizeof *t && !exports(77));
    who->told(3);
    slot **table = NULL;
    unsigned size = 0;
    for (uint32_t module = 1; module < 7; module++) { /* some profilers ask for the size alone first */
        need(t->table_of(module, NULL, &size) == 1 && size == sizes[module]);
        need(t->table_of(module, &table, &size) == 1 && table[1] && *table[1] == NULL);
    }
    need(t->table_of(7, &table, &size) == 0 && t->table_of(0, &table, &size) == 0);
    need(t->table_of(1, &table, &size) == 1);
    *table[5] = (slot)start;
    *table[7] = (slot)end;
    *table[9] = (slot)push;
    *table[11] = (slot)pop;
    return 1;
}
