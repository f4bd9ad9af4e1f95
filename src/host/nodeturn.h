/* One process at a time among those of this user on this machine. The turn ends with the process
 * that has it, however that ends: it is a name that the kernel takes back. Threads: any. */
#ifndef STHI_HOST_NODETURN_H
#define STHI_HOST_NODETURN_H
#include <stdbool.h>
#include <stdint.h>

/* A descriptor to give to sthi_node_turn_end; -1 where it did not come in time, or cannot be
 * had. `name`: at most 60 characters. Blocks: at most `wait_ns`. */
int sthi_node_turn_take(const char *name, int64_t wait_ns);
void sthi_node_turn_end(int turn); /* -1 is fine */
#endif
