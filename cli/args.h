/* Options of the tool's commands: one table per command feeds the parser and its --help. */
#ifndef CLI_ARGS_H
#define CLI_ARGS_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum arg_kind {
    ARG_FLAG,   /* no value; out is bool * */
    ARG_TEXT,   /* out is const char ** */
    ARG_SIZE,   /* "8GB", "512MiB"; out is uint64_t * */
    ARG_NUMBER, /* a decimal integer of at least 0; out is uint64_t * */
    ARG_REAL    /* a finite decimal number of at least 0; out is double * */
} arg_kind;

typedef struct arg_option {
    const char *name; /* long name without the dashes */
    arg_kind kind;
    void *out;         /* holds the default, and is set where the option is given (the last one counts) */
    const char *value; /* what the help calls the value; NULL for flags */
    const char *help;  /* one line */
} arg_option;

typedef struct arg_spec {
    const char *command;     /* as typed after `stagehand` */
    const char *positionals; /* for the help: "PATH" */
    const char *help;        /* what the command does; may have several lines */
    const arg_option *options;
    size_t option_count;
    int min_positionals, max_positionals;
} arg_spec;

/* Parses argv[1..argc): --name value, --name=value, -h, --help, "--" before names that begin with a dash.
 * `positionals` has room for spec->max_positionals; those not given are NULL. False when the command is not
 * to go on: help was printed, or a mistake was; then *out_code is the exit code. */
bool args_parse(const arg_spec *spec, int argc, char **argv, const char **positionals, int *out_code);

/* The word of words[0..count) that `typed` is most likely meant to be; NULL where none is near. */
const char *args_suggest(const char *typed, const char *const *words, size_t count);
#endif
