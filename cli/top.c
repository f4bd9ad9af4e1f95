/* stagehand top: what the running models of this user do now. */
#define _POSIX_C_SOURCE 200809L
#include "top.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "commands.h"
#include "report.h"

typedef struct top_request {
    const char *pid_text;
    int32_t pid; /* 0: all */
    double interval_s;
    bool once, json;
} top_request;

static int take_pid(top_request *r) {
    char *end;
    if (!r->pid_text) return CLI_OK;
    errno = 0;
    long pid = strtol(r->pid_text, &end, 10);
    if (errno || *end || *r->pid_text < '1' || *r->pid_text > '9' || pid > INT32_MAX)
        return cli_usage("top: PID is the number of a process, not '%s'", r->pid_text);
    r->pid = (int32_t)pid;
    return CLI_OK;
}

static bool is_set(const char *variable) {
    const char *value = getenv(variable);
    return value && *value;
}

static bool terminal_can_move(void) {
    const char *kind = getenv("TERM");
    return isatty(STDOUT_FILENO) && kind && *kind && strcmp(kind, "dumb") != 0;
}

static void print_text(const sth_top_list *list, bool color) {
    top_look look = {.color = color};
    if (isatty(STDOUT_FILENO)) top_live_size(&look);
    look.rows = 0;
    char *text = top_text(list, &look);
    fputs(text, stdout);
    free(text);
}

static int run(const top_request *r) {
    bool moves = terminal_can_move(), color = moves && !is_set("NO_COLOR");
    sth_top_list list;
    sth_status status = sth_top_read(r->pid, &list);
    if (status != STH_OK) return cli_fail_status(status);
    int code = CLI_OK;
    if (r->pid && !list.count && !list.passed_over)
        code = cli_fail(CLI_DATA,
                        "process %d shows no model: it is not yours, has none, or has STAGEHAND_TOP=0", (int)r->pid);
    else if (r->json) top_json(&list);
    else if (r->once || !moves) print_text(&list, color);
    else code = top_live(r->pid, r->interval_s, color);
    sth_top_free(&list);
    return code;
}

int command_top(int argc, char **argv) {
    top_request r = {.interval_s = 1};
    int code;
    const arg_option options[] = {
        {"interval", ARG_REAL, &r.interval_s, "S", "seconds from look to look, 0.1 to 3600; 1 without it"},
        {"once", ARG_FLAG, &r.once, NULL, "print one look, as without a terminal"},
        {"json", ARG_FLAG, &r.json, NULL, "print JSON; needs --once"},
    };
    const arg_spec spec = {
        .command = "top",
        .positionals = "[PID]",
        .help = "Shows what the running models of this user do now: of all processes, or of one. The key q ends it.",
        .options = options,
        .option_count = sizeof options / sizeof *options,
        .min_positionals = 0,
        .max_positionals = 1,
    };
    if (!args_parse(&spec, argc, argv, &r.pid_text, &code)) return code;
    if ((code = take_pid(&r))) return code;
    if (r.json && !r.once) return cli_usage("top: --json needs --once: it prints one look");
    if (r.interval_s < 0.1 || r.interval_s > 3600) return cli_usage("top: --interval is 0.1 to 3600 seconds");
    return run(&r);
}
