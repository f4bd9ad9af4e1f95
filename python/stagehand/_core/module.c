/* The module stagehand._core: its types, functions and constants. It wraps the public C interface and knows
 * nothing of torch. Limited API, so that one build serves every CPython from 3.10 on. */
#include "convert.h"
#include "runtime.h"
#include "seat.h"
#include "stagehand/stagehand.h"
#include "stagehand/util.h"

static PyObject *parse_size(PyObject *module, PyObject *args) {
    (void)module;
    const char *text;
    uint64_t bytes;
    if (!PyArg_ParseTuple(args, "s:parse_size", &text)) return NULL;
    sth_status status = sth_parse_size(text, &bytes);
    return status == STH_OK ? PyLong_FromUnsignedLongLong(bytes) : raise_status(status);
}

static PyObject *load_backend(PyObject *module, PyObject *args) {
    (void)module;
    const char *path, *name = NULL;
    sth_status status;
    if (!PyArg_ParseTuple(args, "s:load_backend", &path)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = sth_backend_load(path, &name);
    Py_END_ALLOW_THREADS
    return status == STH_OK ? PyUnicode_FromString(name) : raise_status(status);
}

static PyObject *format_size(PyObject *module, PyObject *args) {
    (void)module;
    uint64_t bytes;
    char text[32];
    if (!PyArg_ParseTuple(args, "O&:format_size", to_u64, &bytes)) return NULL;
    return PyUnicode_FromString(sth_format_size(bytes, text, sizeof text));
}

static PyMethodDef functions[] = {
    {"backends", backends, METH_NOARGS,
     "backends()\n--\n\nNames of the back ends of this build and of those that were loaded, a list of str."},
    {"load_backend", load_backend, METH_VARARGS,
     "load_backend(path, /)\n--\n\n"
     "Loads a back end from a shared object and returns its name; stagehand.load_backend explains it."},
    {"device_count", device_count, METH_VARARGS,
     "device_count(backend, /)\n--\n\n"
     "Returns (number of devices, reason): the reason says why there are none, and is \"\" otherwise."},
    {"find_top_hooks", find_top_hooks, METH_VARARGS,
     "find_top_hooks(push, pop, /)\n--\n\n"
     "A function that returns the calling thread's pair of saved-tensor hooks (pack, unpack), or None. None: this "
     "PyTorch keeps its pairs in another way. push, pop: PyTorch's own."},
    {"know_modes", know_modes, METH_VARARGS,
     "know_modes(dispatch, function, /)\n--\n\n"
     "torch's functions (count, pop, push) for the calling thread's stacks of modes."},
    {"know_unpack", know_unpack, METH_O,
     "know_unpack(function, /)\n--\n\nWhat unpack_saved() calls for all that is no Handle as they usually are."},
    {"watch_unpack", watch_unpack, METH_O,
     "watch_unpack(more, /)\n--\n\n"
     "While the sum of all `more` is not 0, unpack_saved() calls that function for every tensor."},
    {"unpack_saved", unpack_saved, METH_O,
     "unpack_saved(saved, /)\n--\n\n"
     "The hook by which autograd gets a saved tensor back: of a Handle a tensor over the place that its unit\n"
     "has now, which holds a lease."},
    {"tensor_view", make_tensor_view, METH_VARARGS,
     "tensor_view(code, bits, shape, strides, /)\n--\n\n"
     "How a tensor sees the first bytes of a unit's place, for Runtime.acquire(): DLPack's type code, bits\n"
     "of an element, sizes and strides in elements. Returns an opaque bytes object. Raises ValueError."},
    {"pack", (PyCFunction)(void (*)(void))pack_files, METH_VARARGS | METH_KEYWORDS,
     "pack(source, result, format, skip=None, threads=0, progress=None)\n--\n\n"
     "Writes the checkpoint `source` as `result`, in the format \"v2\", \"v3-int4\", \"layer-index\" or\n"
     "\"lossless\";\n"
     "tensors whose name matches the POSIX regex `skip` stay as they are. `progress(tensor, done, total)`\n"
     "stops the work by a false answer (StagehandError, SHUT_DOWN); the same call goes on from there.\n"
     "Blocks with the GIL released. Raises NotFoundError, CheckpointError, TransferError,\n"
     "InvalidArgumentError."},
    {"unpack", (PyCFunction)(void (*)(void))unpack_files, METH_VARARGS | METH_KEYWORDS,
     "unpack(source, result, dtype=\"BF16\", threads=0, progress=None)\n--\n\n"
     "Writes a quantised file or a checkpoint as one safetensors file; decoded weights are of `dtype` (F32,\n"
     "BF16, F16). As pack() else."},
    {"verify", (PyCFunction)(void (*)(void))verify_files, METH_VARARGS | METH_KEYWORDS,
     "verify(path, original=None, threads=0)\n--\n\n"
     "A list of dicts, one for each tensor or layer: name, encoding, checksum (1 right, 0 wrong, -1 none),\n"
     "compared, missing, equal, max_abs, rel_l2, cosine against the checkpoint `original`. As pack() else."},
    {"transfer_layout", transfer_layout, METH_VARARGS,
     "transfer_layout(tensors, piece_bytes, place_address=0, /)\n--\n\n"
     "(segments, packed bytes, bytes of the largest segment) of a unit that crosses the link packed. tensors:\n"
     "(encoding, dtype, offset in the place, rows, columns) in the order of the place; encoding: \"verbatim\"\n"
     "(one row of bytes), \"int8\", \"fp8\", \"int4\"; dtype: \"F32\", \"BF16\", \"F16\". segments: opaque bytes.\n"
     "With the address of an image of the place also \"lossless\" (one row), of the size of its values.\n"
     "Raises InvalidArgumentError."},
    {"transfer_most", transfer_most, METH_VARARGS,
     "transfer_most(tensors, piece_bytes, /)\n--\n\n"
     "(packed bytes, bytes of the largest segment) that transfer_layout() can make of any values."},
    {"lossless_estimate", lossless_estimate, METH_VARARGS,
     "lossless_estimate(dtype, address, count, /)\n--\n\n"
     "Bytes of values at an address in lossless segments, from samples; their own where that is not less by\n"
     "a tenth. Address 0: as weights usually are."},
    {"transfer_segments", transfer_segments, METH_VARARGS,
     "transfer_segments(tensors, /)\n--\n\n"
     "Segments that are laid out already: each (encoding, dtype, offset in the place, rows, columns,\n"
     "stride, codes, scales, zeros), offsets in the packed image, scales and zeros None where there are\n"
     "none. add_unit() checks them."},
    {"transfer_encode", transfer_encode, METH_VARARGS,
     "transfer_encode(segments, place_address, packed_address, /)\n--\n\n"
     "Encodes an image of a place into its packed image. Returns the sums of squares (error, reference).\n"
     "Raises CorruptDataError for values that are not finite."},
    {"transfer_decode", transfer_decode, METH_VARARGS,
     "transfer_decode(segments, packed_address, place_address, /)\n--\n\n"
     "The opposite; bytes between segments stay."},
    {"budget_advice", (PyCFunction)(void (*)(void))budget_advice, METH_VARARGS | METH_KEYWORDS,
     "budget_advice(budget, *, weights, modules, owners, inside, fixed, one_extent, room=None)\n--\n\n"
     "What a model that has not run yet does with a budget: a dict of stagehand/budget.h's advice; \"unit\":\n"
     "for each weight the number of its unit, None where it stays on the device; \"keep\": a bool for each\n"
     "unit. weights: (bytes, module, kind, WEIGHT_ flags, segment or None); modules: MODULE_ flags; owners:\n"
     "(module, weight); inside: (module, module inside it); fixed: bytes; one_extent: of the static policy.\n"
     "room: the budget, an int, with which the model, wrapped anew, has so many bytes for places.\n"
     "Raises InvalidArgumentError."},
    {"first_residents", first_residents, METH_VARARGS,
     "first_residents(units, budget, stage_bytes, less, /)\n--\n\n"
     "Which units a plan on the order given, with no compute times known, would keep on the device: a list\n"
     "of bools. units: (bytes, UNIT_ flags, bytes over the link or 0, bytes on the device where it may stay\n"
     "packed there or 0); one that stays packed is False. A budget that\n"
     "does not hold all has room for so many bytes of stages, too, and is smaller by the less-th part of the rest, if\n"
     "less is not 0. Raises StagehandOOMError."},
    {"choose_trainables", (PyCFunction)(void (*)(void))choose_trainables, METH_VARARGS | METH_KEYWORDS,
     "choose_trainables(weights, *, room=0, slack=0, link_bytes_per_s=0, wanted=False)\n--\n\n"
     "(for each weight the name of its home, a key of HOMES, bytes on the device) of weights that are\n"
     "trained: tuples (bytes, of its gradient, of its state). The rest as in stagehand/trainables.h; a link\n"
     "of 0: its default. Raises InvalidArgumentError."},
    {"name_ranks", name_ranks, METH_VARARGS,
     "name_ranks(name, /)\n--\n\n"
     "Three lists of names under which checkpoints may hold a parameter (checkpoint.h)."},
    {"rows_bytes", (PyCFunction)(void (*)(void))rows_bytes, METH_VARARGS | METH_KEYWORDS,
     "rows_bytes(slots, /, *, part_bytes, rows, rows_largest, rows_token, units_all, units_least, stays_bytes)\n--\n\n"
     "Bytes that a pool of so many slots takes (rows.h)."},
    {"rows_slots", (PyCFunction)(void (*)(void))rows_slots, METH_VARARGS | METH_KEYWORDS,
     "rows_slots(budget, /, *, part_bytes, rows, rows_largest, rows_token, units_all, units_least, stays_bytes)\n--\n\n"
     "Slots that a pool of rows has with a budget (rows.h)."},
    {"rows_smallest", (PyCFunction)(void (*)(void))rows_smallest, METH_VARARGS | METH_KEYWORDS,
     "rows_smallest(slots, /, *, part_bytes, rows, rows_largest, rows_token, units_all, units_least, "
     "stays_bytes)\n--\n\n"
     "The smallest budget with which the pool has so many slots (rows.h)."},
    {"rows_expected", rows_expected, METH_VARARGS,
     "rows_expected(rows, per_token, tokens, /)\n--\n\n"
     "Distinct rows that so many tokens use on average, where all rows are as likely."},
    {"parse_size", parse_size, METH_VARARGS,
     "parse_size(text, /)\n--\n\n"
     "Bytes of \"512MB\", \"8GiB\", \"1.5G\" or \"4096\": K M G T and KB ... are powers of 1000, KiB\n"
     "... of 1024. Raises InvalidArgumentError (a ValueError) that says which forms are accepted."},
    {"format_size", format_size, METH_VARARGS,
     "format_size(bytes, /)\n--\n\nA size as text, such as \"3.00 GiB\"."},
    {"timeline_begin", timeline_begin, METH_VARARGS,
     "timeline_begin(path, events=2**18, /)\n--\n\n"
     "Records what the process does when into a ring of so many events, for the file `path`. Raises\n"
     "InvalidStateTransitionError where a recording is under way, TransferError, InvalidArgumentError."},
    {"timeline_end", timeline_end, METH_NOARGS,
     "timeline_end()\n--\n\n"
     "Ends the recording and writes its file. Returns how many events gave way to newer ones."},
    {"set_log", set_log, METH_O,
     "set_log(function, /)\n--\n\n"
     "function(level, message), or None: hears what the library says, on any thread. level: 0 debug, 1 info,\n"
     "2 warning."},
    {"append_lines", append_lines, METH_VARARGS,
     "append_lines(path, text, max_bytes, /)\n--\n\n"
     "Appends bytes, whole lines of JSON, to a telemetry file: all or nothing. False: the file is full, and\n"
     "says so. Raises OSError for what telemetry is not written to."},
    {"anything_mapped", anything_mapped, METH_NOARGS,
     "anything_mapped()\n--\n\nWhether there is a Mapping."},
    {"refuse_writes", refuse_writes, METH_O,
     "refuse_writes(target, /)\n--\n\n"
     "Raises InvalidStateTransitionError where the file `target` (a path or a descriptor) is one that is mapped."},
    {"arena_print", arena_print, METH_VARARGS,
     "arena_print(nbytes, parts, /)\n--\n\n"
     "Of a reservation of `nbytes` with these parts, a list of (offset, address, nbytes): 16 bytes that\n"
     "differ where any byte does. Blocks, with the GIL released. Raises StagehandOOMError."},
    {"tells_writes", tells_writes, METH_NOARGS,
     "tells_writes()\n--\n\n"
     "Whether the system says which pages of a private mapping were written: written_pages()."},
    {"written_pages", written_pages, METH_VARARGS,
     "written_pages(address, nbytes, /)\n--\n\n"
     "Ranges (begin, end) of addresses in a private mapping whose pages were written since it was made;\n"
     "None: this system does not tell. address: a multiple of the page size."},
    {"exchange_unless", exchange_unless, METH_VARARGS,
     "exchange_unless(list, function, a, b, class_a, class_b, /)\n--\n\n"
     "If the list is empty: calls function(a, b), which is no code of Python's, and gives both their classes, without\n"
     "another thread in between. Whether it did."},
    {"same_memory", same_memory, METH_VARARGS,
     "same_memory(address, address, nbytes, /)\n--\n\nWhether two ranges of host memory hold the same bytes."},
    {"_fault_arm", fault_arm, METH_VARARGS,
     "_fault_arm(kind, n, forever, /)\n--\n\n"
     "For tests: the n-th call of the kind from now on fails, or all from it on."},
    {"_fault_disarm", fault_disarm, METH_NOARGS, "_fault_disarm()\n--\n\nFor tests: no call fails any more."},
    {"_fault_seen", fault_seen, METH_VARARGS,
     "_fault_seen(kind, /)\n--\n\nFor tests: calls of the kind since it was armed."},
    {"_assume_available", assume_available, METH_O,
     "_assume_available(nbytes, /)\n--\n\n"
     "For tests: host memory that is taken to be available; 0: what the system says, again."},
    {"_live_blocks", live_blocks, METH_NOARGS,
     "_live_blocks()\n--\n\nFor tests: blocks of memory that the library holds, what is mapped left out."},
    {NULL, NULL, 0, NULL},
};

static const struct {
    const char *name;
    long value;
} constants[] = {
    {"CAP_PINNED_HOST", STH_CAP_PINNED_HOST},
    {"CAP_MAPPED_HOST", STH_CAP_MAPPED_HOST},
    {"CAP_RING", STH_CAP_RING},
    {"CAP_PEER_TO_PEER", STH_CAP_PEER_TO_PEER},
    {"CAP_GRAPH_CAPTURE", STH_CAP_GRAPH_CAPTURE},
    {"CAP_UNIFIED_MEMORY", STH_CAP_UNIFIED_MEMORY},
    {"CAP_VIRTUAL_TIME", STH_CAP_VIRTUAL_TIME},
    {"CAP_EXPAND", STH_CAP_EXPAND},
    {"CAP_EXPAND_FILES", STH_CAP_EXPAND_FILES},
    {"CAP_EXPAND_LOSSLESS", STH_CAP_EXPAND_LOSSLESS},
    {"CAP_HOST_IS_DEVICE", STH_CAP_HOST_IS_DEVICE},
    {"CAP_SHARED_EVENTS", STH_CAP_SHARED_EVENTS},
    {"UNIT_IDLE", STH_UNIT_IDLE},
    {"ALIGN", STH_ALIGN},
    {"SLOTS_MOST", STH_SLOTS_MOST},
    {"STAGES", STH_BUDGET_STAGES},
    {"BUDGET_SMALL", STH_BUDGET_SMALL},
    {"TRAINABLE_STATE_BYTES", STH_TRAINABLE_STATE_BYTES},
    {"LEAST_PIECE", STH_BUDGET_LEAST_PIECE},
    {"WEIGHT_SMALL", STH_WEIGHT_SMALL},
    {"WEIGHT_IN_PLACE", STH_WEIGHT_IN_PLACE},
    {"WEIGHT_TRAINS", STH_WEIGHT_TRAINS},
    {"WEIGHT_STORED", STH_WEIGHT_STORED},
    {"MODULE_LIST", STH_MODULE_LIST},
    {"MODULE_OUTER", STH_MODULE_OUTER},
    {"UNIT_KEEP", STH_UNIT_KEEP},
    {"UNIT_EITHER", STH_UNIT_EITHER},
    {"UNIT_ON_DEMAND", STH_UNIT_ON_DEMAND},
    {"UNIT_WRITABLE", STH_UNIT_WRITABLE},
    {"UNIT_WATCHED", STH_UNIT_WATCHED},
    {"UNIT_ASIDE", STH_UNIT_ASIDE},
};

static bool add_type_over(PyObject *module, PyType_Spec *spec, PyTypeObject *base, PyTypeObject **slot) {
    *slot = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, (PyObject *)base);
    return *slot && PyModule_AddType(module, *slot) == 0;
}

static bool add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **slot) {
    return add_type_over(module, spec, NULL, slot);
}

static bool add_types(PyObject *module, core_state *state) {
    return add_type(module, &device_spec, &state->device) && add_type(module, &arena_spec, &state->arena) &&
           add_type(module, &runtime_spec, &state->runtime) &&
           add_type(module, &checkpoint_spec, &state->checkpoint) &&
           add_type(module, &pool_spec, &state->pool) &&
           add_type(module, &download_spec, &state->download) &&
           add_type(module, &ticket_spec, &state->ticket) &&
           add_type(module, &adamw_spec, &state->adamw) &&
           add_type(module, &activations_spec, &state->activations) &&
           add_type(module, &activation_record_spec, &state->activation_record) &&
           add_type(module, &quant_spec, &state->quant) &&
           add_type(module, &conductor_spec, &state->conductor) &&
           add_type(module, &runner_spec, &state->runner) && add_type(module, &here_spec, &state->here) &&
           add_type(module, &calls_spec, &state->calls) && add_type(module, &mark_spec, &state->mark) &&
           add_type(module, &sitter_spec, &state->sitter) && add_type(module, &seat_spec, &state->seat) &&
           add_type(module, &forward_spec, &state->forward) &&
           add_type(module, &mapping_spec, &state->mapping) &&
           add_type_over(module, &masters_spec, &PyDict_Type, &state->masters) &&
           add_type(module, &aside_spec, &state->aside) && add_type(module, &handle_spec, &state->handle) &&
           add_type(module, &place_spec, &state->place) && add_type(module, &saver_spec, &state->saver) &&
           add_type(module, &rows_spec, &state->rows) && add_type(module, &pace_spec, &state->pace) &&
           add_type(module, &watermark_spec, &state->watermark);
}

/* Takes over the reference to `value`, which may be NULL. */
static bool add_object(PyObject *module, const char *name, PyObject *value) {
    bool done = value && PyModule_AddObjectRef(module, name, value) == 0;
    Py_XDECREF(value);
    return done;
}

static PyObject *dtype_table(void) {
    PyObject *table = PyDict_New();
    for (int i = 0; table && i < STH_DTYPE_COUNT; i++) {
        PyObject *bits = PyLong_FromUnsignedLong(sth_dtype_bits((sth_dtype)i));
        if (!bits || PyDict_SetItemString(table, sth_dtype_name((sth_dtype)i), bits) < 0) Py_CLEAR(table);
        Py_XDECREF(bits);
    }
    return table;
}

static PyObject *unit_states(void) {
#define COUNT(name, text) "s"
#define VALUE(name, text) , text
    return Py_BuildValue("(" STH_UNIT_STATE_LIST(COUNT) ")" STH_UNIT_STATE_LIST(VALUE));
#undef COUNT
#undef VALUE
}

static int exec_module(PyObject *module) {
    if (!seat_names() || !add_types(module, PyModule_GetState(module))) return -1;
    for (size_t i = 0; i < sizeof constants / sizeof *constants; i++)
        if (PyModule_AddIntConstant(module, constants[i].name, constants[i].value) < 0) return -1;
    bool done = add_object(module, "DTYPES", dtype_table()) &&
                add_object(module, "METRICS", metrics_list()) &&
                add_object(module, "BUDGET_WHY", budget_why()) &&
                add_object(module, "HOMES", homes_table()) &&
                add_object(module, "UNIT_STATES", unit_states()) &&
                add_object(module, "ACTIVATION_STATES", activation_states()) &&
                add_object(module, "CONDUCTOR", conductor_names()) &&
                add_object(module, "__version__", PyUnicode_FromString(sth_version()));
    return done ? 0 : -1;
}

static int traverse_module(PyObject *module, visitproc visit, void *arg) {
    core_state *state = PyModule_GetState(module);
    Py_VISIT(state->device);
    Py_VISIT(state->arena);
    Py_VISIT(state->runtime);
    Py_VISIT(state->checkpoint);
    Py_VISIT(state->pool);
    Py_VISIT(state->download);
    Py_VISIT(state->ticket);
    Py_VISIT(state->adamw);
    Py_VISIT(state->activations);
    Py_VISIT(state->activation_record);
    Py_VISIT(state->quant);
    Py_VISIT(state->conductor);
    Py_VISIT(state->runner);
    Py_VISIT(state->here);
    Py_VISIT(state->calls);
    Py_VISIT(state->mark);
    Py_VISIT(state->sitter);
    Py_VISIT(state->seat);
    Py_VISIT(state->forward);
    Py_VISIT(state->masters);
    Py_VISIT(state->aside);
    Py_VISIT(state->handle);
    Py_VISIT(state->place);
    Py_VISIT(state->saver);
    Py_VISIT(state->rows);
    Py_VISIT(state->pace);
    Py_VISIT(state->watermark);
    return 0;
}

static int clear_module(PyObject *module) {
    core_state *state = PyModule_GetState(module);
    Py_CLEAR(state->device);
    Py_CLEAR(state->arena);
    Py_CLEAR(state->runtime);
    Py_CLEAR(state->checkpoint);
    Py_CLEAR(state->pool);
    Py_CLEAR(state->download);
    Py_CLEAR(state->ticket);
    Py_CLEAR(state->adamw);
    Py_CLEAR(state->activations);
    Py_CLEAR(state->activation_record);
    Py_CLEAR(state->quant);
    Py_CLEAR(state->conductor);
    Py_CLEAR(state->runner);
    Py_CLEAR(state->here);
    Py_CLEAR(state->calls);
    Py_CLEAR(state->mark);
    Py_CLEAR(state->sitter);
    Py_CLEAR(state->seat);
    Py_CLEAR(state->forward);
    Py_CLEAR(state->masters);
    Py_CLEAR(state->aside);
    Py_CLEAR(state->handle);
    Py_CLEAR(state->place);
    Py_CLEAR(state->saver);
    Py_CLEAR(state->rows);
    Py_CLEAR(state->pace);
    Py_CLEAR(state->watermark);
    return 0;
}

static void free_module(void *module) { clear_module(module); }

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, exec_module}, {0, NULL}};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "stagehand._core",
    .m_doc = "The C library of Stagehand: devices, arenas, runtimes, checkpoints, pools, AdamW,\n"
             "activations, the conductor, runners.\n\n"
             "DTYPES: bits per element by dtype name. METRICS: (field, unit, meaning) of a step's\n"
             "record. BUDGET_WHY: texts of Device.find_budget's reasons by name. HOMES: where trained\n"
             "weights live, by name, with the reason. UNIT_STATES,\n"
             "ACTIVATION_STATES: names of the states of a unit, of a saved tensor. CONDUCTOR: names of a\n"
             "conductor's numbers. CAP_, UNIT_, WEIGHT_ and MODULE_: bits. ALIGN: bytes,\n"
             "at whose multiples tensors start. SLOTS_MOST: tokens of a conductor. STAGES: buffers in\n"
             "which packed bytes arrive; LEAST_PIECE: bytes of the smallest. BUDGET_SMALL: bytes, up to\n"
             "which a weight is small.",
    .m_size = sizeof(core_state),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_traverse = traverse_module,
    .m_clear = clear_module,
    .m_free = free_module,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module_definition); }
