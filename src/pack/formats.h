/* What each format makes of a checkpoint. */
#ifndef STHI_PACK_FORMATS_H
#define STHI_PACK_FORMATS_H
#include <regex.h>

#include "pack/job.h"

/* Fill the job with items, files and `finish`; `out` is where it goes. */
sth_status sthi_pack_v2(sthi_pack_job *job, const char *out);
sth_status sthi_pack_v3(sthi_pack_job *job, const char *out);
sth_status sthi_pack_index(sthi_pack_job *job, const char *out);
sth_status sthi_pack_lossless(sthi_pack_job *job, const char *out);
sth_status sthi_pack_plain(sthi_pack_job *job, const char *out);     /* unpacking */
sth_status sthi_unpack_lossless(sthi_pack_job *job, const char *out); /* the same, of what sthi_pack_lossless made */

sth_status sthi_pack_check_options(const sth_pack_options *options);
sth_status sthi_pack(const char *in, const char *out, const sth_pack_options *options);
sth_status sthi_unpack(const char *in, const char *out, const sth_pack_options *options);
sth_status sthi_verify(const char *path, const char *original, const sth_pack_options *options,
                       sth_verified_function each, sth_verify_result *out_result);

/* choose.c: the names of the option `skip`; `pattern` may be NULL. */
typedef struct sthi_skip {
    regex_t names;
    bool any;
} sthi_skip;
sth_status sthi_skip_init(const char *pattern, sthi_skip *out);
bool sthi_skip_has(const sthi_skip *skip, const char *name);
void sthi_skip_fini(sthi_skip *skip);

/* choose.c: which tensors are quantised, and the order of all. */
typedef struct sthi_choice {
    const sth_tensor_info *tensor;
    bool quantise;
    char *base; /* the name without ".weight", where it is quantised */
} sthi_choice;
typedef struct sthi_choices {
    sthi_choice *items; /* in natural order of the names */
    uint64_t count;
} sthi_choices;
/* `least`: smallest number of rows and columns, `unit`: columns must be a multiple of it. */
sth_status sthi_choose(const sthi_pack_job *job, uint64_t least, uint64_t unit, sthi_choices *out);
/* All tensors in natural order of their names; none is quantised. */
sth_status sthi_order(const sthi_pack_job *job, sthi_choices *out);
void sthi_choices_fini(sthi_choices *choices);

/* Where `out` ends with `suffix`, a copy with `new_suffix` in its place; else INVALID_ARGUMENT. The caller frees it. */
sth_status sthi_pack_name(const char *out, const char *suffix, const char *new_suffix, char **out_name);
const char *sthi_pack_leaf(const char *path); /* behind the last slash */
#endif
