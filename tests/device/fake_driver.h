/* What the stand-ins for the CUDA and the HIP driver share: a card on host memory.
 *
 *   fake_driver.c   calls that fail on purpose, contexts, complaints, what tests steer
 *   fake_memory.c   device memory, mappings, registered host memory
 *   fake_stream.c   a thread for each stream, events, copies and kernels that come late
 *   fake_order.c    which work is behind which, and who touched which bytes
 *   fake_cuda.c, fake_hip.c, fake_kernels.c   the vendors' names over it
 *
 * It is stricter than a driver where a mistake of ours would go unseen: a call without a current context, an address
 * outside live memory, unexpected flags are errors. What a driver would not even notice is a *complaint*, which a
 * test reads: a copy or kernel that touches bytes which another stream writes without an event between, memory that
 * goes while work on it is pending, a wait for an event that was never recorded.
 *
 * One lock guards all of it; work runs under it too. Environment, read at each init: FAKE_DRIVER_DEVICES (default 1),
 * FAKE_DRIVER_MEMORY and FAKE_DRIVER_PIN_LIMIT (bytes); FAKE_DRIVER_STICKY: a refused registration is told of twice;
 * FAKE_DRIVER_NO_MAPPINGS: no virtual memory, so no rings. */
#ifndef TESTS_FAKE_DRIVER_H
#define TESTS_FAKE_DRIVER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- what tests steer: found with dlsym, by these names, in either library */

typedef struct fake_plan {
    const char *function; /* the driver's own name of it; NULL: any */
    long nth;             /* the nth call of it from now on; 0: none */
    bool forever;         /* and all later ones; of any function: the card is dead, nothing that is pending runs */
    int code;             /* what the call returns */
    /* A call that ends something ends it all the same, as a driver does that reports the failure of earlier work. */
    bool ends_anyway;
} fake_plan;

typedef struct fake_controls {
    void (*plan)(const fake_plan *); /* NULL: nothing fails. Counting begins anew */
    long (*calls)(const char *function); /* since plan; NULL: of all */
    const char *(*function)(int i);  /* names of the functions that were ever called; NULL past the end */
    bool (*ends)(const char *function); /* whether it is one that ends something */
    long (*live)(void);              /* objects not yet freed, retained contexts included */
    /* How late work comes: 0 at once; else from this seed none, up to late_us, or ten times that unless it is waited
     * for. */
    void (*schedule)(uint64_t seed, unsigned late_us);
    long (*complaints)(char *first, size_t room); /* how many, and the first one's text */
    void (*shut_down)(bool yes);     /* every call reports that the driver has been shut down */
    void (*switch_context)(void);    /* another library makes its own context current on this thread */
    bool (*is_switched)(void);       /* whether that one is current here */
    void (*reset)(void);             /* forgets what was left behind, and complaints */
} fake_controls;
#define FAKE_CONTROLS "fake_driver_controls" /* a const fake_controls */

/* ---- for fake_cuda.c and fake_hip.c */

typedef enum fake_code {
    FAKE_OK,
    FAKE_INVALID_VALUE,
    FAKE_OUT_OF_MEMORY,
    FAKE_DEINITIALIZED,
    FAKE_NO_DEVICE,
    FAKE_INVALID_DEVICE,
    FAKE_INVALID_CONTEXT,
    FAKE_INVALID_HANDLE,
    FAKE_NOT_READY,
    FAKE_HOST_REGISTERED,
    FAKE_HOST_NOT_REGISTERED,
    FAKE_CODES
} fake_code;

extern const int fake_native[FAKE_CODES]; /* the vendor's numbers */
extern const bool fake_by_number;         /* devices are current by their numbers; there are no contexts to hold */

typedef struct fake_function {
    const char *name;
    long calls;
    bool known, ends;
    struct fake_function *next;
} fake_function;

enum { FAKE_ANYWHERE = 0, FAKE_IN_CONTEXT = 1, FAKE_ENDS = 2 };

typedef struct fake_call {
    bool run;       /* do what the call is for */
    int injected;   /* what it returns in any case; 0: what comes of it */
    fake_code code; /* why it does not run */
} fake_call;
fake_call fake_enter(fake_function *f, int needs); /* takes the lock */
int fake_leave(const fake_call *, fake_code);      /* lets it go; the vendor's number */

/* The body of each driver function. */
#define FAKE_CALL(needs, operation)                             \
    static fake_function here = {.name = __func__};             \
    fake_call call = fake_enter(&here, needs);                  \
    return fake_leave(&call, call.run ? (operation) : FAKE_OK)

/* fake_driver.c: devices and contexts, which are current by thread */
fake_code fake_init(unsigned flags);
bool fake_has_mappings(void);
fake_code fake_count(int *out);
fake_code fake_device(int *out, int ordinal);
fake_code fake_name(char *out, int room, int device);
fake_code fake_retain(void **out, int device);
fake_code fake_release(int device);
void *fake_current(void);
void fake_set_current(void *);
fake_code fake_get_number(int *out);
fake_code fake_set_number(int device);

/* fake_memory.c. Addresses are those of the process. */
enum { FAKE_PAGE_UNIT = 4096 }; /* a real card has 2 MiB: smaller, so that small budgets have rings */
fake_code fake_memory_info(size_t *out_free, size_t *out_total);
fake_code fake_alloc(uint64_t *out, size_t bytes);
fake_code fake_free(uint64_t);
fake_code fake_register(void *, size_t bytes);
fake_code fake_unregister(void *);
fake_code fake_host_pointer(uint64_t *out, void *);
fake_code fake_reserve(uint64_t *out, size_t bytes);
fake_code fake_unreserve(uint64_t, size_t bytes);
fake_code fake_create(uint64_t *out, size_t bytes);
fake_code fake_release_handle(uint64_t);
fake_code fake_map(uint64_t, size_t bytes, uint64_t handle);
fake_code fake_unmap(uint64_t, size_t bytes);
fake_code fake_access(uint64_t, size_t bytes);

/* fake_stream.c. A stream is NULL or what fake_stream_create gave. */
fake_code fake_stream_create(void **out);
fake_code fake_stream_destroy(void *);
fake_code fake_stream_synchronize(void *);
fake_code fake_synchronize(void);
fake_code fake_copy_h2d(uint64_t dst, const void *src, size_t bytes, void *stream);
fake_code fake_copy_d2h(void *dst, uint64_t src, size_t bytes, void *stream);
fake_code fake_copy_d2d(uint64_t dst, uint64_t src, size_t bytes, void *stream);
fake_code fake_stream_wait(void *stream, void *event);
fake_code fake_event_create(void **out, bool timing);
fake_code fake_event_destroy(void *);
fake_code fake_event_record(void *, void *stream);
fake_code fake_event_query(void *);
fake_code fake_event_synchronize(void *);
fake_code fake_event_elapsed(float *out_ms, void *a, void *b);

/* fake_kernels.c: modules are images of fake_compiler.c's, kernels the text of the back end's, compiled for the CPU */
fake_code fake_module_load(void **out, const void *image);
fake_code fake_module_unload(void *);
fake_code fake_module_function(void **out, void *module, const char *name);
fake_code fake_launch(void *function, const unsigned grid[3], const unsigned block[3], unsigned shared, void *stream,
                      void **parameters, void **extra);

#define EXPORT __attribute__((visibility("default")))
#endif
