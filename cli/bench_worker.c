/* A process that answers lines of JSON with lines of JSON, and is killed where it does not in time. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bench.h"
#include "progress.h"

enum { LOOK_MS = 50, MOST_TEXT = 1 << 20 };

/* ---- finding the Python */

static int run_quietly(char *const argv[]) {
    pid_t pid = fork();
    if (pid < 0) return -1;
    if (pid == 0) {
        int null = open("/dev/null", O_RDWR | O_CLOEXEC);
        for (int fd = 0; null >= 0 && fd < 3; fd++) (void)dup2(null, fd);
        execv(argv[0], argv);
        _exit(127);
    }
    int status = 0;
    while (waitpid(pid, &status, 0) < 0 && errno == EINTR) continue;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/* The tool lies in bin beside its Python, or, in a wheel that carries its libraries, in site-packages. */
static bool beside_the_tool(char *out, size_t capacity) {
    static const char *const ways[] = {"python3", "../../../../bin/python3"};
    char folder[PATH_MAX];
    ssize_t n = readlink("/proc/self/exe", folder, sizeof folder - 1);
    if (n <= 0) return false;
    folder[n] = '\0';
    *(strrchr(folder, '/') + 1) = '\0';
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
        int length = snprintf(out, capacity, "%s%s", folder, ways[i]);
        if (length > 0 && (size_t)length < capacity && access(out, X_OK) == 0) return true;
    }
    return false;
}

bool bench_find_python(char *out, size_t capacity, const char **out_why) {
    static char asks[] =
        "import sys, importlib.util as u; sys.exit(0 if u.find_spec('stagehand') and u.find_spec('torch') else 3)";
    const char *given = getenv("STAGEHAND_PYTHON");
    *out_why = "no Python lies beside this tool";
    if (given && *given) {
        if ((size_t)snprintf(out, capacity, "%s", given) >= capacity) return false;
    } else if (!beside_the_tool(out, capacity)) {
        return false;
    }
    *out_why = "the Python beside this tool has no PyTorch, or lacks this package";
    char *const argv[] = {out, "-c", asks, NULL};
    return run_quietly(argv) == 0;
}

/* ---- the process */

bool bench_worker_start(bench_worker *w, char *const argv[]) {
    int to[2] = {-1, -1}, from[2] = {-1, -1};
    *w = (bench_worker){.to = -1, .from = -1};
    if (pipe2(to, O_CLOEXEC) || pipe2(from, O_CLOEXEC)) return false;
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) _exit(1);
        signal(SIGINT, SIG_IGN); /* the tool ends it */
        if (dup2(to[0], 0) < 0 || dup2(from[1], 1) < 0) _exit(1);
        execv(argv[0], argv);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    w->pid = pid > 0 ? pid : 0;
    w->to = to[1];
    w->from = from[0];
    signal(SIGPIPE, SIG_IGN); /* a worker that has ended shows when it is read from */
    return pid > 0;
}

void bench_worker_end(bench_worker *w) {
    if (w->pid > 0) {
        (void)kill(w->pid, SIGKILL);
        while (waitpid(w->pid, NULL, 0) < 0 && errno == EINTR) continue;
    }
    if (w->to >= 0) close(w->to);
    if (w->from >= 0) close(w->from);
    free(w->text);
    *w = (bench_worker){.to = -1, .from = -1};
}

static bool send_line(const bench_worker *w, const json_t *request) {
    char *text = json_dumps(request, JSON_COMPACT);
    size_t length = text ? strlen(text) : 0;
    if (text) text[length++] = '\n'; /* in place of its end: written by length */
    bool ok = text && write(w->to, text, length) == (ssize_t)length;
    free(text);
    return ok;
}

/* What has come, as far as a line's end: NULL where that is still to come. */
static json_t *take_line(bench_worker *w) {
    char *end = w->text ? memchr(w->text, '\n', w->length) : NULL;
    if (!end) return NULL;
    size_t used = (size_t)(end - w->text) + 1;
    json_t *found = json_loadb(w->text, used, 0, NULL);
    memmove(w->text, w->text + used, w->length - used);
    w->length -= used;
    return found ? found : json_object(); /* noise */
}

/* False: it has ended, or says too much. */
static bool read_more(bench_worker *w) {
    if (w->room - w->length < 4096) {
        char *text = w->room < MOST_TEXT ? realloc(w->text, w->room + 8192) : NULL;
        if (!text) return false;
        w->text = text;
        w->room += 8192;
    }
    ssize_t n = read(w->from, w->text + w->length, w->room - w->length);
    if (n > 0) w->length += (size_t)n;
    return n > 0 || (n < 0 && errno == EINTR);
}

static bench_answer wait_for_line(bench_worker *w, int64_t deadline_ns, const bench_clock *clock, json_t **out) {
    for (;;) {
        if ((*out = take_line(w))) return ANSWER_OK;
        if (progress_stopped()) return ANSWER_STOPPED;
        if (clock->now(clock->context) >= deadline_ns) return ANSWER_LATE;
        struct pollfd p = {.fd = w->from, .events = POLLIN};
        int n = poll(&p, 1, LOOK_MS);
        if (n > 0 && !read_more(w)) return ANSWER_ENDED;
    }
}

bench_answer bench_worker_ask(bench_worker *w, json_t *request, int64_t deadline_ns, const bench_clock *clock,
                              json_t **out) {
    bool sent = w->pid > 0 && (!request || send_line(w, request));
    json_decref(request);
    bench_answer answer = sent ? wait_for_line(w, deadline_ns, clock, out) : ANSWER_ENDED;
    if (answer != ANSWER_OK) bench_worker_end(w);
    return answer;
}
