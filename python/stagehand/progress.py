"""Progress of what takes long, by tqdm where that is installed: on a terminal or in a notebook, from one second on."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator

THRESHOLD_S = 1.0


def _wanted() -> bool:
    """Somebody looks: standard error is a terminal, or this is a notebook; and tqdm is there."""
    watched = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    return watched and importlib.util.find_spec("tqdm") is not None


def _tqdm():
    from tqdm.auto import tqdm
    return tqdm


class _Bar:
    """Bytes done of `total`. tqdm is imported when the threshold has passed."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total, self._done = what, total, 0
        self._begun = time.monotonic()
        self._wanted = _wanted()
        self._bar = None

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif self._wanted and time.monotonic() - self._begun >= THRESHOLD_S:
            self._bar = _tqdm()(desc=self._what, total=self._total, initial=self._done, unit="B", unit_scale=True,
                                unit_divisor=1024, leave=False)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


@contextlib.contextmanager
def shown(what: str, total: int) -> Iterator[_Bar]:
    """A bar for `total` bytes, whose `advance(nbytes)` moves it. what: such as "stagehand: loading model"."""
    bar = _Bar(what, total)
    try:
        yield bar
    finally:
        bar.close()


def over(what: str, items: Iterable, nbytes) -> Iterator:
    """The items, one after the other, each of nbytes(item)."""
    items = list(items)
    with shown(what, sum(map(nbytes, items))) as bar:
        for item in items:
            yield item
            bar.advance(nbytes(item))
