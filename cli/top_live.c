/* The terminal of `stagehand top`: another screen, no echo, a look each interval, a redraw when the window changes. All
 * of it is put back at the end, also after a signal. */
#define _DEFAULT_SOURCE
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "host.h"
#include "report.h"
#include "top.h"

#define ENTER "\033[?1049h\033[?25l"
#define LEAVE "\033[?25h\033[?1049l"

static volatile sig_atomic_t stopped; /* the signal */
static volatile sig_atomic_t resized;

static void stop(int number) { stopped = number; }
static void resize(int number) {
    (void)number;
    resized = 1;
}

void top_live_size(top_look *look) {
    struct winsize size;
    bool said = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0;
    look->columns = said && size.ws_col ? size.ws_col : 80;
    look->rows = said && size.ws_row ? size.ws_row : 24;
}

/* ---- the terminal ---- */

/* Without SA_RESTART: a signal ends the wait for a key. */
static void listen_to_signals(void) {
    struct sigaction action = {.sa_handler = stop};
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) sigaction(ends[i], &action, NULL);
    action.sa_handler = resize;
    sigaction(SIGWINCH, &action, NULL);
    sigaction(SIGCONT, &action, NULL); /* what stood there meanwhile is drawn over */
}

/* True where keys can be read. */
static bool enter(struct termios *before) {
    listen_to_signals();
    fputs(ENTER, stdout);
    if (!isatty(STDIN_FILENO) || tcgetattr(STDIN_FILENO, before)) return false;
    struct termios now = *before;
    now.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    now.c_cc[VSUSP] = _POSIX_VDISABLE;
    now.c_cc[VMIN] = 1;
    now.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSANOW, &now);
    return true;
}

static void leave(const struct termios *before, bool keys) {
    fputs(LEAVE, stdout);
    fflush(stdout);
    if (keys) tcsetattr(STDIN_FILENO, TCSANOW, before);
}

/* ---- frames ---- */

/* Each line clears its rest. The last one has no newline, which would scroll. */
static void draw(const sth_top_list *list, bool color) {
    top_look look = {.color = color, .live = true};
    top_live_size(&look);
    if (look.columns > 1) look.columns--; /* clearing from the last column would take its character */
    char *text = top_text(list, &look);
    fputs("\033[H", stdout);
    for (const char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        fwrite(line, 1, (size_t)(end - line), stdout);
        fputs(end[1] ? "\033[K\n" : "\033[K", stdout);
    }
    fputs("\033[J", stdout);
    fflush(stdout);
    free(text);
}

/* Waits until the next look is due. False: a key or the terminal's end says that it is over. */
static bool wait_for_look(double interval_s, bool keys) {
    int64_t until = host_now_ns() + (int64_t)(interval_s * 1e9);
    struct pollfd in = {.fd = keys ? STDIN_FILENO : -1, .events = POLLIN};
    for (int64_t left; !stopped && !resized && (left = until - host_now_ns()) > 0;) {
        char key;
        int ready = poll(&in, 1, (int)(left / 1000000) + 1);
        if (ready < 0 && errno != EINTR) return false;
        if (ready <= 0) continue;
        if (read(STDIN_FILENO, &key, 1) != 1 || key == 'q' || key == 'Q') return false;
        if (key == ' ') return true;
    }
    return true;
}

int top_live(int32_t pid, double interval_s, bool color) {
    struct termios before;
    bool keys = enter(&before), more = true;
    sth_status status = STH_OK;
    while (more && !stopped && !ferror(stdout)) {
        sth_top_list list;
        if ((status = sth_top_read(pid, &list)) != STH_OK) break;
        resized = 0;
        draw(&list, color);
        sth_top_free(&list);
        more = wait_for_look(interval_s, keys);
    }
    leave(&before, keys);
    if (status != STH_OK) return cli_fail_status(status);
    return stopped ? 128 + stopped : CLI_OK;
}
