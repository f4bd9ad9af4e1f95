/* The table of a decorated device, and the decorators in a device's name.
 *
 * Every entry packs its arguments into a record and goes through pass(): before, the inner call, after. The table has
 * what the inner one has, and the foreign copies always: so a decorator can tell memory of the device's own from
 * memory that a framework allocated also where the inner device takes any address.
 * A decorated device does not share its events: what a decorator knows of them is in its own books.
 * Locks: none here. In a child after fork() no decorator is asked, so no lock of the parent's is met. */
#define _GNU_SOURCE
#include "device/decorate/layer.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

static const sthi_decorator *const decorators[] = {
    &sthi_check_decorator, &sthi_trace_decorator, &sthi_fault_decorator, &sthi_delay_decorator, &sthi_slow_decorator};
static const uint32_t UNSHARED = STH_CAP_SHARED_EVENTS;
enum { DECORATORS = sizeof decorators / sizeof *decorators, LONGEST = 1024 };

static sthi_layer *layer_of(sth_backend_device *self) { return (sthi_layer *)self; }

static bool is_child(const sthi_layer *l) { return l->fork_depth != sthi_fork_depth(); }

/* Outputs of a call, until it is known that it has not failed: the caller's are set only then. */
typedef struct outputs {
    sth_device_info info;
    sth_devptr address;
    sth_stream stream;
    sth_event *event;
    bool done;
    int64_t ns;
} outputs;

#define EACH_OUTPUT(X) X(info) X(address) X(stream) X(event) X(done) X(ns)

static sthi_call redirect(const sthi_call *c, outputs *o) {
    sthi_call own = *c;
#define REDIRECT(what) \
    if (c->out_##what) own.out_##what = &o->what;
    EACH_OUTPUT(REDIRECT)
#undef REDIRECT
    return own;
}

static void hand_out(const sthi_call *c, const outputs *o) {
#define HAND_OUT(what) \
    if (c->out_##what) *c->out_##what = o->what;
    EACH_OUTPUT(HAND_OUT)
#undef HAND_OUT
}

static sth_status pass(sth_backend_device *self, const sthi_call *c) {
    sthi_layer *l = layer_of(self);
    if (is_child(l)) return sthi_call_make(l->inner, l->inner_self, c);
    outputs o;
    sthi_call own = redirect(c, &o);
    STHI_TRY(l->decorator->before(l, &own));
    sth_status rc = sthi_call_make(l->inner, l->inner_self, &own);
    if (sthi_entries[c->entry].kind == STHI_VOID) return rc;
    if (l->decorator->after) rc = l->decorator->after(l, &own, rc);
    if (rc == STH_OK && c->out_info) o.info.capabilities &= ~UNSHARED;
    if (rc == STH_OK) hand_out(c, &o);
    return rc;
}

/* ---- the table */

#define PLAIN_ENTRY(name, parameters, fields)
#define STATUS_ENTRY(name, parameters, fields)                    \
    static sth_status on_##name parameters {                      \
        sthi_call c = {.entry = STHI_ENTRY_##name, UNPACK fields}; \
        return pass(self, &c);                                    \
    }
#define VOID_ENTRY(name, parameters, fields)                      \
    static void on_##name parameters {                            \
        sthi_call c = {.entry = STHI_ENTRY_##name, UNPACK fields}; \
        (void)pass(self, &c);                                     \
    }
#define UNPACK(...) __VA_ARGS__
#define ENTRY(need, kind, name, parameters, fields, arguments) kind##_ENTRY(name, parameters, fields)
STHI_ENTRIES(ENTRY)
#undef ENTRY

static uint32_t on_capabilities(sth_backend_device *self) {
    return layer_of(self)->capabilities & ~UNSHARED;
}

static int64_t on_now_ns(sth_backend_device *self) {
    sthi_layer *l = layer_of(self);
    return l->inner->now_ns(l->inner_self);
}

static uint64_t on_ring_granularity(sth_backend_device *self) {
    sthi_layer *l = layer_of(self);
    return l->inner->ring_granularity(l->inner_self);
}

static void on_close(sth_backend_device *self) {
    sthi_layer *l = layer_of(self);
    if (is_child(l)) return; /* as back ends do */
    sth_status found = l->decorator->closing ? l->decorator->closing(l) : STH_OK;
    sthi_error_copy what;
    sthi_error_save(&what);
    l->inner->close(l->inner_self);
    if (found != STH_OK) sthi_error_restore(&what);
    if (l->decorator->fini) l->decorator->fini(l);
    sthi_free(l);
}

static void fill_table(sthi_layer *l) {
    const sth_backend_ops *in = l->inner;
    sth_backend_ops *t = &l->table;
    *t = *in; /* version, name, count, open */
#define KEEP_PLAIN(name)
#define KEEP_STATUS(name) t->name = in->name ? on_##name : NULL;
#define KEEP_VOID(name) KEEP_STATUS(name)
#define KEEP(need, kind, name, ...) KEEP_##kind(name)
    STHI_ENTRIES(KEEP)
#undef KEEP
    t->capabilities = on_capabilities;
    t->now_ns = on_now_ns;
    t->ring_granularity = in->ring_granularity ? on_ring_granularity : NULL;
    t->close = on_close;
    t->copy_d2h_foreign = on_copy_d2h_foreign;
    t->copy_h2d_foreign = on_copy_h2d_foreign;
}

/* ---- names */

/* The '+' that ends the first decorator; NULL: there is none. Options may hold one too. */
static const char *end_of_first(const char *name) {
    int depth = 0;
    for (const char *p = name; *p; p++) {
        if (*p == '(') depth++;
        else if (*p == ')') depth--;
        else if (*p == '+' && depth == 0) return p;
    }
    return NULL;
}

const char *sthi_undecorated(const char *name) {
    for (const char *end; (end = end_of_first(name));) name = end + 1;
    return name;
}

static sth_status find_decorator(const char *name, size_t length, const sthi_decorator **out) {
    for (int i = 0; i < DECORATORS; i++)
        if (strlen(decorators[i]->name) == length && !strncmp(name, decorators[i]->name, length)) {
            *out = decorators[i];
            return STH_OK;
        }
    return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, name,
                     "\"%.*s\" is no decorator; before a device may stand check, trace(file=PATH), fault(CALL=N), "
                     "slow and delay, each with a \"+\" behind it",
                     (int)length, name);
}

sth_status sthi_layer_bad_option(const sthi_layer *l, const char *key, const char *value, const char *known) {
    return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, l->decorator->name, "%s does not know %s=%s; it knows %s",
                     l->decorator->name, key, value, known);
}

bool sthi_layer_number(const char *text, uint64_t most, uint64_t *out) {
    uint64_t n = 0;
    if (!*text) return false;
    for (; *text; text++) {
        if (*text < '0' || *text > '9' || n > (most - (uint64_t)(*text - '0')) / 10) return false;
        n = n * 10 + (uint64_t)(*text - '0');
    }
    *out = n;
    return true;
}

/* text: "key=value,key=value", which is cut into pieces. */
static sth_status set_options(sthi_layer *l, char *text) {
    for (char *rest = text, *one; (one = strsep(&rest, ","));) {
        char *value = strchr(one, '=');
        if (!value)
            return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, l->decorator->name,
                             "the options of %s are key=value with commas between them, and \"%s\" is none",
                             l->decorator->name, one);
        *value++ = 0;
        STHI_TRY(l->decorator->set(l, one, value));
    }
    return STH_OK;
}

static sth_status configure(sthi_layer *l, const char *options, size_t length) {
    char text[LONGEST];
    if (l->decorator->init) STHI_TRY(l->decorator->init(l));
    sth_status rc = STH_OK;
    if (length) {
        snprintf(text, sizeof text, "%.*s", (int)length, options);
        rc = set_options(l, text);
    }
    if (rc == STH_OK && l->decorator->start) rc = l->decorator->start(l);
    if (rc != STH_OK && l->decorator->fini) l->decorator->fini(l);
    return rc;
}

/* piece: one decorator with its options, `length` characters. */
static sth_status wrap(const char *piece, size_t length, const sth_backend_ops **ops, sth_backend_device **self) {
    const sthi_decorator *decorator = NULL;
    size_t name = strcspn(piece, "(+"), options = length - name;
    STHI_TRY(find_decorator(piece, name, &decorator));
    if (options && (options < 2 || piece[length - 1] != ')' || options > LONGEST))
        return sthi_fail(STH_INVALID_ARGUMENT, "stagehand", 0, piece,
                         "the options of %s do not end with \")\" before the \"+\", or are longer than %d characters",
                         decorator->name, LONGEST);
    sthi_layer *l = sthi_zalloc(1, decorator->size);
    if (!l) return sthi_no_memory(decorator->name, "a decorator");
    l->decorator = decorator;
    l->inner = *ops;
    l->inner_self = *self;
    l->capabilities = l->inner->capabilities(l->inner_self);
    l->fork_depth = sthi_fork_depth();
    fill_table(l);
    sth_status rc = configure(l, piece + name + 1, options ? options - 2 : 0);
    if (rc != STH_OK) {
        sthi_free(l);
        return rc;
    }
    *ops = &l->table;
    *self = (sth_backend_device *)l;
    return STH_OK;
}

/* From the inside out: the last one stands next to the device. */
sth_status sthi_decorate(const char *name, const sth_backend_ops **ops, sth_backend_device **self) {
    const char *end = end_of_first(name);
    if (!end) return STH_OK;
    STHI_TRY(sthi_decorate(end + 1, ops, self));
    return wrap(name, (size_t)(end - name), ops, self);
}
