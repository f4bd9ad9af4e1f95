/* Decorators: tables that stand before another device's table, made from the list of entries (entries.h).
 *
 *   layer.c    the table of a decorated device; names such as "check+fault(copy_h2d=3)+sim"
 *   book.c     what is alive, by address or handle: for check and trace
 *   check.c    wrong use is an error that names the call and the object
 *   trace.c    a line of JSON for each call; replay.c makes the calls of such a file again
 *   fault.c    the n-th call of a kind fails
 *   delay.c    random waits before calls and on streams
 *   slow.c     a link of less than its rate */
#ifndef STHI_LAYER_H
#define STHI_LAYER_H
#include <stdatomic.h>

#include "base/thread.h"
#include "device/device.h"
#include "device/entries.h"

typedef struct sthi_layer sthi_layer;

typedef struct sthi_decorator {
    const char *name;
    size_t size; /* of its struct, which begins with an sthi_layer and is zeroed */
    sth_status (*init)(sthi_layer *); /* before any option; NULL: nothing to do */
    /* One option. Fails with sthi_layer_bad_option. */
    sth_status (*set)(sthi_layer *, const char *key, const char *value);
    sth_status (*start)(sthi_layer *); /* all options are set; NULL: nothing to do */
    /* Before the inner call, which is not made where this fails. `call` is its own. */
    sth_status (*before)(sthi_layer *, const sthi_call *);
    /* After it, with its status; returns what the caller gets. Not after void calls. NULL: nothing to do. */
    sth_status (*after)(sthi_layer *, const sthi_call *, sth_status);
    sth_status (*closing)(sthi_layer *); /* the inner device is still open; NULL: nothing to do */
    void (*fini)(sthi_layer *);    /* after init, also where start failed; NULL: nothing to do */
} sthi_decorator;

struct sthi_layer {
    sth_backend_ops table; /* what the library calls */
    const sthi_decorator *decorator;
    const sth_backend_ops *inner;
    sth_backend_device *inner_self;
    uint32_t capabilities; /* of the inner device */
    unsigned fork_depth;
};

extern const sthi_decorator sthi_check_decorator, sthi_trace_decorator, sthi_fault_decorator, sthi_delay_decorator,
    sthi_slow_decorator;

/* Puts the decorators that `name` begins with before a device: *ops and *self become those of the outermost. On
 * failure they are what must be closed. A name without decorators changes nothing. */
sth_status sthi_decorate(const char *name, const sth_backend_ops **ops, sth_backend_device **self);
/* Where the device's own name begins, behind its decorators. */
const char *sthi_undecorated(const char *name);

/* `known`: the options that there are, in words. */
sth_status sthi_layer_bad_option(const sthi_layer *l, const char *key, const char *value, const char *known);
/* A whole decimal number, at most `most`. */
bool sthi_layer_number(const char *text, uint64_t most, uint64_t *out);
#endif
