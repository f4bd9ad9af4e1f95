/* Calls of activation.h. Each record has its own part of one piece of device memory, which stays until the store has
 * ended. */
#include "fuzz/calls.h"

enum { ROOM = CALLS_MEMORY / 2, EACH = ROOM / CALLS_RECORDS };

static void make(calls *c, calls_device *d) {
    sth_activation_options o;
    sth_activation_options_init(&o);
    sth_activation_options_init(NULL);
    o.high = calls_byte(c) % 4 ? 1 << 14 : calls_extreme(c);
    o.low = calls_byte(c) % 4 ? 1 << 13 : calls_extreme(c);
    o.class_count = calls_byte(c) % 2 ? 0 : calls_number(c, 3);
    for (uint32_t i = 0; i < STH_ACTIVATION_CLASSES; i++)
        o.class_bytes[i] = (i + 1) << 12, o.class_slabs[i] = 1 + calls_byte(c) % 3u;
    if (calls_once_in(c, 16)) o.class_bytes[0] = calls_bytes(c, 1 << 12);
    if (calls_once_in(c, 16)) o.class_slabs[0] = calls_number(c, 2);
    o.max_d2h = calls_number(c, 4);
    o.max_h2d = calls_number(c, 4);
    o.ahead_bytes = calls_extreme(c);
    o.checksums = calls_byte(c) & 1;
    o.priority = (int)calls_extreme(c);
    if (calls_once_in(c, 24)) o.size = (size_t)calls_extreme(c);
    sth_devptr room;
    if (CALLS_TRY(sth_device_alloc(d->device, ROOM, &room)) != STH_OK) return;
    sth_activation *made = (void *)c;
    sth_status rc = CALLS_TRY(sth_activation_create(calls_or_null(c, d->device), calls_byte(c) % 8 ? &o : NULL, &made));
    CHECK(rc == STH_OK || made == (void *)c);
    if (rc == STH_OK) c->activation = made, c->spilled = room, c->spill_on = d;
    else sth_device_free(d->device, room, ROOM);
}

static calls_record *any_record(calls *c) { return &c->records[calls_byte(c) % CALLS_RECORDS]; }

/* Mostly one that lives; else one that has ended, or a number. */
static sth_record named(calls *c, const calls_record *r) {
    return calls_once_in(c, 24) ? calls_extreme(c) : r->record;
}

static void save(calls *c, uint32_t i) {
    sth_record record = 77;
    bool drop;
    uint64_t bytes = calls_bytes(c, EACH);
    sth_status rc = CALLS_TRY(sth_activation_save(c->activation, bytes, calls_once_in(c, 8), &record));
    CHECK(rc == STH_OK || record == 77);
    if (rc != STH_OK) return;
    if (c->records[i].record) CALLS_TRY(sth_activation_release(c->activation, c->records[i].record, 0));
    c->records[i] = (calls_record){record, (uint64_t)i * EACH, bytes};
    if (calls_once_in(c, 4)) CALLS_TRY(sth_activation_recomputable(c->activation, record, &drop));
}

static const calls_record *find(const calls *c, sth_record record) {
    for (int i = 0; i < CALLS_RECORDS; i++)
        if (c->records[i].record == record) return &c->records[i];
    return NULL;
}

static void relieve(calls *c) {
    for (int i = 0; i < 4; i++) {
        sth_record record;
        sth_relief what;
        if (CALLS_TRY(sth_activation_relieve(c->activation, calls_byte(c) % 4 ? 0 : calls_extreme(c),
                                             calls_byte(c) % 4 ? 0 : calls_extreme(c), 0, &record, &what)) != STH_OK ||
            what == STH_RELIEF_NONE)
            return;
        const calls_record *r = find(c, record);
        CHECK(r);
        if (what == STH_RELIEF_SPILL) CALLS_TRY(sth_activation_spill(c->activation, record, c->spilled + r->offset, 0));
    }
}

static void back(calls *c, calls_record *r) {
    sth_activation_state state;
    sth_record record = named(c, r);
    if (CALLS_TRY(sth_activation_ask(c->activation, record, &state)) != STH_OK) return;
    if (state == STH_ACTIVATION_SPILLED || calls_once_in(c, 8))
        CALLS_TRY(sth_activation_restore(c->activation, record, c->spilled + r->offset, calls_stream(c)));
    else if (state == STH_ACTIVATION_DROPPED || calls_once_in(c, 8))
        CALLS_TRY(sth_activation_recomputed(c->activation, record));
    if (calls_byte(c) % 4) CALLS_TRY(sth_activation_arrive(c->activation, record, calls_stream(c)));
}

static void ahead(calls *c) {
    sth_record record;
    if (CALLS_TRY(sth_activation_ahead(c->activation, calls_byte(c) % 4 ? 0 : calls_extreme(c), &record)) != STH_OK ||
        !record)
        return;
    const calls_record *r = find(c, record);
    CHECK(r);
    CALLS_TRY(sth_activation_restore(c->activation, record, c->spilled + r->offset, 0));
}

static void rest(calls *c) {
    sth_activation_stats stats;
    sth_activation_state state;
    sth_activation *on = calls_or_null(c, c->activation);
    switch (calls_byte(c) % 7) {
    case 0: CALLS_TRY(sth_activation_set_marks(on, calls_bytes(c, 1 << 16), calls_bytes(c, 1 << 15))); break;
    case 1: CALLS_TRY(sth_activation_set_caps(on, calls_number(c, 4), calls_number(c, 4))); break;
    case 2: CALLS_TRY(sth_activation_pass(on, calls_extreme(c))); break;
    case 3: CALLS_TRY(sth_activation_state_get(on, named(c, any_record(c)), calls_or_null(c, &state))); break;
    case 4: CALLS_TRY(sth_activation_stats_get(on, calls_or_null(c, &stats))); break;
    case 5: CALLS_TRY(sth_activation_set_conductor(on, calls_or_null(c, c->conductor))); break;
    default: if (calls_once_in(c, 16)) CALLS_TRY(sth_activation_close(on));
    }
}

void calls_on_spills(calls *c) {
    calls_device *d = calls_any_device(c);
    if (!c->activation) {
        if (d) make(c, d);
        return;
    }
    calls_record *r = any_record(c);
    switch (calls_byte(c) % 10) {
    case 0:
    case 1:
    case 2: save(c, (uint32_t)(r - c->records)); break;
    case 3:
    case 4: relieve(c); break;
    case 5: back(c, r); break;
    case 6: ahead(c); break;
    case 7: CALLS_TRY(sth_activation_let_go(c->activation, named(c, r), calls_stream(c))); break;
    case 8:
        if (CALLS_TRY(sth_activation_release(c->activation, r->record, 0)) == STH_OK)
            CHECK(CALLS_TRY(sth_activation_release(c->activation, r->record, 0)) != STH_OK);
        r->record = 0;
        break;
    default: rest(c);
    }
}

void calls_end_spills(calls *c) {
    sth_activation_destroy(c->activation);
    if (c->activation) sth_device_free(c->spill_on->device, c->spilled, ROOM);
    sth_activation_destroy(NULL);
}
