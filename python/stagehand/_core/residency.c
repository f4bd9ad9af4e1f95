/* Several runtimes on one device: methods of Runtime and Device. The GIL is released in all of them: a runtime that
 * gives way calls its Python allocator. */
#include "runtime.h"

#include <string.h>

#include "convert.h"
#include "stagehand/util.h"

static sth_status keep_end(sth_runtime *runtime) { return sth_runtime_keep_end(runtime), STH_OK; }
static sth_status release(sth_runtime *runtime) { return sth_runtime_release(runtime), STH_OK; }
static sth_status reserve_primary(sth_runtime *runtime) { return sth_runtime_reserve(runtime, STH_PRIORITY_PRIMARY); }
static sth_status reserve_secondary(sth_runtime *runtime) {
    return sth_runtime_reserve(runtime, STH_PRIORITY_SECONDARY);
}

PyObject *runtime_keep_begin(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_runtime_keep_begin);
}
PyObject *runtime_keep_end(PyObject *op, PyObject *none) { return (void)none, runtime_call(op, keep_end); }
PyObject *runtime_release(PyObject *op, PyObject *none) { return (void)none, runtime_call(op, release); }
PyObject *runtime_guest_begin(PyObject *op, PyObject *none) {
    return (void)none, runtime_call(op, sth_runtime_guest_begin);
}

PyObject *runtime_reserve(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"priority", NULL};
    const char *priority;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "s:reserve", names, &priority)) return NULL;
    if (!strcmp(priority, "primary")) return runtime_call(op, reserve_primary);
    if (!strcmp(priority, "secondary")) return runtime_call(op, reserve_secondary);
    return raise_error(STH_INVALID_ARGUMENT, "priority", "priority is \"primary\" or \"secondary\"");
}

PyObject *runtime_guest_end(PyObject *op, PyObject *none) {
    (void)none;
    runtime_object *self = (runtime_object *)op;
    uint64_t left = 0;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_runtime_guest_end(self->runtime, &left));
    PyObject *result = status == STH_OK ? PyLong_FromUnsignedLongLong(left) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

PyObject *runtime_set_aside(PyObject *op, PyObject *args) {
    PyObject *given, *items;
    int aside;
    guard *g = runtime_guard(op);
    if (!PyArg_ParseTuple(args, "Op:set_aside", &given, &aside) || !(items = PySequence_Tuple(given))) return NULL;
    Py_ssize_t count = PyTuple_Size(items);
    uint32_t *units = PyMem_Malloc((size_t)(count + 1) * sizeof *units);
    bool valid = units != NULL;
    if (!valid) PyErr_NoMemory();
    for (Py_ssize_t i = 0; valid && i < count; i++) valid = to_u32(PyTuple_GetItem(items, i), &units[i]);
    Py_DECREF(items);
    PyObject *result = NULL;
    if (valid && guard_enter(g)) {
        sth_status status;
        WITHOUT_GIL(status, sth_runtime_set_aside(runtime_core(op), units, (uint32_t)count, aside));
        result = none_or_raise(status);
        guard_leave(g);
    }
    PyMem_Free(units);
    return result;
}

NUMBER_METHOD(runtime_lend, 64, runtime_core, runtime_guard, sth_runtime_lend)
NUMBER_METHOD(runtime_set_reserved, 64, runtime_core, runtime_guard, sth_runtime_set_reserved)
NUMBER_METHOD(runtime_soften, 64, runtime_core, runtime_guard, sth_runtime_soften)

PyObject *runtime_reserved(PyObject *op, void *closure) {
    (void)closure;
    runtime_object *self = (runtime_object *)op;
    uint64_t bytes;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(bytes, sth_runtime_reserved(self->runtime));
    guard_leave(&self->guard);
    return PyLong_FromUnsignedLongLong(bytes);
}

PyObject *runtime_parked(PyObject *op, void *closure) {
    (void)closure;
    runtime_object *self = (runtime_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    bool parked = sth_runtime_is_parked(self->runtime);
    guard_leave(&self->guard);
    return PyBool_FromLong(parked);
}

static const field info_fields[] = {
    FIELD(sth_residency_info, cap, U64),     FIELD(sth_residency_info, occupied, U64),
    FIELD(sth_residency_info, free, U64),    FIELD(sth_residency_info, peak, U64),
    FIELD(sth_residency_info, primary, U64), FIELD(sth_residency_info, secondary, U64),
    FIELD(sth_residency_info, kept, U64),    FIELD(sth_residency_info, fixed, U64),
    FIELD(sth_residency_info, yielding, U64),
    FIELD(sth_residency_info, runtimes, U32),
    FIELD_END,
};

PyObject *device_residency(PyObject *op, PyObject *none) {
    (void)none;
    device_object *self = (device_object *)op;
    sth_residency_info info;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_residency_get(self->device, &info));
    PyObject *result = status == STH_OK ? dict_of(&info, info_fields) : raise_status(status);
    guard_leave(&self->guard);
    return result;
}

static PyObject *ask_turn(PyObject *op, bool (*question)(sth_device *)) {
    device_object *self = (device_object *)op;
    bool answer;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(answer, question(self->device));
    guard_leave(&self->guard);
    return PyBool_FromLong(answer);
}

PyObject *device_turn_begin(PyObject *op, PyObject *none) {
    (void)none;
    device_object *self = (device_object *)op;
    sth_status status;
    if (!guard_enter(&self->guard)) return NULL;
    WITHOUT_GIL(status, sth_residency_turn_begin(self->device));
    guard_leave(&self->guard);
    return none_or_raise(status);
}

PyObject *device_turn_is_first(PyObject *op, PyObject *none) {
    return (void)none, ask_turn(op, sth_residency_turn_is_first);
}
PyObject *device_turn_wait(PyObject *op, PyObject *none) { return (void)none, ask_turn(op, sth_residency_turn_wait); }

PyObject *device_turn_end(PyObject *op, PyObject *none) {
    (void)none;
    device_object *self = (device_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    sth_residency_turn_end(self->device);
    Py_END_ALLOW_THREADS
    guard_leave(&self->guard);
    Py_RETURN_NONE;
}

/* A number of bytes, a size such as "20GB", or None. */
static bool parse_budget(PyObject *value, uint64_t *out) {
    *out = 0;
    if (value == Py_None) return true;
    if (PyUnicode_Check(value)) {
        const char *text = PyUnicode_AsUTF8AndSize(value, NULL);
        if (!text) return false;
        sth_status status = sth_parse_size(text, out);
        if (status != STH_OK) return raise_status(status) != NULL;
    } else if (!to_u64(value, out)) {
        return false;
    }
    return *out || raise_error(STH_INVALID_ARGUMENT, "budget", "a device's budget must be positive") != NULL;
}

bool device_take_budget(device_object *self, PyObject *value) {
    uint64_t bytes;
    sth_status status;
    if (!parse_budget(value, &bytes)) return false;
    WITHOUT_GIL(status, sth_residency_set_cap(self->device, bytes));
    if (status == STH_OK) self->budget = bytes;
    return status == STH_OK || raise_status(status) != NULL;
}

PyObject *device_set_budget(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"budget", NULL};
    device_object *self = (device_object *)op;
    PyObject *value;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O:set_budget", names, &value)) return NULL;
    if (!guard_enter(&self->guard)) return NULL;
    bool taken = device_take_budget(self, value);
    guard_leave(&self->guard);
    if (!taken) return NULL;
    Py_RETURN_NONE;
}

PyObject *device_assume_free(PyObject *op, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"bytes", NULL};
    device_object *self = (device_object *)op;
    uint64_t bytes;
    sth_residency_info info;
    sth_status status = STH_OK;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&:assume_free", names, to_u64, &bytes)) return NULL;
    if (self->budget) Py_RETURN_NONE;
    if (!guard_enter(&self->guard)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    /* Somebody may come in between: then it is said again at the next opportunity. */
    status = sth_residency_get(self->device, &info);
    if (status == STH_OK && bytes < UINT64_MAX - info.occupied)
        (void)sth_residency_set_cap(self->device, info.occupied + bytes);
    Py_END_ALLOW_THREADS
    PyObject *result = none_or_raise(status);
    guard_leave(&self->guard);
    return result;
}

/* Numbers of a reading; what is not named is 0. Behind them, for find_budget, whose step is about to begin. */
static const char *const reading_names[] = {"total", "free", "framework_reserved", "framework_allocated",
                                            "framework_peak", "failures", "retries", "budget", "want", "least",
                                            "steps", "growth", "phase", "runs", "ceiling", "runtime", "spare", NULL};

typedef struct asked {
    sth_memory_reading reading;
    runtime_object *runtime; /* borrowed; NULL: none */
    uint64_t spare;
} asked;

static bool parse_asked(PyObject *op, PyObject *args, PyObject *kwargs, asked *out) {
    core_state *state = PyType_GetModuleState(Py_TYPE(op));
    sth_memory_reading *r = &out->reading;
    PyObject *runtime = Py_None;
    int runs = 0;
    *out = (asked){.spare = 0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$O&O&O&O&O&O&O&O&O&O&O&dO&pO&OO&:find_budget",
                                     (char **)reading_names, to_u64, &r->total, to_u64, &r->free, to_u64,
                                     &r->framework_reserved, to_u64, &r->framework_allocated, to_u64,
                                     &r->framework_peak, to_u64, &r->failures, to_u64, &r->retries, to_u64, &r->budget,
                                     to_u64, &r->want, to_u64, &r->least, to_u64, &r->steps, &r->growth, to_u64,
                                     &r->phase, &runs, to_u64, &r->ceiling, &runtime, to_u64, &out->spare))
        return false;
    r->limit = ((device_object *)op)->budget;
    r->runs = runs != 0;
    if (runtime != Py_None && !PyObject_TypeCheck(runtime, state->runtime))
        return PyErr_SetString(PyExc_TypeError, "runtime is a Runtime, or None"), false;
    if (runtime != Py_None) out->runtime = (runtime_object *)runtime;
    return true;
}

static PyObject *verdict_dict(const sth_budget_verdict *v) {
    static const char *const names[] = {
#define NAME(name, text) #name,
        STH_BUDGET_WHY_LIST(NAME)
#undef NAME
    };
    return Py_BuildValue("{sK ss ss sK sK sK sK sK sK sK sO sO}", "budget", (unsigned long long)v->budget, "why",
                         names[v->why], "text", sth_budget_why_text(v->why), "cap", (unsigned long long)v->cap,
                         "capacity", (unsigned long long)v->capacity, "others", (unsigned long long)v->others, "margin",
                         (unsigned long long)v->margin, "reserve", (unsigned long long)v->reserve, "growths",
                         (unsigned long long)v->growths, "shrinks", (unsigned long long)v->shrinks, "reset_peak",
                         v->reset_peak ? Py_True : Py_False, "trim", v->trim ? Py_True : Py_False);
}

PyObject *device_find_budget(PyObject *op, PyObject *args, PyObject *kwargs) {
    device_object *self = (device_object *)op;
    asked a;
    sth_budget_verdict v;
    sth_status status;
    if (!parse_asked(op, args, kwargs, &a)) return NULL;
    guard *g = a.runtime ? &a.runtime->guard : &self->guard;
    if (!guard_enter(g)) return NULL;
    if (a.runtime) WITHOUT_GIL(status, sth_runtime_find_budget(a.runtime->runtime, &a.reading, a.spare, &v));
    else status = sth_residency_find_budget(self->device, &a.reading, &v);
    PyObject *result = status == STH_OK ? verdict_dict(&v) : raise_status(status);
    guard_leave(g);
    return result;
}

PyObject *device_above_ceiling(PyObject *op, PyObject *args, PyObject *kwargs) {
    device_object *self = (device_object *)op;
    asked a;
    if (!parse_asked(op, args, kwargs, &a) || !guard_enter(&self->guard)) return NULL;
    bool above = sth_residency_above_ceiling(self->device, &a.reading);
    guard_leave(&self->guard);
    return PyBool_FromLong(above);
}

PyObject *runtime_budget_without(PyObject *op, PyObject *args) {
    uint64_t bytes, spare, budget, freed = 0;
    if (!PyArg_ParseTuple(args, "O&O&:budget_without", to_u64, &bytes, to_u64, &spare)) return NULL;
    if (!guard_enter(runtime_guard(op))) return NULL;
    WITHOUT_GIL(budget, sth_runtime_budget_without(runtime_core(op), bytes, spare, &freed));
    guard_leave(runtime_guard(op));
    return Py_BuildValue("(KK)", (unsigned long long)budget, (unsigned long long)freed);
}

PyObject *budget_why(void) {
    PyObject *dict = PyDict_New();
#define ITEM(name, text)                                                                     \
    if (dict) {                                                                              \
        PyObject *value = PyUnicode_FromString(text);                                        \
        if (!value || PyDict_SetItemString(dict, #name, value) < 0) Py_CLEAR(dict);          \
        Py_XDECREF(value);                                                                   \
    }
    STH_BUDGET_WHY_LIST(ITEM)
#undef ITEM
    return dict;
}

PyObject *device_forget(PyObject *op, PyObject *none) {
    (void)none;
    device_object *self = (device_object *)op;
    if (!guard_enter(&self->guard)) return NULL;
    sth_residency_forget(self->device);
    guard_leave(&self->guard);
    Py_RETURN_NONE;
}

PyObject *device_budget(PyObject *op, void *closure) {
    (void)closure;
    uint64_t budget = ((device_object *)op)->budget;
    if (budget) return PyLong_FromUnsignedLongLong(budget);
    Py_RETURN_NONE;
}
