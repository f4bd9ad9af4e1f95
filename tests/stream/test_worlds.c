/* Random worlds from seeds: units, budgets, orders, streams, leases kept too long, early exits, writes,
 * budget changes, pinning limits, failing calls, in every fourth a conductor and somebody else on the link, in every
 * tenth many small units that are loaded together; after every event all invariants are checked, and every use
 * sees the right bytes. On the caller's stream that is looked at at once; on others the host runs ahead, and
 * what the device saw is copied out and compared when the step is over.
 *
 * A failure prints the seed; STH_WORLD_SEED=n replays one, STH_WORLDS=k plays k of them from there on. */
#define _GNU_SOURCE
#include <setjmp.h>
#include <signal.h>
#include <sys/wait.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/fault.h"
#include "base/memory.h"
#include "conductor/conductor.h"
#include "load/lanes.h"
#include "runtime/budget.h"
#include "runtime/check.h"
#include "runtime/lease.h"
#include "runtime/runtime.h"
#include "runtime/step_calls.h"
#include "runtime/verify.h"
#include "stream/world.h"
#include "support/check.h"

enum { FEW_UNITS = 4, MORE_UNITS = 12, SMALL_UNITS = 64, MAX_UNITS = SMALL_UNITS, MAX_KEPT = 3,
       MAX_STREAMS = 3, MAX_SEEN = 128, MAX_WORKERS = 4, DEFAULT_WORLDS = 2500, WORLDS_IN_FULL = 20000,
       WORLD_SECONDS = 100 };

typedef struct dice {
    uint64_t s;
} dice;

static uint64_t roll(dice *d, uint64_t below) { /* splitmix64 */
    uint64_t z = (d->s += UINT64_C(0x9E3779B97F4A7C15));
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (z ^ (z >> 31)) % below;
}

/* What a use on a stream that runs behind the host saw. */
typedef struct sight {
    uint8_t *bytes;
    uint32_t unit;
    uint8_t version;
} sight;

typedef struct player {
    world w;
    dice d;
    uint64_t seed;
    uint32_t order[4 * MAX_UNITS], count;
    sth_lease kept[MAX_KEPT];
    uint32_t kept_count;
    sth_stream streams[MAX_STREAMS]; /* [0] is the caller's own */
    uint32_t stream_count;
    sight seen[MAX_SEEN];
    uint32_t seen_count;
    bool writable, faults;
    sth_conductor *conductor; /* in every fourth world; then others copy as well */
    sthi_lane *others;
    sth_stream others_stream;
    sth_devptr others_memory;
    uint8_t version;
    uint64_t joined; /* units that came with a neighbour, where there were bundles at the end */
    char why[256];
    bool failed;
} player;

static void complain(player *p, const char *what) {
    if (p->failed) return;
    p->failed = true;
    snprintf(p->why, sizeof p->why, "%s (%s)", what, sth_last_error()->message);
}

/* Statuses that this world may produce. Anything else is a finding. */
static bool allowed(const player *p, sth_status rc) {
    if (rc == STH_OK || rc == STH_BUDGET_TOO_SMALL) return true;
    return p->faults && (rc == STH_DEVICE_ERROR || rc == STH_OUT_OF_DEVICE_MEMORY);
}

static void check(player *p, sth_status rc, const char *what) {
    const char *why;
    if (!allowed(p, rc)) complain(p, what);
    if (!sthi_runtime_check(p->w.runtime, &why)) {
        sthi_fail(STH_INTERNAL, "test", 0, NULL, "%s", why);
        complain(p, what);
    }
}

static void new_order(player *p) {
    p->count = 0;
    for (uint32_t u = 0; u < p->w.units; u++) p->order[p->count++] = u;
    if (roll(&p->d, 3) == 0) /* there and back */
        for (uint32_t u = p->w.units; u-- > 0;) p->order[p->count++] = u;
    if (roll(&p->d, 3) == 0)
        for (uint32_t i = p->count; i > 1; i--) {
            uint32_t j = (uint32_t)roll(&p->d, i), t = p->order[i - 1];
            p->order[i - 1] = p->order[j];
            p->order[j] = t;
        }
}

static void keep_or_release(player *p, const sth_lease *lease) {
    if (p->kept_count < MAX_KEPT && roll(&p->d, 40) == 0) p->kept[p->kept_count++] = *lease;
    else sthi_lease_release(p->w.runtime, lease);
}

/* Copies out what the stream sees in the place now; compared by look_back. */
static void look(player *p, const sth_lease *l, sth_stream stream) {
    if (p->seen_count == MAX_SEEN) return;
    sight *s = &p->seen[p->seen_count];
    *s = (sight){sthi_alloc(p->w.bytes[l->unit]), l->unit, p->w.version[l->unit]};
    if (!s->bytes) return; /* a fault */
    p->seen_count++;
    sth_device *d = p->w.device;
    if (d->ops->copy_d2h(d->self, s->bytes, l->address, p->w.bytes[l->unit], stream) == STH_OK) return;
    p->seen_count--;
    sthi_free(s->bytes);
}

static void look_back(player *p) {
    sthi_fault_disarm_all();
    for (uint32_t i = 1; i < p->stream_count; i++)
        if (p->w.device->ops->stream_synchronize(p->w.device->self, p->streams[i]) != STH_OK)
            complain(p, "a stream hangs");
    while (p->seen_count) {
        sight *s = &p->seen[--p->seen_count];
        if (!world_shows(&p->w, s->unit, s->version, s->bytes)) complain(p, "wrong bytes seen by a stream");
        sthi_free(s->bytes);
    }
}

static void use(player *p, uint32_t unit) {
    sth_lease lease;
    sth_stream stream = p->streams[roll(&p->d, p->stream_count)];
    sth_status rc = sthi_unit_acquire(p->w.runtime, unit, stream, &lease);
    check(p, rc, "acquire");
    if (rc != STH_OK) return;
    if (stream == 0 && !world_right(&p->w, &lease)) complain(p, "wrong bytes when acquired");
    if (stream != 0 && roll(&p->d, 2)) look(p, &lease, stream);
    (void)p->w.device->ops->sim_compute(p->w.device->self, stream, (int64_t)roll(&p->d, 60000));
    if (stream == 0 && !world_right(&p->w, &lease)) complain(p, "wrong bytes after the use");
    if (stream != 0) look(p, &lease, stream);
    keep_or_release(p, &lease);
    if (roll(&p->d, 4)) check(p, sthi_runtime_poll(p->w.runtime), "poll");
}

/* As after a backward pass: images may be written, and the step goes on. */
static void pause_and_write(player *p) {
    sth_status rc = sthi_step_pause(p->w.runtime);
    check(p, rc, "pause");
    if (rc != STH_OK || !p->writable || p->kept_count || p->w.runtime->options.read_only) return;
    uint32_t unit = (uint32_t)roll(&p->d, p->w.units);
    world_fill(&p->w, unit, ++p->version);
    check(p, sthi_unit_mark_written(p->w.runtime, unit), "mark written");
}

static void step(player *p) {
    uint32_t n = p->count;
    if (roll(&p->d, 12) == 0) n = (uint32_t)roll(&p->d, p->count + 1); /* an exception in the middle */
    bool marked = roll(&p->d, 4) != 0;
    if (marked) check(p, sthi_step_begin(p->w.runtime), "begin");
    for (uint32_t t = 0; t < n && !p->failed; t++) {
        if (roll(&p->d, 60) == 0) continue; /* a branch not taken */
        use(p, p->order[t]);
        if (roll(&p->d, 60) == 0) use(p, (uint32_t)roll(&p->d, p->w.units));
        if (roll(&p->d, 60) == 0) pause_and_write(p);
    }
    if (p->w.runtime->step.open && (marked || roll(&p->d, 2)))
        check(p, sthi_step_end(p->w.runtime), "end");
    if (p->seen_count > MAX_SEEN / 2 || roll(&p->d, 4) == 0) look_back(p);
}

static void write_some(player *p) {
    if (!p->writable || p->kept_count) return;
    if (p->w.runtime->step.open) check(p, sthi_step_end(p->w.runtime), "end before writing");
    /* With read_only, writing waits; without, the end of the step did, if it did not fail. */
    if (p->w.runtime->options.read_only || p->faults || roll(&p->d, 2)) {
        sthi_fault_disarm_all();
        check(p, sthi_runtime_synchronize(p->w.runtime), "synchronize");
    }
    for (uint32_t u = 0; u < p->w.units; u++) {
        if (roll(&p->d, 2)) continue;
        world_fill(&p->w, u, ++p->version);
        check(p, sthi_unit_mark_written(p->w.runtime, u), "mark written");
    }
}

static void verify(player *p) {
    uint32_t unit = (uint32_t)roll(&p->d, p->w.units);
    bool equal = false;
    sth_status rc = sthi_unit_verify(p->w.runtime, unit, &equal, NULL);
    check(p, rc, "verify");
    if (rc == STH_OK && !equal) complain(p, "a unit differs from its source");
}

static void let_go(player *p) {
    while (p->kept_count) {
        sth_lease *l = &p->kept[--p->kept_count];
        /* On another stream its copy may still be under way. */
        look_back(p);
        if (!world_right(&p->w, l)) complain(p, "wrong bytes under a lease that was kept");
        sthi_lease_release(p->w.runtime, l);
    }
    check(p, sthi_runtime_poll(p->w.runtime), "poll");
}

static void change_budget(player *p, uint64_t capacity) {
    if (p->w.runtime->step.open) check(p, sthi_step_end(p->w.runtime), "end before a new budget");
    uint64_t least = sthi_smallest_budget(p->w.runtime);
    if (least < capacity)
        check(p, sthi_runtime_set_budget(p->w.runtime, least + roll(&p->d, capacity - least)), "set budget");
}

/* ---- a conductor, and somebody else on the link */

enum { OTHERS_BYTES = 4096, PIECE = 1024 };
static uint8_t others_bytes[OTHERS_BYTES];

static void open_conductor(player *p) {
    sth_device *d = p->w.device;
    sth_conductor_options o;
    sth_conductor_options_init(&o);
    o.piece_bytes = PIECE;
    if (d->ops->alloc(d->self, OTHERS_BYTES, &p->others_memory) != STH_OK) return; /* the runtime has it all */
    check(p, d->ops->stream_create(d->self, 0, &p->others_stream), "a stream for others");
    check(p, sthi_conductor_create(&o, &p->conductor), "conductor");
    check(p, sthi_lane_open(p->conductor, d, p->others_stream, STH_DIRECTION_H2D, p, &p->others), "a lane for others");
    check(p, sthi_runtime_set_conductor(p->w.runtime, p->conductor), "attach");
}

static void others_copy(player *p) {
    if (!p->conductor) return;
    sth_device *d = p->w.device;
    int64_t due = d->ops->now_ns(d->self) + (int64_t)roll(&p->d, 2000000);
    sthi_way way = sthi_lane_begin(p->others, OTHERS_BYTES, due, OTHERS_BYTES);
    for (uint64_t at = 0; at < OTHERS_BYTES; at += way.piece)
        (void)d->ops->copy_h2d(d->self, p->others_memory + at, others_bytes + at, way.piece, p->others_stream);
    sthi_lane_end(p->others, way.flight);
    if (roll(&p->d, 20) == 0) check(p, sthi_runtime_set_conductor(p->w.runtime, NULL), "detach");
    if (roll(&p->d, 20) == 0) check(p, sthi_runtime_set_conductor(p->w.runtime, p->conductor), "attach again");
}

static void close_conductor(player *p) {
    if (!p->conductor) return;
    sthi_lane_close(p->others);
    sthi_conductor_destroy(p->conductor); /* the runtime's lanes keep it */
    p->w.device->ops->stream_destroy(p->w.device->self, p->others_stream);
    p->w.device->ops->free(p->w.device->self, p->others_memory, OTHERS_BYTES);
}

static void play(player *p, uint64_t capacity) {
    int events = 4 + (int)roll(&p->d, 10);
    new_order(p);
    for (int i = 0; i < events && !p->failed; i++) {
        if (p->faults && roll(&p->d, 3) == 0)
            sthi_fault_arm(roll(&p->d, 2) ? STHI_FAULT_DEVICE_CALL : STHI_FAULT_DEVICE_ALLOC,
                           1 + roll(&p->d, 30), roll(&p->d, 8) == 0);
        others_copy(p);
        switch (roll(&p->d, 9)) {
        case 0: new_order(p); break;
        case 1: let_go(p); break;
        case 2: write_some(p); break;
        case 3: change_budget(p, capacity); break;
        case 4: if (roll(&p->d, 3) == 0) verify(p); break;
        default: step(p);
        }
        sthi_fault_disarm_all();
    }
    let_go(p);
    if (!p->failed) step(p); /* whatever happened, the next step is right */
    let_go(p);
    look_back(p);
}

static uint64_t sum(const uint64_t *bytes, uint32_t n) {
    uint64_t s = 0;
    for (uint32_t i = 0; i < n; i++) s += (bytes[i] + 511) / 512 * 512;
    return s;
}

/* Returns false, with p->why, when something was wrong. */
static bool run_world(uint64_t seed, player *p) {
    *p = (player){.d = {seed * 2 + 1}, .seed = seed};
    uint64_t bytes[MAX_UNITS], largest = 0;
    bool small = seed % 10 == 3;
    /* Planning many takes long. */
    uint32_t n = 1 + (uint32_t)roll(&p->d, roll(&p->d, 10) ? FEW_UNITS : MORE_UNITS);
    if (small) n = SMALL_UNITS / 2 + (uint32_t)roll(&p->d, SMALL_UNITS / 2);
    for (uint32_t i = 0; i < n; i++) {
        bytes[i] = 1 + roll(&p->d, small ? 512 + 512 * (roll(&p->d, 8) == 0) : roll(&p->d, 4) ? 6000 : 40000);
        uint64_t placed = (bytes[i] + 511) / 512 * 512;
        if (placed > largest) largest = placed;
    }
    uint64_t capacity = largest + roll(&p->d, sum(bytes, n) * 5 / 4 + 1);
    world_spec spec = world_default(n, bytes, capacity);
    spec.chunk = 512u << roll(&p->d, 7);
    spec.link = UINT64_C(1) << (small ? 34 : 24 + roll(&p->d, 10));
    spec.policy = roll(&p->d, 8) ? STH_POLICY_PLANNED : STH_POLICY_STATIC;
    p->writable = spec.writable = roll(&p->d, 2);
    spec.read_only = !spec.writable || roll(&p->d, 3) == 0;
    if (roll(&p->d, 3) == 0) spec.packed = (sth_transfer)(1 + roll(&p->d, STH_TRANSFER_INT4));
    if (spec.packed && roll(&p->d, 3) == 0) spec.packed = STH_TRANSFER_LOSSLESS;
    spec.no_expand = roll(&p->d, 4) == 0;
    if (roll(&p->d, 4) == 0) spec.pin_limit = 4096 + roll(&p->d, 100000);
    p->faults = roll(&p->d, 3) == 0;
    if (seed % 4 == 1) spec.capacity = capacity + OTHERS_BYTES; /* theirs is beside the runtime's */
    sth_status rc = world_open(&p->w, &spec);
    if (rc != STH_OK) {
        if (!allowed(p, rc)) complain(p, "open");
        return !p->failed;
    }
    p->stream_count = 1 + (uint32_t)roll(&p->d, MAX_STREAMS);
    for (uint32_t i = 1; i < p->stream_count; i++)
        if (p->w.device->ops->stream_create(p->w.device->self, 0, &p->streams[i]) != STH_OK) p->stream_count = i;
    if (seed % 4 == 1) open_conductor(p);
    play(p, capacity);
    if (p->w.runtime->planned.bundles) p->joined += p->w.runtime->stats.joined_copies;
    close_conductor(p);
    for (uint32_t i = 1; i < p->stream_count; i++)
        p->w.device->ops->stream_destroy(p->w.device->self, p->streams[i]);
    world_close(&p->w);
    return !p->failed;
}

static uint64_t playing; /* seed of the world that is being played */

/* A world that does not end is a finding like any other: say which. */
static void out_of_time(int signal_number) {
    char text[] = "STH_WORLD_SEED=00000000000000000000 does not end\n";
    uint64_t n = playing;
    for (char *digit = strchr(text, ' ') - 1; *digit != '='; digit--, n /= 10) *digit = (char)('0' + n % 10);
    ssize_t written = write(STDERR_FILENO, text, sizeof text - 1);
    signal(signal_number, written < 0 ? SIG_IGN : SIG_DFL);
    abort();
}

static uint64_t number_from(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

/* Plays every `step`-th seed from `first` on; false, with a line on stderr, at the first failure. */
static bool play_seeds(uint64_t first, uint64_t end, uint64_t step) {
    static player p;
    long live = sthi_alloc_live();
    uint64_t joined = 0;
    for (uint64_t seed = first; seed < end; seed += step) {
        playing = seed;
        alarm(WORLD_SECONDS);
        bool right = run_world(seed, &p);
        alarm(0);
        joined += p.joined;
        if (!right) fprintf(stderr, "STH_WORLD_SEED=%llu: %s\n", (unsigned long long)seed, p.why);
        else if (sthi_alloc_live() != live)
            fprintf(stderr, "STH_WORLD_SEED=%llu: %ld blocks leaked\n", (unsigned long long)seed,
                    sthi_alloc_live() - live);
        else continue;
        return false;
    }
    if (!joined && end - first > 100) fprintf(stderr, "no unit came together with another\n");
    return joined || end - first <= 100;
}

static void test_random_worlds(void **state) {
    (void)state;
    uint64_t first = number_from("STH_WORLD_SEED", 1);
    uint64_t most = getenv("STH_TEST_FULL") ? WORLDS_IN_FULL : DEFAULT_WORLDS;
    uint64_t count = number_from("STH_WORLDS", getenv("STH_WORLD_SEED") ? 1 : most);
    int workers = sthi_cpu_count() < MAX_WORKERS ? sthi_cpu_count() : MAX_WORKERS;
    signal(SIGALRM, out_of_time);
    if (count == 1) {
        assert_true(play_seeds(first, first + 1, 1));
        return;
    }
    pid_t pids[MAX_WORKERS];
    for (int i = 0; i < workers; i++) {
        pids[i] = fork();
        assert_true(pids[i] >= 0);
        if (!pids[i]) _exit(play_seeds(first + (uint64_t)i, first + count, (uint64_t)workers) ? 0 : 1);
    }
    bool right = true;
    for (int i = 0; i < workers; i++) {
        int status = 0;
        right = waitpid(pids[i], &status, 0) == pids[i] && status == 0 && right;
    }
    if (!right) fail_msg("a world went wrong; its seed stands above");
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random_worlds)};
    return cmocka_run_group_tests_name("worlds", tests, NULL, NULL);
}
