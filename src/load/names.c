/* Names for errors: which tensor a byte belongs to. Units do not change their tensors, so no lock
 * is needed. */
#include "load/names.h"

#include "state/state.h"
#include "store/checkpoint.h"

const char *sthi_tensor_name(const sthi_unit *u, uint64_t place_offset) {
    const char *name = u->name;
    for (uint32_t i = 0; i < u->tensor_count && u->tensors[i].place_offset <= place_offset; i++)
        name = u->tensors[i].name;
    return name;
}

sth_status sthi_name_failure(const sthi_unit *u, uint32_t file, uint64_t offset) {
    sthi_error_copy why;
    sthi_error_save(&why);
    const char *tensor = sthi_checkpoint_tensor_at(u->checkpoint, file, offset);
    return sthi_fail(why.status, why.domain, why.native, why.object, "unit '%s', tensor '%s': %s", u->name,
                     tensor ? tensor : "(between tensors)", why.message);
}
