"""Weights that were given data of another shape or dtype between two passes, as transformers' resize_token_embeddings
does: `weight.data = larger`. Places and images have the old size, so the session is closed and one with the same
options is opened, as for a conversion (converting.py), before the next pass begins.

A program that resizes a layer registers new modules or parameters on the way. Only behind a registration are the
weights' shapes compared, so that a usual pass costs nothing. Data of another shape that is given without one is refused
at the weight's next use (images.py).
"""

from __future__ import annotations

from ..errors import StagehandError, StagehandOOMError, some_of


def resized(session) -> list[str]:
    """Names of such weights, where a new session may be opened for them: no step is under way."""
    if not session.writes.behind_registrations() or session.steps.busy():
        return []
    return [entry.name for unit in session.units for entry in unit.entries
            if entry.param.shape != entry.shape or entry.param.dtype != entry.dtype]


def open_anew(session, runtime) -> None:
    """The runtime takes the model over again, if weights were resized. A budget that is too small now leaves the model
    plain, and raises StagehandOOMError."""
    names = resized(session)
    if not names:
        return
    with session.steps.pass_lock:
        if session.closed:  # another thread has done so meanwhile
            return
        runtime._pause()
        try:
            runtime._resume(dtype=None)
        except StagehandError as error:
            runtime.shutdown()
            kind = StagehandOOMError if isinstance(error, StagehandOOMError) else StagehandError
            raise kind(f"data of another shape or dtype was given to {some_of(names)} after wrapping. The model is "
                       f"plain now, because it cannot be wrapped with it: {error}", error.status, names[0],
                       error.native_code) from error
