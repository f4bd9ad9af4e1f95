/* Names under which a checkpoint may hold a parameter, and their ranks. */
#include "store/candidates.h"

#include <string.h>

#include "base/fault.h"
#include "base/memory.h"
#include "support/check.h"

enum { NAMES_MOST = 256, LENGTH_MOST = 160 };

typedef struct seen {
    uint32_t count, ranks[NAMES_MOST];
    char names[NAMES_MOST][LENGTH_MOST];
} seen;

static void see(void *context, uint32_t rank, const char *name) {
    seen *s = context;
    assert_in_range(s->count, 0, NAMES_MOST - 1);
    assert_in_range(strlen(name), 0, LENGTH_MOST - 1);
    s->ranks[s->count] = rank;
    strcpy(s->names[s->count++], name);
}

static seen names_of(const char *name) {
    seen s = {0};
    assert_ok(sthi_checkpoint_names(name, see, &s));
    return s;
}

/* The rank of the first candidate of this name; -1: there is none. */
static int rank_of(const seen *s, const char *name) {
    for (uint32_t i = 0; i < s->count; i++)
        if (!strcmp(s->names[i], name)) return (int)s->ranks[i];
    return -1;
}

static void a_name_has_candidates_in_three_ranks(void **state) {
    (void)state;
    static const struct {
        const char *ours, *theirs;
        int rank;
    } table[] = {
        {"blocks.0.up.weight", "blocks.0.up.weight", 0},
        {"blocks.0.up.weight", "model.diffusion_model.blocks.0.up.weight", 1},
        {"blocks.0.up.base_layer.weight", "blocks.0.up.weight", 1},
        {"orig.orig.up.weight", "up.weight", 1},
        {"blocks.0.orig.up.org_module.weight", "model.blocks.0.up.weight", 1},
        {"blocks.0.attn1.to_q.weight", "blocks.0.self_attn.q.weight", 2},
        {"blocks.0.attn1.to_q.weight", "blocks.0.self_attn.to_q.weight", 2},
        {"attn2.attn2.mlp", "diffusion_model.cross_attn.cross_attn.block_sparse_moe", 2},
        {"blocks.0.attn2.to_out.0.weight", "blocks.0.cross_attn.o.weight", 2},
        {"blocks.0.ffn.net.0.proj.weight", "diffusion_model.blocks.0.ffn.0.weight", 2},
        {"blocks.0.ff.net.2.weight", "blocks.0.ff.linear_out.weight", 2},
        {"blocks.0.scale_shift_table", "blocks.0.modulation", 2},
        {"orig.norm2", "model.norm3", 2},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        seen s = names_of(table[i].ours);
        if (rank_of(&s, table[i].theirs) != table[i].rank)
            fail_msg("%s is in rank %d for %s", table[i].theirs, rank_of(&s, table[i].theirs), table[i].ours);
        for (uint32_t k = 1; k < s.count; k++) assert_true(s.ranks[k - 1] <= s.ranks[k]);
        assert_int_equal(s.ranks[0], 0);
        assert_string_equal(s.names[0], table[i].ours);
    }
}

static void components_are_replaced_as_a_whole(void **state) {
    (void)state;
    static const char *const table[] = {"blocks.0.attn10.to_qkv.weight", "myorig.x", "a.mlps", "xmlp.b", "a.orig", "",
                                        ".", "..", "norm22.to_out.01"};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        seen s = names_of(table[i]);
        assert_int_equal(s.count, 5); /* itself, and itself under each root */
        assert_int_equal(s.ranks[4], 1);
        assert_string_equal(s.names[1], table[i]);
    }
}

static void a_name_with_too_many_candidates_is_refused(void **state) {
    (void)state;
    seen s = {0};
    assert_status(sthi_checkpoint_names("attn1.attn2.to_q.to_k.to_v.to_out.0.ffn.net.0.proj.ffn.net.2.norm2."
                                        "scale_shift_table.ff.net.0.proj.ff.net.2.mlp", see, &s),
                  STH_INVALID_ARGUMENT);
    assert_int_equal(s.count, 0);
}

static void any_allocation_may_fail(void **state) {
    (void)state;
    long live = sthi_alloc_live();
    sth_status rc = STH_OUT_OF_HOST_MEMORY;
    for (uint64_t n = 1; rc != STH_OK; n++) {
        seen s = {0};
        sthi_fault_arm(STHI_FAULT_ALLOC, n, false);
        rc = sthi_checkpoint_names("orig.mlp.weight", see, &s);
        sthi_fault_disarm_all();
        if (rc != STH_OK) assert_int_equal(rc, STH_OUT_OF_HOST_MEMORY);
        assert_int_equal(sthi_alloc_live(), live);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_name_has_candidates_in_three_ranks),
        cmocka_unit_test(components_are_replaced_as_a_whole),
        cmocka_unit_test(a_name_with_too_many_candidates_is_refused),
        cmocka_unit_test(any_allocation_may_fail),
    };
    return cmocka_run_group_tests_name("store/candidates", tests, NULL, NULL);
}
