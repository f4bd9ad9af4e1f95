/* stagehand/trainables.h - which trained weights live on the device.
 *
 * A weight that is trained has one master. On the host it costs a copy to the device and one of its
 * gradient back in every step, and the host's time for both and for its update. On the device it
 * costs room: for itself, its gradient and its optimizer's state, each counted once. Room that
 * nobody else would use is free; other room is taken from weights that are frozen, which then cross
 * the link twice a step. Small weights therefore belong on the device, and large ones on the host.
 *
 * Unless a function says otherwise: Threads: any, at once. Blocks: no. Allocates: no. */
#ifndef STAGEHAND_TRAINABLES_H
#define STAGEHAND_TRAINABLES_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "stagehand/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, text): where a trained weight lives, and why. */
#define STH_HOME_LIST(X)                                                    \
    X(DEVICE, "it is trained, and lives on the device")                     \
    X(PRICE, "its room on the device costs more time than its way there")   \
    X(ROOM, "the budget has no room for it, its gradient and its state")
typedef enum sth_home {
#define STH_HOME_ENUM(name, text) STH_HOME_##name,
    STH_HOME_LIST(STH_HOME_ENUM)
#undef STH_HOME_ENUM
        STH_HOME_COUNT
} sth_home; /* all but STH_HOME_DEVICE: on the host */

/* Bytes of state for an element, of an optimizer that nobody knows yet: two moments of float32. */
enum { STH_TRAINABLE_STATE_BYTES = 8 };

typedef struct sth_trainable {
    uint64_t bytes;          /* of the weight */
    uint64_t gradient_bytes;
    uint64_t state_bytes;    /* of the optimizer's state beside it */
} sth_trainable;

typedef struct sth_trainables_input {
    size_t size;             /* sizeof(sth_trainables_input), set by init */
    const sth_trainable *weights;
    uint32_t count;
    bool wanted;             /* on the device whatever it costs, as far as there is room. Default false */
    uint64_t room;           /* bytes that weights, gradients and states may take on the device */
    /* bytes of the budget that are left with all weights on the device, frozen ones and these, but
     * without gradients and states of these; 0: not all of them fit */
    uint64_t slack;
    double link_bytes_per_s; /* > 0. Default 25e9 */
    int64_t host_ns;         /* host's time a step for a weight whose master is there. Default 1 ms */
} sth_trainables_input;
STH_API void sth_trainables_input_init(sth_trainables_input *input);

/* Decides, small weights first: out_homes[i] is that of weights[i], out_bytes what those on the
 * device take there. More room never puts a weight back on the host. Returns INVALID_ARGUMENT;
 * OUT_OF_HOST_MEMORY. Allocates: scratch, freed before it returns. */
STH_API sth_status sth_trainables_choose(const sth_trainables_input *input, sth_home *out_homes,
                                         uint64_t *out_bytes);

/* The reason in words; "" for a number that is no home. */
STH_API const char *sth_home_text(sth_home home);

#ifdef __cplusplus
}
#endif
#endif
