/* NVTX without its headers: a program hands a function to the profiler's library, by which the library asks for tables
 * of slots and fills in what it wants to be called. Slots that stay empty are not called. Writes happen once, before
 * the flag is set that lets others read the slots. No locks. */
#define _GNU_SOURCE
#include "telemetry/ranges.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

atomic_uint sthi_onlooker_bits;

/* The interface's numbers: https://github.com/NVIDIA/NVTX. */
enum { TABLE_CALLBACKS = 1, TABLE_VERSION = 3, NVTX_VERSION = 3 };
enum { MODULE_CORE = 1, MODULES = 7, MOST_SLOTS = 16 };
enum { CORE_RANGE_START = 5, CORE_RANGE_END = 7, CORE_RANGE_PUSH = 9, CORE_RANGE_POP = 11 }; /* of text in bytes */

static const unsigned slot_count[MODULES] = {0, 16, 9, 15, 7, 16, 7};

typedef void (*slot)(void);
static slot slots[MODULES][MOST_SLOTS];
static slot *tables[MODULES][MOST_SLOTS]; /* the first of each stays NULL */

static int table_of(uint32_t module, slot ***out_table, unsigned *out_size) {
    if (module == 0 || module >= MODULES) return 0;
    for (unsigned i = 1; i < slot_count[module]; i++) tables[module][i] = &slots[module][i];
    if (out_table) *out_table = tables[module];
    if (out_size) *out_size = slot_count[module];
    return 1;
}

static void told_version(uint32_t version) { (void)version; }

static const struct {
    size_t size;
    int (*table_of)(uint32_t, slot ***, unsigned *);
} callbacks = {sizeof callbacks, table_of};

static const struct {
    size_t size;
    uint32_t version, reserved;
    void (*told)(uint32_t);
} version = {sizeof version, NVTX_VERSION, 0, told_version};

static const void *export_table(uint32_t id) {
    if (id == TABLE_CALLBACKS) return &callbacks;
    return id == TABLE_VERSION ? (const void *)&version : NULL;
}

typedef int initialize(const void *(*)(uint32_t));

static void attach(void) {
    const char *path = getenv("NVTX_INJECTION64_PATH");
    void *library = path && *path ? dlopen(path, RTLD_LAZY) : NULL;
    if (!library) return;
    initialize *begin = (initialize *)(uintptr_t)dlsym(library, "InitializeInjectionNvtx2");
    if (!begin || !begin(export_table)) {
        (void)dlclose(library);
        return;
    }
    const slot *core = slots[MODULE_CORE];
    if (core[CORE_RANGE_PUSH] && core[CORE_RANGE_POP])
        atomic_fetch_or_explicit(&sthi_onlooker_bits, STHI_PROFILED, memory_order_release);
}

void sthi_ranges_attach(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, attach);
}

typedef char range_text[160];

static void spell(range_text out, const char *what, const char *name) {
    snprintf(out, sizeof(range_text), "stagehand: %.20s %.120s", what, name);
}

/* Pairs with the release in attach(): the slots are seen. */
static const slot *core_slots(void) {
    atomic_thread_fence(memory_order_acquire);
    return slots[MODULE_CORE];
}

void sthi_range_push(const char *what, const char *name) {
    range_text text;
    spell(text, what, name);
    (void)((int (*)(const char *))core_slots()[CORE_RANGE_PUSH])(text);
}

void sthi_range_pop(void) { (void)((int (*)(void))core_slots()[CORE_RANGE_POP])(); }

uint64_t sthi_range_start(const char *what, const char *name) {
    range_text text;
    if (!(sthi_onlookers() & STHI_PROFILED) || !core_slots()[CORE_RANGE_START]) return 0;
    spell(text, what, name);
    return ((uint64_t(*)(const char *))core_slots()[CORE_RANGE_START])(text);
}

void sthi_range_end(uint64_t range) {
    if (range && core_slots()[CORE_RANGE_END]) ((void (*)(uint64_t))core_slots()[CORE_RANGE_END])(range);
}
