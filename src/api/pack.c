/* Exported functions of stagehand/pack.h: checks arguments, then calls src/pack. */
#include "stagehand/pack.h"

#include "base/error.h"
#include "pack/formats.h"

#define STHI_TEXT(name, text) text,
static const char *const formats[] = {STH_PACK_FORMAT_LIST(STHI_TEXT)};
#undef STHI_TEXT

const char *sth_pack_format_name(sth_pack_format format) {
    return (unsigned)format < STH_PACK_FORMAT_COUNT ? formats[format] : "?";
}

void sth_pack_options_init(sth_pack_options *options) {
    if (!options) return;
    *options = (sth_pack_options){.size = sizeof *options, .format = STH_PACK_V2, .dtype = STH_DTYPE_BF16};
}

static sth_status check(const char *in, const char *out, const void *third) {
    if (in && *in && out && *out && third) return STH_OK;
    return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, NULL, "needed are two paths that are not empty, and options");
}

sth_status sth_pack(const char *in, const char *out, const sth_pack_options *options) {
    STHI_TRY(check(in, out, options));
    return sthi_pack(in, out, options);
}

sth_status sth_unpack(const char *in, const char *out, const sth_pack_options *options) {
    STHI_TRY(check(in, out, options));
    return sthi_unpack(in, out, options);
}

sth_status sth_verify(const char *path, const char *original, const sth_pack_options *options,
                      sth_verified_function each, sth_verify_result *out_result) {
    sth_pack_options defaults;
    sth_pack_options_init(&defaults);
    STHI_TRY(check(path, original ? original : path, out_result));
    return sthi_verify(path, original, options ? options : &defaults, each, out_result);
}
