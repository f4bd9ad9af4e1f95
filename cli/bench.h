/* stagehand bench: rates of this machine, and steps of a stack of blocks by several ways, within a time.
 * docs/bench.md says what the rows mean. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "host.h"
#include "stagehand/device.h"

/* Monotonic nanoseconds; tests put their own in. */
typedef struct bench_clock {
    int64_t (*now)(void *context);
    void *context;
} bench_clock;

typedef struct bench_request {
    const char *device, *disk, *json; /* NULL where not given */
    uint64_t seconds;
    bool rates_only;
    bench_clock clock;
    int64_t begun_ns, deadline_ns;
} bench_request;

/* Below 0: too late. */
static inline double bench_seconds_left(const bench_request *r) {
    return (double)(r->deadline_ns - r->clock.now(r->clock.context)) / 1e9;
}

/* ---- bench_rates.c */

typedef enum bench_rate {
    RATE_UP, RATE_DOWN, RATE_BOTH, RATE_PAGEABLE, RATE_PIN, RATE_COPY, RATE_DISK, RATE_COUNT
} bench_rate;
extern const char *const bench_rate_key[RATE_COUNT];   /* of the JSON */
extern const char *const bench_rate_title[RATE_COUNT]; /* of the table */

typedef struct bench_rates {
    sth_device_info device;
    host_facts host;
    bool simulated;
    double rate[RATE_COUNT];         /* bytes per second; 0: left out */
    char note[RATE_COUNT][400];      /* how it was measured, or why it was left out */
} bench_rates;

/* What can be measured is, what cannot says why. Returns an exit code: that no device opens, or Ctrl-C. */
int bench_measure_rates(const bench_request *r, bench_rates *out);

/* ---- bench_plan.c: pure */

enum { BENCH_SHARES = 2, BENCH_SYSTEMS = 4, BENCH_RUNS = BENCH_SHARES * BENCH_SYSTEMS, BENCH_LENGTHS = 2 };
extern const char *const bench_system_name[BENCH_SYSTEMS];

typedef struct bench_facts {
    uint64_t vram_free, ram_room; /* bytes */
    bool simulated;
    double rate[RATE_COUNT];      /* as measured; 0: unknown */
    double seconds;               /* that are left for all runs */
} bench_facts;

typedef struct bench_run {
    int share, system;            /* per cent of the free VRAM; index into bench_system_name */
    uint32_t blocks, hidden, tokens[BENCH_LENGTHS];
    uint64_t weights, budget;     /* bytes; budget: 0 where the way has none */
    const char *shrunk;           /* why the stack is smaller than its share; NULL: it is not */
    double seconds;               /* that it is expected to take, compute aside */
    uint32_t steps;               /* of each length, that are in `seconds` */
    char why[200];                /* why it is left out; "": it is not */
} bench_run;

/* RAM that this process may still take, and leaves a fifth, and at least 2 GiB, to others. */
uint64_t bench_ram_room(const host_facts *host);

/* All runs, in their order. The stack of a share is as large as memory and time allow. */
void bench_plan(const bench_facts *facts, bench_run runs[BENCH_RUNS]);
/* Seconds that a run will take where a resident step takes `resident_ms` of each length (0: not known). */
double bench_run_seconds(const bench_run *run, const double resident_ms[BENCH_LENGTHS]);

/* ---- bench_worker.c: the process with PyTorch */

typedef struct bench_worker {
    int pid, to, from; /* pid 0: there is none */
    char *text;        /* of the next line */
    size_t length, room;
} bench_worker;

/* The Python that has this package and PyTorch: that of $STAGEHAND_PYTHON, or beside the tool. False: none; *out_why
 * says what is missing. */
bool bench_find_python(char *out, size_t capacity, const char **out_why);
/* argv ends with NULL. False with the reason in errno. The process ends with this one. */
bool bench_worker_start(bench_worker *w, char *const argv[]);
typedef enum bench_answer { ANSWER_OK, ANSWER_LATE, ANSWER_ENDED, ANSWER_STOPPED } bench_answer;
/* Sends `request` (NULL: nothing; taken over) and waits for one line of JSON, which the caller gives back. Where it
 * does not come in time, or Ctrl-C does, the process is killed. */
bench_answer bench_worker_ask(bench_worker *w, json_t *request, int64_t deadline_ns, const bench_clock *clock,
                              json_t **out);
void bench_worker_end(bench_worker *w);

/* ---- bench_text.c, bench_json.c */

typedef struct bench_outcome {
    bench_rates rates;
    char python_why[200];         /* why no step was run; "": they were */
    json_t *versions;             /* of PyTorch and the peers; NULL: not asked */
    bench_run runs[BENCH_RUNS];   /* [run_count] */
    int run_count;
    json_t *rows[BENCH_RUNS];     /* arrays of rows; NULL: left out */
    double seconds;               /* that all of it took */
} bench_outcome;

void bench_print_rates(const bench_rates *r);
void bench_print_runs(const bench_outcome *o);
/* Into a new file. Returns an exit code. */
int bench_write_json(const bench_outcome *o, const char *path);
#endif
