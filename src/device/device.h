/* Devices inside the library: a back end's table and what the library keeps beside it. What the calls of
 * the table promise is in stagehand/backend.h; nothing outside src/device knows any one back end. */
#ifndef STHI_DEVICE_H
#define STHI_DEVICE_H
#include "base/thread.h"
#include "core/account.h"
#include "core/finder.h"
#include "core/turns.h"
#include "stagehand/backend.h"

typedef struct sthi_phase {
    struct sthi_phase *next;
    uint64_t number;
    sthi_finder finder;
} sthi_phase;

struct sth_device {
    const sth_backend_ops *ops;
    sth_backend_device *self; /* what every call of the table takes first */
    uint32_t capabilities;    /* as the table has told; asked once */
    _Atomic int refs;
    sthi_mutex account_lock;    /* a leaf: guards the account and the finder */
    sthi_cond account_changed;  /* memory was given back, a step ended, an asker is through with a member */
    sthi_account account;       /* what the runtimes on this device occupy */
    sthi_turns turns;           /* of threads that wait for room; guarded by the account's lock */
    uint64_t default_cap;
    sthi_finder finder;         /* of budgets that nobody gave */
    sthi_phase *phases;         /* those of models that take turns; NULL: there are none */
    sthi_finder *ran;           /* of the one that had the last step; NULL: nobody has */
};

void sthi_device_drop_phases(sth_device *device); /* account locked, or nobody else has the device */

extern const sth_backend_ops sthi_sim_ops;
extern const sth_backend_ops sthi_cuda_ops;
extern const sth_backend_ops sthi_hip_ops;

/* check.c */

/* Whether a table may be used: its version, its size, its name, its required entries. Names what is wrong. */
sth_status sthi_backend_check(const sth_backend_ops *table);
/* Whether it has what these capabilities need. */
sth_status sthi_backend_check_capabilities(const sth_backend_ops *table, uint32_t capabilities);
/* A table as large as this library's own: entries that the given one is too old for are NULL. It was checked. */
void sthi_backend_complete(const sth_backend_ops *given, sth_backend_ops *out);

/* registry.c: back ends by name ("cuda:1"). Every table in the list has been checked. */
const sth_backend_ops *sthi_backend_at(int i); /* NULL past the end */
sth_status sthi_backend_register(const sth_backend_ops *table);
sth_status sthi_backend_load(const char *path, const char **out_name); /* NULL: what the environment names */
/* Splits "cuda:1" into a back end and an index, decorators left aside; "cpu" is another name of "sim". */
sth_status sthi_backend_find(const char *name, const sth_backend_ops **out, int *out_index);

/* decorate/replay.c */
sth_status sthi_trace_replay(const char *path, sth_device *device, sth_replay_report *out);

/* device.c */
void sthi_sim_options_init(sth_sim_options *options);
void sthi_device_retain(sth_device *d);
void sthi_device_release(sth_device *d); /* closes with the last reference; NULL is fine */
sth_status sthi_device_open(const char *name, const sth_sim_options *sim, sth_device **out);
#endif
