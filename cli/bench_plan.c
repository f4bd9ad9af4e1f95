/* Which runs there will be: how large a stack memory and time allow, and what each way needs of both. Pure. */
#include <stdio.h>
#include <string.h>

#include "bench.h"

const char *const bench_system_name[BENCH_SYSTEMS] = {"resident", "stagehand", "diffusers group offload",
                                                      "accelerate cpu_offload"};
enum { RESIDENT, OURS, DIFFUSERS, ACCELERATE };

static const int shares[BENCH_SHARES] = {30, 60};

/* Steps of each length, those that warm up included; what a way holds in RAM and sends over the link in a step, as a
 * multiple of the weights; and how often the weights are copied within RAM before. */
static const struct way {
    uint32_t steps;
    double ram, sent, copies;
    bool pins, pageable;
} ways[BENCH_SYSTEMS] = {
    [RESIDENT] = {8, 1.0, 0, 3, false, true},
    [OURS] = {10, 1.0, 0.75, 4, true, false},
    [DIFFUSERS] = {5, 2.0, 1.0, 4, true, false}, /* its pinned copies stand beside the weights */
    [ACCELERATE] = {3, 1.0, 1.0, 3, false, true},
};

/* Of a block: attention and MLP in bf16. */
static uint64_t block_bytes(uint32_t hidden) { return (uint64_t)12 * hidden * hidden * 2; }

#define LEAST_RAM_KEPT ((uint64_t)2 << 30)
enum { LEAST_BLOCKS = 3, MOST_BLOCKS = 1000 };
static const double START = 0.5;        /* seconds of a run that do not depend on its size */
static const double LEAST_RATE = 1e9;   /* bytes per second, where a rate is not known */
static const double VRAM_SHARE = 0.85;  /* that weights may take beside activations */
static const double USE_OF_TIME = 0.75; /* the rest is for what takes longer than was expected, and for compute */

static double rate(const bench_facts *f, bench_rate which) {
    return f->rate[which] > 0 ? f->rate[which] : LEAST_RATE;
}

static double seconds_per_byte(const bench_facts *f, const struct way *w) {
    double up = rate(f, w->pageable ? RATE_PAGEABLE : RATE_UP);
    double once = w->copies / rate(f, RATE_COPY) + (w->pins ? 1 / rate(f, RATE_PIN) : 0) + 1 / up;
    return once + BENCH_LENGTHS * w->steps * w->sent / up;
}

/* Bytes of a stack whose four runs take `seconds`. */
static double bytes_in(const bench_facts *f, double seconds) {
    double each = 0;
    for (int s = 0; s < BENCH_SYSTEMS; s++) each += seconds_per_byte(f, &ways[s]);
    double left = seconds - BENCH_SYSTEMS * START;
    return left > 0 ? left / each : 0;
}

/* The largest stack for a share; its fields that all systems have in common. */
static bench_run stack_of(const bench_facts *f, int share) {
    bench_run run = {.share = share, .hidden = 3072, .tokens = {1024, 4096}};
    int all = 0;
    for (int i = 0; i < BENCH_SHARES; i++) all += shares[i];
    double bytes = (double)f->vram_free / 100 * share;
    double in_time = bytes_in(f, f->seconds * USE_OF_TIME * share / all);
    if (f->simulated) {
        run.hidden = 64;
        run.tokens[0] = 16;
        run.tokens[1] = 64;
        bytes = (double)(share / 5 * block_bytes(run.hidden));
        run.shrunk = "as there is no card";
    }
    if (bytes > (double)f->ram_room) {
        bytes = (double)f->ram_room;
        run.shrunk = "as the RAM that is available allows";
    }
    if (bytes > in_time) {
        bytes = in_time;
        run.shrunk = "to end in time";
    }
    if (!f->simulated && bytes < (double)(8 * block_bytes(run.hidden))) run.hidden = 1024;
    double blocks = bytes / (double)block_bytes(run.hidden);
    run.blocks = blocks < MOST_BLOCKS ? (uint32_t)blocks : MOST_BLOCKS;
    run.weights = run.blocks * block_bytes(run.hidden);
    return run;
}

static void gb(char *out, size_t capacity, const char *form, double bytes) {
    snprintf(out, capacity, form, bytes / 1e9);
}

/* What keeps a run from being made, whatever the time. */
static void judge(const bench_facts *f, const bench_run *before, bench_run *run) {
    const struct way *w = &ways[run->system];
    size_t room = sizeof run->why;
    if (run->blocks < LEAST_BLOCKS)
        snprintf(run->why, room, "%u blocks fit into VRAM, RAM and time; %u are the least", run->blocks,
                 (unsigned)LEAST_BLOCKS);
    else if (before && before->weights >= run->weights)
        snprintf(run->why, room, "the stack would be no larger than that of %d %%", before->share);
    else if (f->simulated && run->system >= DIFFUSERS)
        snprintf(run->why, room, "it needs a card");
    else if (run->system == RESIDENT && (double)run->weights > VRAM_SHARE * (double)f->vram_free)
        gb(run->why, room, "%.1f GB of weights do not fit into the free VRAM", (double)run->weights);
    else if (w->ram * (double)run->weights > (double)f->ram_room)
        gb(run->why, room, "it would hold %.1f GB of RAM", w->ram * (double)run->weights);
}

uint64_t bench_ram_room(const host_facts *host) {
    uint64_t room = host->ram_available;
    if (host->container_limit != HOST_UNLIMITED) {
        uint64_t used = host->container_used, limit = host->container_limit;
        uint64_t left = limit > used ? limit - used : 0;
        room = left < room ? left : room;
    }
    uint64_t kept = room / 5 > LEAST_RAM_KEPT ? room / 5 : LEAST_RAM_KEPT;
    return room > kept ? room - kept : 0;
}

void bench_plan(const bench_facts *f, bench_run runs[BENCH_RUNS]) {
    for (int i = 0; i < BENCH_SHARES; i++) {
        bench_run stack = stack_of(f, shares[i]);
        for (int s = 0; s < BENCH_SYSTEMS; s++) {
            bench_run *run = &runs[i * BENCH_SYSTEMS + s];
            *run = stack;
            run->system = s;
            run->budget = s == OURS ? run->weights / 3 : 0;
            run->steps = ways[s].steps;
            run->seconds = START + seconds_per_byte(f, &ways[s]) * (double)run->weights;
            judge(f, i ? &runs[(i - 1) * BENCH_SYSTEMS] : NULL, run);
        }
    }
}

double bench_run_seconds(const bench_run *run, const double resident_ms[BENCH_LENGTHS]) {
    double seconds = run->seconds;
    for (int i = 0; i < BENCH_LENGTHS; i++) seconds += run->steps * resident_ms[i] / 1e3;
    return seconds;
}
