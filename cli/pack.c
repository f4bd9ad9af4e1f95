/* `stagehand pack` and `stagehand unpack`: what the library does, with a bar. */
#include <stdio.h>
#include <string.h>

#include "args.h"
#include "commands.h"
#include "progress.h"
#include "report.h"
#include "stagehand/pack.h"

static int finish(progress_bar *bar, sth_status status, const char *out) {
    progress_end(bar);
    if (status == STH_SHUT_DOWN && progress_stopped()) {
        cli_fail(CLI_STOPPED, "stopped; the same command goes on where it was");
        return CLI_STOPPED;
    }
    if (status != STH_OK) return cli_fail_status(status);
    cli_put(stdout, out);
    putchar('\n');
    return CLI_OK;
}

static bool find_format(const char *text, sth_pack_format *out) {
    for (int i = 0; i < STH_PACK_FORMAT_COUNT; i++) {
        if (strcmp(text, sth_pack_format_name((sth_pack_format)i)) != 0) continue;
        *out = (sth_pack_format)i;
        return true;
    }
    return false;
}

/* One of --format, --lossless, --int8 and --int4. */
static int choose_format(const char *format, bool lossless, bool int8, bool int4, sth_pack_format *out) {
    if ((format != NULL) + lossless + int8 + int4 != 1)
        return cli_usage("pack: give one of --lossless, --int8, --int4 and --format");
    if (lossless) *out = STH_PACK_LOSSLESS;
    else if (!format) *out = int8 ? STH_PACK_V2 : STH_PACK_V3_INT4;
    else if (!find_format(format, out))
        return cli_usage("pack: --format is v2, v3-int4, layer-index or lossless, not '%s'", format);
    return CLI_OK;
}

int command_pack(int argc, char **argv) {
    const char *format = NULL, *paths[2];
    bool lossless = false, int8 = false, int4 = false, quiet = false;
    uint64_t threads = 0;
    int code;
    sth_pack_options options;
    sth_pack_options_init(&options);
    const arg_option table[] = {
        {"format", ARG_TEXT, &format, "FORMAT",
         "v2 or lossless (OUT.safetensors), v3-int4 (a folder) or layer-index (OUT.json)"},
        {"lossless", ARG_FLAG, &lossless, NULL, "keep every bit, in 0.7 of the bytes (bfloat16)"},
        {"int8", ARG_FLAG, &int8, NULL, "the same as --format v2"},
        {"int4", ARG_FLAG, &int4, NULL, "the same as --format v3-int4"},
        {"skip", ARG_TEXT, &options.skip, "REGEX", "leave tensors whose name matches as they are"},
        {"threads", ARG_NUMBER, &threads, "N", "threads that compute (default: one for each core)"},
        {"quiet", ARG_FLAG, &quiet, NULL, "no progress"},
    };
    static const char help[] =
        "Quantises a checkpoint, packs it without loss, or lays it out for streaming. OUT appears when\n"
        "it is whole; until then the work is in OUT.partial, and the same command goes on from there.";
    const arg_spec spec = {"pack", "IN OUT", help, table, sizeof table / sizeof *table, 2, 2};
    if (!args_parse(&spec, argc, argv, paths, &code)) return code;
    if ((code = choose_format(format, lossless, int8, int4, &options.format)) != CLI_OK) return code;
    progress_bar bar = progress_begin("packed", quiet);
    options.threads = threads > UINT32_MAX ? UINT32_MAX : (uint32_t)threads;
    options.progress = progress_show;
    options.context = &bar;
    return finish(&bar, sth_pack(paths[0], paths[1], &options), paths[1]);
}

static bool find_dtype(const char *text, sth_dtype *out) {
    static const struct {
        const char *name;
        sth_dtype dtype;
    } known[] = {{"f32", STH_DTYPE_F32}, {"bf16", STH_DTYPE_BF16}, {"f16", STH_DTYPE_F16}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strcmp(text, known[i].name) != 0) continue;
        *out = known[i].dtype;
        return true;
    }
    return false;
}

int command_unpack(int argc, char **argv) {
    const char *dtype = "bf16", *paths[2];
    bool quiet = false;
    uint64_t threads = 0;
    int code;
    sth_pack_options options;
    sth_pack_options_init(&options);
    const arg_option table[] = {
        {"dtype", ARG_TEXT, &dtype, "DTYPE", "of the decoded weights: bf16 (default), f16 or f32"},
        {"threads", ARG_NUMBER, &threads, "N", "threads that compute (default: one for each core)"},
        {"quiet", ARG_FLAG, &quiet, NULL, "no progress"},
    };
    const arg_spec spec = {"unpack", "IN OUT",
                           "Decodes a quantised file, or gathers a layer index or shards, into one file\n"
                           "OUT.safetensors. A losslessly packed file comes back as the file that it was, or as a\n"
                           "folder with its shards and their index. OUT appears when it is whole.",
                           table, sizeof table / sizeof *table, 2, 2};
    if (!args_parse(&spec, argc, argv, paths, &code)) return code;
    if (!find_dtype(dtype, &options.dtype)) return cli_usage("unpack: --dtype is bf16, f16 or f32, not '%s'", dtype);
    progress_bar bar = progress_begin("unpacked", quiet);
    options.threads = threads > UINT32_MAX ? UINT32_MAX : (uint32_t)threads;
    options.progress = progress_show;
    options.context = &bar;
    return finish(&bar, sth_unpack(paths[0], paths[1], &options), paths[1]);
}
