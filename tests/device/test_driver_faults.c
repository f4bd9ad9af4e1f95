/* Every function of the driver fails, once or for ever from its n-th call on, in a scenario that opens a device,
 * streams weights through a ring beside residents, spills activations and shuts down, while work comes late. Whatever
 * happens is an error with the driver's own code; nothing crashes, hangs, leaks or touches what it must not; bytes are
 * right wherever a call said OK; and when the fault is over the runtime goes on. Run with the back end's name.
 *
 * STH_FAULT=function:n (for ever: function:n+) plays one of them. Of the first 50 calls the first 16 and then every
 * fourth are tried through a ring, which has most functions; elsewhere the first 6 and then some; with STH_TEST_FULL
 * all of them and some of those behind.
 * Without it fewer under sanitizers, which are slow, and on HIP, which runs the same code over other names. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "activation/rig.h"
#include "base/memory.h"
#include "device/stand_in.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/runtime.h"
#include "runtime/step_calls.h"
#include "stream/world.h"

enum { UNITS = 8, STEPS = 3, USES = (STEPS + 3) * UNITS, LARGEST_UNIT = 90000,
       FIRST = 50, MANY = 8, FEW = 4, SECONDS = 100, UNKNOWN_ERROR = 999, OUT_OF_MEMORY = 2 };
static const uint64_t RING_BYTES[UNITS] = {60000, 9000, 90000, 30000, 5000, 70000, 40000, 20000};
static const uint64_t SMALL_BYTES[UNITS] = {20000, 3000, 30000, 10000, 1700, 23000, 13000, 7000};
static const uint32_t FORWARD[UNITS] = {0, 1, 2, 3, 4, 5, 6, 7}, OTHER[UNITS] = {7, 3, 0, 1, 5, 4, 6, 2};

static const char *backend;
static const fake_controls *fake;
static int plays, code = UNKNOWN_ERROR; /* what calls fail with */
static unsigned char *results; /* USES x LARGEST_UNIT */

typedef struct kind {
    const char *name;
    sth_transfer packed;
    bool staged; /* host memory cannot be pinned but for slabs */
    bool ring;
    const uint64_t *bytes;
    uint64_t budget;
} kind;
static const kind kinds[] = {
    {"through a ring", STH_TRANSFER_VERBATIM, false, true, RING_BYTES, 64 * FAKE_PAGE_UNIT},
    {"packed and staged", STH_TRANSFER_INT8, true, false, SMALL_BYTES, 130000},
    {"without a ring", STH_TRANSFER_VERBATIM, false, false, SMALL_BYTES, 85000},
};

typedef struct play {
    const kind *kind;
    fake_plan plan;
    sth_device *device;
    world w;
    rig g;
    sth_stream compute;
    struct {
        uint32_t unit;
        uint8_t version;
    } uses[USES];
    int use_count;
    bool pinned, wants_rig;
} play;

static char doing[160];

static void hangs(int signal) {
    (void)signal;
    static const char text[] = "hangs: STH_FAULT=";
    (void)!write(STDERR_FILENO, text, sizeof text - 1);
    (void)!write(STDERR_FILENO, doing, strlen(doing));
    abort();
}

static void broken(const play *p, const char *what, const char *why) {
    fail_msg("STH_FAULT=%s:%ld%s, %s%s: %s: %s", p->plan.function ? p->plan.function : "any", p->plan.nth,
             p->plan.forever ? "+" : "", p->kind->name, p->plan.ends_anyway ? ", ends anyway" : "", what, why);
}

/* True when it is OK; other statuses must be the plan's doing. */
static bool good(const play *p, sth_status rc, const char *what) {
    if (rc == STH_OK) return true;
    const sth_error *e = sth_last_error();
    bool starts = p->plan.function && strstr(p->plan.function, "Init");
    starts = starts || (!p->plan.function && p->plan.nth == 1);
    bool fits = rc == STH_DEVICE_ERROR;
    if (p->plan.code == OUT_OF_MEMORY)
        fits = rc == STH_OUT_OF_DEVICE_MEMORY || rc == STH_OUT_OF_PINNED_MEMORY || rc == STH_OUT_OF_ADDRESS_SPACE;
    if (starts) fits = rc == STH_BACKEND_UNAVAILABLE;
    bool injected = fits && e->native_code == p->plan.code && !strcmp(e->domain, backend);
    /* Leases whose end cannot be recorded keep their places. */
    if (e->status != rc || !(injected || (rc == STH_BUDGET_TOO_SMALL && p->plan.nth)))
        broken(p, what, e->message);
    return false;
}

/* ---- streaming: what is read from a place on the device, in the order of the stream that uses it */

static bool use(play *p, uint32_t unit) {
    const sth_backend_ops *o = p->device->ops;
    sth_lease lease;
    if (!good(p, sthi_unit_acquire(p->w.runtime, unit, p->compute, &lease), "acquire")) return false;
    unsigned char *to = results + (size_t)p->use_count * LARGEST_UNIT;
    sth_status rc = o->copy_d2h(p->device->self, to, lease.address, p->kind->bytes[unit], p->compute);
    if (rc == STH_OK) {
        p->uses[p->use_count].unit = unit;
        p->uses[p->use_count++].version = p->w.version[unit];
    }
    bool copied = good(p, rc, "reading a place");
    sthi_lease_release(p->w.runtime, &lease);
    return good(p, sthi_runtime_poll(p->w.runtime), "poll") && copied;
}

static void sound(const play *p) {
    const char *why;
    if (!sthi_runtime_check(p->w.runtime, &why)) broken(p, "check", why);
}

static bool step(play *p, const uint32_t *order) {
    bool ok = good(p, sthi_step_begin(p->w.runtime), "step begin");
    for (int i = 0; i < UNITS && ok; i++) ok = use(p, order[i]);
    sound(p);
    if (p->w.runtime->step.open) ok = good(p, sthi_step_end(p->w.runtime), "step end") && ok;
    sound(p);
    return ok;
}

/* Once all is done: every copy that was said to be under way brought the right bytes. */
static void compare(play *p) {
    for (int i = 0; i < p->use_count; i++)
        if (!world_shows(&p->w, p->uses[i].unit, p->uses[i].version, results + (size_t)i * LARGEST_UNIT)) {
            char why[64];
            snprintf(why, sizeof why, "use %d, unit %u", i, p->uses[i].unit);
            broken(p, "wrong bytes on the device", why);
        }
    p->use_count = 0;
}

static bool settle(play *p) {
    if (!good(p, p->device->ops->stream_synchronize(p->device->self, p->compute), "settle")) return false;
    compare(p);
    return true;
}

static bool open_world(play *p) {
    world_spec spec = world_default(UNITS, p->kind->bytes, p->kind->budget);
    spec.virtual_time = false;
    spec.device = p->device;
    spec.packed = p->kind->packed;
    spec.readers = 0;
    spec.chunk = p->kind->ring ? 16384 : 8192;
    return good(p, world_open(&p->w, &spec), "open");
}

static bool stream(play *p) {
    bool ok = step(p, FORWARD);
    (void)(p->use_count && settle(p));
    ok = step(p, FORWARD) && ok;
    if (good(p, sthi_runtime_synchronize(p->w.runtime), "synchronize") && settle(p)) {
        world_fill(&p->w, 2, (uint8_t)(p->w.version[2] + 1));
        if (!p->w.packed[2]) ok = good(p, sthi_unit_mark_written(p->w.runtime, 2), "written") && ok;
        else world_fill(&p->w, 2, (uint8_t)(p->w.version[2] - 1));
    }
    ok = step(p, OTHER) && ok;
    return (p->use_count ? settle(p) : true) && ok;
}

/* ---- spilling */

static bool spill(play *p) {
    enum { COUNT = 6 };
    rig *g = &p->g;
    bool ok = good(p, sth_activation_pass(g->store, 1), "pass");
    for (int i = 0; i < COUNT && ok; i++)
        ok = good(p, rig_save(g, i, 20000 + 4096 * (uint64_t)i, (unsigned)i, false), "save");
    for (int i = COUNT - 1; i >= 0 && ok; i--) {
        ok = good(p, rig_ask(g, i), "ask") && good(p, rig_ahead(g), "ahead");
        if (ok) ok = good(p, rig_release(g, i), "release");
    }
    for (int i = 0; i < COUNT; i++)
        if (g->things[i].record) (void)good(p, rig_release(g, i), "release after a failure");
    return ok;
}

static bool open_rig(play *p) {
    sth_activation_options o;
    sth_activation_options_init(&o);
    o.high = 60000;
    o.low = 40000;
    return good(p, rig_start(&p->g, p->device, &o, false), "activations");
}

/* ---- one play */

static bool begin(play *p) {
    sth_devptr alias;
    if (!p->device && !good(p, sth_device_open(backend, NULL, &p->device), "device")) return false;
    const sth_backend_ops *o = p->device->ops;
    if (!p->pinned && !p->kind->staged)
        p->pinned = o->host_register(p->device->self, results, (uint64_t)USES * LARGEST_UNIT, &alias) == STH_OK;
    if (!p->compute && !good(p, o->stream_create(p->device->self, 0, &p->compute), "stream")) return false;
    return p->w.runtime || open_world(p);
}

static void end(play *p) {
    if (!p->device) return;
    const sth_backend_ops *o = p->device->ops;
    world_close(&p->w);
    if (p->wants_rig) rig_fini(&p->g);
    if (p->compute) o->stream_destroy(p->device->self, p->compute);
    if (p->pinned) o->host_unregister(p->device->self, results, (uint64_t)USES * LARGEST_UNIT);
    sth_device_close(p->device);
}

/* The fault is over: all of it works. */
static void goes_on(play *p) {
    p->plan.nth = 0; /* nothing is allowed to fail */
    if (!begin(p)) return;
    if (p->use_count) (void)settle(p);
    for (int i = 0; i < 2; i++) {
        (void)step(p, i ? OTHER : FORWARD);
        (void)settle(p);
    }
    if (p->wants_rig && !p->g.store) {
        rig_fini(&p->g);
        (void)open_rig(p);
    }
    p->wants_rig = p->wants_rig || open_rig(p);
    (void)spill(p);
}

/* The scenario, with the plan; its calls by function when there is none. */
static void perform(const kind *k, const fake_plan *plan) {
    play p = {.kind = k, .plan = *plan};
    long blocks = sthi_alloc_live();
    char why[256];
    snprintf(doing, sizeof doing, "%s:%ld%s, %s\n", plan->function ? plan->function : "any", plan->nth,
             plan->forever ? "+" : "", k->name);
    alarm(SECONDS);
    plays++;
    if (k->staged) setenv("FAKE_DRIVER_PIN_LIMIT", "300000", 1);
    else unsetenv("FAKE_DRIVER_PIN_LIMIT");
    if (!k->ring) setenv("FAKE_DRIVER_NO_MAPPINGS", "1", 1);
    else unsetenv("FAKE_DRIVER_NO_MAPPINGS");
    fake->reset();
    fake->schedule((uint64_t)plan->nth * 2 + 1, 0);
    fake->plan(plan);
    if (begin(&p)) {
        (void)stream(&p);
        p.wants_rig = true;
        if (open_rig(&p)) (void)spill(&p);
    }
    bool dead = plan->forever && !plan->function;
    bool met = plan->nth && fake->calls(plan->function) >= plan->nth; /* else it is a call of the shutting down */
    if (met && plan->nth % 3 && !dead) {                              /* else it shuts down while calls still fail */
        fake_plan was = p.plan;
        fake->plan(NULL);
        goes_on(&p);
        p.plan = was;
    }
    end(&p);
    if (plan->nth) fake->plan(NULL); /* else the calls are counted still */
    alarm(0);
    if (fake->complaints(why, sizeof why)) broken(&p, "the stand-in complains", why);
    long left = fake->live();
    bool may_stay = plan->nth && !plan->ends_anyway && (dead || fake->ends(plan->function));
    /* A ring that may be in use is kept. */
    may_stay =
        may_stay || (plan->forever && (strstr(plan->function, "CtxSync") || strstr(plan->function, "DeviceSync")));
    if (left && !may_stay) {
        snprintf(why, sizeof why, "%ld objects", left);
        broken(&p, "left with the driver", why);
    }
    if (sthi_alloc_live() != blocks) {
        snprintf(why, sizeof why, "%ld blocks", sthi_alloc_live() - blocks);
        broken(&p, "host memory leaked", why);
    }
    fake->schedule(0, 0);
}

static bool one_is_wanted(const kind *k) {
    char text[128];
    const char *wanted = getenv("STH_FAULT");
    if (!wanted) return false;
    snprintf(text, sizeof text, "%s", wanted);
    char *number = strchr(text, ':');
    if (!number) fail_msg("STH_FAULT is function:n or function:n+");
    *number++ = 0;
    fake_plan plan = {.function = strcmp(text, "any") ? text : NULL, .nth = atol(number), .code = code};
    plan.forever = strchr(number, '+') != NULL;
    for (int anyway = 0; anyway < 2; anyway++) {
        plan.ends_anyway = anyway;
        perform(k, &plan);
    }
    return true;
}

static long next_call(const kind *k, long call) {
    if (getenv("STH_TEST_FULL")) return call + (call < FIRST ? 1 : 37);
    bool fewer = strcmp(backend, "cuda") || code != UNKNOWN_ERROR;
    if (UNDER_TSAN) return call * 100;
    if (UNDER_ASAN || fewer) return call < 2 ? call + 1 : call * (UNDER_ASAN ? 50 : 8);
    if (k->ring) return call + (call < MANY ? 1 : 7);
    return call + (call < FEW ? 1 : 23);
}

static void every_function_at_each_call(const kind *k, bool forever) {
    bool full = getenv("STH_TEST_FULL") != NULL;
    if (one_is_wanted(k)) return;
    perform(k, &(fake_plan){0});
    const char *names[128];
    long counts[128];
    int n = 0, called = 0;
    for (const char *name; n < 128 && (name = fake->function(n)); n++) {
        names[n] = name;
        counts[n] = fake->calls(name);
        called += counts[n] > 0;
        if (getenv("STH_SHOW")) print_message("%-32s %ld\n", names[n], counts[n]);
    }
    assert_true(called > 22);
    bool halved = UNDER_TSAN && !full; /* each function fails either once or for ever */
    for (int i = halved && forever; i < n; i += halved ? 2 : 1)
        for (long call = 1; call <= counts[i] && call <= (full ? 20 * FIRST : FIRST); call = next_call(k, call))
            for (int anyway = 0; anyway <= fake->ends(names[i]); anyway++)
                perform(k, &(fake_plan){.function = names[i], .nth = call, .forever = forever, .code = code,
                                        .ends_anyway = anyway});
}

static void once(void **state) {
    (void)state;
    every_function_at_each_call(&kinds[0], false);
}

static void for_ever(void **state) {
    (void)state;
    every_function_at_each_call(&kinds[0], true);
}

static void once_packed_and_staged(void **state) {
    (void)state;
    every_function_at_each_call(&kinds[1], false);
}

static void for_ever_packed_and_staged(void **state) {
    (void)state;
    every_function_at_each_call(&kinds[1], true);
}

static void once_without_a_ring(void **state) {
    (void)state;
    every_function_at_each_call(&kinds[2], false);
}

static void for_ever_without_a_ring(void **state) {
    (void)state;
    every_function_at_each_call(&kinds[2], true);
}

/* The class of errors behind which a runtime looks for another way. */
static void memory_runs_out(void **state) {
    (void)state;
    code = OUT_OF_MEMORY;
    bool all = getenv("STH_TEST_FULL") || (!UNDER_TSAN && !UNDER_ASAN && !strcmp(backend, "cuda"));
    size_t kinds_tried = all ? sizeof kinds / sizeof *kinds : 1;
    for (size_t k = 0; k < kinds_tried; k++)
        for (int forever = 0; forever < 2; forever++) every_function_at_each_call(&kinds[k], forever);
    code = UNKNOWN_ERROR;
}

/* From the n-th call on every one fails and nothing that was enqueued runs. */
static void the_card_dies(void **state) {
    (void)state;
    if (getenv("STH_FAULT")) return;
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        perform(&kinds[k], &(fake_plan){0});
        long all = fake->calls(NULL);
        for (long n = 1; n <= all; n += 1 + n / few_under_tsan(3, 10))
            perform(&kinds[k], &(fake_plan){.nth = n, .forever = true, .code = code});
    }
}

int main(int argc, char **argv) {
    if (argc < 2 || !(fake = stand_in_of(backend = argv[1]))) {
        fprintf(stderr, "give a back end, and its stand-in in the environment\n");
        return 1;
    }
    if (argc > 2) cmocka_set_test_filter(argv[2]);
    signal(SIGALRM, hangs);
    results = sthi_pages_map((uint64_t)USES * LARGEST_UNIT, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(once),
        cmocka_unit_test(for_ever),
        cmocka_unit_test(once_packed_and_staged),
        cmocka_unit_test(for_ever_packed_and_staged),
        cmocka_unit_test(once_without_a_ring),
        cmocka_unit_test(for_ever_without_a_ring),
        cmocka_unit_test(memory_runs_out),
        cmocka_unit_test(the_card_dies),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    if (getenv("STH_SHOW")) print_message("%d plays\n", plays);
    return failed;
}
