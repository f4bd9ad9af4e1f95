/* A recording as a Chrome trace, which Perfetto reads too: JSON, an event a line. A source is a process there, a track
 * or a thread of the host a thread. Times are microseconds from a base that torch.profiler's traces have as well. No
 * locks. */
#define _POSIX_C_SOURCE 200809L
#include "telemetry/recorded.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include <zlib.h>

#include "base/error.h"
#include "base/memory.h"
#include "store/utf8.h"

/* As torch.profiler's: the last whole number of these quarters of a year since 1970. */
static const int64_t BASE_NS = INT64_C(7889238) * 1000000000;
enum { LINE = 2048, FIRST_PROCESS = 1000000, THREADS_FROM = 100 };

typedef struct writer {
    const sthi_recording *r;
    gzFile to;
    int64_t base_ns;
    bool failed, begun;
} writer;

static const bool track_of_thread[] = {
#define THREAD(name, text, thread) thread,
    STHI_TRACK_LIST(THREAD)
#undef THREAD
};

__attribute__((format(printf, 2, 3))) static void put(writer *w, const char *format, ...) {
    char line[LINE];
    va_list args;
    va_start(args, format);
    int n = vsnprintf(line, sizeof line, format, args);
    va_end(args);
    if (n < 0 || n >= LINE || gzwrite(w->to, line, (unsigned)n) != n) w->failed = true;
}

/* Not the first byte of a character of UTF-8. */
static bool is_inner(char c) { return ((unsigned char)c & 0xc0) == 0x80; }

/* A JSON string, cut where it is very long; text that is no UTF-8 has "?" for what is not ASCII. */
static void quote(const char *text, char *out) {
    size_t bytes = strlen(text), n = 0, i = 0;
    bool plain = !sthi_utf8_is_text(text, bytes);
    out[n++] = '"';
    for (; i < bytes && n < LINE / 4; i++) {
        unsigned char c = (unsigned char)text[i];
        if (c == '"' || c == '\\') out[n++] = '\\', out[n++] = (char)c;
        else if (c < 0x20 || c == 0x7f || (plain && c >= 0x80)) out[n++] = '?';
        else out[n++] = (char)c;
    }
    if (!plain && i < bytes && is_inner(text[i])) { /* cut inside a character: without it */
        while (is_inner(out[n - 1])) n--;
        n--;
    }
    out[n++] = '"';
    out[n] = '\0';
}

typedef char quoted[LINE / 4 + 8];

static double us(const writer *w, int64_t ns) { return (double)(ns - w->base_ns) / 1e3; }

/* The comma before every event but the first. */
static void event(writer *w) {
    put(w, w->begun ? ",\n" : "\n");
    w->begun = true;
}

static uint32_t process(const sthi_recorded *e) { return FIRST_PROCESS + e->source; }

static long thread(const writer *w, const sthi_recorded *e) {
    return track_of_thread[e->track] ? THREADS_FROM + w->r->threads[e->thread].id : (long)e->track + 1;
}

static void put_arrow(writer *w, const sthi_recorded *e, bool begins, uint64_t number) {
    event(w);
    put(w,
        "{\"ph\":\"%s\",\"id\":%" PRIu64 ",\"pid\":%u,\"tid\":%ld,\"ts\":%.3f,\"name\":\"copy to use\","
        "\"cat\":\"arrow\"%s}",
        begins ? "s" : "f", number, process(e), thread(w, e), us(w, e->begin_ns), begins ? "" : ",\"bp\":\"e\"");
}

static void put_slice(writer *w, const sthi_recorded *e) {
    quoted name;
    quote(w->r->texts[e->name], name);
    event(w);
    put(w, "{\"ph\":\"X\",\"pid\":%u,\"tid\":%ld,\"ts\":%.3f,\"dur\":%.3f,\"name\":%s,\"cat\":\"%s\",\"args\":{",
        process(e), thread(w, e), us(w, e->begin_ns), (double)e->duration_ns / 1e3, name, sthi_track_text(e->track));
    if (e->step >= 0) put(w, "\"step\":%" PRId64 "%s", e->step, e->bytes ? "," : "");
    if (e->bytes) put(w, "\"bytes\":%" PRIu64, e->bytes);
    put(w, "}}");
    if (e->arrow_from) put_arrow(w, e, true, e->arrow_from);
    if (e->arrow_to) put_arrow(w, e, false, e->arrow_to);
}

static void put_counter(writer *w, const sthi_recorded *e) {
    quoted name;
    quote(w->r->texts[e->name], name);
    event(w);
    put(w, "{\"ph\":\"C\",\"pid\":%u,\"ts\":%.3f,\"name\":%s,\"args\":{\"value\":%.6g}}", process(e),
        us(w, e->begin_ns), name, e->value);
}

static void put_name(writer *w, uint32_t pid, long tid, const char *kind, const char *text) {
    quoted name;
    quote(text, name);
    event(w);
    put(w, "{\"ph\":\"M\",\"pid\":%u,\"tid\":%ld,\"name\":\"%s\",\"args\":{\"name\":%s}}", pid, tid, kind, name);
}

/* Names of processes and threads: one for each pair that has an event. `seen`: a byte for each pair. */
static void put_names(writer *w, uint8_t *seen, uint64_t first) {
    const sthi_recording *r = w->r;
    uint32_t each = 1 + STHI_TRACK_COUNT + r->thread_count;
    for (uint64_t i = first; i < r->count; i++) {
        const sthi_recorded *e = &r->ring[i % r->cap];
        uint8_t *of = seen + (size_t)e->source * each;
        char text[128];
        if (!of[0]) {
            snprintf(text, sizeof text, "stagehand: %.100s", r->texts[e->source]);
            put_name(w, process(e), 0, "process_name", text);
        }
        of[0] = 1;
        if (e->track == STHI_COUNTER_TRACK) continue;
        bool host = track_of_thread[e->track];
        uint8_t *own = of + 1 + (host ? STHI_TRACK_COUNT + e->thread : e->track);
        const char *name = host ? r->threads[e->thread].name : sthi_track_text(e->track);
        if (!*own) put_name(w, process(e), thread(w, e), "thread_name", name);
        *own = 1;
    }
}

static void put_all(writer *w, uint8_t *seen) {
    const sthi_recording *r = w->r;
    uint64_t first = r->count > r->cap ? r->count - r->cap : 0;
    put(w, "{\"schemaVersion\":1,\"stagehand\":1,\"displayTimeUnit\":\"ms\",\"baseTimeNanoseconds\":%" PRId64
           ",\"lost\":%" PRIu64 ",\"traceEvents\":[", w->base_ns, first);
    put_names(w, seen, first);
    for (uint64_t i = first; i < r->count; i++) {
        const sthi_recorded *e = &r->ring[i % r->cap];
        if (e->track == STHI_COUNTER_TRACK) put_counter(w, e);
        else put_slice(w, e);
    }
    put(w, "\n]}\n");
}

static sth_status failed(const sthi_recording *r) {
    return sthi_fail(STH_IO, NULL, 0, r->path, "'%.200s' could not be written; free some room on the disk", r->path);
}

sth_status sthi_chrome_write(const sthi_recording *r) {
    writer w = {.r = r, .base_ns = r->begun_ns / BASE_NS * BASE_NS};
    uint8_t *seen = sthi_zalloc((size_t)r->text_count * (1 + STHI_TRACK_COUNT + r->thread_count), 1);
    if (!seen) return sthi_no_memory(r->path, "writing a trace");
    int fd = ftruncate(r->fd, 0) == 0 ? dup(r->fd) : -1;
    const char *mode = r->compressed ? "wb1" : "wbT";
    w.to = fd >= 0 ? gzdopen(fd, mode) : NULL;
    if (w.to) put_all(&w, seen);
    else if (fd >= 0) (void)close(fd);
    sthi_free(seen);
    if (!w.to) return failed(r);
    bool closed = gzclose(w.to) == Z_OK;
    return closed && !w.failed ? STH_OK : failed(r);
}
