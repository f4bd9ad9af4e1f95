/* Named cards and named models, for predictions without either: public figures and the
 * arithmetic on them. Pure. */
#ifndef CLI_CATALOGUE_H
#define CLI_CATALOGUE_H
#include <stdint.h>

#include "units.h"

typedef struct card {
    const char *name, *title; /* as typed; for people */
    double vram;              /* bytes */
    int pcie, lanes;          /* generation, and lanes of the card */
    double flops;             /* bf16 with sums in float32, dense, a second, as its maker gives it */
    double memory;            /* bytes per second of its memory, as its maker gives it */
} card;

/* NULL past the end. */
const card *card_at(int i);
/* Capitals, blanks, "-", "_" and a leading "rtx" do not count. NULL where there is none. */
const card *card_find(const char *name);

/* As they are taken for predictions, below the figures above. catalogue.c has the shares and
 * the reasons. */
double card_link(const card *c);   /* bytes per second */
double card_flops(const card *c);  /* a second */
double card_memory(const card *c); /* bytes per second */
double card_budget(const card *c); /* bytes for weights, where none are given */
extern const double card_link_share, card_flops_share;

typedef struct named_model named_model;
const named_model *model_at(int i);
const named_model *model_find(const char *name);
const char *model_name(const named_model *m);   /* as typed */
const char *model_source(const named_model *m); /* whose configuration it is */
const char *model_pass(const named_model *m);   /* of what the prediction is */

/* Units in the order of use, bf16, and nanoseconds that each computes on the card; both belong
 * to the caller (units_free, free). Out of memory ends the tool. */
void model_units(const named_model *m, const card *c, units *out_units, int64_t **out_compute_ns);
#endif
