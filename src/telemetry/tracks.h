/* The tracks of a recording, and their names. */
#ifndef STHI_TELEMETRY_TRACKS_H
#define STHI_TELEMETRY_TRACKS_H
#include <stdbool.h>

/* X(name, text, of a thread): tracks. Those of threads have one line for each thread. */
#define STHI_TRACK_LIST(X)                       \
    X(STEPS, "steps", false)                     \
    X(COMPUTE, "compute", false)                 \
    X(COPY_UP, "copies up", false)               \
    X(COPY_DEMAND, "copies up, on demand", false) \
    X(EXPAND, "decoding on the device", false)   \
    X(COPY_DOWN, "copies down", false)           \
    X(SPILL, "spills", false)                    \
    X(RESTORE, "restores", false)                \
    X(READ, "disk", true)                        \
    X(STAGE, "staging", true)                    \
    X(DECODE, "decoding", true)                  \
    X(CALL, "host call", true)                   \
    X(OPTIMIZER, "optimizer", true)
typedef enum sthi_track {
#define STHI_TRACK_ENUM(name, text, thread) STHI_TRACK_##name,
    STHI_TRACK_LIST(STHI_TRACK_ENUM)
#undef STHI_TRACK_ENUM
        STHI_TRACK_COUNT
} sthi_track;

static inline const char *sthi_track_text(sthi_track track) {
    static const char *const texts[] = {
#define STHI_TRACK_TEXT(name, text, thread) text,
        STHI_TRACK_LIST(STHI_TRACK_TEXT)
#undef STHI_TRACK_TEXT
    };
    return texts[track];
}
#endif
