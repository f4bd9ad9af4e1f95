"""torchtune's tests of offloaded activations, on stagehand.activation. Without a card the CPU stands in for it.

Of torchtune nothing is imported but the tests: what they name is put in the place of its modules.
"""

import os
import sys
import types

import torch
from support import DEVICE, sort_out

from stagehand import activation


class OffloadActivations:
    """Spills all that it can: the budget is one byte."""

    def __init__(self, *args, **kwargs):
        self._context = activation.offload(1, device=DEVICE)

    def __enter__(self):
        return self._context.__enter__()

    def __exit__(self, *error):
        return self._context.__exit__(*error)


class _OnCPU(types.ModuleType):
    """torch, whose device "cuda" is the CPU, and whose card has nothing to do."""

    cuda = types.SimpleNamespace(_sleep=lambda cycles: None)

    def __getattr__(self, name):
        found = getattr(torch, name)
        if not isinstance(found, types.BuiltinFunctionType):
            return found
        return lambda *args, **kwargs: found(*args, **({**kwargs, "device": "cpu"} if "device" in kwargs else kwargs))

    @staticmethod
    def device(name):
        return torch.device("cpu")


def _module(name, path=(), **members):
    sys.modules[name] = module = types.ModuleType(name)
    vars(module).update(members, __path__=list(path))


_module("torchtune")
_module("torchtune.training", OffloadActivations=OffloadActivations)
_module("tests", [f"{path}/tests" for path in sys.path if os.path.isdir(f"{path}/tests/torchtune")])
_module("tests.test_utils", gpu_test=lambda gpu_count: lambda test: test)


def pytest_collection_modifyitems(items):
    sort_out(items, {}, {})
    for item in items:
        if DEVICE == "sim":
            item.module.torch = _OnCPU("torch")
