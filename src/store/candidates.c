/* Candidates for the name of a parameter: all names that the rules below make of it, found breadth first. A rule
 * replaces a whole component, or several that follow each other, wherever they stand in the name.
 *
 * No lock, no state. Does not know which names a checkpoint has. */
#include "store/candidates.h"

#include <stdbool.h>
#include <string.h>

#include "base/error.h"
#include "base/memory.h"

enum { NAMES_MOST = 4096 };

/* theirs: NULL, where the component goes with the dot behind it. */
typedef struct rule {
    const char *ours, *theirs;
} rule;

/* What wrappers and adapters put in between. */
static const rule wrappers[] = {{"orig", NULL}, {"org_module", NULL}, {"base_layer", NULL}};

/* One direction: from what models are written with to what their first releases used. */
static const rule aliases[] = {
    {"attn1", "self_attn"},
    {"attn2", "cross_attn"},
    {"to_q", "q"},
    {"to_k", "k"},
    {"to_v", "v"},
    {"to_out.0", "o"},
    {"ffn.net.0.proj", "ffn.0"},
    {"ffn.net.2", "ffn.2"},
    {"norm2", "norm3"},
    {"scale_shift_table", "modulation"},
    {"ff.net.0.proj", "ff.linear_in"},
    {"ff.net.2", "ff.linear_out"},
    {"ff_context.net.0.proj", "ff_context.linear_in"},
    {"ff_context.net.2", "ff_context.linear_out"},
    {"mlp", "block_sparse_moe"},
};

static const char *const roots[] = {"", "model.diffusion_model.", "diffusion_model.", "model."};

#define COUNT(list) (sizeof(list) / sizeof *(list))

typedef struct names {
    char *items[NAMES_MOST];
    uint32_t count;
} names;

static bool begins_with(const char *at, const rule *r) {
    size_t length = strlen(r->ours);
    if (strncmp(at, r->ours, length)) return false;
    return at[length] == '.' || (r->theirs && !at[length]);
}

/* The length of the name by the rule, which is written to `out` unless that is NULL. */
static size_t rewrite(const char *name, const rule *r, char *out) {
    size_t n = 0;
    for (const char *p = name; *p;) {
        const char *at = p == name && begins_with(p, r) ? p : NULL;
        if (!at && *p == '.' && begins_with(p + 1, r)) at = p + 1;
        if (!at || at > p) {
            if (out) out[n] = *p;
            n++;
        }
        if (!at) {
            p++;
            continue;
        }
        size_t length = r->theirs ? strlen(r->theirs) : 0;
        if (out && length) memcpy(out + n, r->theirs, length);
        n += length;
        p = at + strlen(r->ours) + !r->theirs;
    }
    if (out) out[n] = 0;
    return n;
}

static bool has(const names *found, const char *name) {
    for (uint32_t i = 0; i < found->count; i++)
        if (!strcmp(found->items[i], name)) return true;
    return false;
}

/* Takes `name` over; NULL: there was no memory for it. */
static sth_status add(names *found, char *name, const char *first) {
    if (!name) return sthi_no_memory(first, "names for '%.160s'", first);
    if (found->count == NAMES_MOST) {
        sthi_free(name);
        return sthi_fail(STH_INVALID_ARGUMENT, NULL, 0, first,
                         "'%.160s' could have more than %d names in a checkpoint: rename its modules", first,
                         NAMES_MOST);
    }
    found->items[found->count++] = name;
    return STH_OK;
}

/* All that the rules make of the names, and of what they made. */
static sth_status close_over(names *found, const rule *rules, size_t count, const char *first) {
    for (uint32_t i = 0; i < found->count; i++)
        for (size_t k = 0; k < count; k++) {
            char *other = sthi_alloc(rewrite(found->items[i], &rules[k], NULL) + 1);
            if (other) rewrite(found->items[i], &rules[k], other);
            if (other && has(found, other)) sthi_free(other);
            else STHI_TRY(add(found, other, first));
        }
    return STH_OK;
}

static sth_status visit_rank(const names *found, uint32_t begin, uint32_t end, uint32_t rank, sth_name_visit *visit,
                             void *context) {
    for (size_t r = 0; r < COUNT(roots); r++)
        for (uint32_t i = begin; i < end; i++) {
            size_t root = strlen(roots[r]), length = strlen(found->items[i]) + 1;
            char *full = sthi_alloc(root + length);
            if (!full) return sthi_no_memory(found->items[0], "names for '%.160s'", found->items[0]);
            memcpy(full, roots[r], root);
            memcpy(full + root, found->items[i], length);
            visit(context, rank, full);
            sthi_free(full);
        }
    return STH_OK;
}

static sth_status visit_all(names *found, const char *name, sth_name_visit *visit, void *context) {
    STHI_TRY(add(found, sthi_strdup(name), name));
    STHI_TRY(close_over(found, wrappers, COUNT(wrappers), name));
    uint32_t plain = found->count;
    STHI_TRY(close_over(found, aliases, COUNT(aliases), name));
    visit(context, 0, name);
    STHI_TRY(visit_rank(found, 0, plain, 1, visit, context));
    return visit_rank(found, plain, found->count, 2, visit, context);
}

sth_status sthi_checkpoint_names(const char *name, sth_name_visit *visit, void *context) {
    names *found = sthi_zalloc(1, sizeof *found);
    if (!found) return sthi_no_memory(name, "names for '%.160s'", name);
    sth_status rc = visit_all(found, name, visit, context);
    for (uint32_t i = 0; i < found->count; i++) sthi_free(found->items[i]);
    sthi_free(found);
    return rc;
}
