"""The private names of PyTorch that the package uses.

private.txt lists them, with the way in which the package does without each one. A private name may
go in any release. `check` refuses a PyTorch that lacks one that is needed, by name, when stagehand
is imported. tests/python/test_private.py compares the list with the code, and hides each name.
"""

from __future__ import annotations

import pathlib
import pkgutil

OLDEST, NEWEST = "2.4", "2.15"  # PyTorch
LINES = [line for line in pathlib.Path(__file__).with_name("private.txt").read_text().splitlines()
         if line and not line.startswith("#")]


def is_there(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def check(version: str) -> None:
    """Raises ImportError where this PyTorch, of that version, lacks a name that is needed."""
    missing = [line for line in LINES if ": " not in line and not any(map(is_there, line.split(" or ")))]
    if missing:
        raise ImportError(f"stagehand uses {', '.join(missing)}, which this PyTorch ({version}) does not have. Use "
                          f"PyTorch {OLDEST} to {NEWEST}, which it was tried with, or a newer stagehand")
