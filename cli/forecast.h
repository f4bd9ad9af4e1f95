/* From a checkpoint and what the user says about the machine to the planner's input and its plans. */
#ifndef CLI_FORECAST_H
#define CLI_FORECAST_H
#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "catalogue.h"
#include "stagehand/curve.h"
#include "stagehand/plan.h"
#include "units.h"

typedef enum compute_source {
    COMPUTE_UNKNOWN, COMPUTE_GIVEN, COMPUTE_TELEMETRY, COMPUTE_CARD
} compute_source;
typedef enum link_source { LINK_GIVEN, LINK_MEASURED, LINK_ASSUMED, LINK_CARD } link_source;

typedef struct forecast_request {
    /* NULL where not given; passes is set */
    const char *path, *blocks, *passes, *device, *telemetry, *transfer;
    const card *card;         /* then `model` takes the place of `path`, and nothing is measured */
    const named_model *model;
    uint64_t ram;             /* of the machine that the card is in; 0: holds all weights */
    uint64_t budget, ram_budget;
    double disk_gb_s; /* negative where not given: everything is in RAM */
    double link_gb_s, compute_ms; /* negative where not given */
} forecast_request;

typedef struct forecast {
    const forecast_request *request;
    sth_checkpoint *checkpoint;
    units units;
    bool backward; /* forward, then backward in the opposite order */
    sth_plan_unit *plan_units;
    sth_plan_use *uses;
    sth_plan_input input;
    link_source link_from;
    int64_t *unit_ns; /* compute time of each unit; NULL: by its bytes */
    double disk_gb_s; /* negative: everything is in RAM */
    bool disk_assumed;
    char link_device[160]; /* whose link it is; "" where it was given without a device */
    bool link_pinned;
    compute_source compute_from;
    double compute_ms; /* of a step with everything resident */
    sth_plan *plan; /* NULL without a budget */
    uint64_t ram_bytes; /* of units that are in RAM although the model is in files */
    uint64_t host_bytes; /* that all weights take in RAM, as they cross the link */
    bool more_helps; /* the budget does not hold everything yet */
    sth_prediction more; /* with 1 GiB more */
    sth_curve_point *curve; /* [curve_count]; NULL: not asked for */
    uint32_t curve_count;
} forecast;

#define FORECAST_MORE ((uint64_t)1 << 30)

/* All return an exit code and say on stderr what is wrong; forecast_free is right after any. */
int forecast_prepare(const forecast_request *request, forecast *out);
int forecast_plan(forecast *f);
int forecast_curve(forecast *f);
void forecast_free(forecast *f);

/* Share, 0 to 1, of the bytes used in a step that are on the device already. */
double forecast_hit_share(const forecast *f);
/* Bytes used in a step: those of a unit that is used twice count twice. */
uint64_t forecast_used_bytes(const forecast *f);

/* plan_text.c, plan_json.c */
void plan_print(const forecast *f);
void plan_print_line(const forecast *f, bool heading); /* of a model on a card */
void plan_print_json(const forecast *f);
json_t *plan_json(const forecast *f); /* the caller's */
/* The curve as a picture in a file that is not there yet. Returns an exit code. */
int plan_write_svg(const forecast *f, const char *path);
#endif
