"""Internal: a managed model, and its steps."""

from .._moved import attribute


def __getattr__(name: str):
    return attribute(__name__, name)
