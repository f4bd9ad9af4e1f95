/* The planner's inner parts: a digest of the input, the loads and homes that follow from a choice of
 * residents, the simulation that prices them, and the search over choices. Pure: no I/O, no clock. */
#ifndef STHI_CORE_PLAN_H
#define STHI_CORE_PLAN_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/plan.h"

/* A flag of units in inputs that plan_packed.c makes: it stays packed, whatever else is chosen. */
#define STHI_UNIT_STAYS_PACKED (1u << 31)

/* What the planner may do with a unit. */
typedef enum sthi_unit_kind {
    STHI_UNIT_UNUSED,    /* in no use of the step: nothing to plan */
    STHI_UNIT_FIXED,     /* always resident: KEEP, empty, or held without a break */
    STHI_UNIT_DEMAND,    /* never planned */
    STHI_UNIT_STREAMABLE /* resident or streamed, as the search likes */
} sthi_unit_kind;

/* The checked input and what can be said about it before any choice is made. */
typedef struct sthi_plan_world {
    const sth_plan_input *in;
    uint8_t *kind;           /* [unit_count] sthi_unit_kind */
    uint32_t *unit_uses;     /* [unit_count] uses in a step */
    uint32_t *back;          /* [use_count] uses since this unit's previous use, 1..use_count */
    uint32_t *order;         /* [order_count] streamable units by first use */
    uint32_t *order_use;     /* [order_count] their first uses */
    uint32_t order_count;
    uint64_t fixed_bytes;    /* of fixed units */
    uint64_t demand_bytes;   /* set aside for units on demand */
    uint64_t stream_bytes;   /* of streamable units */
    uint64_t used_bytes;     /* B: fixed units in use and streamable ones */
    double cheapest;         /* least share of its bytes that a streamable unit sends over the link */
    double dearest;          /* the largest such share */
    uint64_t disk_bytes;     /* of streamable units that come from the disk, where its rate counts */
    bool writes;             /* some unit that is used is WRITTEN */
    uint64_t written_bytes;  /* of streamable units that are WRITTEN */
    uint64_t renewed_bytes;  /* over the link in each step, for fixed units that are */
    double renewed_ns;       /* no step is shorter, because what is written comes in the step */
    uint64_t least_ring;     /* that is asked for, no more than the budget has left */
    uint64_t largest;        /* largest streamable unit */
    uint32_t largest_unit;
    bool changes;            /* some unit is PRESENT, and the first lap counts */
    bool reuse;              /* some streamable unit is used more than once */
    bool holds;              /* some use holds its unit beside later ones */
    int64_t compute_ns;
} sthi_plan_world;

/* The use at whose end what `use` holds is let go. Both are counted through the laps. */
static inline uint64_t sthi_let_go(const sth_plan_input *in, uint64_t use) {
    uint32_t held = in->uses[use % in->use_count].held;
    return use + (held ? held : in->held_at_once) - 1;
}

/* Checks the input and digests it. On success the caller calls fini. */
sth_status sthi_plan_world_init(sthi_plan_world *world, const sth_plan_input *in);
void sthi_plan_world_fini(sthi_plan_world *world);

/* Whether the use begins before its unit's previous use has let go. */
bool sthi_still_held(const sthi_plan_world *world, uint32_t use);

/* Bytes of streamable units that no plan within `room` (budget less fixed and demand bytes) can avoid to move in a
 * step. */
sth_status sthi_plan_least_bytes(const sthi_plan_world *world, uint64_t room, uint64_t *out_bytes);
/* Time that no plan within `room` can stay below; least_bytes: as above. */
double sthi_plan_least_ns(const sthi_plan_world *world, uint64_t room, uint64_t least_bytes);

/* How places are laid out in the ring. */
typedef enum sthi_homes {
    STHI_HOMES_ROW,    /* one behind the other from offset 0; the next lap starts at 0 again */
    STHI_HOMES_EVEN,   /* the same, stretched so that a lap fills a whole number of turns */
    STHI_HOMES_TURNING, /* the row runs backwards where that reaches a place that is free sooner */
    STHI_HOMES_APART   /* units that are held beside later ones lie apart, and the row runs on between them */
} sthi_homes;

typedef struct sthi_choice {
    uint64_t ring; /* bytes */
    uint64_t hold; /* a unit stays in its place until its next use if it and what streams in between
                      are together no larger than this, or nothing does; 0: never */
    sthi_homes homes;
} sthi_choice;

/* One load of a lap, or the copy that renews what the lap before left behind. */
typedef struct sthi_lap_load {
    uint32_t unit, first_use;
    uint64_t last_use; /* may be >= use_count: in the next lap */
    uint64_t bytes, offset;
} sthi_lap_load;

typedef struct sthi_span {
    uint64_t start, end; /* ring bytes */
    uint32_t owner;      /* lap * load_count + load, or OWNER_NONE */
    uint32_t prev, next;
} sthi_span;

typedef struct sthi_dep {
    uint64_t end;  /* bytes of the load, from its start, up to which this earlier load matters */
    uint32_t load; /* load_count stands for "nothing to wait for" */
} sthi_dep;

/* Chunks that wait for the same earlier loads, and so are copied back to back. */
typedef struct sthi_run {
    uint32_t dep_first, dep_last; /* inclusive */
    double ns;
} sthi_run;

/* Scratch for one input: everything that pricing one choice needs, allocated once. */
typedef struct sthi_pipe {
    uint32_t use_count, load_count;
    uint32_t renewal_count;  /* copies into places that WRITTEN units have already: they wait for no place */
    uint32_t ahead;          /* first loads of a lap that come before all renewals; see plan_pipe.c */
    bool writes;             /* as of the world */
    sthi_lap_load *loads;    /* [use_count]: load_count loads, behind them renewal_count renewals, both by first use */
    uint32_t *use_load;      /* [use_count] load or STH_NONE */
    uint32_t *start_load;    /* [use_count] load or renewal whose first use this is */
    uint32_t *free_load;     /* [use_count] first of the loads whose places are free when this use ends */
    uint32_t *free_next;     /* [use_count] by load: the next of them, or STH_NONE */
    uint8_t *written;        /* [use_count] by load or renewal: its unit is WRITTEN */
    double *end;             /* [use_count] end of each use, last lap */
    double *stall;           /* [use_count] wait before each use, last lap */
    double *arrive, *freed;  /* [use_count + 1] by load; arrive of renewals, too */
    sthi_span *spans;        /* ring bytes and who wrote them last */
    uint32_t span_count, span_spare, span_cursor;
    sthi_dep *deps;
    uint32_t dep_count;
    sthi_run *runs;
    uint32_t *run_first;     /* [use_count + 1] first run of each load */
    uint64_t *tree;          /* [2 * use_count + 1] for reuse distances */
    uint64_t *distance;      /* [use_count] */
    uint8_t *held;           /* [use_count] the use is served by its unit's previous load */
    double *missing;         /* [use_count] at its first use, the time of a copy of a resident that is not PRESENT */
    double missing_ns;       /* all of them */
    double first_share;      /* of the first lap, in a plan's price; 0: nothing is PRESENT, or the lap does not count */
    uint64_t load_bytes;     /* of one lap */
} sthi_pipe;

typedef struct sthi_price {
    bool runs;       /* false: some load would wait for a use that waits for it */
    double step_ns, link_ns, disk_ns;
    double price_ns; /* what the search compares: the step, or where there is a first lap that with shares of others */
} sthi_price;

sth_status sthi_pipe_init(sthi_pipe *pipe, uint32_t use_count);
void sthi_pipe_fini(sthi_pipe *pipe);

/* Fills loads, use_load, start_load and free_load from a choice of residents. `resident` may be NULL: nothing
 * streamable is. `anew` may be NULL; uses marked in it load their unit anew whatever `hold` says. */
void sthi_pipe_build_loads(sthi_pipe *pipe, const sthi_plan_world *world, const uint8_t *resident,
                           uint64_t hold, const uint8_t *anew);
/* Finishes start_load, free_load and renewals once loads and use_load are set. */
void sthi_pipe_index_loads(sthi_pipe *pipe, const sthi_plan_world *world);
/* Gives every load its offset. False if there is no room for one. */
bool sthi_pipe_place(sthi_pipe *pipe, const sth_plan_input *in, uint64_t ring, sthi_homes homes);
bool sthi_pipe_place_apart(sthi_pipe *pipe, const sth_plan_input *in, uint64_t ring);
/* The most bytes of loads that callers hold at once. */
uint64_t sthi_pipe_most_held(sthi_pipe *pipe, const sth_plan_input *in);
/* Says which residents the first lap brings, and what it counts. */
void sthi_pipe_note_missing(sthi_pipe *pipe, const sthi_plan_world *world, const uint8_t *resident);
/* Runs laps until they repeat. Gives up, with an infinite price, once it is known to be `limit` or more. */
sthi_price sthi_pipe_simulate(sthi_pipe *pipe, const sth_plan_input *in, uint64_t ring, double limit);
/* Time that the copies of one lap take on the link, back to back; and that their reads take on the disk. */
double sthi_pipe_link_ns(const sthi_pipe *pipe, const sth_plan_input *in);
double sthi_pipe_disk_ns(const sthi_pipe *pipe, const sth_plan_input *in);
/* Bytes of a load of the unit that cross the link. */
uint64_t sthi_wire_bytes(const sth_plan_input *in, uint32_t unit);
bool sthi_from_disk(const sth_plan_input *in, uint32_t unit); /* and the disk's rate counts */
bool sthi_is_written(const sth_plan_input *in, uint32_t unit);

/* The record of who wrote each ring byte last. */
void sthi_tape_reset(sthi_pipe *pipe, uint64_t ring);
/* Latest use at which the owners of the bytes let go of them, counted through the laps; -1 if free. */
int64_t sthi_tape_latest(sthi_pipe *pipe, const sth_plan_input *in, uint64_t ring, uint64_t offset, uint64_t bytes);
void sthi_tape_write(sthi_pipe *pipe, uint64_t ring, uint64_t offset, uint64_t bytes, uint32_t owner,
                     bool record);
#define STHI_OWNER_NONE UINT32_MAX

/* Best choice found for `room` bytes; on return the pipe holds its loads at their homes. `resident` has
 * unit_count entries, set on return. */
sth_status sthi_plan_search(const sthi_plan_world *world, sthi_pipe *pipe, uint64_t room,
                            const sthi_choice *smallest, uint64_t least_bytes, uint8_t *resident,
                            uint64_t *out_ring);

/* Simulations that a search may make. */
uint32_t sthi_plan_trials(const sthi_plan_world *world);

const char *sthi_bound_name(sth_bound bound);
void sthi_plan_input_init(sth_plan_input *in);
sth_status sthi_plan_create(const sth_plan_input *in, sth_plan **out_plan);
/* One for the input, with nothing resident and empty loads; NULL: memory is out. */
sth_plan *sthi_plan_alloc(const sth_plan_input *in, uint32_t load_count);
void sthi_plan_destroy(sth_plan *plan);
sth_status sthi_plan_predict(const sth_plan_input *in, const sth_plan *plan, sth_prediction *out);
/* Those two for an input whose units stay as it says; the ones above also choose, and price, what stays packed. */
sth_status sthi_plan_create_as_it_is(const sth_plan_input *in, sth_plan **out_plan);
sth_status sthi_plan_predict_as_it_is(const sth_plan_input *in, const sth_plan *plan, sth_prediction *out);
sth_status sthi_plan_smallest(const sth_plan_input *in, uint64_t *out_budget);
#endif
