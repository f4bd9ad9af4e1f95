/* Type Mapping: a private mapping of a whole open file, unmapped with the object. Reading costs no anonymous memory; a
 * write copies the page and never reaches the file.
 *
 * A mapped file that is written ends in wrong values, one that is cut off in SIGBUS. So
 *  - all mappings are in one list, by the file's device and inode, and `refuse_writes` looks there for a file that
 *    somebody is about to open for writing;
 *  - a handler of SIGBUS puts a page of 0xff (NaN as a floating number, -1 as an integer) in the place of a page that
 *    the file has lost, so that the read ends, and has Python raise an error that names the file. Any other SIGBUS goes
 *    to the handler that was there before.
 *
 * Invariants: a node is never freed, so that the handler may walk the list at any time; its begin is 0 while it is
 * unused. The GIL guards the list against other writers. The handler makes system calls only, and asks for one pending
 * call. */
#include "convert.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct node {
    struct node *next;
    _Atomic(uintptr_t) begin, end; /* addresses, of whole pages */
    dev_t device;
    ino_t inode;
    PyObject *path;      /* str; NULL: the node is unused */
    atomic_bool lost;    /* pages of it were missing, and nobody has been told */
    atomic_ulong thread; /* that read them */
    bool told;           /* once at least */
} node;

typedef struct mapping_object {
    PyObject_HEAD
    node *node;
    uint64_t bytes;
} mapping_object;

static _Atomic(node *) nodes;
static unsigned live; /* nodes in use */
static struct sigaction before;
static uintptr_t page;
static atomic_bool calling; /* a pending call is asked for */

/* ---- pages that are lost ---- */

static node *node_of(uintptr_t address) {
    for (node *n = atomic_load(&nodes); n; n = n->next)
        if (atomic_load(&n->begin) && atomic_load(&n->begin) <= address && address < atomic_load(&n->end)) return n;
    return NULL;
}

/* Calls stagehand.mapped of a file that was lost; nothing where its name is not known. NULL: an error is set. */
static PyObject *raise_lost(PyObject *module, node *n) {
    if (!n->path) return Py_NewRef(Py_None);
    PyObject *told = n->told ? Py_True : Py_False;
    return PyObject_CallMethod(module, "raise_lost", "OkO", n->path, atomic_load(&n->thread), told);
}

/* A pending call: on the main thread, between two instructions of its program. */
static int tell(void *unused) {
    (void)unused;
    atomic_store(&calling, false);
    for (node *n = atomic_load(&nodes); n; n = n->next) {
        if (!atomic_exchange(&n->lost, false)) continue;
        PyObject *module = PyImport_ImportModule("stagehand.weights.mapped");
        PyObject *done = module ? raise_lost(module, n) : NULL;
        n->told = true;
        Py_XDECREF(module);
        if (!done) return -1;
        Py_DECREF(done);
    }
    return 0;
}

static void on_bus_error(int number, siginfo_t *info, void *context);

static void pass_on(int number, siginfo_t *info, void *context) {
    if (before.sa_flags & SA_SIGINFO) before.sa_sigaction(number, info, context);
    else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) before.sa_handler(number);
    else {
        signal(number, SIG_DFL); /* the access is made again, and ends the process as it would have */
        if (info->si_code <= 0) raise(number);
    }
}

/* The main thread may wait for a lock or for the end of another thread: a signal makes it look at pending calls. */
static void wake_main(void) {
    struct sigaction now;
    pid_t process = getpid(), self = (pid_t)syscall(SYS_gettid);
    if (self == process || sigaction(SIGBUS, NULL, &now) || now.sa_sigaction != on_bus_error) return;
    syscall(SYS_tgkill, process, process, SIGBUS);
}

static void on_bus_error(int number, siginfo_t *info, void *context) {
    int saved = errno;
    if (info->si_code == SI_TKILL && info->si_pid == getpid() && atomic_load(&calling)) return;
    uintptr_t address = (uintptr_t)info->si_addr & ~(page - 1);
    node *n = info->si_code == BUS_ADRERR ? node_of(address) : NULL;
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
    void *filled = n ? mmap((void *)address, page, PROT_READ | PROT_WRITE, flags, -1, 0) : MAP_FAILED;
    if (filled == MAP_FAILED) {
        errno = saved;
        pass_on(number, info, context);
        return;
    }
    memset(filled, 0xff, page);
    atomic_store(&n->thread, PyThread_get_thread_ident());
    atomic_store(&n->lost, true);
    if (!atomic_exchange(&calling, true)) {
        if (Py_AddPendingCall(tell, NULL)) atomic_store(&calling, false);
        else wake_main();
    }
    errno = saved;
}

/* Once: a handler that somebody sets later stands before this one. */
static bool watch_bus_errors(void) {
    static bool watching;
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    if (watching) return true;
    page = (uintptr_t)sysconf(_SC_PAGESIZE);
    action.sa_sigaction = on_bus_error;
    sigemptyset(&action.sa_mask);
    watching = sigaction(SIGBUS, NULL, &before) == 0 && sigaction(SIGBUS, &action, NULL) == 0;
    return watching;
}

/* ---- files that are mapped ---- */

static node *unused_node(void) {
    for (node *n = atomic_load(&nodes); n; n = n->next)
        if (!n->path) return n;
    node *n = PyMem_Calloc(1, sizeof *n);
    if (!n) return (node *)(void *)PyErr_NoMemory();
    n->next = atomic_load(&nodes);
    atomic_store(&nodes, n);
    return n;
}

static node *node_of_file(const struct stat *st) {
    for (node *n = atomic_load(&nodes); n; n = n->next)
        if (n->path && n->device == st->st_dev && n->inode == st->st_ino) return n;
    return NULL;
}

/* Raises for a mapped file; 0: it may be written. */
static int check_file(const struct stat *st, PyObject *target) {
    if (!node_of_file(st)) return 0;
    PyGC_Collect(); /* a model that nobody holds may be waiting for it */
    node *n = node_of_file(st);
    if (!n) return 0;
    PyObject *module = PyImport_ImportModule("stagehand.weights.mapped");
    PyObject *done = module ? PyObject_CallMethod(module, "raise_mapped", "OO", n->path, target) : NULL;
    Py_XDECREF(module);
    Py_XDECREF(done);
    return done ? 0 : -1;
}

/* target: a path or a descriptor. What cannot be looked at is left to whoever opens it. */
static int check_target(PyObject *target) {
    struct stat st;
    PyObject *path = NULL;
    if (PyLong_Check(target)) {
        long fd = PyLong_AsLong(target);
        if (PyErr_Occurred()) PyErr_Clear();
        else if (fd >= 0 && fd <= INT32_MAX && !fstat((int)fd, &st)) return check_file(&st, target);
        return 0;
    }
    if (!PyUnicode_FSConverter(target, &path)) {
        PyErr_Clear();
        return 0;
    }
    int status = stat(PyBytes_AsString(path), &st) ? 0 : check_file(&st, target);
    Py_DECREF(path);
    return status;
}

PyObject *anything_mapped(PyObject *module, PyObject *none) {
    (void)module, (void)none;
    return PyBool_FromLong(live > 0);
}

PyObject *refuse_writes(PyObject *module, PyObject *target) {
    (void)module;
    if (live && check_target(target)) return NULL;
    Py_RETURN_NONE;
}

/* ---- the type ---- */

static PyObject *fail_map(PyObject *path, uint64_t bytes, int code) {
    char message[1024];
    const char *text = PyUnicode_AsUTF8AndSize(path, NULL);
    if (!text) return NULL;
    snprintf(message, sizeof message, "%.600s: %llu bytes of it cannot be mapped: %s", text, (unsigned long long)bytes,
             strerror(code));
    return raise_error(code == ENOMEM ? STH_OUT_OF_ADDRESS_SPACE : STH_IO, text, message);
}

static PyObject *mapping_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"descriptor", "path", NULL};
    PyObject *path;
    int fd;
    struct stat st;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iU:Mapping", names, &fd, &path)) return NULL;
    if (fstat(fd, &st)) return fail_map(path, 0, errno);
    node *n = unused_node();
    mapping_object *self = n ? (mapping_object *)PyType_GenericAlloc(type, 0) : NULL;
    if (!self) return NULL;
    if (!watch_bus_errors()) PyErr_SetFromErrno(PyExc_OSError);
    void *at = PyErr_Occurred() ? MAP_FAILED
                                : mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                                       fd, 0);
    if (at == MAP_FAILED) {
        if (!PyErr_Occurred()) fail_map(path, (uint64_t)st.st_size, errno);
        Py_DECREF(self);
        return NULL;
    }
    self->node = n;
    self->bytes = (uint64_t)st.st_size;
    n->device = st.st_dev;
    n->inode = st.st_ino;
    n->path = Py_NewRef(path);
    n->told = false;
    atomic_store(&n->lost, false);
    atomic_store(&n->end, (uintptr_t)at + (((uintptr_t)st.st_size + page - 1) & ~(page - 1)));
    atomic_store(&n->begin, (uintptr_t)at);
    live++;
    return (PyObject *)self;
}

static void mapping_dealloc(PyObject *op) {
    mapping_object *self = (mapping_object *)op;
    node *n = self->node;
    if (n) {
        uintptr_t begin = atomic_exchange(&n->begin, 0);
        munmap((void *)begin, (size_t)self->bytes);
        live--;
        Py_CLEAR(n->path);
    }
    object_free(op);
}

static PyObject *mapping_address(PyObject *op, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(atomic_load(&((mapping_object *)op)->node->begin));
}

static PyObject *mapping_bytes(PyObject *op, void *unused) {
    (void)unused;
    return PyLong_FromUnsignedLongLong(((mapping_object *)op)->bytes);
}

static PyGetSetDef mapping_getset[] = {
    {"address", mapping_address, NULL, "Of the first byte.", NULL},
    {"nbytes", mapping_bytes, NULL, "Bytes of the file when it was mapped.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot mapping_slots[] = {
    {Py_tp_doc, (void *)"Mapping(descriptor, path)\n--\n\n"
                        "A private mapping of a whole open file, which must not be empty, until the object dies. The\n"
                        "descriptor stays the caller's and may be closed after. `path` is for errors. Raises\n"
                        "StagehandOOMError where the address space is used up, TransferError."},
    {Py_tp_new, mapping_new},
    {Py_tp_dealloc, mapping_dealloc},
    {Py_tp_getset, mapping_getset},
    {0, NULL},
};
PyType_Spec mapping_spec = {"stagehand._core.Mapping", sizeof(mapping_object), 0, Py_TPFLAGS_DEFAULT, mapping_slots};
