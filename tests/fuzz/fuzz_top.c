/* Fuzz target for pages of the live view, which any program of the user may have written. Input: a header, then the
 * words of a place.
 *
 * Property: a header of another version or process is refused; what is taken has finite numbers and texts that end and
 * hold no control characters; the tool's screen of it has no escape but colors, and no line beyond its edge. */
#include <math.h>
#include <string.h>

#include "../cli/top.h"
#include "fuzz/files.h"
#include "telemetry/top.h"

enum { PID = 77, COLUMNS = 60, ROWS = 5 };

static void check_text(const char *text, size_t room) {
    CHECK(memchr(text, 0, room));
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        CHECK(*c >= 0x20 && *c != 0x7f);
        CHECK(*c != 0xc2 || c[1] < 0x80 || c[1] > 0x9f);
    }
}

/* Columns are bytes at least where a character has two of them at most, and counts for two. */
static void check_screen(const sth_top_list *list, bool color) {
    char *text = top_text(list, &(top_look){.columns = COLUMNS, .rows = ROWS, .color = color, .live = true});
    size_t lines = 0;
    unsigned used = 0;
    for (const char *c = text; *c; c++) {
        if (*c == '\033') {
            CHECK(color && c[1] == '[');
            c += strcspn(c, "m");
        } else if (*c == '\n') {
            used = 0;
            lines++;
        } else {
            CHECK((unsigned char)*c >= 0x20);
            used += ((unsigned char)*c & 0xc0) != 0x80;
            CHECK(used <= COLUMNS);
        }
    }
    CHECK(lines && lines <= ROWS);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    sthi_top_header header;
    sthi_top_words words;
    sth_top_runtime runtime;
    if (size < sizeof header + sizeof words) return 0;
    memcpy(&header, data, sizeof header);
    memcpy(&words, data + sizeof header, sizeof words);
    bool sound = sthi_top_header_is_sound(&header, PID);
    CHECK(!sound || (header.version == STHI_TOP_VERSION && header.pid == PID));
    if (!sthi_top_take(&header, &words, 1000, &runtime)) return 0;
    check_text(runtime.program, sizeof runtime.program);
    check_text(runtime.figures.name, sizeof runtime.figures.name);
    check_text(runtime.figures.device, sizeof runtime.figures.device);
    CHECK(runtime.age_s >= 0 && isfinite(runtime.age_s) && runtime.figures.bound_by <= STH_BOUND_DISK);
    CHECK(isfinite(runtime.figures.step.step_time_ms) && isfinite(runtime.figures.step.link_gb_s));
    runtime.pid = PID;
    sth_top_list list = {.runtimes = &runtime, .count = 1};
    check_screen(&list, false);
    check_screen(&list, true);
    return 0;
}
