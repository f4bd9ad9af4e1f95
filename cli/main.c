/* The tool `stagehand`: finds the command in the table and runs it. Uses public headers only, as any other
 * program would. */
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "report.h"
#include "stagehand/stagehand.h"

typedef struct command {
    const char *name;
    const char *help; /* one line */
    int (*run)(int argc, char **argv);
} command;

static const command commands[] = {
    {"bench", "what this machine can do: link, RAM, disk, and steps of a model, in two minutes", command_bench},
    {"doctor", "what there is to stream with, and what to do about what is wrong", command_doctor},
    {"inspect", "what is in a model file, and whether it is sound", command_inspect},
    {"pack", "quantise a checkpoint, pack it without loss, or lay it out for streaming", command_pack},
    {"plan", "what streaming a model within a budget will cost", command_plan},
    {"stream", "stream a model through a device, and compare with what was predicted", command_stream},
    {"unpack", "turn a packed file back into a checkpoint", command_unpack},
    {"replay", "make the calls of a device's trace again", command_replay},
    {"report", "make a page of what steps took and why", command_report},
    {"top", "what running models do now", command_top},
    {"verify", "check a file's checksums, and its error against the original", command_verify},
};

#define COMMAND_COUNT (sizeof commands / sizeof *commands)

static int print_help(void) {
    fputs("usage: stagehand COMMAND [options]\n\n"
          "Streams model weights through a GPU that is smaller than the model.\n\ncommands:\n",
          stdout);
    for (size_t i = 0; i < COMMAND_COUNT; i++) printf("  %-10s %s\n", commands[i].name, commands[i].help);
    fputs("\nstagehand COMMAND --help tells more; stagehand --version prints the version.\n\n"
          "exit codes:\n"
          "  0  done\n"
          "  1  what was to be checked is not so\n"
          "  2  wrong usage\n"
          "  3  a file is missing, unreadable or wrong\n"
          "  4  a device or a resource is missing or used up\n"
          "  130  stopped by Ctrl-C\n",
          stdout);
    return CLI_OK;
}

static int unknown_command(const char *typed) {
    const char *words[COMMAND_COUNT];
    for (size_t i = 0; i < COMMAND_COUNT; i++) words[i] = commands[i].name;
    const char *near = args_suggest(typed, words, COMMAND_COUNT);
    return near ? cli_usage("unknown command '%s'; did you mean '%s'?", typed, near)
                : cli_usage("unknown command '%s'; see stagehand --help", typed);
}

static int run(int argc, char **argv) {
    if (argc < 2) return cli_usage("no command given; see stagehand --help");
    const char *name = argv[1];
    if (strcmp(name, "--help") == 0 || strcmp(name, "-h") == 0 || strcmp(name, "help") == 0)
        return print_help();
    if (strcmp(name, "--version") == 0)
        return printf("stagehand %s\n", sth_version()) > 0 ? CLI_OK : CLI_DATA;
    for (size_t i = 0; i < COMMAND_COUNT; i++)
        if (strcmp(name, commands[i].name) == 0) return commands[i].run(argc - 1, argv + 1);
    return unknown_command(name);
}

int main(int argc, char **argv) {
    int code = run(argc, argv);
    /* A full disk behind stdout shows only now. */
    if ((fflush(stdout) || ferror(stdout)) && code == CLI_OK)
        return cli_fail(CLI_DATA, "writing the output failed");
    return code;
}
