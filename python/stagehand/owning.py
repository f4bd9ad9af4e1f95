"""Objects that stand for something outside of Python: memory of a device, pinned memory, threads, files."""

from __future__ import annotations


class NotCopied:
    """Base of what copy, deepcopy and pickle refuse by name. _instead: what to do in their place."""

    _instead = "make another one there"

    def __reduce_ex__(self, protocol):
        raise TypeError(f"a {type(self).__name__} can be neither copied nor pickled, for it stands for memory and "
                        f"copies of this process: {self._instead}")


class Owning(NotCopied):
    """Base of what is given back by `shutdown()`: also a context, whose end is the shutdown."""

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.shutdown()
