/* The option parser. Does not permute or abbreviate: an option is its full name. */
#include "args.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "stagehand/util.h"

#define MAX_WORDS 64
#define MAX_WORD 31

/* ---- suggestions ---- */

static size_t smallest(size_t a, size_t b, size_t c) {
    size_t ab = a < b ? a : b;
    return ab < c ? ab : c;
}

/* Number of letters to insert, remove or change. Both words have at most MAX_WORD letters. */
static size_t distance(const char *a, const char *b) {
    size_t row[MAX_WORD + 1], n = strlen(b);
    for (size_t j = 0; j <= n; j++) row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n; j++) {
            size_t above = row[j];
            row[j] = smallest(above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1]));
            diagonal = above;
        }
    }
    return row[n];
}

const char *args_suggest(const char *typed, const char *const *words, size_t count) {
    const char *best = NULL;
    size_t best_distance = 3, typed_length = strlen(typed);
    if (typed_length == 0 || typed_length > MAX_WORD) return NULL;
    for (size_t i = 0; i < count; i++) {
        if (strlen(words[i]) > MAX_WORD) continue;
        bool begins = strncmp(words[i], typed, typed_length) == 0;
        size_t d = begins ? 0 : distance(typed, words[i]);
        if (d >= best_distance || (!begins && d >= typed_length)) continue;
        best = words[i];
        best_distance = d;
    }
    return best;
}

/* ---- help ---- */

static void print_option(const char *name, const char *value, const char *help) {
    char left[48];
    snprintf(left, sizeof left, "--%s%s%s", name, value ? " " : "", value ? value : "");
    printf("  %-24s %s\n", left, help);
}

static void print_help(const arg_spec *spec) {
    printf("usage: stagehand %s%s%s%s\n\n%s\n\noptions:\n", spec->command,
           spec->option_count ? " [options]" : "", *spec->positionals ? " " : "", spec->positionals,
           spec->help);
    for (size_t i = 0; i < spec->option_count; i++)
        print_option(spec->options[i].name, spec->options[i].value, spec->options[i].help);
    print_option("help", NULL, "this text");
}

/* ---- values ---- */

static bool set_number(const char *text, uint64_t *out) {
    char *end;
    if (!isdigit((unsigned char)*text)) return false;
    errno = 0;
    unsigned long long n = strtoull(text, &end, 10);
    if (*end || errno) return false;
    *out = n;
    return true;
}

static bool set_real(const char *text, double *out) {
    char *end;
    if (!isdigit((unsigned char)*text) && *text != '.') return false;
    double n = strtod(text, &end);
    if (end == text || *end || !isfinite(n)) return false;
    *out = n;
    return true;
}

static bool set_value(const arg_option *option, const char *text) {
    switch (option->kind) {
    case ARG_TEXT:
        *(const char **)option->out = text;
        return true;
    case ARG_SIZE:
        return sth_parse_size(text, option->out) == STH_OK;
    case ARG_NUMBER:
        return set_number(text, option->out);
    case ARG_REAL:
        return set_real(text, option->out);
    case ARG_FLAG:
        break;
    }
    return false;
}

static const char *kind_text(arg_kind kind) {
    switch (kind) {
    case ARG_SIZE:
        return "a size such as 8GB, 512MiB or 4096";
    case ARG_NUMBER:
        return "a whole number";
    case ARG_REAL:
        return "a number";
    case ARG_FLAG:
    case ARG_TEXT:
        break;
    }
    return "a value";
}

/* ---- parsing ---- */

typedef struct cursor {
    const arg_spec *spec;
    int argc, at;
    char **argv;
} cursor;

static const arg_option *find_option(const arg_spec *spec, const char *name, size_t length) {
    for (size_t i = 0; i < spec->option_count; i++) {
        const char *known = spec->options[i].name;
        if (strlen(known) == length && memcmp(known, name, length) == 0) return &spec->options[i];
    }
    return NULL;
}

static int unknown_option(const arg_spec *spec, const char *name, size_t length) {
    const char *words[MAX_WORDS] = {"help"};
    size_t count = 1;
    char typed[MAX_WORD + 1];
    for (size_t i = 0; i < spec->option_count && count < MAX_WORDS; i++)
        words[count++] = spec->options[i].name;
    snprintf(typed, sizeof typed, "%.*s", (int)(length < MAX_WORD ? length : MAX_WORD), name);
    const char *near = args_suggest(typed, words, count);
    return near ? cli_usage("%s: unknown option --%s; did you mean --%s?", spec->command, typed, near)
                : cli_usage("%s: unknown option --%s; see stagehand %s --help", spec->command, typed,
                            spec->command);
}

/* The value of an option: behind `equals`, or in the next word. Returns an exit code. */
static int take_found(cursor *c, const arg_option *option, const char *equals) {
    if (option->kind == ARG_FLAG) {
        if (equals) return cli_usage("%s: --%s takes no value", c->spec->command, option->name);
        *(bool *)option->out = true;
        return CLI_OK;
    }
    const char *text = equals ? equals + 1 : NULL;
    if (!equals && c->at + 1 < c->argc) text = c->argv[++c->at];
    if (!text) return cli_usage("%s: --%s needs %s", c->spec->command, option->name, kind_text(option->kind));
    if (!set_value(option, text))
        return cli_usage("%s: --%s needs %s, not '%s'", c->spec->command, option->name,
                         kind_text(option->kind), text);
    return CLI_OK;
}

/* Handles argv[at], which begins with "--" and a name, and its value. Returns an exit code. */
static int take_option(cursor *c) {
    const char *name = c->argv[c->at] + 2, *equals = strchr(name, '=');
    size_t length = equals ? (size_t)(equals - name) : strlen(name);
    const arg_option *option = find_option(c->spec, name, length);
    return option ? take_found(c, option, equals) : unknown_option(c->spec, name, length);
}

/* "-o", where the command has --output. */
static int take_letter(cursor *c) {
    const char *word = c->argv[c->at];
    const arg_option *output = strcmp(word, "-o") ? NULL : find_option(c->spec, "output", strlen("output"));
    if (output) return take_found(c, output, NULL);
    return cli_usage("%s: unknown option %s; see stagehand %s --help", c->spec->command, word, c->spec->command);
}

static int check_positionals(const arg_spec *spec, int given) {
    if (given >= spec->min_positionals) return CLI_OK;
    return cli_usage("%s: missing argument; usage: stagehand %s %s", spec->command, spec->command,
                     spec->positionals);
}

bool args_parse(const arg_spec *spec, int argc, char **argv, const char **positionals, int *out_code) {
    cursor c = {.spec = spec, .argc = argc, .at = 1, .argv = argv};
    bool options_end = false;
    int given = 0, code = CLI_OK;
    for (int i = 0; i < spec->max_positionals; i++) positionals[i] = NULL;
    for (; c.at < argc && code == CLI_OK; c.at++) {
        const char *word = argv[c.at];
        if (!options_end && (strcmp(word, "--help") == 0 || strcmp(word, "-h") == 0)) {
            print_help(spec);
            *out_code = CLI_OK;
            return false;
        }
        if (!options_end && strcmp(word, "--") == 0) options_end = true;
        else if (!options_end && strncmp(word, "--", 2) == 0) code = take_option(&c);
        else if (!options_end && word[0] == '-' && word[1]) code = take_letter(&c);
        else if (given < spec->max_positionals) positionals[given++] = word;
        else code = cli_usage("%s: one argument too many: '%s'", spec->command, word);
    }
    if (code == CLI_OK) code = check_positionals(spec, given);
    *out_code = code;
    return code == CLI_OK;
}
