/* Type Watermark: below which saved activations stay on the device. Plain data under the GIL; changed under the lock of
 * the store's user. */
#include "convert.h"

typedef struct watermark_object {
    PyObject ob_base;
    sth_watermark mark;
} watermark_object;

static sth_watermark *mark_of(PyObject *op) { return &((watermark_object *)op)->mark; }

static PyObject *watermark_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"high", "low", "budget", NULL};
    uint64_t high, low, budget = 0;
    PyObject *given = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O:Watermark", names, to_u64, &high, to_u64, &low, &given) ||
        !to_u64_or_none(given, &budget))
        return NULL;
    PyObject *op = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (op) sth_watermark_init(mark_of(op), high, low, given != Py_None, budget);
    return op;
}

static PyObject *watermark_follow(PyObject *op, PyObject *args) {
    uint64_t peak;
    int moved;
    if (!PyArg_ParseTuple(args, "O&p:follow", to_u64, &peak, &moved)) return NULL;
    return PyBool_FromLong(sth_watermark_follow(mark_of(op), peak, moved));
}

static PyObject *watermark_limit(PyObject *op, PyObject *args) {
    PyObject *given;
    uint64_t most;
    if (!PyArg_ParseTuple(args, "O!O&:limit", (PyObject *)Py_TYPE(op), &given, to_u64, &most)) return NULL;
    return PyBool_FromLong(sth_watermark_limit(mark_of(op), mark_of(given), most));
}

static PyObject *watermark_copy(PyObject *op, PyObject *none) {
    (void)none;
    PyTypeObject *type = Py_TYPE(op);
    PyObject *made = ((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (made) *mark_of(made) = *mark_of(op);
    return made;
}

static PyObject *watermark_high(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(mark_of(op)->high);
}

static PyObject *watermark_low(PyObject *op, void *closure) {
    (void)closure;
    return PyLong_FromUnsignedLongLong(sth_watermark_low(mark_of(op)));
}

/* A number of a mark that follows; None of one that does not. */
static PyObject *if_follows(PyObject *op, uint64_t value) {
    return mark_of(op)->follows ? PyLong_FromUnsignedLongLong(value) : Py_NewRef(Py_None);
}

static PyObject *watermark_budget(PyObject *op, void *closure) {
    (void)closure;
    return if_follows(op, mark_of(op)->budget);
}

static PyObject *watermark_ceiling(PyObject *op, void *closure) {
    (void)closure;
    return if_follows(op, mark_of(op)->ceiling);
}

static PyMethodDef watermark_methods[] = {
    {"follow", watermark_follow, METH_VARARGS,
     "follow(peak, moved, /)\n--\n\n"
     "A pass has ended, which took `peak` bytes of the device; moved: something was spilled or dropped so\n"
     "far. Whether the mark is another one."},
    {"limit", watermark_limit, METH_VARARGS,
     "limit(given, most, /)\n--\n\nNo more than so many bytes, of a mark as it was given. Whether it is another one."},
    {"copy", watermark_copy, METH_NOARGS, "copy()\n--\n\nThe same, as it is now."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef watermark_members[] = {
    {"high", watermark_high, NULL, "Bytes above which something is spilled.", NULL},
    {"low", watermark_low, NULL, "Bytes down to which it is.", NULL},
    {"budget", watermark_budget, NULL, "Bytes below which it follows, or None.", NULL},
    {"ceiling", watermark_ceiling, NULL, "Bytes above which it was too high, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot watermark_slots[] = {
    {Py_tp_doc, (void *)"Watermark(high, low, budget=None)\n--\n\n"
                        "Marks of an Activations store, in bytes, that follow what passes take, below a budget\n"
                        "(stagehand/activation.h). None: they stay."},
    {Py_tp_new, watermark_new},
    {Py_tp_dealloc, object_free},
    {Py_tp_methods, watermark_methods},
    {Py_tp_getset, watermark_members},
    {0, NULL},
};
PyType_Spec watermark_spec = {"stagehand._core.Watermark", sizeof(watermark_object), 0, Py_TPFLAGS_DEFAULT,
                              watermark_slots};
