/* Figures out of a page that another process wrote: nothing in it is believed before it was looked at. Pure. */
#include <math.h>
#include <string.h>

#include "store/utf8.h"
#include "telemetry/top.h"

bool sthi_top_header_is_sound(const sthi_top_header *h, int32_t pid) {
    return h->magic == STHI_TOP_MAGIC && h->version == STHI_TOP_VERSION && h->pid == (uint32_t)pid &&
           h->places == STHI_TOP_PLACES && h->place_bytes == STHI_TOP_PLACE_BYTES &&
           h->figures_bytes == sizeof(sth_top_figures);
}

/* Bytes of a control character that begins here; 0: it is none. */
static size_t control_bytes(const unsigned char *c) {
    if (*c < 0x20 || *c == 0x7f) return 1;
    return *c == 0xc2 && c[1] >= 0x80 && c[1] <= 0x9f ? 2 : 0;
}

/* Shortens a text that was cut within a character. */
static void drop_torn_end(char *text) {
    size_t n = strlen(text), back = 0;
    while (back < n && back < 4 && ((unsigned char)text[n - 1 - back] & 0xc0) == 0x80) back++;
    if (back == n || back == 4) return;
    unsigned char lead = (unsigned char)text[n - 1 - back];
    size_t needs = 0;
    if (lead > 0xf4) return;
    for (unsigned char bit = 0x40; lead >= 0xc0 && lead & bit; bit >>= 1) needs++;
    if (back < needs) text[n - 1 - back] = 0;
}

void sthi_top_clean(char *text, size_t room) {
    text[room - 1] = 0;
    drop_torn_end(text);
    bool utf8 = sthi_utf8_is_text(text, strlen(text));
    for (unsigned char *c = (unsigned char *)text; *c; c++) {
        if (!utf8 && *c >= 0x80) *c = '?';
        for (size_t n = control_bytes(c); n-- > 0;) c[n] = '?';
    }
}

static bool numbers_are_sound(const sth_step_metrics *m) {
#define SOUND(field, unit, text) \
    if (!isfinite(m->field) || m->field < 0) return false;
    STH_STEP_METRICS_LIST(SOUND)
#undef SOUND
    return true;
}

bool sthi_top_take(const sthi_top_header *header, const sthi_top_words *words, int64_t now_ns, sth_top_runtime *out) {
    const sth_top_figures *f = &words->figures;
    if (words->taken != 1 || f->bound_by > STH_BOUND_DISK || f->planned > 1 || f->parked > 1) return false;
    if (!numbers_are_sound(&f->step)) return false;
    *out = (sth_top_runtime){.figures = *f};
    memcpy(out->program, header->program, sizeof out->program);
    sthi_top_clean(out->program, sizeof out->program);
    sthi_top_clean(out->figures.name, sizeof out->figures.name);
    sthi_top_clean(out->figures.device, sizeof out->figures.device);
    memset(out->figures.unused, 0, sizeof out->figures.unused);
    uint64_t now = (uint64_t)now_ns;
    out->age_s = now > words->stored_ns ? (double)(now - words->stored_ns) / 1e9 : 0;
    return true;
}
