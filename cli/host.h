/* What the machine gives: memory, limits, and how fast a path can be read. Linux only. */
#ifndef CLI_HOST_H
#define CLI_HOST_H
#include <stdbool.h>
#include <stdint.h>

#define HOST_UNLIMITED UINT64_MAX

typedef struct host_facts {
    uint64_t ram_total, ram_available; /* bytes; 0 where the system does not say */
    uint64_t pin_limit;                /* RLIMIT_MEMLOCK */
    uint64_t container_limit;          /* smallest memory limit of the control groups round this process */
    uint64_t container_used;           /* bytes charged to the group with that limit; 0 without limit */
    bool wsl;
    unsigned processors;               /* that this process may run on */
    char cpu[128], driver[64];         /* of the processor; of NVIDIA's kernel module; "" where it is unknown */
} host_facts;

/* `root` is put before /proc and /sys: "" for this machine, a folder in tests. */
void host_look(const char *root, host_facts *out);

/* Resident bytes of this process, now and at most. */
typedef struct host_use { uint64_t now, peak; } host_use;
host_use host_process_use(void);

/* Reads up to `limit` bytes of a file, or of the largest regular file in a folder, through the page cache.
 * Returns an exit code; says on stderr what is wrong. */
typedef struct disk_rate {
    uint64_t bytes;
    double bytes_per_s;
} disk_rate;
int host_disk_rate(const char *path, uint64_t limit, disk_rate *out);

/* Monotonic nanoseconds. */
int64_t host_now_ns(void);
#endif
