/* The arithmetic of a watermark. See watermark.h. */
#include "core/watermark.h"

#include "base/arith.h"

enum {
    PATIENCE = 100,    /* passes for which a mark that was too high is remembered */
    DIFFER_SHARE = 128, /* of the budget, by which passes differ */
    LEAST_SHARE = 8    /* of the budget: the mark is no lower */
};

void sthi_watermark_init(sth_watermark *m, uint64_t high, uint64_t low, bool follows, uint64_t budget) {
    *m = (sth_watermark){.high = high, .band = sthi_minus(high, low), .follows = follows, .budget = budget,
                         .ceiling = budget};
}

/* Tensors are large, and a little more may be one too many each time: the mark comes closer by halves, and stays below
 * one that was too high. */
bool sthi_watermark_follow(sth_watermark *m, uint64_t peak, bool moved) {
    if (!m->follows || !peak) return false;
    uint64_t differ = m->budget / DIFFER_SHARE, aim = m->budget - differ, high;
    if (m->patience) m->patience--;
    else m->ceiling = m->budget;
    if (peak > aim) {
        high = m->ceiling = sthi_minus(m->high, peak - aim);
        m->patience = PATIENCE;
    } else if (aim - peak > differ && moved) {
        high = sthi_min_u64(m->high + (aim - peak + 1) / 2, m->ceiling);
    } else {
        return false;
    }
    m->high = sthi_min_u64(sthi_max_u64(high, m->budget / LEAST_SHARE), m->budget);
    return true;
}

/* band * high / of, which may not overflow: high is no more than a memory, nor is band more than `of`. */
static uint64_t scaled(uint64_t band, uint64_t high, uint64_t of) {
    if (!of) return 0;
    uint64_t product;
    return sthi_mul_u64(band, high, &product) ? product / of : (uint64_t)((double)band * ((double)high / (double)of));
}

bool sthi_watermark_limit(sth_watermark *m, const sth_watermark *given, uint64_t most) {
    uint64_t high = sthi_min_u64(given->high, most);
    if (given->follows) { /* below it the mark goes on following */
        m->budget = sthi_min_u64(given->budget, most);
        m->ceiling = sthi_min_u64(m->ceiling, m->budget);
        high = sthi_min_u64(m->high, m->budget);
    }
    if (high == m->high) return false;
    m->high = high;
    m->band = scaled(given->band, high, given->high);
    return true;
}

uint64_t sthi_watermark_low(const sth_watermark *m) { return sthi_minus(m->high, m->band); }
