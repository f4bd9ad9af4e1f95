/* stagehand/status.h - what every call returns, and the detail behind a failure.
 *
 * A status is 0 on success and negative on failure. The thread that made the failing call can
 * read a fuller account with sth_last_error(): which object (file, tensor, unit), which native
 * code, and a sentence that says what to do. Nothing in the library aborts the host program. */
#ifndef STAGEHAND_STATUS_H
#define STAGEHAND_STATUS_H

#if defined(__GNUC__)
#define STH_API __attribute__((visibility("default")))
#else
#define STH_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, value, class, text). The class says what is ruined: the call (CALLER), nothing but the
 * resource asked for (RESOURCE), the data named (DATA), the device (DEVICE), the runtime
 * (RUNTIME). */
#define STH_STATUS_LIST(X)                                                                     \
    X(OK, 0, NONE, "success")                                                                  \
    X(INVALID_ARGUMENT, -1, CALLER, "an argument is out of its range")                         \
    X(INVALID_STATE, -2, CALLER, "the object is in a state that does not allow this call")     \
    X(NOT_FOUND, -3, CALLER, "the thing named does not exist")                                 \
    X(UNSUPPORTED, -4, CALLER, "this device or file cannot do that")                           \
    X(STALE, -5, CALLER, "the handle refers to something that has ended")                      \
    X(OUT_OF_HOST_MEMORY, -10, RESOURCE, "host memory is exhausted")                           \
    X(OUT_OF_PINNED_MEMORY, -11, RESOURCE, "the limit for pinned host memory is reached")      \
    X(OUT_OF_DEVICE_MEMORY, -12, RESOURCE, "device memory is exhausted")                       \
    X(OUT_OF_ADDRESS_SPACE, -13, RESOURCE, "address space is exhausted")                       \
    X(BUDGET_TOO_SMALL, -14, RESOURCE, "the budget is below what one step needs at once")      \
    X(IO, -20, DATA, "reading or writing failed")                                              \
    X(CORRUPT_DATA, -21, DATA, "the file contradicts itself or its format")                    \
    X(CHANGED_DATA, -22, DATA, "the file changed while it was open")                           \
    X(DTYPE_MISMATCH, -23, DATA, "the dtype is not the one expected")                          \
    X(SHAPE_MISMATCH, -24, DATA, "the shape is not the one expected")                          \
    X(DEVICE_ERROR, -30, DEVICE, "the device driver reported an error")                        \
    X(BACKEND_UNAVAILABLE, -31, DEVICE, "no such device, or its driver cannot be loaded")      \
    X(SHUT_DOWN, -40, RUNTIME, "the runtime has been shut down")                               \
    X(INTERNAL, -41, RUNTIME, "a rule inside Stagehand was broken; please report it")

typedef enum sth_status {
#define STH_STATUS_ENUM(name, value, cls, text) STH_##name = value,
    STH_STATUS_LIST(STH_STATUS_ENUM)
#undef STH_STATUS_ENUM
} sth_status;

/* Detail of the last failure on the calling thread. Strings are never NULL and live until the next
 * failing call on the same thread. */
typedef struct sth_error {
    sth_status status;
    long native_code;    /* errno or the driver's code; 0 if there is none */
    const char *domain;  /* "errno", "cuda", "hip", "sim", "safetensors", "stagehand" */
    const char *object;  /* file, tensor or unit at fault; "" if there is none */
    const char *message; /* one sentence or two, for a person */
} sth_error;

/* Name of a status, such as "BUDGET_TOO_SMALL"; "UNKNOWN" for other values.
 * Threads: any. Blocks: no. Allocates: no. */
STH_API const char *sth_status_name(sth_status status);

/* One line of English for a status. Threads: any. Blocks: no. Allocates: no. */
STH_API const char *sth_status_text(sth_status status);

/* The last failure on this thread; status is STH_OK if there was none.
 * Threads: any, each sees its own. Blocks: no. Allocates: no. */
STH_API const sth_error *sth_last_error(void);

/* Records a failure for sth_last_error() on this thread and returns `status`: for functions that
 * the library calls back, such as those of sth_allocator. Strings are copied, cut where too
 * long, and may be NULL. STH_OK clears the record. Threads: any, each its own. Blocks: no.
 * Allocates: no. */
STH_API sth_status sth_error_set(sth_status status, const char *domain, long native_code,
                                 const char *object, const char *message);

#ifdef __cplusplus
}
#endif
#endif
