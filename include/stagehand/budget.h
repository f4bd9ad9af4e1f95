/* stagehand/budget.h - the budget of a model that has not run yet: which small weights stay on the
 * device, which units are kept there, and the smallest budget that works.
 *
 *     fill sth_budget_model -> sth_budget_advise() -> advice->... -> sth_budget_advice_destroy()
 *
 *     budget = fixed + small weights that stay + stages + places
 *
 * The advice knows modules and their weights, and no order of uses: the planner (plan.h) plans with
 * the order, later. The advice counts the worst that modules can do:
 * - A weight streams as a part of a unit. Neighbors of one module and one kind are one unit.
 * - A call of a module leases all weights that the module owns. While a module inside runs, the
 *   lease of the outer one goes on, wherever in memory it lies: what is free lies apart then.
 * - Small weights stay on the device as far as 1/8 of the budget holds them, and as far as the
 *   rest leaves enough to work with.
 * - Packed bytes arrive in STH_BUDGET_STAGES buffers, each as large as the largest piece. A piece
 *   is 1/256 of the budget, or smaller where the budget has no room for that. There are more
 *   buffers, up to STH_BUDGET_MOST_STAGES, as far as 1/64 of the budget holds them and 1/8 of what
 *   places do not need: the link goes on while expansions wait for a kernel to end.
 * With every budget from the smallest on the model works.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_BUDGET_H
#define STAGEHAND_BUDGET_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/status.h"
#include "stagehand/transfer.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
    STH_BUDGET_SMALL = 4096,               /* bytes: a weight of so many is small whatever its shape */
    STH_BUDGET_STAGES = 3,                 /* buffers on the device in which packed bytes arrive, at least */
    STH_BUDGET_MOST_STAGES = 17,
    STH_BUDGET_LEAST_PIECE = 16 << 10,     /* bytes of a piece, but where a single row has more */
    STH_BUDGET_MOST_PIECE = 8 << 20
};

enum {
    STH_WEIGHT_SMALL = 1u << 0,    /* a vector or a scalar: small whatever its size */
    STH_WEIGHT_IN_PLACE = 1u << 1, /* needs no place where it is all of its unit: read in host memory */
    STH_WEIGHT_TRAINS = 1u << 2,   /* its unit crosses the link as it is */
    STH_WEIGHT_STORED = 1u << 3    /* with `packed`: packed in its file, and crosses so in any case */
};

typedef struct sth_budget_weight {
    uint64_t bytes;  /* on the device; multiple of 512 */
    uint32_t module; /* whose unit it is in; weights of one module are neighbors */
    uint32_t kind;   /* any number: weights of different kinds are in different units */
    uint32_t flags;  /* STH_WEIGHT_ bits */
    /* How it crosses packed: the whole tensor as one segment. Read are encoding, dtype, rows, cols,
     * and, where `stride` is not 0, what sth_quant_segments() sets. NULL: it does not. If one
     * weight of a unit crosses packed, the unit's other weights cross in pieces, too. */
    const sth_segment *packed;
} sth_budget_weight;

enum {
    STH_MODULE_LIST = 1u << 0, /* a loop reads its weights one by one: each is a unit of its own */
    STH_MODULE_OUTER = 1u << 1 /* has modules inside: its small weights stay before those of others */
};

/* first, second: module and a weight that it owns; or a module and one inside it. */
typedef struct sth_budget_pair {
    uint32_t first, second;
} sth_budget_pair;

typedef struct sth_budget_model {
    size_t size;                      /* sizeof(sth_budget_model), set by init */
    const sth_budget_weight *weights; /* what may stream, in the order of use */
    uint32_t weight_count;
    const uint32_t *modules;          /* [module_count] STH_MODULE_ bits */
    uint32_t module_count;
    const sth_budget_pair *owners;    /* (module, weight), each once, weights that are tied too */
    uint32_t owner_count;
    const sth_budget_pair *inside;    /* (module, module inside it), at any depth, each once */
    uint32_t inside_count;
    uint64_t fixed_bytes;             /* on the device in any case: what never streams */
    bool one_extent;                  /* all places lie in one piece of memory, and no unit is kept
                                         (the static policy). Default false */
} sth_budget_model;
STH_API void sth_budget_model_init(sth_budget_model *model);

typedef struct sth_budget_advice {
    uint32_t weight_count, unit_count;
    uint32_t *unit;         /* [weight_count]: number of the weight's unit; STH_BUDGET_STAYS */
    bool *keep;             /* [unit_count]: add it with STH_UNIT_KEEP. A module holds it while modules
                               inside use theirs */
    bool works;             /* the budget is enough. If not, the rest is as for one that is */
    uint64_t piece_bytes;   /* of packed bytes: for sth_transfer_layout() and sth_quant_segments() */
    uint64_t stays_bytes;   /* fixed ones, and small weights that stay */
    uint32_t stages;        /* buffers: for sth_runtime_options.stages */
    uint64_t stage_bytes;   /* of all stages together; 0: nothing crosses packed */
    uint64_t units_bytes;   /* of all units that need places */
    uint64_t units_least;   /* bytes of places with which these work */
    uint64_t least_room;    /* for sth_runtime_options.least_room */
    uint64_t smallest;      /* budget that works */
    uint64_t comfortable;   /* budget: with room for three of the largest unit at once */
} sth_budget_advice;

#define STH_BUDGET_STAYS UINT32_MAX

/* Tells how the model uses `budget` bytes. Returns INVALID_ARGUMENT for a model with sizes or
 * numbers that cannot be, naming them; OUT_OF_HOST_MEMORY. Allocates: the advice, and scratch. */
STH_API sth_status sth_budget_advise(const sth_budget_model *model, uint64_t budget,
                                     sth_budget_advice **out_advice);
STH_API void sth_budget_advice_destroy(sth_budget_advice *advice); /* NULL is fine */

/* The budget with which the model, wrapped again, has `room` bytes for places: more of it goes to
 * small weights and larger pieces. Returns, Allocates: as sth_budget_advise. */
STH_API sth_status sth_budget_with_room(const sth_budget_model *model, uint64_t room,
                                        uint64_t *out_budget);

#ifdef __cplusplus
}
#endif
#endif
