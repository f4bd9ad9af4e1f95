/* A perceptron of some layers with recognisable weights, in memory and as a file, and one runner over it. */
#ifndef TESTS_RUNNER_RIG_H
#define TESTS_RUNNER_RIG_H
#include <stdatomic.h>

#include "stagehand/stagehand.h"

enum { RIG_LAYERS = 24, RIG_ROWS = 3 };

/* Where the layers come from. */
typedef enum rig_source { RIG_FILE, RIG_MEMORY, RIG_OWN } rig_source;

typedef struct rig_spec {
    rig_source source;
    const char *folder;   /* RIG_FILE: where it is written */
    sth_dtype dtype;
    uint64_t width, hidden; /* a layer: width -> hidden -> width, both with bias */
    uint32_t layers;      /* at most RIG_LAYERS */
    uint64_t rows;
    uint64_t budget;      /* 0: all is resident */
    uint32_t group, lookahead, readers;
    bool virtual_time, after_last, residual;
    sth_nonlinearity f;
    double flops_per_s;   /* of the simulated device; 0: the host's */
    uint64_t link;        /* bytes per second; 0: as fast as memcpy */
    uint64_t staging;     /* bytes of slabs; 0: chosen */
    uint64_t ram;
    bool cuda;            /* on the card, by the CUDA executor; `in` and `out` are then host memory */
} rig_spec;

typedef struct rig {
    rig_spec spec;
    sth_store_layer layers[RIG_LAYERS];
    sth_store_tensor tensors[RIG_LAYERS][4];
    char names[RIG_LAYERS][16];
    void *data[RIG_LAYERS];
    atomic_int own_fails; /* RIG_OWN: the n-th request and those behind it fail; 0: none does */
    atomic_int own_reads;
    sth_device *device;
    sth_store *store;
    sth_executor *executor;
    sth_runner *runner;
    sth_devptr in, out;   /* rows x width */
    uint64_t in_bytes;
} rig;

rig_spec rig_default(void);
sth_status rig_open(rig *g, const rig_spec *spec);
void rig_close(rig *g);
/* One run over the rig's input; the output is copied to `to`, in_bytes long. */
sth_status rig_run(rig *g, void *to);
uint64_t rig_layer_bytes(const rig *g); /* of a layer's place */
float rig_value(uint32_t seed, uint64_t i); /* in (-1, 1) */
float rig_load(sth_dtype dtype, const void *p, uint64_t i);
void rig_store(sth_dtype dtype, void *p, uint64_t i, float v);
#endif
