/* A caller of the store as Python is one: it holds the device's memory and does what the store says. Memory that
 * is let go of is scribbled over at once, in the order of the stream, and memory for a copy back is dirty: bytes
 * that are read or written out of order are wrong. */
#ifndef TESTS_ACTIVATION_RIG_H
#define TESTS_ACTIVATION_RIG_H
#include "device/device.h"
#include "stagehand/activation.h"
#include "support/check.h"

enum { THINGS = 64, MEMORIES = 512 };

typedef struct thing {
    sth_record record; /* 0: none */
    uint64_t bytes;
    unsigned seed;
    sth_devptr memory, copy; /* 0: let go of */
    bool held;               /* somebody else may write to `memory` */
} thing;

typedef struct rig {
    sth_device *device;
    sth_activation *store;
    sth_stream stream;
    thing things[THINGS];
    struct {
        sth_devptr at;
        uint64_t bytes;
    } memories[MEMORIES]; /* given back by rig_rest, when nothing is enqueued */
    int memory_count;
    uint8_t *garbage, *found;
    unsigned most_spilling;
    bool recomputable, held; /* of what is saved from now on */
    bool quiet; /* nothing is scribbled over and nothing checked: the link does the store's work alone */
} rig;

enum { LARGEST = 512 << 10 };

/* On a device that is there already, which the rig keeps; rig_fini is for what it could not make, too. */
sth_status rig_start(rig *g, sth_device *device, const sth_activation_options *options, bool stream_zero);
/* link: bytes per second. options may be NULL. stream_zero: the calling thread, as Python does on "sim". */
void rig_init(rig *g, bool virtual_time, uint64_t link, const sth_activation_options *options, bool stream_zero);
void rig_fini(rig *g);
void rig_rest(rig *g); /* all copies are done; memory that nothing holds goes */

/* Each returns the first failure; what fails is left as it was. */
sth_status rig_save(rig *g, int i, uint64_t bytes, unsigned seed, bool passing);
sth_status rig_room(rig *g, uint64_t need);
sth_status rig_let_loose(rig *g, int i, unsigned seed); /* a held one is written once more, and is held no more */
sth_status rig_ask(rig *g, int i); /* brings it back and checks its bytes */
sth_status rig_ahead(rig *g);
sth_status rig_release(rig *g, int i);

sth_activation_state rig_state(rig *g, int i);
sth_activation_stats rig_stats(rig *g);
#endif
