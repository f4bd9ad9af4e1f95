/* The bar is redrawn ten times a second on a terminal; a file gets ten lines. */
#define _POSIX_C_SOURCE 200809L
#include "progress.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "host.h"
#include "report.h"

#define REDRAW_NS 100000000
#define BAR 30
#define NAME 40

static volatile sig_atomic_t stopped;

static void stop(int signal_number) {
    (void)signal_number;
    stopped = 1;
}

bool progress_stopped(void) { return stopped != 0; }

progress_bar progress_begin(const char *verb, bool quiet) {
    struct sigaction action = {.sa_handler = stop};
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    return (progress_bar){.verb = verb, .terminal = isatty(STDERR_FILENO), .quiet = quiet, .begun_ns = host_now_ns()};
}

static void draw(const progress_bar *bar, const char *tensor, double share, uint64_t done, int64_t now) {
    char filled[BAR + 1], name[NAME + 1];
    int n = (int)(share * BAR);
    memset(filled, '.', BAR);
    memset(filled, '#', (size_t)n);
    filled[BAR] = '\0';
    snprintf(name, sizeof name, "%s", tensor);
    double seconds = (double)(now - bar->begun_ns) / 1e9, rate = seconds > 0 ? (double)done / 1e6 / seconds : 0;
    fprintf(stderr, "\r%s [%s] %3.0f %% %7.1f MB/s  ", bar->verb, filled, share * 100, rate);
    cli_put(stderr, name);
    fputs("\033[K", stderr);
    fflush(stderr);
}

bool progress_show(void *context, const char *tensor, uint64_t done, uint64_t total) {
    progress_bar *bar = context;
    int64_t now = host_now_ns();
    double share = total && done < total ? (double)done / (double)total : 1;
    int tenth = (int)(share * 10);
    if (bar->quiet) return !stopped;
    if (bar->terminal && (now - bar->shown_ns >= REDRAW_NS || done >= total)) {
        draw(bar, tensor, share, done, now);
        bar->shown_ns = now;
    } else if (!bar->terminal && tenth > bar->shown_tenth) {
        fprintf(stderr, "%s %d %%\n", bar->verb, tenth * 10);
        bar->shown_tenth = tenth;
    }
    return !stopped;
}

void progress_end(progress_bar *bar) {
    if (bar->terminal && bar->shown_ns) fputc('\n', stderr);
}
