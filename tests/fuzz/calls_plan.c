/* Calls of plan.h and transfer.h. */
#include "fuzz/calls.h"

enum { UNITS = 5, USES = 8, IMAGE = 1 << 16 };

static void predict(calls *c, sth_plan_input *in, sth_plan *plan) {
    sth_prediction prediction;
    CHECK(plan->unit_count == in->unit_count && plan->use_count == in->use_count);
    if (calls_byte(c) & 1) in->link_bytes_per_s = calls_real(c);
    if (calls_byte(c) & 1) in->chunk_bytes = calls_extreme(c);
    CALLS_TRY(sth_plan_predict(calls_or_null(c, in), calls_or_null(c, plan), calls_or_null(c, &prediction)));
}

static void plan(calls *c) {
    sth_plan_unit units[UNITS];
    sth_plan_use uses[USES];
    sth_plan_input in;
    sth_plan_input_init(&in);
    sth_plan_input_init(NULL);
    for (int i = 0; i < UNITS; i++)
        units[i] = (sth_plan_unit){calls_bytes(c, 1 << 17), calls_byte(c) % 2 ? 0 : calls_byte(c) & 63,
                                   calls_byte(c) % 4 ? 0 : calls_extreme(c),
                                   calls_byte(c) % 4 ? 0 : calls_extreme(c)};
    for (int i = 0; i < USES; i++)
        uses[i] = (sth_plan_use){calls_number(c, UNITS), calls_byte(c) % 2 ? 0 : calls_number(c, USES),
                                 calls_byte(c) % 8 ? 1000 * calls_byte(c) : (int64_t)calls_extreme(c),
                                 calls_byte(c) % 8 ? 0 : (int64_t)calls_extreme(c)};
    in.units = calls_or_null_const(c, units);
    in.uses = calls_or_null_const(c, uses);
    in.unit_count = 1 + calls_byte(c) % UNITS;
    in.use_count = calls_byte(c) % (USES + 1u);
    in.budget = calls_bytes(c, CALLS_MEMORY);
    in.link_bytes_per_s = calls_byte(c) % 4 ? 1e9 : calls_real(c);
    in.copy_overhead_ns = calls_byte(c) % 4 ? 2200 : (int64_t)calls_extreme(c);
    in.chunk_bytes = calls_byte(c) % 4 ? 1 << 14 : calls_extreme(c);
    in.ring_granularity = calls_byte(c) % 4 ? 512 : calls_extreme(c);
    in.ring_mapped_twice = calls_byte(c) & 1;
    in.held_at_once = calls_byte(c) % 4 ? 1 : calls_number(c, USES);
    in.disk_bytes_per_s = calls_byte(c) % 4 ? 0 : calls_real(c);
    in.read_ahead_bytes = calls_byte(c) % 4 ? 1 << 16 : calls_extreme(c);
    in.least_ring_bytes = calls_byte(c) % 4 ? 0 : calls_extreme(c);
    if (calls_once_in(c, 24)) in.size = (size_t)calls_extreme(c);
    sth_plan *made = (void *)c;
    uint64_t least = sth_plan_smallest_budget(calls_or_null(c, &in));
    sth_status rc = CALLS_TRY(sth_plan_create(&in, &made));
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc == STH_OK) predict(c, &in, made), sth_plan_destroy(made);
    if (rc == STH_OK || !least || least > CALLS_MEMORY) return;
    in.budget = least;
    rc = CALLS_TRY(sth_plan_create(&in, &made));
    CHECK(rc == STH_OK); /* the budget that is called the smallest works */
    sth_plan_destroy(made);
}

static void budget(calls *c) {
    sth_budget_weight weights[6];
    uint32_t modules[4];
    sth_budget_pair owners[8], inside[6];
    sth_segment packed = {.encoding = (sth_transfer)calls_choice(c, 4), .rows = 1 + calls_byte(c), .cols = 64};
    sth_budget_model m;
    sth_budget_model_init(calls_or_null(c, &m));
    sth_budget_model_init(&m);
    m.weights = weights, m.modules = modules, m.owners = owners, m.inside = inside;
    m.weight_count = calls_byte(c) % 7u, m.module_count = 1 + calls_byte(c) % 4u;
    m.owner_count = calls_byte(c) % 9u, m.inside_count = calls_byte(c) % 7u;
    for (uint32_t i = 0; i < 6; i++)
        weights[i] = (sth_budget_weight){.bytes = 512 * (uint64_t)calls_byte(c), .module = calls_byte(c) % 4u,
                                         .kind = calls_byte(c) % 2u, .flags = calls_byte(c),
                                         .packed = calls_byte(c) % 4 ? NULL : &packed};
    for (uint32_t i = 0; i < 4; i++) modules[i] = calls_byte(c);
    for (uint32_t i = 0; i < 8; i++) owners[i] = (sth_budget_pair){calls_byte(c) % 4u, calls_byte(c) % 6u};
    for (uint32_t i = 0; i < 6; i++) inside[i] = (sth_budget_pair){calls_byte(c) % 4u, calls_byte(c) % 4u};
    if (calls_once_in(c, 8)) weights[0].bytes = calls_extreme(c);
    m.fixed_bytes = calls_byte(c) % 4 ? calls_byte(c) : calls_extreme(c);
    m.one_extent = calls_byte(c) % 2;
    if (calls_once_in(c, 24)) m.size = (size_t)calls_extreme(c);
    uint64_t bytes = calls_byte(c) % 2 ? calls_extreme(c) : 4096 * (uint64_t)calls_byte(c), with_room = 0;
    sth_budget_advice *advice = NULL;
    CALLS_TRY(sth_budget_with_room(&m, bytes, calls_or_null(c, &with_room)));
    if (CALLS_TRY(sth_budget_advise(calls_or_null(c, &m), bytes, &advice)) != STH_OK) return;
    uint64_t smallest = advice->smallest;
    CHECK(advice->works == (bytes >= smallest));
    sth_budget_advice_destroy(advice);
    if (CALLS_TRY(sth_budget_advise(&m, smallest, &advice)) != STH_OK) return;
    CHECK(advice->works && advice->smallest == smallest);
    sth_budget_advice_destroy(advice);
}

static void transfer(calls *c) {
    static uint8_t packed[2 * IMAGE];
    sth_segment tensors[2], segments[64];
    uint32_t count = 1 + calls_byte(c) % 2u, made = 0;
    uint64_t bytes = 0, at = 0;
    sth_transfer_error error = {0};
    for (uint32_t i = 0; i < count; i++) {
        tensors[i] = (sth_segment){.encoding = (sth_transfer)calls_choice(c, 4), .dtype = STH_DTYPE_F32,
                                   .place_offset = at, .rows = 1 + calls_byte(c) % 16u, .cols = 4 + calls_byte(c)};
        if (calls_byte(c) % 4 == 0) tensors[i].dtype = (sth_dtype)calls_choice(c, STH_DTYPE_COUNT);
        if (tensors[i].encoding == STH_TRANSFER_VERBATIM) tensors[i].rows = 1;
        at += (tensors[i].rows * tensors[i].cols * 4 + 15) / 16 * 16;
    }
    if (calls_once_in(c, 8)) tensors[0].rows = calls_bytes(c, 64);
    if (calls_once_in(c, 8)) tensors[0].cols = calls_bytes(c, 64);
    if (calls_once_in(c, 8)) tensors[count - 1].place_offset = calls_extreme(c) | UINT64_C(1) << 62;
    uint64_t piece = calls_byte(c) % 4 ? 1 << 10 : calls_extreme(c);
    CALLS_TRY(sth_transfer_layout(calls_or_null_const(c, tensors), count, piece, NULL, 0, &made, &bytes));
    if (CALLS_TRY(sth_transfer_layout(tensors, count, piece, segments, 64, &made, &bytes)) != STH_OK) return;
    if (bytes > sizeof packed || tensors[count - 1].place_offset >= IMAGE) return;
    for (uint32_t i = 0; i < IMAGE / 4; i++) {
        float value = (float)(i % 97) - 48;
        memcpy(calls_memory + 4 * i, &value, 4);
    }
    sth_segment *odd = &segments[calls_byte(c) % made];
    if (calls_once_in(c, 8)) odd->encoding = (sth_transfer)calls_choice(c, STH_TRANSFER_COUNT + 3);
    if (calls_once_in(c, 8)) odd->dtype = (sth_dtype)calls_choice(c, STH_DTYPE_COUNT);
    if (calls_once_in(c, 8)) odd->stride = calls_byte(c);
    if (CALLS_TRY(sth_transfer_encode(calls_or_null_const(c, segments), made, calls_memory, packed,
                                      1 + calls_byte(c) % 2u, calls_or_null(c, &error))) == STH_OK)
        CALLS_TRY(sth_transfer_decode(calls_or_null_const(c, segments), made, packed, calls_memory));
    memset(calls_memory, 0, IMAGE);
}

void calls_on_plan(calls *c) {
    if (calls_byte(c) & 1) plan(c);
    else transfer(c);
    budget(c);
    sth_plan_destroy(NULL);
}
