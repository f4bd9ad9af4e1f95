/* Functions pack, unpack and verify over stagehand/pack.h. The GIL is released but for callbacks. */
#include "convert.h"

#include <string.h>

#include "stagehand/pack.h"

typedef struct pack_call {
    PyObject *progress, *list; /* borrowed: a callable or NULL, the list of what verify found */
    PyThreadState *thread;
    bool failed;               /* an exception is set */
} pack_call;

static bool report(void *context, const char *tensor, uint64_t done, uint64_t total) {
    pack_call *call = context;
    PyEval_RestoreThread(call->thread);
    bool go_on = PyErr_CheckSignals() == 0;
    if (go_on && call->progress) {
        PyObject *answer = PyObject_CallFunction(call->progress, "sKK", tensor, (unsigned long long)done,
                                                 (unsigned long long)total);
        int truth = answer ? PyObject_IsTrue(answer) : -1;
        Py_XDECREF(answer);
        call->failed = truth < 0;
        go_on = truth > 0;
    } else if (!go_on) {
        call->failed = true;
    }
    call->thread = PyEval_SaveThread();
    return go_on;
}

static PyObject *verified_entry(const sth_verified *t) {
    PyObject *name = text_or_empty(t->name);
    if (!name) return NULL;
    return Py_BuildValue("{sNsssisOsOsOsdsdsd}", "name", name, "encoding", t->encoding, "checksum", t->checksum,
                         "compared", t->compared ? Py_True : Py_False, "missing", t->missing ? Py_True : Py_False,
                         "equal", t->equal ? Py_True : Py_False, "max_abs", t->max_abs, "rel_l2", t->rel_l2, "cosine",
                         t->cosine);
}

static void collect(void *context, const sth_verified *t) {
    pack_call *call = context;
    PyEval_RestoreThread(call->thread);
    PyObject *entry = call->failed ? NULL : verified_entry(t);
    if (!entry || PyList_Append(call->list, entry) < 0) call->failed = true;
    Py_XDECREF(entry);
    call->thread = PyEval_SaveThread();
}

static bool find_format(const char *text, sth_pack_format *out) {
    for (int i = 0; i < STH_PACK_FORMAT_COUNT; i++) {
        if (strcmp(text, sth_pack_format_name((sth_pack_format)i)) != 0) continue;
        *out = (sth_pack_format)i;
        return true;
    }
    raise_error(STH_INVALID_ARGUMENT, "format", "the formats are v2, v3-int4, layer-index and lossless");
    return false;
}

static bool find_dtype(const char *text, sth_dtype *out) {
    for (int i = 0; i < STH_DTYPE_COUNT; i++) {
        if (strcmp(sth_dtype_name((sth_dtype)i), text) != 0) continue;
        *out = (sth_dtype)i;
        return true;
    }
    raise_error(STH_INVALID_ARGUMENT, "dtype", "weights are unpacked as F32, BF16 or F16");
    return false;
}

static PyObject *conclude(const pack_call *call, sth_status status) {
    return call->failed ? NULL : none_or_raise(status);
}

PyObject *pack_files(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"source", "result", "format", "skip", "threads", "progress", NULL};
    (void)module;
    PyObject *source = NULL, *result = NULL, *progress = Py_None, *answer = NULL;
    const char *format;
    sth_pack_options options;
    sth_pack_options_init(&options);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&s|zO&O:pack", names, PyUnicode_FSConverter, &source,
                                     PyUnicode_FSConverter, &result, &format, &options.skip, to_u32, &options.threads,
                                     &progress)) {
        Py_XDECREF(source);
        return NULL;
    }
    pack_call call = {.progress = progress == Py_None ? NULL : progress};
    options.progress = report;
    options.context = &call;
    if (find_format(format, &options.format)) {
        const char *in = PyBytes_AsString(source), *out = PyBytes_AsString(result);
        call.thread = PyEval_SaveThread();
        sth_status status = sth_pack(in, out, &options);
        PyEval_RestoreThread(call.thread);
        answer = conclude(&call, status);
    }
    Py_DECREF(source);
    Py_DECREF(result);
    return answer;
}

PyObject *unpack_files(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"source", "result", "dtype", "threads", "progress", NULL};
    (void)module;
    PyObject *source = NULL, *result = NULL, *progress = Py_None, *answer = NULL;
    const char *dtype = "BF16";
    sth_pack_options options;
    sth_pack_options_init(&options);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|sO&O:unpack", names, PyUnicode_FSConverter, &source,
                                     PyUnicode_FSConverter, &result, &dtype, to_u32, &options.threads, &progress)) {
        Py_XDECREF(source);
        return NULL;
    }
    pack_call call = {.progress = progress == Py_None ? NULL : progress};
    options.progress = report;
    options.context = &call;
    if (find_dtype(dtype, &options.dtype)) {
        const char *in = PyBytes_AsString(source), *out = PyBytes_AsString(result);
        call.thread = PyEval_SaveThread();
        sth_status status = sth_unpack(in, out, &options);
        PyEval_RestoreThread(call.thread);
        answer = conclude(&call, status);
    }
    Py_DECREF(source);
    Py_DECREF(result);
    return answer;
}

PyObject *verify_files(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"path", "original", "threads", NULL};
    (void)module;
    PyObject *path = NULL, *original = Py_None, *original_path = NULL, *answer = NULL;
    sth_pack_options options;
    sth_verify_result result;
    sth_pack_options_init(&options);
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|OO&:verify", names, PyUnicode_FSConverter, &path, &original,
                                     to_u32, &options.threads)) {
        Py_XDECREF(path);
        return NULL;
    }
    pack_call call = {.list = PyList_New(0)};
    options.progress = report;
    options.context = &call;
    if (call.list && (original == Py_None || PyUnicode_FSConverter(original, &original_path))) {
        const char *in = PyBytes_AsString(path), *other = original_path ? PyBytes_AsString(original_path) : NULL;
        call.thread = PyEval_SaveThread();
        sth_status status = sth_verify(in, other, &options, collect, &result);
        PyEval_RestoreThread(call.thread);
        answer = conclude(&call, status);
    }
    Py_DECREF(path);
    Py_XDECREF(original_path);
    if (!answer) {
        Py_XDECREF(call.list);
        return NULL;
    }
    Py_DECREF(answer);
    return call.list;
}
