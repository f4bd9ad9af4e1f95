/* The runner from the inside (docs/runner.md):
 *
 *   executor.c   a user's table, checked
 *   mlp.c        the shipped executors: a layer as linear maps; dense_cpu.c computes them
 *   runner.c     life; layers -> units of the runtime
 *   shapes.c     what lies between layers: shapes, buffers
 *   adapter.c    resident LoRA pairs
 *   run.c        one pass; host.c the same from and to host memory
 *   figures.c    events round layers -> metrics
 *
 * Lock: the runner's, held in every call. */
#ifndef STHI_RUNNER_H
#define STHI_RUNNER_H
#include "base/thread.h"
#include "device/dense.h"
#include "stagehand/runner.h"
#include "store/store.h"
#include "state/state.h"

struct sth_executor {
    sth_executor_ops ops;
    void *self;
    char *name;
};

enum { STHI_RUNNER_TAPES = 2 }; /* runs whose events may be outstanding */

typedef struct sthi_runner_layer {
    const sth_store_layer *said;
    sth_layer_tensor *tensors;  /* addresses are set for each run */
    uint64_t *place_offsets;    /* [tensors] in the unit's place */
    uint64_t bytes;             /* sum of its tensors */
    sth_layer_adapter *adapters;
    uint32_t adapter_count;
    sth_activations output;     /* of the shapes in force, without addresses */
    double compute_ns, stall_ns;
    uint64_t runs;
} sthi_runner_layer;

typedef struct sthi_runner_unit {
    uint32_t first, count;      /* layers */
    uint64_t bytes;             /* of its place */
} sthi_runner_unit;

/* Events of one run. */
typedef struct sthi_tape {
    sth_event **arrive, **start; /* [units] before and behind the wait for its copy */
    sth_event **end;           /* [layers] */
    uint64_t run, step;         /* step: of the runtime */
    bool whole;                 /* all of them are recorded, and not read yet */
} sthi_tape;

typedef struct sthi_adapter_memory {
    sth_devptr address;
    uint64_t bytes;
} sthi_adapter_memory;

struct sth_runner {
    sthi_mutex lock;
    sth_device *device;
    sth_store *store;
    sth_executor *executor;
    sth_runtime *runtime;
    uint64_t reserved;          /* as the caller gave it */
    sthi_runner_layer *layers;
    uint32_t layer_count;
    sthi_runner_unit *units;
    uint32_t unit_count;
    bool reads_ahead;           /* no readers do */

    bool shaped;
    sth_activations input;      /* that the shapes in force are for */
    uint64_t scratch_bytes, between_bytes[2];
    sth_devptr buffer;          /* | between 0 | between 1 | scratch | */
    uint64_t buffer_bytes;
    sth_stream stream;          /* of runs from host memory; 0: not made yet */
    sth_devptr host_buffer;     /* input | output of such runs */
    uint64_t host_bytes;
    uint8_t *staging;           /* the same in host memory */
    uint64_t staging_bytes;
    sthi_adapter_memory *adapters;
    uint32_t adapter_count;
    uint64_t adapter_bytes;

    sthi_tape tapes[STHI_RUNNER_TAPES];
    uint64_t runs;              /* begun */
    sth_run_metrics newest;
    uint64_t newest_step;
    bool known;                 /* `newest` is of a run */
};

/* executor.c */
sth_status sthi_executor_create(const sth_executor_ops *ops, void *self, sth_executor **out);
void sthi_executor_close(sth_executor *executor);

/* mlp.c */
void sthi_mlp_options_init(sth_mlp_options *options);
/* Takes over `dense`, also on failure. */
sth_status sthi_mlp_create(const char *name, const sth_mlp_options *options, sthi_dense *dense, sth_executor **out);

/* runner.c */
void sthi_runner_options_init(sth_runner_options *options);
sth_status sthi_runner_create(sth_device *device, sth_store *store, sth_executor *executor,
                              const sth_runner_options *options, sth_runner **out);
void sthi_runner_destroy(sth_runner *r);

/* shapes.c. Lock held */
sth_status sthi_runner_shape(sth_runner *r, const sth_activations *input); /* shapes in force, and room for them */
sth_status sthi_runner_ask(sth_runner *r, const sth_activations *input, sth_activations *out); /* changes nothing */
/* Another piece of memory, of the budget, instead of one that is too small; on failure that one stays. */
sth_status sthi_runner_grow(sth_runner *r, sth_devptr *address, uint64_t *bytes, uint64_t want);
sth_status sthi_runner_reserve_more(sth_runner *r, uint64_t bytes); /* for what is about to be taken */
void sthi_runner_reserve_exactly(sth_runner *r);                   /* what there is */
uint64_t sthi_activations_bytes(const sth_activations *a);         /* each at a multiple of 512 */
void sthi_activations_lay_out(sth_activations *a, sth_devptr at);
/* Where layer `i` reads from and writes to in this run. */
void sthi_runner_place(sth_runner *r, uint32_t i, const sth_activations *input, const sth_activations *output,
                       sth_activations *out_in, sth_activations *out_out);
sth_layer_spec sthi_runner_spec(const sth_runner *r, uint32_t layer);
/* The last failure of this thread with the layer's name in front. */
sth_status sthi_runner_name_failure(const sth_runner *r, uint32_t layer, sth_status status);

/* adapter.c */
sth_status sthi_runner_add_adapter(sth_runner *r, const char *layer, const char *tensor, const sth_layer_adapter *pair,
                                   const void *a, const void *b);
void sthi_runner_free_adapters(sth_runner *r);

/* run.c */
sth_status sthi_runner_check_count(const sth_activations *made, const sth_activations *output); /* as many of both */
sth_status sthi_runner_run(sth_runner *r, const sth_activations *input, sth_activations *output, sth_stream stream);

/* host.c */
sth_status sthi_runner_run_host(sth_runner *r, const sth_activations *input, sth_activations *output);

/* figures.c. Lock held */
sth_status sthi_tapes_open(sth_runner *r);
void sthi_tapes_close(sth_runner *r);
sthi_tape *sthi_tape_begin(sth_runner *r);  /* NULL: this run goes untimed */
bool sthi_tape_record(sth_runner *r, sth_event **event, sth_stream stream);
void sthi_tape_end(sth_runner *r, sthi_tape *tape, bool whole);
sth_status sthi_runner_settle(sth_runner *r); /* waits for the runs that are timed, and reads their events */
void sthi_runner_layer_figures(sth_runner *r, uint32_t layer, sth_layer_metrics *out); /* as settled */
sth_status sthi_runner_figures(sth_runner *r, sth_run_metrics *out);
#endif
