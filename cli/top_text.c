/* The screen of `stagehand top`: a heading, and for each process its models with four lines each. Lines are composed
 * whole and cut at the edge afterwards. A character that is not ASCII counts for two columns, so that no line wraps. */
#define _POSIX_C_SOURCE 200809L
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "top.h"

#define BOLD "\033[1m"
#define CYAN "\033[36m"
#define YELLOW "\033[33m"
#define PLAIN "\033[0m"

enum { BAR = 20, WIDE = 72 /* columns from which bars are drawn */ };
static const double OFF = 0.1; /* by so much of the prediction a step is marked */

typedef struct screen {
    FILE *to;
    const top_look *look;
} screen;

static FILE *begin_text(char **out, size_t *out_bytes) {
    FILE *to = open_memstream(out, out_bytes);
    if (!to) exit(cli_fail(CLI_DEVICE, "no host memory"));
    return to;
}

static void end_text(FILE *to) {
    if (ferror(to) | fclose(to)) exit(cli_fail(CLI_DEVICE, "no host memory"));
}

/* ---- lines ---- */

static void color(const screen *s, const char *code) {
    if (s->look->color) fputs(code, s->to);
}

static double share(double part, double whole) {
    double x = whole > 0 ? part / whole : 0;
    if (x > 1) return 1;
    return x > 0 ? x : 0;
}

/* "    link    [########------------]  ", the bar where there is room. */
static void row(const screen *s, const char *label, double filled) {
    fprintf(s->to, "    %-7s ", label);
    if (s->look->columns && s->look->columns < WIDE) return;
    int full = (int)(filled * BAR + 0.5);
    putc('[', s->to);
    color(s, CYAN);
    for (int i = 0; i < BAR; i++) putc(i < full ? '#' : '-', s->to);
    color(s, PLAIN);
    fputs("] ", s->to);
}

static void put_step(const screen *s, const sth_top_figures *f) {
    const sth_step_metrics *m = &f->step;
    if (m->step_time_ms <= 0) {
        fputs(f->steps ? "no step is timed yet" : "no step yet", s->to);
        return;
    }
    double off = m->predicted_ms > 0 ? m->step_time_ms / m->predicted_ms - 1 : 0;
    fprintf(s->to, "step %.0f: %.1f ms", m->step, m->step_time_ms);
    if (m->predicted_ms <= 0) return;
    if (off > OFF || off < -OFF) color(s, YELLOW);
    fprintf(s->to, ", predicted %.1f (%+.1f %%)", m->predicted_ms, 100 * off);
    color(s, PLAIN);
}

static void put_head(const screen *s, const sth_top_runtime *r) {
    const sth_top_figures *f = &r->figures;
    fputs("  ", s->to);
    color(s, BOLD);
    cli_put(s->to, f->name);
    color(s, PLAIN);
    fputs(" on ", s->to);
    cli_put(s->to, f->device);
    fputs("  ", s->to);
    put_step(s, f);
    if (f->planned) fprintf(s->to, "; bound by %s", cli_bound((sth_bound)f->bound_by));
    if (f->parked) fputs("; others have its memory", s->to);
    if (r->age_s >= 2 && r->age_s < 1e9) fprintf(s->to, "; idle for %.0f s", r->age_s);
    putc('\n', s->to);
}

static void put_link(const screen *s, const sth_top_figures *f) {
    const sth_step_metrics *m = &f->step;
    double seconds = m->step_time_ms / 1e3, can = (double)f->link_bytes_per_s;
    double up = seconds > 0 ? m->h2d_bytes / seconds : 0, down = seconds > 0 ? m->d2h_bytes / seconds : 0;
    row(s, "link", share(up, can));
    fprintf(s->to, "up %.2f", up / 1e9);
    if (can > 0) fprintf(s->to, " of %.2f GB/s (%.0f %%)", can / 1e9, 100 * share(up, can));
    else fputs(" GB/s", s->to);
    fprintf(s->to, ", down %.2f GB/s; %s a step planned\n", down / 1e9, cli_size(f->bytes_per_step).text);
}

static void put_memory(const screen *s, const sth_top_figures *f) {
    row(s, "memory", share((double)f->device_bytes, (double)f->budget));
    fprintf(s->to, "%s of %s (%.0f %%)", cli_size(f->device_bytes).text, cli_size(f->budget).text,
            100 * share((double)f->device_bytes, (double)f->budget));
    if (f->limit < f->budget) fprintf(s->to, ", others leave %s", cli_size(f->limit).text);
    fprintf(s->to, "; %s stay, ring %s, %s stream\n", cli_size(f->resident_bytes).text, cli_size(f->ring_bytes).text,
            cli_size(f->streamed_bytes).text);
}

static void put_uses(const screen *s, const sth_top_figures *f) {
    const sth_step_metrics *m = &f->step;
    double uses = m->prefetch_hits + m->prefetch_misses;
    row(s, "uses", share(m->prefetch_hits, uses));
    fprintf(s->to, "%.0f of %.0f in time; stalls %.1f ms (%.0f %% of the step), %" PRIu64 " loads on demand so far\n",
            m->prefetch_hits, uses, m->stall_time_ms, 100 * share(m->stall_time_ms, m->step_time_ms), f->demand_loads);
}

static uint32_t processes_of(const sth_top_list *list) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < list->count; i++) n += !i || list->runtimes[i].pid != list->runtimes[i - 1].pid;
    return n;
}

static void put_all(const screen *s, const sth_top_list *list) {
    uint32_t processes = processes_of(list);
    color(s, BOLD);
    fprintf(s->to, "stagehand top: %" PRIu32 " model%s in %" PRIu32 " process%s", list->count,
            list->count == 1 ? "" : "s", processes, processes == 1 ? "" : "es");
    color(s, PLAIN);
    fputs(s->look->live ? "   q ends it\n" : "\n", s->to);
    if (list->passed_over)
        fprintf(s->to, "%" PRIu32 " running process(es) passed over: another version of stagehand, or damaged pages\n",
                list->passed_over);
    if (!list->count)
        fputs("A model appears when it is wrapped or sealed, unless its process has STAGEHAND_TOP=0.\n", s->to);
    for (uint32_t i = 0; i < list->count; i++) {
        const sth_top_runtime *r = &list->runtimes[i];
        if (!i || r->pid != r[-1].pid) {
            fprintf(s->to, "\n%" PRId32 " ", r->pid);
            cli_put(s->to, r->program);
            putc('\n', s->to);
        }
        put_head(s, r);
        put_link(s, &r->figures);
        put_memory(s, &r->figures);
        put_uses(s, &r->figures);
    }
}

/* ---- edges ---- */

static size_t escape_bytes(const char *text) {
    return *text == '\033' ? strcspn(text, "m") + 1 : 0;
}

static void put_cut(FILE *to, const char *line, size_t bytes, unsigned columns, bool colored) {
    unsigned used = 0;
    for (size_t i = 0; i < bytes;) {
        size_t n = escape_bytes(line + i);
        if (!n) {
            n = 1;
            while (i + n < bytes && ((unsigned char)line[i + n] & 0xc0) == 0x80) n++;
            used += n > 1 ? 2 : 1;
            if (columns && used > columns) break;
        }
        fwrite(line + i, 1, n, to);
        i += n;
    }
    if (columns && used > columns && colored) fputs(PLAIN, to);
    putc('\n', to);
}

char *top_text(const sth_top_list *list, const top_look *look) {
    char *whole, *cut;
    size_t bytes;
    screen s = {begin_text(&whole, &bytes), look};
    put_all(&s, list);
    end_text(s.to);
    FILE *to = begin_text(&cut, &bytes);
    unsigned rows = 0;
    for (const char *line = whole, *end; (end = strchr(line, '\n')); line = end + 1) {
        if (look->rows && ++rows == look->rows && end[1]) {
            const char *more = "... more: a taller window shows it, or stagehand top PID one process";
            put_cut(to, more, strlen(more), look->columns, false);
            break;
        }
        put_cut(to, line, (size_t)(end - line), look->columns, look->color);
    }
    end_text(to);
    free(whole);
    return cut;
}
