/* The work whose instructions counts.py counts: prepares, then calls measured() once, which is what callgrind collects.
 *
 *   work resident|streamed UNITS    ten steps of acquire and release: all units on the device, or a quarter of them
 *   work plan UNITS                 a plan for a quarter of the bytes, forward
 *   work plan-training UNITS        the same, forward and backward
 *   work header FILE                opening a checkpoint
 *   work memory UNITS               nothing to collect: prints the heap's bytes and blocks of a sealed runtime
 *
 * Virtual time and no threads, so that every run does the same. Prints by what a count is to be divided. */
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "stagehand/stagehand.h"

/* A runtime plans again after 1, 2, 4, ... timed steps: those measured lie between two of them. */
enum { STEPS = 10, WARM = 40, UNIT_BYTES = 4096, USE_NS = 20000 };

static void need(sth_status status) {
    if (status == STH_OK) return;
    fprintf(stderr, "%s: %s\n", sth_status_name(status), sth_last_error()->message);
    exit(1);
}

/* ---- steps ---- */

typedef struct world {
    sth_device *device;
    sth_runtime *runtime;
    uint32_t units;
    char *weights;
} world;

static void open_world(world *w, uint32_t units, uint32_t on_device) {
    sth_sim_options sim;
    sth_runtime_options options;
    sth_sim_options_init(&sim);
    sim.virtual_time = true;
    sim.link_bytes_per_s = 4000000000;
    sth_runtime_options_init(&options);
    options.budget = (uint64_t)on_device * UNIT_BYTES;
    options.link_bytes_per_s = 4e9;
    *w = (world){.units = units};
    need(sth_device_open("sim", &sim, &w->device));
    need(sth_runtime_create(w->device, &options, &w->runtime));
    sth_arena *arena;
    void *image;
    need(sth_arena_create(w->device, (uint64_t)units * UNIT_BYTES, &arena));
    for (uint32_t i = 0; i < units; i++) {
        char name[32];
        uint32_t unit;
        snprintf(name, sizeof name, "blocks.%u.weight", i);
        need(sth_arena_reserve(arena, UNIT_BYTES, &image));
        sth_unit_desc desc = {.name = name, .bytes = UNIT_BYTES, .host = image, .arena = arena};
        need(sth_runtime_add_unit(w->runtime, &desc, &unit));
    }
    need(sth_arena_finish(arena));
    sth_arena_release(arena);
    need(sth_runtime_seal(w->runtime));
}

static void close_world(world *w) {
    sth_runtime_destroy(w->runtime);
    sth_device_close(w->device);
}

static void step(world *w) {
    sth_lease lease;
    need(sth_step_begin(w->runtime));
    for (uint32_t unit = 0; unit < w->units; unit++) {
        need(sth_unit_acquire(w->runtime, unit, 0, &lease));
        need(sth_sim_compute(w->device, 0, USE_NS));
        sth_lease_release(w->runtime, &lease);
    }
    need(sth_step_end(w->runtime));
}

/* ---- what is measured ---- */

typedef struct job {
    const char *what, *path;
    uint32_t units;
    world world;
    sth_plan_input input;
    sth_plan *plan;
    sth_checkpoint *checkpoint;
} job;

__attribute__((noinline)) void measured(job *j);
void measured(job *j) {
    if (j->input.units) need(sth_plan_create(&j->input, &j->plan));
    else if (j->path) need(sth_checkpoint_open(j->path, &j->checkpoint));
    else
        for (int i = 0; i < STEPS; i++) step(&j->world);
}

static void steps(job *j, uint32_t on_device) {
    open_world(&j->world, j->units, on_device);
    for (int i = 0; i < WARM; i++) step(&j->world);
    measured(j);
    printf("%u\n", STEPS * j->units);
    close_world(&j->world);
}

/* Sizes of a transformer: four kinds of layer, over and over. */
static void plan(job *j, bool training) {
    static const uint64_t sizes[] = {33554432, 8388608, 90177536, 45088768};
    uint32_t n = j->units, uses = training ? 2 * n : n;
    sth_plan_unit *units = calloc(n, sizeof *units);
    sth_plan_use *order = calloc(uses, sizeof *order);
    if (!units || !order) exit(1);
    uint64_t total = 0;
    for (uint32_t i = 0; i < n; i++) total += units[i].bytes = sizes[i % 4];
    for (uint32_t i = 0; i < uses; i++) {
        order[i].unit = i < n ? i : 2 * n - 1 - i;
        order[i].compute_ns = (int64_t)(units[order[i].unit].bytes / 100);
    }
    sth_plan_input_init(&j->input);
    j->input.units = units, j->input.unit_count = n;
    j->input.uses = order, j->input.use_count = uses;
    j->input.budget = total / 4;
    j->input.link_bytes_per_s = 50e9;
    j->input.ring_mapped_twice = true;
    measured(j);
    printf("%u\n", n);
    sth_plan_destroy(j->plan);
    free(units), free(order);
}

static void header(job *j) {
    measured(j);
    printf("%llu\n", (unsigned long long)sth_checkpoint_tensor_count(j->checkpoint));
    sth_checkpoint_close(j->checkpoint);
}

static void memory(job *j) {
    mallopt(M_MMAP_THRESHOLD, 1 << 30); /* everything in the heap that is asked about */
    size_t bytes = mallinfo2().uordblks;
    long blocks = sthi_alloc_live();
    open_world(&j->world, j->units, j->units / 4); /* no step: events, which are the device's, come with the first */
    printf("%u %zu %ld\n", j->units, mallinfo2().uordblks - bytes, sthi_alloc_live() - blocks);
    close_world(&j->world);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    job j = {.what = argv[1], .units = (uint32_t)strtoul(argv[2], NULL, 10)};
    if (strcmp(j.what, "resident") == 0) steps(&j, 2 * j.units);
    else if (strcmp(j.what, "streamed") == 0) steps(&j, j.units / 4);
    else if (strncmp(j.what, "plan", 4) == 0) plan(&j, j.what[4] == '-');
    else if (strcmp(j.what, "header") == 0) j.path = argv[2], header(&j);
    else if (strcmp(j.what, "memory") == 0) memory(&j);
    else return 2;
    return 0;
}
