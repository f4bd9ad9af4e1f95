"""Internal: a model under management, and its steps."""

from .._moved import attribute


def __getattr__(name: str):
    return attribute(__name__, name)
