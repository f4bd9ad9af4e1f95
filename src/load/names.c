/* Names for errors: which tensor a byte belongs to. Units do not change their tensors, so no lock
 * is needed. */
#include "load/names.h"

#include "state/state.h"

const char *sthi_tensor_name(const sthi_unit *u, uint64_t place_offset) {
    const char *name = u->name;
    for (uint32_t i = 0; i < u->tensor_count && u->tensors[i].place_offset <= place_offset; i++)
        name = u->tensors[i].name;
    return name;
}

/* The tensor that a byte of the file belongs to; NULL for a gap. */
static const char *tensor_at(const sth_checkpoint *c, uint32_t file, uint64_t offset) {
    for (uint64_t i = 0; i < c->tensors.count; i++) {
        const sth_tensor_info *t = &c->tensors.items[i];
        if (t->file == file && offset >= t->offset && offset - t->offset < t->bytes) return t->name;
    }
    return NULL;
}

sth_status sthi_name_failure(const sthi_unit *u, uint32_t file, uint64_t offset) {
    sthi_error_copy why;
    sthi_error_save(&why);
    const char *tensor = tensor_at(u->checkpoint, file, offset);
    return sthi_fail(why.status, why.domain, why.native, why.object, "unit '%s', tensor '%s': %s", u->name,
                     tensor ? tensor : "(between tensors)", why.message);
}
