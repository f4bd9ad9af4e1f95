/* Exported functions of stagehand/trainables.h: checks arguments, then calls src/core. */
#include "stagehand/trainables.h"

#include "api/arguments.h"
#include "core/trainables.h"

void sth_trainables_input_init(sth_trainables_input *input) {
    if (input) *input = (sth_trainables_input){.size = sizeof *input, .link_bytes_per_s = 25e9, .host_ns = 1000000};
}

sth_status sth_trainables_choose(const sth_trainables_input *input, sth_home *out_homes, uint64_t *out_bytes) {
    if (!input || !out_bytes) return null_argument("input or out_bytes");
    if (input->size != sizeof *input)
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, "input", "call sth_trainables_input_init() on it first");
    if (input->count && (!input->weights || !out_homes)) return null_argument("weights or out_homes");
    return sthi_trainables_choose(input, out_homes, out_bytes);
}

const char *sth_home_text(sth_home home) {
#define STHI_HOME_TEXT(name, text) text,
    static const char *const texts[] = {STH_HOME_LIST(STHI_HOME_TEXT)};
#undef STHI_HOME_TEXT
    return (unsigned)home < STH_HOME_COUNT ? texts[home] : "";
}
