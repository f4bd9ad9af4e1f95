/* Fuzz target for the public functions: bytes are a sequence of calls, on simulated devices, with the arguments that
 * calls.h describes. Objects are made before they are used, and ended once.
 *
 * Property: nothing crashes, hangs or is left allocated; every failure is a status of the list, never INTERNAL, and
 * the thread's record has its message; a handle that is asked for is set on success alone. */
#include "fuzz/calls.h"

#include "base/memory.h"

enum { MOST_CALLS = 160 };

/* By how often: runtimes and what they stand on more than the rest. */
static void (*const parts[])(calls *) = {
    calls_on_runtime, calls_on_runtime, calls_on_runtime, calls_on_runtime, calls_on_runtime, calls_on_runtime,
    calls_on_device, calls_on_memory, calls_on_memory, calls_on_plan, calls_on_files, calls_on_runner,
    calls_on_conductor, calls_on_spills, calls_on_spills, calls_on_downloads, calls_on_updates};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    calls_make_files();
    calls c = {.at = data, .end = data + size};
    long live = sthi_alloc_live();
    for (int i = 0; i < MOST_CALLS && c.at < c.end; i++)
        parts[calls_byte(&c) % (sizeof parts / sizeof *parts)](&c);
    c.at = c.end; /* ends take no arguments */
    calls_end_runner(&c);
    calls_end_runtimes(&c);
    calls_end_files(&c);
    calls_end_spills(&c);
    calls_end_downloads(&c);
    calls_end_conductor(&c);
    calls_end_updates(&c);
    calls_end_memory(&c);
    calls_end_devices(&c);
    CHECK(sthi_alloc_live() == live);
    return 0;
}
