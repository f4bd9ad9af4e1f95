/* What `stagehand doctor` finds, and what it advises. */
#ifndef CLI_DOCTOR_H
#define CLI_DOCTOR_H
#include <stdbool.h>

#include "host.h"
#include "stagehand/device.h"

enum { RATE_SIZES = 3, MAX_FINDINGS = 32 };
extern const uint64_t doctor_rate_bytes[RATE_SIZES];

/* One device of one back end, or a back end without devices (index -1). */
typedef struct finding {
    const char *backend;
    int index;
    bool ok;           /* opened, and its link measured */
    bool pinned;       /* memory could be pinned */
    char error[512];   /* why not; also why memory could not be pinned */
    sth_device_info info;
    double pinned_rate[RATE_SIZES], pageable_rate[RATE_SIZES]; /* bytes per second; 0: not measured */
} finding;

typedef struct diagnosis {
    finding findings[MAX_FINDINGS];
    int finding_count;
    host_facts host;
    const char *disk_path; /* NULL: not asked for */
    disk_rate disk;
    char advice[MAX_FINDINGS][640];
    int advice_count;
} diagnosis;

void doctor_look_at_devices(diagnosis *d);
/* Fills the advice from everything else: one line for each thing that is wrong. */
void doctor_advise(diagnosis *d);
void doctor_print(const diagnosis *d);
void doctor_print_json(const diagnosis *d);

/* X(capability bit, name) */
#define CAPABILITY_LIST(X)                      \
    X(STH_CAP_PINNED_HOST, "pinned_host")       \
    X(STH_CAP_MAPPED_HOST, "mapped_host")       \
    X(STH_CAP_RING, "ring")                     \
    X(STH_CAP_PEER_TO_PEER, "peer_to_peer")     \
    X(STH_CAP_GRAPH_CAPTURE, "graph_capture")   \
    X(STH_CAP_UNIFIED_MEMORY, "unified_memory") \
    X(STH_CAP_VIRTUAL_TIME, "virtual_time")     \
    X(STH_CAP_EXPAND, "expand")                 \
    X(STH_CAP_HOST_IS_DEVICE, "host_is_device") \
    X(STH_CAP_SHARED_EVENTS, "shared_events")
#endif
