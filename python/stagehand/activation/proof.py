"""Whether what backward computed again is what forward had.

A recipe is tried once, and a later pass may do what autograd does not count: a write through `.data`, or in place
before a cast, after which the operator's inputs no longer give the bytes. So a sample of the bits is copied where a
tensor is dropped, another where it is back, and whether they differ goes to a flag in pinned host memory, some at a
time. Nothing waits for the device: the host looks at the flags each time, and gradients that are wrong raise while
backward runs, or as the next pass begins.

A sample is RUNS runs of words, spread evenly, and a 64th of the tensor at most: what is written there without
autograd's knowing is whole tensors, many rows or columns, and not a few elements. It costs the device one short copy;
a sum of as much takes three times as long.
"""

from __future__ import annotations

import ctypes

from .._torch import torch, view
from ..errors import StagehandError

FLAGS = 1024  # more than the device can be behind by
EACH = 16  # comparisons that are sent together
RUNS, RUN = 256, 32  # words, in each run at most
NOTHING = bytes(FLAGS)


def sample(tensor) -> torch.Tensor:
    """int64 words of a tensor's storage, on its device; of a small one their sum."""
    words = tensor.untyped_storage().nbytes() // 8
    run = min(words // (RUNS * 64), RUN)
    if run == 0:
        return view(tensor, 0, torch.int64, (words,), (1,)).sum()
    apart = words // (RUNS * run)  # in runs
    apart -= apart % 2 == 0  # odd: rows are powers of two, and every column is to be met
    return view(tensor, 0, torch.int64, (RUNS, run), (apart * run, 1)).clone(memory_format=torch.contiguous_format)


class Proof:
    """The flags of one runtime. Threads: one at a time."""

    def __init__(self, pinned: bool) -> None:
        self._pinned = pinned
        self._flags: torch.Tensor | None = None
        self._bytes = None  # of the flags, to look at: asking torch costs fifty times as much
        self._what: dict[int, str] = {}
        self._count = 0
        self._missing = 0  # samples of this pass that were not compared yet
        self._waiting: list[tuple] = []  # (found, expected, what)
        self._stream = None  # the last of theirs
        self._side = None  # a stream: flags must not queue for the link between copies that others wait for

    def expect(self, tensor) -> torch.Tensor:
        """The sample of a tensor that is dropped, for `compare`."""
        self._missing += 1
        return sample(tensor)

    def compare(self, tensor, expected: torch.Tensor, what: str) -> None:
        """A tensor that was computed again, and the sample that it must give. what: for the message. Does not wait."""
        if self._pinned:
            stream = torch.cuda.current_stream(tensor.device)
            if self._waiting and stream != self._stream:
                stream.wait_stream(self._stream)
            self._stream = stream
        if self._waiting and self._waiting[0][1].shape != expected.shape:
            self._send()
        self._waiting.append((sample(tensor), expected, what))
        self._missing -= 1
        if len(self._waiting) == EACH or self._missing <= 0:
            self._send()

    def begin(self) -> None:
        """A pass begins. Raises as `look`."""
        self._missing = 0
        self._send()
        self.look()

    def _send(self) -> None:
        """What was compared is on its way to the flags."""
        if not self._waiting:
            return
        found, expected, what = zip(*self._waiting)
        self._waiting = []
        if self._pinned and torch.cuda.current_stream(found[0].device) != self._stream:
            torch.cuda.current_stream(found[0].device).wait_stream(self._stream)
        with torch.inference_mode(False):  # the flags outlive the mode
            if self._flags is None:
                self._flags = torch.zeros(FLAGS, dtype=torch.bool, device="cpu", pin_memory=self._pinned)
                self._bytes = (ctypes.c_char * FLAGS).from_address(self._flags.data_ptr())
            wrong = (torch.stack(found) != torch.stack(expected)).view(len(what), -1).any(1)
        at = self._count if self._count + len(what) <= FLAGS else 0
        self._count = at + len(what)
        self._what.update(zip(range(at, self._count), what))
        self._copy(self._flags[at:self._count], wrong)

    def _copy(self, flags, wrong) -> None:
        if not self._pinned:
            flags.copy_(wrong)
            return
        if self._side is None:
            self._side = torch.cuda.Stream(wrong.device)
        self._side.wait_stream(torch.cuda.current_stream(wrong.device))
        with torch.cuda.stream(self._side):
            flags.copy_(wrong, non_blocking=True)
        wrong.record_stream(self._side)

    def look(self) -> None:
        """Raises StagehandError where samples differed, as far as the device has come; once for all that are
        enqueued."""
        if self._flags is None or self._bytes.raw == NOTHING:
            return
        self._send()
        if self._pinned:
            torch.cuda.synchronize()  # the rest of that backward is not to be taken for the next one
        what = ", ".join(dict.fromkeys(self._what[at] for at in self._flags.nonzero().flatten().tolist()))
        self._flags.zero_()
        raise StagehandError(
            f"gradients are wrong: what was computed again for backward is not what forward had, for {what}. Its "
            f"bytes, or those of an input, were changed where autograd does not see it (through .data, or in place "
            f"under no_grad before a cast), and were not when that was tried. From now on nothing more is computed "
            f"again: clear the gradients and repeat the step, or set recompute_cheap=False")
