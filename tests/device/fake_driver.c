/* The stand-in's calls: which fail on purpose, contexts, complaints, and what tests steer. See fake_driver.h. */
#include "fake_driver.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fake_parts.h"

pthread_mutex_t fake_lock = PTHREAD_MUTEX_INITIALIZER;
static fake_function *functions;
static fake_plan plan;
static char planned[64]; /* the plan's function: the caller's string may go */
static long all_calls, complaint_count;
static char first_complaint[256];
static bool shut_down, sticky, told_again;
static int devices, retained;
static char primary, foreign; /* contexts are addresses */
static _Thread_local void *current;
enum { FOREIGN = 63 };
static _Thread_local int number; /* the current device, where there are no contexts */

/* ---- tables */

span *fake_find(table *t, const void *p) {
    for (size_t i = 0; i < t->count; i++)
        if (t->items[i].p == p) return &t->items[i];
    return NULL;
}

bool fake_add(table *t, span s) {
    if (t->count == FAKE_TABLE) return false;
    t->items[t->count++] = s;
    return true;
}

void fake_drop(table *t, span *s) { *s = t->items[--t->count]; }

/* ---- calls */

static bool is_planned(const fake_function *f) {
    if (!plan.nth || (plan.function && strcmp(planned, f->name))) return false;
    long n = plan.function ? f->calls : all_calls;
    return n == plan.nth || (plan.forever && n > plan.nth);
}

static bool in_context(void) {
    return fake_by_number ? number < devices : current == &primary && retained > 0;
}

fake_call fake_enter(fake_function *f, int needs) {
    pthread_mutex_lock(&fake_lock);
    if (!f->known) {
        f->known = true;
        f->ends = needs & FAKE_ENDS;
        f->next = functions;
        functions = f;
    }
    f->calls++;
    all_calls++;
    if (shut_down) return (fake_call){.code = FAKE_DEINITIALIZED};
    if (is_planned(f)) {
        if (plan.forever && !plan.function) fake_kill();
        return (fake_call){.run = plan.ends_anyway && needs & FAKE_ENDS, .injected = plan.code};
    }
    if (needs & FAKE_IN_CONTEXT && !in_context()) return (fake_call){.code = FAKE_INVALID_CONTEXT};
    if (told_again && needs == FAKE_IN_CONTEXT) {
        told_again = false;
        return (fake_call){.code = FAKE_OUT_OF_MEMORY};
    }
    return (fake_call){.run = true};
}

int fake_leave(const fake_call *call, fake_code code) {
    pthread_mutex_unlock(&fake_lock);
    return call->injected ? call->injected : fake_native[call->run ? code : call->code];
}

void fake_complain(const char *text, ...) {
    va_list arguments;
    va_start(arguments, text);
    if (complaint_count++ == 0) vsnprintf(first_complaint, sizeof first_complaint, text, arguments);
    va_end(arguments);
}

/* ---- devices and contexts */

static size_t setting(const char *name, size_t fallback) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : fallback;
}

fake_code fake_refusal(void) {
    told_again = sticky;
    return FAKE_OUT_OF_MEMORY;
}

fake_code fake_init(unsigned flags) {
    sticky = getenv("FAKE_DRIVER_STICKY") != NULL;
    devices = (int)setting("FAKE_DRIVER_DEVICES", 1);
    fake_memory_init(setting("FAKE_DRIVER_MEMORY", (size_t)1 << 30), setting("FAKE_DRIVER_PIN_LIMIT", SIZE_MAX));
    return flags ? FAKE_INVALID_VALUE : devices ? FAKE_OK : FAKE_NO_DEVICE;
}

bool fake_has_mappings(void) { return !getenv("FAKE_DRIVER_NO_MAPPINGS"); }

fake_code fake_count(int *out) {
    *out = devices;
    return FAKE_OK;
}

fake_code fake_device(int *out, int ordinal) {
    if (ordinal < 0 || ordinal >= devices) return FAKE_INVALID_DEVICE;
    *out = ordinal;
    return FAKE_OK;
}

fake_code fake_name(char *out, int room, int device) {
    snprintf(out, (size_t)room, "stand-in card %d", device);
    return FAKE_OK;
}

fake_code fake_retain(void **out, int device) {
    if (device < 0 || device >= devices) return FAKE_INVALID_DEVICE;
    retained++;
    *out = &primary;
    return FAKE_OK;
}

fake_code fake_release(int device) {
    (void)device;
    if (retained == 0) return FAKE_INVALID_CONTEXT;
    fake_wait_for_all();
    retained--;
    return FAKE_OK;
}

void *fake_current(void) { return current; }
void fake_set_current(void *context) { current = context; }

fake_code fake_get_number(int *out) {
    *out = number;
    return FAKE_OK;
}

fake_code fake_set_number(int device) {
    if (device != FOREIGN && (device < 0 || device >= devices)) return FAKE_INVALID_DEVICE;
    number = device;
    return FAKE_OK;
}

/* ---- what tests steer */

static void set_plan(const fake_plan *wanted) {
    pthread_mutex_lock(&fake_lock);
    plan = wanted ? *wanted : (fake_plan){0};
    snprintf(planned, sizeof planned, "%s", plan.function ? plan.function : "");
    for (fake_function *f = functions; f; f = f->next) f->calls = 0;
    all_calls = 0;
    pthread_mutex_unlock(&fake_lock);
}

static long calls(const char *function) {
    pthread_mutex_lock(&fake_lock);
    long n = function ? 0 : all_calls;
    for (fake_function *f = functions; function && f; f = f->next)
        if (!strcmp(f->name, function)) n = f->calls;
    pthread_mutex_unlock(&fake_lock);
    return n;
}

static bool ends(const char *function) {
    pthread_mutex_lock(&fake_lock);
    fake_function *f = functions;
    while (f && strcmp(f->name, function)) f = f->next;
    pthread_mutex_unlock(&fake_lock);
    return f && f->ends;
}

static const char *function_name(int i) {
    pthread_mutex_lock(&fake_lock);
    fake_function *f = functions;
    while (f && i-- > 0) f = f->next;
    pthread_mutex_unlock(&fake_lock);
    return f ? f->name : NULL;
}

static long live(void) {
    pthread_mutex_lock(&fake_lock);
    long n = retained + fake_memory_live() + fake_streams_live() + fake_modules_live();
    pthread_mutex_unlock(&fake_lock);
    return n;
}

static void schedule(uint64_t seed, unsigned late_us) {
    pthread_mutex_lock(&fake_lock);
    fake_schedule(seed, late_us);
    pthread_mutex_unlock(&fake_lock);
}

static long complaints(char *first, size_t room) {
    pthread_mutex_lock(&fake_lock);
    long n = complaint_count;
    if (n && room) snprintf(first, room, "%s", first_complaint);
    pthread_mutex_unlock(&fake_lock);
    return n;
}

static void set_shut_down(bool yes) {
    pthread_mutex_lock(&fake_lock);
    shut_down = yes;
    pthread_mutex_unlock(&fake_lock);
}

static void switch_context(void) {
    current = &foreign;
    number = FOREIGN;
}

static bool is_switched(void) { return fake_by_number ? number == FOREIGN : current == &foreign; }

static void reset(void) {
    pthread_mutex_lock(&fake_lock);
    fake_wait_for_all();
    fake_streams_reset();
    fake_memory_reset();
    fake_modules_reset();
    fake_order_reset();
    retained = 0;
    complaint_count = 0;
    pthread_mutex_unlock(&fake_lock);
}

EXPORT extern const fake_controls fake_driver_controls;
const fake_controls fake_driver_controls = {
    .plan = set_plan,
    .calls = calls,
    .function = function_name,
    .ends = ends,
    .live = live,
    .schedule = schedule,
    .complaints = complaints,
    .shut_down = set_shut_down,
    .switch_context = switch_context,
    .is_switched = is_switched,
    .reset = reset,
};
