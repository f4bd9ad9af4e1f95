/* A run as HTML: the page, its pictures, its sentences. Pure. */
#ifndef STHI_TELEMETRY_REPORT_H
#define STHI_TELEMETRY_REPORT_H
#include "base/text.h"
#include "stagehand/report.h"

/* Means over steps that count: the first two of more are for learning the order. */
typedef struct sthi_report_means {
    uint32_t steps;
    double step_ms, predicted_ms, compute_ms, copy_ms, stall_ms, h2d_bytes, d2h_bytes, file_bytes, link_gb_s,
        host_waits, hits, misses, vram_mb;
} sthi_report_means;
sthi_report_means sthi_report_means_of(const sth_report_input *in);

/* report_pictures.c */
void sthi_picture_map(sthi_text *t, const sth_report_input *in);      /* what stays and what streams */
void sthi_picture_bounds(sthi_text *t, const sthi_report_means *m);   /* what bounds a step */
void sthi_picture_step(sthi_text *t, const sth_report_input *in);     /* unit by unit: work and waits */
void sthi_picture_times(sthi_text *t, const sth_report_input *in);    /* steps, and what was predicted */
void sthi_picture_memory(sthi_text *t, const sth_report_input *in);

/* report_advice.c: list items. */
void sthi_report_advice(sthi_text *t, const sth_report_input *in, const sthi_report_means *m);

sth_status sthi_report_write(const sth_report_input *in, sth_report_form form, char **out_text);
#endif
