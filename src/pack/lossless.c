/* A losslessly packed file from a checkpoint; docs/lossless.md has the layout.
 *
 * How long pieces are must be known before the first of them is written. The source is therefore read twice: to count
 * exponents, then to pack. Both times threads take pieces, each of which reads its own values. Packed tensors come
 * first, each a multiple of 512 bytes; then those that are stored, odd sizes last; then what describes them. The
 * checksums are those of the values as they were, so that they judge packing and unpacking as well as the disk. */
#include <stdio.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/arith.h"
#include "base/error.h"
#include "base/memory.h"
#include "base/thread.h"
#include "device/lossless.h"
#include "pack/formats.h"
#include "pack/lossless.h"
#include "quant/lossless.h"
#include "store/dtype.h"
#include "store/json.h"
#include "store/path.h"

#define PER_THREAD 2u    /* pieces that are in memory at once, for each thread */
#define HEADER_LENGTH 8u /* bytes before the text of a header */

/* ---- pieces of the source */

static sthi_lossless_form form_of(const sth_tensor_info *t) { return sthi_lossless_form_of((int)t->dtype); }

static uint64_t pieces_of(const sth_tensor_info *t) {
    return sthi_lossless_pieces(form_of(t), t->bytes / (form_of(t).bits / 8));
}

static uint64_t piece_bytes(const sth_tensor_info *t, uint64_t piece) {
    return sthi_min_u64(STHI_LOSSLESS_PIECE, t->bytes - piece * STHI_LOSSLESS_PIECE);
}

static sth_status read_piece(const sthi_pack_job *job, const sth_tensor_info *t, uint64_t piece, uint8_t *out) {
    return sthi_checkpoint_read(job->checkpoint, t->file, t->offset + piece * STHI_LOSSLESS_PIECE,
                                piece_bytes(t, piece), out);
}

/* ---- measuring */

typedef struct candidate {
    const sth_tensor_info *tensor;
    uint32_t *lengths; /* of its pieces */
} candidate;

typedef struct candidates {
    candidate *items;
    uint64_t count, pieces;
} candidates;

typedef struct measuring {
    sthi_job job;
    const sthi_pack_job *pack;
    const candidate *of;
    uint64_t first;
} measuring;

static sth_status measure_piece(sthi_job *job, uint64_t i, void *scratch) {
    const measuring *m = (const measuring *)job;
    const sth_tensor_info *t = m->of->tensor;
    sthi_exponents found;
    uint8_t table[STHI_TABLE_BYTES];
    uint64_t piece = m->first + i, elements = piece_bytes(t, piece) / (form_of(t).bits / 8), bytes = 0;
    STHI_TRY(read_piece(m->pack, t, piece, scratch));
    sthi_exponents_count(t->dtype, scratch, elements, &found);
    (void)sthi_round_up(sthi_lossless_bytes((int)t->dtype, elements, sthi_exponents_choose(&found, table)), STHI_ALIGN,
                        &bytes);
    m->of->lengths[piece] = (uint32_t)bytes;
    return STH_OK;
}

static uint32_t threads_of(const sthi_pack_job *job) {
    return job->options.threads ? job->options.threads : (uint32_t)sthi_core_count();
}

static sth_status measure(sthi_pack_job *job, const candidates *all) {
    uint64_t together = PER_THREAD * threads_of(job);
    sthi_workers *workers = NULL;
    STHI_TRY(sthi_workers_create("packer", "sth-pack", threads_of(job), STHI_LOSSLESS_PIECE, &workers));
    sth_status status = STH_OK;
    for (uint64_t c = 0; status == STH_OK && c < all->count; c++) {
        const candidate *of = &all->items[c];
        uint64_t pieces = pieces_of(of->tensor);
        for (uint64_t first = 0; status == STH_OK && first < pieces; first += together) {
            measuring m = {.job = {.run = measure_piece, .pieces = sthi_min_u64(together, pieces - first)},
                           .pack = job, .of = of, .first = first};
            status = sthi_workers_run(workers, &m.job);
            uint64_t left = of->tensor->bytes - first * STHI_LOSSLESS_PIECE;
            uint64_t bytes = sthi_min_u64(together * STHI_LOSSLESS_PIECE, left);
            if (status == STH_OK) status = sthi_job_progress(job, of->tensor->name, bytes);
        }
    }
    sthi_workers_destroy(workers);
    return status;
}

/* Tensors that may be packed, in the order on disk; `room` has the lengths of all their pieces. */
static sth_status list_candidates(sthi_pack_job *job, candidates *out, uint32_t **out_room) {
    const sthi_tensors *all = &job->checkpoint->tensors;
    sthi_skip skip;
    out->items = sthi_zalloc((size_t)all->count, sizeof *out->items);
    if (!out->items) return sthi_job_out_of_memory(job);
    STHI_TRY(sthi_skip_init(job->options.skip, &skip));
    for (uint64_t i = 0; i < all->count; i++) {
        const sth_tensor_info *t = &all->items[i];
        if (!form_of(t).bits || t->bytes / (form_of(t).bits / 8) < STHI_LOSSLESS_LEAST || sthi_skip_has(&skip, t->name))
            continue;
        out->items[out->count++].tensor = t;
        out->pieces += pieces_of(t);
        job->all_work += t->bytes;
    }
    sthi_skip_fini(&skip);
    uint32_t *room = *out_room = sthi_zalloc((size_t)out->pieces, sizeof *room);
    if (!room) return sthi_job_out_of_memory(job);
    for (uint64_t i = 0; i < out->count; i++) {
        out->items[i].lengths = room;
        room += pieces_of(out->items[i].tensor);
    }
    return STH_OK;
}

static uint64_t packed_bytes(const candidate *c) {
    uint64_t sum = 0;
    for (uint64_t i = 0; i < pieces_of(c->tensor); i++) sum += c->lengths[i];
    return sum;
}

/* ---- packing */

typedef struct packing {
    sthi_job job;
    const sthi_pack_job *pack;
    const sth_tensor_info *tensor;
    const uint32_t *lengths;
    uint64_t first, most; /* most: bytes of the largest piece */
    uint8_t *values, *packed;
} packing;

static sth_status pack_piece(sthi_job *job, uint64_t i, void *scratch) {
    const packing *p = (const packing *)job;
    const sth_tensor_info *t = p->tensor;
    uint64_t piece = p->first + i;
    uint8_t *values = p->values + i * STHI_LOSSLESS_PIECE;
    (void)scratch;
    STHI_TRY(read_piece(p->pack, t, piece, values));
    if (sthi_lossless_pack(t->dtype, values, piece_bytes(t, piece) / (form_of(t).bits / 8), p->packed + i * p->most,
                           p->lengths[piece]))
        return STH_OK;
    return sthi_fail(STH_CHANGED_DATA, NULL, 0, p->pack->in, "%.300s: tensor '%.160s' changed while it was packed",
                     p->pack->in, t->name);
}

static sth_status pack_some(sthi_pack_job *job, packing *p, uint64_t count, XXH3_state_t *hash) {
    uint64_t bytes = 0;
    p->job = (sthi_job){.run = pack_piece, .pieces = count};
    STHI_TRY(sthi_workers_run(job->workers, &p->job));
    for (uint64_t i = 0; i < count; i++) {
        uint64_t plain = piece_bytes(p->tensor, p->first + i);
        XXH3_128bits_update(hash, p->values + i * STHI_LOSSLESS_PIECE, (size_t)plain);
        STHI_TRY(sthi_job_put(job, 0, p->packed + i * p->most, p->lengths[p->first + i]));
        bytes += plain;
    }
    return sthi_job_progress(job, p->tensor->name, bytes);
}

/* The checksum of a packed tensor's values, for the list at the end. */
static sth_status note_sum(sthi_pack_job *job, const char *name, const XXH3_state_t *hash) {
    char text[33];
    XXH128_hash_t h = XXH3_128bits_digest(hash);
    sthi_sum_digits(h.high64, h.low64, text);
    return json_object_set_new(job->notes, name, json_string(text)) ? sthi_job_out_of_memory(job) : STH_OK;
}

static sth_status make_packed(sthi_pack_job *job, const sthi_job_item *item) {
    const sth_tensor_info *t = item->source;
    uint64_t pieces = pieces_of(t), together = sthi_min_u64(PER_THREAD * threads_of(job), pieces);
    packing p = {.pack = job, .tensor = t, .lengths = item->note};
    XXH3_state_t hash;
    XXH3_128bits_reset(&hash);
    for (uint64_t i = 0; i < pieces; i++) p.most = sthi_max_u64(p.most, p.lengths[i]);
    p.values = sthi_zalloc((size_t)together, STHI_LOSSLESS_PIECE);
    p.packed = sthi_zalloc((size_t)together, (size_t)p.most);
    sth_status status = p.values && p.packed ? STH_OK : sthi_job_out_of_memory(job);
    for (; status == STH_OK && p.first < pieces; p.first += together)
        status = pack_some(job, &p, sthi_min_u64(together, pieces - p.first), &hash);
    sthi_free(p.values);
    sthi_free(p.packed);
    return status == STH_OK ? note_sum(job, t->name, &hash) : status;
}

/* ---- what describes the tensors */

typedef struct text {
    uint64_t bytes;
    char at[];
} text;

static sth_status make_text(sthi_pack_job *job, const sthi_job_item *item) {
    const text *t = item->note;
    return sthi_job_put(job, 0, t->at, t->bytes);
}

/* The lengths of all pieces: the notes of the items that pack. */
static sth_status make_lengths(sthi_pack_job *job, const sthi_job_item *item) {
    (void)item;
    for (uint64_t i = 0; i < job->item_count; i++) {
        const sthi_job_item *packed = &job->items[i];
        if (packed->make == make_packed)
            STHI_TRY(sthi_job_put(job, 0, packed->note, pieces_of(packed->source) * sizeof(uint32_t)));
    }
    return STH_OK;
}

/* The item that makes a tensor of the source, and then those of the headers and the index, by the row of its checksum.
 * */
typedef struct rows {
    uint64_t count;
    uint64_t items[];
} rows;

static const char *sum_of(const sthi_pack_job *job, const sthi_job_item *item) {
    const char *name = job->tensors[item->first].name;
    if (item->make != make_packed) return job->tensors[item->first].checksum;
    return json_string_value(json_object_get(job->notes, name));
}

static sth_status make_sums(sthi_pack_job *job, const sthi_job_item *item) {
    const rows *r = item->note;
    uint8_t sum[STHI_SUM_BYTES];
    for (uint64_t i = 0; i < r->count; i++) {
        if (!sthi_sum_of_text(sum_of(job, &job->items[r->items[i]]), sum))
            return sthi_fail(STH_CORRUPT_DATA, NULL, 0, job->folder.path,
                             "%.300s: what it says of earlier work makes no sense; call again", job->folder.path);
        STHI_TRY(sthi_job_put(job, 0, sum, sizeof sum));
    }
    return STH_OK;
}

/* Adds an item with one tensor; takes `note` over. */
static sth_status add_own(sthi_pack_job *job, const char *name, sth_dtype dtype, int rank, const uint64_t *shape,
                          sth_status (*make)(sthi_pack_job *, const sthi_job_item *), void *note) {
    sth_status status = sthi_job_add_item(job, &(sthi_job_item){.make = make, .note = note});
    if (status != STH_OK) {
        sthi_free(note);
        return status;
    }
    return sthi_job_add_tensor(job, STHI_LOSSLESS_PREFIX, name, dtype, rank, shape);
}

static sth_status read_text(const sthi_pack_job *job, const sthi_file *file, uint64_t bytes, text **out) {
    text *t = sthi_alloc((size_t)(sizeof *t + bytes));
    if (!t) return sthi_job_out_of_memory(job);
    t->bytes = bytes;
    sth_status status = sthi_file_read(file, 0, bytes, t->at);
    if (status == STH_OK) *out = t;
    else sthi_free(t);
    return status;
}

/* The header with its length, and nothing behind it but the tensors that are known. */
static sth_status add_header(sthi_pack_job *job, uint32_t file) {
    const sthi_file *f = &job->checkpoint->files[file];
    const sthi_tensors *all = &job->checkpoint->tensors;
    unsigned char raw[HEADER_LENGTH];
    char name[32];
    text *t = NULL;
    uint64_t bytes = 0, data = 0;
    STHI_TRY(sthi_file_read(f, 0, sizeof raw, raw));
    for (unsigned i = HEADER_LENGTH; i-- > 0;) bytes = bytes << 8 | raw[i];
    bytes += HEADER_LENGTH; /* it was checked at open */
    for (uint64_t i = 0; i < all->count; i++) data += all->items[i].file == file ? all->items[i].bytes : 0;
    if (bytes + data != f->size)
        return sthi_fail(STH_UNSUPPORTED, NULL, 0, f->path,
                         "%.300s: holds tensors that the index does not place there, so that it would not come back; "
                         "pack this file alone, or mend the index",
                         f->path);
    snprintf(name, sizeof name, "header.%u", file);
    STHI_TRY(read_text(job, f, bytes, &t));
    return add_own(job, name, STH_DTYPE_U8, 1, &bytes, make_text, t);
}

static sth_status read_index(const sthi_pack_job *job, const char *path, text **out) {
    sthi_file file;
    json_t *root = NULL;
    STHI_TRY(sthi_file_open(path, &file));
    sth_status status = sthi_json_read(&file, 0, file.size, &root);
    if (status == STH_OK && !json_object_get(root, "weight_map"))
        status = sthi_fail(STH_UNSUPPORTED, NULL, 0, path,
                           "%.300s: a layer index is not packed losslessly; pack the file that it was made from", path);
    json_decref(root);
    if (status == STH_OK) status = read_text(job, &file, file.size, out);
    sthi_file_close(&file);
    return status;
}

/* A file that comes back lies in one folder with the index. */
static sth_status check_file_name(const sthi_pack_job *job, const char *path, const char *index) {
    const char *name = sthi_pack_leaf(path);
    if (sthi_original_name_is_fine(name) && name - path == sthi_pack_leaf(index) - index) return STH_OK;
    return sthi_fail(STH_UNSUPPORTED, NULL, 0, job->in,
                     "%.300s: '%.200s' could not be put back: its name must be at most 200 bytes, not begin with "
                     "state.json, and lie beside the index",
                     job->in, path);
}

/* The metadata of the header. index: NULL where the source is one file. */
static sth_status describe(sthi_pack_job *job, const char *index) {
    json_t *bytes = json_array(), *files = json_array();
    sth_status status = index ? check_file_name(job, index, index) : STH_OK;
    for (uint32_t i = 0; status == STH_OK && i < job->checkpoint->file_count; i++) {
        const sthi_file *f = &job->checkpoint->files[i];
        json_array_append_new(bytes, json_integer((json_int_t)f->size));
        json_array_append_new(files, json_string(sthi_pack_leaf(f->path)));
        if (index) status = check_file_name(job, f->path, index);
    }
    json_t *all = json_pack("{s:i, s:o}", "version", 1, "bytes", bytes);
    if (index && all) json_object_set_new(all, "index", json_string(sthi_pack_leaf(index)));
    if (index && all) json_object_set(all, "files", files);
    char *words = all ? json_dumps(all, JSON_COMPACT) : NULL;
    json_decref(all);
    json_decref(files);
    if (status == STH_OK && (!words || json_object_set_new(job->notes, "__metadata__",
                                                           json_pack("{s:s}", STHI_LOSSLESS_KEY, words))))
        status = sthi_job_out_of_memory(job);
    sthi_json_free_text(words);
    return status;
}

/* ---- the list */

static sth_status add_packed(sthi_pack_job *job, const candidate *c, rows *r) {
    uint64_t bytes = packed_bytes(c), lengths = pieces_of(c->tensor) * sizeof *c->lengths;
    uint32_t *note = sthi_alloc((size_t)lengths);
    if (!note) return sthi_job_out_of_memory(job);
    memcpy(note, c->lengths, (size_t)lengths);
    r->items[c->tensor - job->checkpoint->tensors.items] = job->item_count;
    sthi_job_item item = {.make = make_packed, .source = c->tensor, .work = c->tensor->bytes, .note = note};
    sth_status status = sthi_job_add_item(job, &item);
    if (status != STH_OK) {
        sthi_free(note);
        return status;
    }
    return sthi_job_add_tensor(job, c->tensor->name, "", STH_DTYPE_U8, 1, &bytes);
}

static sth_status add_lengths(sthi_pack_job *job) {
    uint64_t pieces = 0;
    for (uint64_t i = 0; i < job->item_count; i++)
        if (job->items[i].make == make_packed) pieces += pieces_of(job->items[i].source);
    return add_own(job, "lengths", STH_DTYPE_U32, 1, &pieces, make_lengths, NULL);
}

static sth_status add_tensors(sthi_pack_job *job, const candidates *c, rows *r) {
    const sthi_tensors *all = &job->checkpoint->tensors;
    uint64_t none = UINT64_MAX;
    for (uint64_t i = 0; i < all->count; i++) r->items[i] = none;
    for (uint64_t i = 0; i < c->count; i++)
        if (sthi_lossless_pays(packed_bytes(&c->items[i]), c->items[i].tensor->bytes))
            STHI_TRY(add_packed(job, &c->items[i], r));
    for (int odd = 0; odd < 2; odd++) {
        if (odd) STHI_TRY(add_lengths(job));
        for (uint64_t i = 0; i < all->count; i++) {
            const sth_tensor_info *t = &all->items[i];
            if (r->items[i] != none || (t->bytes % 8 != 0) != odd) continue;
            r->items[i] = job->item_count;
            STHI_TRY(sthi_job_add_copy(job, t));
        }
    }
    return STH_OK;
}

/* r: taken over. */
static sth_status add_sums(sthi_pack_job *job, rows *r) {
    return add_own(job, "xxh3_128", STH_DTYPE_U8, 2, (uint64_t[]){r->count, STHI_SUM_BYTES}, make_sums, r);
}

static sth_status add_descriptions(sthi_pack_job *job, text **index, rows *r) {
    text *t = *index;
    r->count = job->checkpoint->tensors.count;
    for (uint32_t i = 0; i < job->checkpoint->file_count; i++) {
        r->items[r->count++] = job->item_count;
        STHI_TRY(add_header(job, i));
    }
    if (!t) return STH_OK;
    r->items[r->count++] = job->item_count;
    *index = NULL;
    return add_own(job, "index", STH_DTYPE_U8, 1, &t->bytes, make_text, t);
}

/* index: NULL where the source is one file; the job takes it over, and it is NULL then. */
static sth_status add_all(sthi_pack_job *job, const candidates *c, text **index) {
    uint64_t most = job->checkpoint->tensors.count + job->checkpoint->file_count + 1;
    rows *r = sthi_zalloc((size_t)most + 1, sizeof *r->items);
    if (!r) return sthi_job_out_of_memory(job);
    sth_status status = add_tensors(job, c, r);
    if (status == STH_OK) status = add_descriptions(job, index, r);
    if (status == STH_OK) return add_sums(job, r);
    sthi_free(r);
    return status;
}

static sth_status check_source(const sthi_pack_job *job) {
    const sthi_tensors *all = &job->checkpoint->tensors;
    for (uint64_t i = 0; i < all->count; i++)
        if (strncmp(all->items[i].name, STHI_LOSSLESS_PREFIX, strlen(STHI_LOSSLESS_PREFIX)) == 0)
            return sthi_fail(STH_UNSUPPORTED, NULL, 0, job->in,
                             "%.300s: is losslessly packed already (it has a tensor '%.100s'); use it as it is",
                             job->in,
                             all->items[i].name);
    return STH_OK;
}

/* index: the path of the source's, NULL where that is one file. */
static sth_status plan(sthi_pack_job *job, const char *index) {
    candidates c = {0};
    uint32_t *room = NULL;
    text *words = NULL;
    if (index) STHI_TRY(read_index(job, index, &words));
    sth_status status = describe(job, index);
    if (status == STH_OK) status = list_candidates(job, &c, &room);
    if (status == STH_OK) status = measure(job, &c);
    if (status == STH_OK) status = add_all(job, &c, &words);
    sthi_free(c.items);
    sthi_free(room);
    sthi_free(words);
    return status;
}

/* *out: the index of the source, for sthi_free; NULL where that is one file. */
static sth_status find_index(const char *in, char **out) {
    char *path = NULL;
    if (sthi_path_is_folder(in)) STHI_TRY(sthi_path_in_folder(in, &path));
    else if (!(path = sthi_strdup(in))) return sthi_no_memory(in, "packing %.300s", in);
    if (!sthi_path_ends_with(path, ".json")) {
        sthi_free(path);
        path = NULL;
    }
    *out = path;
    return STH_OK;
}

sth_status sthi_pack_lossless(sthi_pack_job *job, const char *out) {
    char *unused = NULL, *index = NULL;
    STHI_TRY(sthi_pack_name(out, ".safetensors", "", &unused));
    sthi_free(unused);
    STHI_TRY(check_source(job));
    STHI_TRY(sthi_job_add_file(job, sthi_pack_leaf(out), out));
    STHI_TRY(find_index(job->in, &index));
    sth_status status = plan(job, index);
    sthi_free(index);
    return status;
}
