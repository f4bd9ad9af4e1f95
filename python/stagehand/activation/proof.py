"""Whether what backward computed again is what forward had.

A recipe is tried once, and a later pass may do what autograd does not count: a write through `.data`, or in place
before a cast, after which the operator's inputs no longer give the bytes. So a sum of the bits is made where a tensor
is dropped, another where it is back, and whether they differ goes to a flag in pinned host memory. Nothing waits for
the device: the host looks at the flags each time, and gradients that are wrong raise while backward runs, or as the
next pass begins.
"""

from __future__ import annotations

from .._torch import torch, view
from ..errors import StagehandError

FLAGS = 1024  # more than the device can be behind by


def bits(tensor) -> torch.Tensor:
    """A sum over the bytes of a tensor's storage but the last seven at most: int64, on its device, 0-dim."""
    words = tensor.untyped_storage().nbytes() // 8
    return view(tensor, 0, torch.int64, (words,), (1,)).sum()


class Proof:
    """The flags of one runtime. Threads: one at a time."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._flags: torch.Tensor | None = None
        self._what: dict[int, str] = {}
        self._count = 0

    def compare(self, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """Two sums that must be equal. what: for the message. Does not wait."""
        if self._flags is None:
            with torch.inference_mode(False):  # they outlive the mode
                self._flags = torch.zeros(FLAGS, dtype=torch.bool, pin_memory=self._pinned)
        at = self._count % FLAGS
        self._count += 1
        self._what[at] = what
        self._flags[at].copy_(found != expected, non_blocking=True)

    def look(self) -> None:
        """Raises StagehandError where sums differed, as far as the device has come; once for all that are enqueued."""
        if self._flags is None or not self._flags.any():
            return
        if self._pinned:
            torch.cuda.synchronize()  # the rest of that backward is not to be taken for the next one
        what = ", ".join(dict.fromkeys(self._what[at] for at in self._flags.nonzero().flatten().tolist()))
        self._flags.zero_()
        raise StagehandError(
            f"gradients are wrong: what was computed again for backward is not what forward had, for {what}. Its "
            f"bytes, or those of an input, were changed where autograd does not see it (through .data, or in place "
            f"under no_grad before a cast), and were not when that was tried. From now on nothing more is computed "
            f"again: clear the gradients and repeat the step, or set recompute_cheap=False")
