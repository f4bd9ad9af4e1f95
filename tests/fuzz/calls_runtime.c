/* Calls of runtime.h, residency.h and graph.h. */
#include "fuzz/calls.h"

/* An allocator over the device's own that refuses now and then; its context is the calls_device. */
static uint32_t asked;

static sth_status lend(void *context, uint64_t bytes, sth_devptr *out) {
    calls_device *d = context;
    if (++asked % 16 == 0)
        return sth_error_set(STH_OUT_OF_DEVICE_MEMORY, "fuzz", 0, "allocator", "the allocator refuses this one");
    return sth_device_alloc(d->device, bytes, out);
}

static void take_back(void *context, sth_devptr address, uint64_t bytes) {
    calls_device *d = context;
    sth_device_free(d->device, address, bytes);
}

static void trim(void *context) { (void)context; }

static void odd_options(calls *c, sth_runtime_options *o) {
    switch (calls_byte(c) % 14) {
    case 0: o->size = (size_t)calls_extreme(c); break;
    case 1: o->budget = calls_extreme(c); break;
    case 2: o->reserved = calls_extreme(c); break;
    case 3: o->least_room = calls_extreme(c); break;
    case 4: o->name = calls_text(c); break;
    case 5: o->policy = (sth_policy)calls_choice(c, 2); break;
    case 6: o->prefetch_window = (uint32_t)calls_extreme(c); break;
    case 7: o->high_watermark = calls_extreme(c), o->low_watermark = calls_extreme(c); break;
    case 8: o->link_bytes_per_s = calls_real(c); break;
    case 9: o->chunk_bytes = calls_extreme(c); break;
    case 10: o->reader_threads = calls_byte(c) % 4 ? calls_byte(c) % 3 : UINT32_MAX - calls_byte(c) % 2; break;
    case 11: o->copy_priority = (int)calls_extreme(c); break;
    case 12: o->telemetry_max_bytes = calls_extreme(c), o->telemetry_path = fuzz_path("telemetry"); break;
    default: o->allocator.free = NULL, o->allocator.alloc = lend;
    }
}

static void make(calls *c, calls_runtime *r, calls_device *d) {
    sth_runtime_options o;
    sth_runtime_options_init(&o);
    sth_runtime_options_init(NULL);
    o.budget = calls_byte(c) % 4 ? d->memory / (1 + calls_byte(c) % 4u) : calls_bytes(c, CALLS_MEMORY);
    o.policy = calls_byte(c) % 4 ? STH_POLICY_PLANNED : STH_POLICY_STATIC;
    o.link_bytes_per_s = calls_byte(c) % 4 ? 1e9 : 0;
    o.reader_threads = calls_byte(c) % 2;
    o.staging_bytes = calls_byte(c) % 2 ? 0 : calls_bytes(c, 1 << 17);
    o.ram_budget = calls_byte(c) % 2 ? 0 : calls_bytes(c, 1 << 17);
    o.read_only = calls_byte(c) & 1;
    o.parked = calls_once_in(c, 8);
    if (calls_once_in(c, 4)) o.allocator = (sth_allocator){lend, take_back, calls_byte(c) & 1 ? trim : NULL, d};
    bool pooled = c->pool && !c->slab_count && calls_once_in(c, 4);
    if (pooled) o.pool = c->pool, c->pool_lent = true;
    const char *lines[] = {fuzz_path("telemetry"), fuzz_folder(), "/dev/null", "/nothing/at/all", ""};
    if (calls_once_in(c, 8)) o.telemetry_path = lines[calls_byte(c) % 5];
    if (calls_once_in(c, 4)) odd_options(c, &o);
    sth_runtime *made = (void *)r;
    sth_status rc = CALLS_TRY(sth_runtime_create(calls_or_null(c, d->device), calls_or_null(c, &o), &made));
    CHECK(rc == STH_OK || made == (void *)r);
    *r = (calls_runtime){.runtime = rc == STH_OK ? made : NULL, .on = d};
}

/* Host images: `bytes` of memory that is there, in an arena or not. */
static void from_host(calls *c, sth_unit_desc *u) {
    calls_arena *a = &c->arenas[calls_byte(c) % CALLS_ARENAS];
    if (a->count && calls_byte(c) % 2) {
        uint32_t i = calls_byte(c) % a->count;
        u->host = a->at[i];
        u->arena = a->arena;
        u->bytes = a->bytes[i];
    } else {
        u->host = calls_images + 512 * (calls_byte(c) % 64);
        u->bytes = calls_bytes(c, CALLS_MEMORY / 2);
        if (a->arena && calls_once_in(c, 8)) u->arena = a->arena; /* which does not hold it */
    }
}

static void from_files(calls *c, sth_unit_desc *u, sth_file_range *ranges) {
    bool stored = c->store && calls_byte(c) & 1;
    u->checkpoint = stored ? NULL : c->checkpoint;
    u->store = stored ? c->store : NULL;
    u->range_count = 1 + calls_byte(c) % 2u;
    u->ranges = ranges;
    for (uint32_t i = 0; i < u->range_count; i++)
        ranges[i] = (sth_file_range){calls_number(c, 2), calls_byte(c) % 4 ? 8 * calls_byte(c) : calls_extreme(c),
                                     calls_bytes(c, 1 << 10), 512 * (calls_byte(c) % 3u)};
    u->bytes = 2048;
}

enum { PACKED = 16, PACKED_BYTES = 8192 };
static _Alignas(512) uint8_t packed_images[PACKED][PACKED_BYTES];

/* Segments over a packed image of its own: laid out, or with one member that is odd. */
static void pack(calls *c, sth_unit_desc *u, sth_segment *segments, uint32_t capacity) {
    sth_segment whole = {.encoding = (sth_transfer)(1 + calls_byte(c) % 3), .dtype = STH_DTYPE_F32,
                         .rows = 1 + calls_byte(c) % 16u, .cols = 4 * (1 + calls_byte(c) % 32u)};
    uint32_t count = 0;
    uint64_t packed = 0;
    if (c->packed == PACKED ||
        CALLS_TRY(sth_transfer_layout(&whole, 1, 1 << 12, segments, capacity, &count, &packed)) != STH_OK)
        return;
    CHECK(packed <= PACKED_BYTES);
    u->segments = segments;
    u->segment_count = count;
    u->bytes = whole.rows * whole.cols * 4;
    u->packed_bytes = packed;
    u->host = packed_images[c->packed++];
    u->arena = NULL;
    u->master = calls_byte(c) & 1 ? calls_images + CALLS_MEMORY / 2 : NULL;
    sth_segment *odd = &segments[calls_byte(c) % count];
    switch (calls_byte(c) % 24) {
    case 0: odd->encoding = (sth_transfer)calls_choice(c, STH_TRANSFER_COUNT); break;
    case 1: odd->dtype = (sth_dtype)calls_choice(c, STH_DTYPE_COUNT); break;
    case 2: odd->rows = calls_extreme(c); break;
    case 3: odd->cols = calls_extreme(c); break;
    case 4: odd->stride = calls_extreme(c); break;
    case 5: odd->codes = calls_extreme(c); break;
    case 6: odd->scales = calls_extreme(c); break;
    case 7: odd->zeros = calls_extreme(c); break;
    case 8: odd->place_offset = calls_extreme(c); break;
    case 9: u->segment_count = 0; break;
    case 10: u->packed_bytes = calls_byte(c) & 1 ? UINT64_MAX : calls_byte(c); break;
    default: break;
    }
}

static void add(calls *c, calls_runtime *r) {
    sth_file_range ranges[2];
    sth_segment segments[16];
    sth_unit_tensor tensor = {calls_or_null(c, "weight"), calls_extreme(c)};
    sth_unit_desc u = {.name = calls_or_null(c, (void *)(uintptr_t)calls_text(c)), .group = "group"};
    uint32_t number = 77;
    if ((c->checkpoint || c->store) && calls_byte(c) % 4 == 0) from_files(c, &u, ranges);
    else if (calls_once_in(c, 4)) pack(c, &u, segments, 16);
    else from_host(c, &u);
    u.flags = calls_byte(c) % 2 ? 0
              : calls_byte(c) % 8 ? (calls_byte(c) & 15) | (calls_byte(c) & 3u) << 8 : (uint32_t)calls_extreme(c);
    if (calls_once_in(c, 8)) u.tensors = calls_or_null(c, &tensor), u.tensor_count = 1;
    sth_status rc = CALLS_TRY(sth_runtime_add_unit(calls_or_null(c, r->runtime), calls_or_null(c, &u), &number));
    CHECK(rc == STH_OK ? number + 1 == sth_runtime_unit_count(r->runtime) : number == 77);
}

static uint32_t any_unit(calls *c, calls_runtime *r) { return calls_number(c, sth_runtime_unit_count(r->runtime)); }

static void acquire(calls *c, calls_runtime *r) {
    sth_lease lease = {.unit = 77};
    sth_status rc = CALLS_TRY(sth_unit_acquire(r->runtime, any_unit(c, r), calls_stream(c), &lease));
    if (rc != STH_OK) return;
    CHECK(lease.address && lease.address % 512 == 0);
    if (r->leased < CALLS_LEASES && calls_byte(c) & 1) r->leases[r->leased++] = lease;
    else sth_lease_release(r->runtime, &lease);
}

static void let_go(calls *c, calls_runtime *r) {
    if (!r->leased) return;
    uint32_t i = calls_byte(c) % r->leased;
    sth_lease_release(NULL, &r->leases[i]);
    sth_lease_release(r->runtime, NULL);
    sth_lease_release(r->runtime, &r->leases[i]);
    r->leases[i] = r->leases[--r->leased];
}

static void whole_step(calls *c, calls_runtime *r) {
    uint32_t units = sth_runtime_unit_count(r->runtime);
    if (CALLS_TRY(sth_step_begin(r->runtime)) != STH_OK) return;
    for (uint32_t i = 0; i < units; i++) {
        sth_lease lease;
        if (CALLS_TRY(sth_unit_acquire(r->runtime, i, 0, &lease)) == STH_OK) sth_lease_release(r->runtime, &lease);
    }
    if (calls_byte(c) & 1) CALLS_TRY(sth_step_pause(r->runtime));
    CALLS_TRY(sth_step_end(r->runtime));
}

static void set_host(calls *c, calls_runtime *r) {
    calls_arena *a = &c->arenas[calls_byte(c) % CALLS_ARENAS];
    uint32_t unit = any_unit(c, r);
    sth_unit_stats stats;
    sth_arena *in = NULL;
    const void *host = calls_images;
    if (CALLS_TRY(sth_unit_stats_get(r->runtime, unit, &stats)) == STH_OK && a->count && a->bytes[0] >= stats.bytes)
        in = a->arena, host = a->at[0];
    else if (a->arena && calls_once_in(c, 8)) in = a->arena; /* which does not hold it */
    CALLS_TRY(sth_unit_set_host(calls_or_null(c, r->runtime), unit, calls_or_null_const(c, host), in));
}

static void masters(calls *c, calls_runtime *r) {
    sth_runtime *on = calls_or_null(c, r->runtime);
    uint32_t units[4], count;
    bool kept;
    switch (calls_byte(c) % 4) {
    case 0: CALLS_TRY(sth_unit_give_master(on, any_unit(c, r), calls_or_null_const(c, calls_images))); break;
    case 1: CALLS_TRY(sth_unit_drop_master(on, any_unit(c, r))); break;
    case 2: CALLS_TRY(sth_unit_keep_master(on, any_unit(c, r), calls_or_null(c, &kept))); break;
    default: CALLS_TRY(sth_runtime_dropped_masters(on, calls_byte(c) & 1, units, 4, calls_or_null(c, &count)));
    }
}

static void ask(calls *c, calls_runtime *r) {
    sth_runtime *on = calls_or_null(c, r->runtime);
    sth_unit_stats unit;
    sth_step_metrics metrics;
    sth_runtime_stats stats;
    sth_file_way way;
    sth_prediction prediction;
    CALLS_TRY(sth_unit_stats_get(on, any_unit(c, r), calls_or_null(c, &unit)));
    CALLS_TRY(sth_runtime_step_metrics(on, calls_number(c, 3), calls_or_null(c, &metrics)));
    CALLS_TRY(sth_runtime_stats_get(on, calls_or_null(c, &stats)));
    CALLS_TRY(sth_runtime_file_way(on, calls_number(c, 2), calls_or_null(c, &way)));
    CALLS_TRY(sth_runtime_prediction(on, calls_or_null(c, &prediction)));
    (void)sth_runtime_file_count(on);
    (void)sth_runtime_smallest_budget(on);
    (void)sth_runtime_is_parked(on);
    sth_runtime_count_guards(on, calls_extreme(c), calls_extreme(c), calls_extreme(c));
    sth_runtime_count_mapped(on, calls_extreme(c));
    sth_runtime_count_d2h(on, calls_extreme(c));
}

static void resident(calls *c, calls_runtime *r) {
    sth_runtime *on = calls_or_null(c, r->runtime);
    uint64_t left;
    switch (calls_byte(c) % 8) {
    case 0:
        if (CALLS_TRY(sth_runtime_keep_begin(on)) == STH_OK) r->keeps++;
        break;
    case 1:
        if (r->keeps || calls_once_in(c, 4)) sth_runtime_keep_end(on);
        if (r->keeps && on) r->keeps--;
        break;
    case 2: CALLS_TRY(sth_runtime_reserve(on, (sth_resident_priority)calls_choice(c, 3))); break;
    case 3: sth_runtime_release(on); break;
    case 4: CALLS_TRY(sth_runtime_guest_begin(on)); break;
    case 5: CALLS_TRY(sth_runtime_guest_end(on, calls_or_null(c, &left))); break;
    case 6:
        CALLS_TRY(sth_runtime_set_reserved(on, calls_bytes(c, 1 << 17)));
        CALLS_TRY(sth_runtime_soften(on, calls_bytes(c, 1 << 17)));
        (void)sth_runtime_reserved(on);
        break;
    default: CALLS_TRY(sth_residency_set_cap(r->on->device, calls_byte(c) % 4 ? 0 : calls_bytes(c, CALLS_MEMORY)));
    }
}

static void account(calls *c, calls_runtime *r) {
    sth_residency_info info;
    sth_budget_verdict verdict;
    sth_memory_reading m = {
        .total = r->on->memory, .free = calls_byte(c) % 4 ? r->on->memory / 2 : calls_extreme(c),
        .framework_reserved = calls_byte(c) % 4 ? 0 : calls_extreme(c), .failures = calls_byte(c) % 4,
        .framework_allocated = calls_byte(c) % 4 ? 0 : calls_extreme(c),
        .framework_peak = calls_byte(c) % 4 ? 0 : calls_extreme(c), .retries = calls_byte(c) % 4,
        .limit = calls_byte(c) % 4 ? 0 : calls_extreme(c), .growth = calls_real(c), .budget = calls_extreme(c),
        .want = calls_extreme(c), .least = calls_extreme(c), .steps = calls_extreme(c)};
    if (calls_once_in(c, 8)) m.total = calls_extreme(c);
    CALLS_TRY(sth_residency_get(calls_or_null(c, r->on->device), calls_or_null(c, &info)));
    CALLS_TRY(sth_residency_find_budget(calls_or_null(c, r->on->device), calls_or_null(c, &m),
                                        calls_or_null(c, &verdict)));
    if (calls_once_in(c, 4)) sth_residency_forget(calls_or_null(c, r->on->device));
}

static void graph(calls *c, calls_runtime *r) {
    sth_graph_info info;
    bool current;
    switch (calls_byte(c) % 6) {
    case 0: CALLS_TRY(sth_graph_prepare(calls_or_null(c, r->runtime))); break;
    case 1: CALLS_TRY(sth_graph_fork(calls_or_null(c, r->runtime), calls_stream(c))); break;
    case 2: CALLS_TRY(sth_graph_join(calls_or_null(c, r->runtime), calls_stream(c))); break;
    case 3: CALLS_TRY(sth_graph_settle(calls_or_null(c, r->runtime), calls_or_null(c, &info))); break;
    case 4:
        CALLS_TRY(sth_graph_replay_begin(calls_or_null(c, r->runtime), calls_extreme(c), calls_stream(c),
                                         calls_or_null(c, &current)));
        break;
    default: CALLS_TRY(sth_graph_replay_end(calls_or_null(c, r->runtime), calls_stream(c)));
    }
}

static void end(calls_runtime *r) {
    sth_runtime_destroy(r->runtime);
    for (uint32_t i = 0; i < r->leased; i++) sth_lease_release(r->runtime, &r->leases[i]);
    *r = (calls_runtime){0};
}

void calls_on_runtime(calls *c) {
    calls_device *d = calls_any_device(c);
    calls_runtime *r = &c->runtimes[calls_byte(c) % CALLS_RUNTIMES];
    bool equal;
    uint64_t hash;
    if (!r->runtime) {
        if (d) make(c, r, d);
        for (int i = 0; r->runtime && i < 3; i++) add(c, r);
        return;
    }
    sth_runtime *on = calls_or_null(c, r->runtime);
    switch (calls_byte(c) % 24) {
    case 0: add(c, r); break;
    case 1: CALLS_TRY(sth_step_begin(on)); break;
    case 2: CALLS_TRY(sth_step_pause(on)); break;
    case 3: CALLS_TRY(sth_step_end(on)); break;
    case 4: CALLS_TRY(sth_runtime_poll(on)); break;
    case 5: CALLS_TRY(sth_runtime_gather(on, calls_bytes(c, CALLS_MEMORY))); break;
    case 6: CALLS_TRY(sth_unit_mark_written(on, any_unit(c, r))); break;
    case 7: calls_once_in(c, 3) ? masters(c, r) : set_host(c, r); break;
    case 8: CALLS_TRY(sth_runtime_fence(on)), CALLS_TRY(sth_step_mark_backward(on, calls_byte(c) & 1)); break;
    case 9: CALLS_TRY(sth_runtime_synchronize(on)), CALLS_TRY(sth_runtime_pass_end(on)); break;
    case 10: CALLS_TRY(sth_runtime_set_budget(on, calls_bytes(c, CALLS_MEMORY))); break;
    case 11:
        CALLS_TRY(sth_unit_verify(on, any_unit(c, r), calls_or_null(c, &equal), calls_or_null(c, &hash)));
        break;
    case 12: ask(c, r); break;
    case 13:
    case 14: resident(c, r); break;
    case 15: account(c, r); break;
    case 16: graph(c, r); break;
    case 17:
        CALLS_TRY(sth_runtime_set_conductor(on, calls_or_null(c, c->conductor)));
        CALLS_TRY(sth_runtime_set_prefetch_window(on, calls_number(c, 5)));
        break;
    case 18: if (calls_once_in(c, 4)) end(r); break;
    case 19: let_go(c, r); break;
    case 20: whole_step(c, r); break;
    case 21: CALLS_TRY(sth_runtime_seal(on)); break;
    default: acquire(c, r);
    }
}

void calls_end_runtimes(calls *c) {
    for (int i = 0; i < CALLS_RUNTIMES; i++)
        if (c->runtimes[i].runtime) end(&c->runtimes[i]);
    sth_runtime_destroy(NULL);
}
