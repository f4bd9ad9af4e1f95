/* The pair of saved-tensor hooks in force, for PyTorch 2.4 to 2.7: Python can push and pop pairs
 * there, and cannot ask.
 *
 * PyTorch keeps each thread's pairs in a std::stack at the start of a struct; its library exports a
 * function that returns the struct's address. The stack is libstdc++'s deque: blocks of 512 bytes,
 * and an end that says where the last element is. An element is two addresses of Python objects
 * (2.4), or two pairs of an address and its interpreter (2.5 to 2.7). find_top_hooks() tries which
 * of them holds, with a pair of its own, and gives up where neither does. */
#include <dlfcn.h>

#include "core.h"

#define LIBRARY "libtorch_cpu.so"
#define STATE "_ZN2at23SavedTensorDefaultHooks13get_tls_stateEv"

enum {
    BLOCK = 512
};

typedef struct deque_iterator {
    char *current, *first, *last, **block;
} deque_iterator;

typedef struct deque {
    void *blocks;
    size_t block_count;
    deque_iterator start, finish;
} deque;

typedef deque *(*state_function)(void);
static state_function state_of_thread; /* NULL: this PyTorch has another one */
static size_t element_size;            /* 0: not known */

/* The last pair, of elements of `size` bytes, borrowed; false: there is none. */
static bool last_pair(size_t size, PyObject **out_pack, PyObject **out_unpack) {
    const deque *pairs = state_of_thread();
    const deque_iterator *finish = &pairs->finish;
    if (finish->current == pairs->start.current) return false;
    const char *element = finish->current != finish->first ? finish->current - size : finish->block[-1] + BLOCK - size;
    memcpy(out_pack, element, sizeof *out_pack);
    memcpy(out_unpack, element + size / 2, sizeof *out_unpack);
    return true;
}

static PyObject *top_hooks(PyObject *module, PyObject *ignore_tracing) {
    (void)module, (void)ignore_tracing;
    PyObject *pack, *unpack;
    if (!last_pair(element_size, &pack, &unpack)) Py_RETURN_NONE;
    return PyTuple_Pack(2, pack, unpack);
}

static PyMethodDef top_method = {"top_hooks", top_hooks, METH_O,
                                 "top_hooks(ignore_tracing, /)\n--\n\nThe calling thread's pair (pack, unpack), or "
                                 "None."};

PyObject *find_top_hooks(PyObject *module, PyObject *args) {
    (void)module;
    PyObject *push, *pop;
    if (!PyArg_ParseTuple(args, "OO:find_top_hooks", &push, &pop)) return NULL;
    void *library = dlopen(LIBRARY, RTLD_NOLOAD | RTLD_LAZY);
    void *symbol = library ? dlsym(library, STATE) : NULL;
    if (library) dlclose(library); /* PyTorch keeps it */
    if (!symbol) Py_RETURN_NONE;
    memcpy(&state_of_thread, &symbol, sizeof symbol);
    PyObject *done = PyObject_CallFunctionObjArgs(push, push, pop, NULL); /* any two callables */
    if (!done) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return NULL;
        PyErr_Clear(); /* imported where hooks are switched off */
        Py_RETURN_NONE;
    }
    Py_DECREF(done);
    for (size_t size = 2 * sizeof(void *); !element_size && size <= 4 * sizeof(void *); size += 2 * sizeof(void *)) {
        PyObject *first, *second;
        if (last_pair(size, &first, &second) && first == push && second == pop) element_size = size;
    }
    done = PyObject_CallFunctionObjArgs(pop, NULL);
    if (!done) return NULL;
    Py_DECREF(done);
    if (!element_size) Py_RETURN_NONE;
    return PyCFunction_New(&top_method, NULL);
}
