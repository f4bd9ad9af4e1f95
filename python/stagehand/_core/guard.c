/* The end of objects. Some may be closed while calls on other threads use them with the GIL
 * released: the object ends in close, or in the last call that was under way then. The counts
 * are guarded by the GIL. */
#include "core.h"

#include <stdio.h>

bool guard_enter(guard *g) {
    if (!g->open) {
        char message[96];
        snprintf(message, sizeof message, "the %s was closed (shut down): make a new one", g->name);
        raise_error(STH_SHUT_DOWN, g->name, message);
        return false;
    }
    g->users++;
    return true;
}

static void end(guard *g) {
    Py_BEGIN_ALLOW_THREADS
    g->end(g->owner);
    Py_END_ALLOW_THREADS
    if (g->ended) g->ended(g->owner);
}

void guard_leave(guard *g) {
    if (--g->users == 0 && !g->open) end(g);
}

void guard_close(guard *g) {
    if (!g->open) return;
    g->open = false;
    if (g->users == 0) end(g);
}

void object_free(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    release(object);
    Py_DECREF(type);
}
