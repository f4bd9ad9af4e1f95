/* Neighbours in host memory: units whose images lie behind each other in one pinned window, which
 * one copy may bring. Lock held. */
#include "load/together.h"

#include "state/state.h"

enum { LEAST_SHARE = 16, TOGETHER_MOST = 8 << 20 };

uint64_t sthi_most_together(uint64_t budget) { return sthi_min_u64(TOGETHER_MOST, budget / LEAST_SHARE); }

bool sthi_images_join(const sthi_unit *a, const sthi_unit *b) {
    return a->direct && b->direct && !a->segments && !b->segments && a->host + a->bytes == b->host;
}

bool sthi_one_window(const sth_runtime *rt, const sthi_unit *u, const uint8_t *from, uint64_t bytes) {
    return sthi_arena_is_pinned(u->in_ram ? rt->sources.kept_arena : u->arena, from, bytes);
}

uint64_t sthi_bytes_in_a_row(const sth_runtime *rt, uint32_t unit, uint64_t room) {
    const sthi_unit *u = &rt->units[unit];
    uint64_t bytes = u->bytes, most = sthi_most_together(room);
    for (uint32_t i = unit; i + 1 < rt->unit_count && sthi_images_join(&rt->units[i], &rt->units[i + 1]); i++) {
        uint64_t more = bytes + rt->units[i + 1].bytes;
        if (more > most || !sthi_one_window(rt, u, u->host, more)) break;
        bytes = more;
    }
    return bytes;
}
