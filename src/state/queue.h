/* The queue of loads: what feed.c decided and issue.c has not copied yet. */
#ifndef STHI_STATE_QUEUE_H
#define STHI_STATE_QUEUE_H
#include <stdbool.h>
#include <stdint.h>

enum { STHI_REQUEST_CAP = 64 /* loads queued ahead of issue */ };

typedef struct sthi_request {
    uint32_t unit;
    uint32_t extent;         /* STH_NONE: chosen when it is issued */
    uint64_t offset;
    uint64_t sequence, lap;  /* sequence: lap x loads + index of the load; planned loads only */
    uint32_t uses;           /* planned uses that it serves */
    int32_t slot;            /* opened when its first chunk is issued */
    bool resident, planned, kept, staged, failed;
    uint64_t read;           /* bytes handed to readers */
} sthi_request;

/* How far the request at the queue's head got. */
typedef enum sthi_issue {
    STHI_ISSUE_DONE,
    STHI_ISSUE_NO_PLACE,
    STHI_ISSUE_NOT_READ,
    STHI_ISSUE_FAILED
} sthi_issue;

/* load/queue.c, load/feed.c, load/issue.c */
typedef struct sthi_queue {
    sthi_request requests[STHI_REQUEST_CAP]; /* by history numbers [head, tail) */
    uint64_t head, tail;
    sthi_issue head_state;
} sthi_queue;
#endif
