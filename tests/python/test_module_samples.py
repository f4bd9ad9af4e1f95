"""Every module of PyTorch on PyTorch's own samples, its weights streamed: outputs, gradients, buffers and state dict
equal those of the module that was not wrapped, bit for bit.

Beside the module there is a Linear of its size, and room for one of them: both are copied again in every pass. The same
with all saved tensors spilled, which modules without parameters go through as well.
"""

from __future__ import annotations

import contextlib
import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

import card  # noqa: E402
from pytorch_samples import cotangents, differentiable, equal, fresh, module_db, seed, tensors  # noqa: E402
from support import FULL, aligned_copy, nbytes, threads  # noqa: E402
from torch import nn  # noqa: E402

import stagehand  # noqa: E402
from stagehand import StagehandConfig, StagehandOOMError, StagehandRuntime, activation  # noqa: E402
from stagehand.modes.layer import discover_layers  # noqa: E402

pytestmark = pytest.mark.skipif(card.ON_CARD, reason="the samples are the CPU's")

PASSES = 3
MOST = {"eval": 1, "train": 2, "spilled": 1}  # samples of a module, all with STH_TEST_FULL=1


class Beside(nn.Module):
    """A module, and a Linear that is used before it."""

    def __init__(self, module):
        super().__init__()
        largest = max((nbytes(part) for part in module.modules()), default=0)
        self.blocks = nn.ModuleList([nn.Linear(32, max(largest // 128, 1), bias=False), module])

    def forward(self, *args, **kwargs):
        self.blocks[0](torch.ones(1, 32))
        return self.blocks[1](*args, **kwargs)


def samples(info, training):
    seed()
    dtype = torch.float64 if "FractionalMaxPool" in info.name else torch.float32  # whose noise is double
    return list(info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training))


def some(found, most) -> list:
    """`most` of them: the first, and others at even distances up to the last."""
    return found if FULL or len(found) <= most else [found[i * (len(found) - 1) // max(most - 1, 1)]
                                                     for i in range(most)]


def models(info, sample, training):
    """(model, the same for reference) whose lazy parts have seen an input."""
    seed(1)
    module = info.module_cls(*sample.constructor_input.args, **sample.constructor_input.kwargs).train(training)
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        with torch.no_grad():
            call(module, sample)
    model = Beside(module)
    return model, aligned_copy(model)


def call(model, sample):
    """(outputs, gradients of the inputs) with gradients left in the parameters."""
    leaves, (args, kwargs) = fresh((sample.forward_input.args, sample.forward_input.kwargs))
    seed(2)
    outputs = model(*args, **kwargs)
    if torch.is_grad_enabled():
        which = differentiable(outputs)
        if which:
            torch.autograd.backward(which, cotangents(which))
    return tensors(outputs), [leaf.grad for leaf in leaves]


def passes(model, sample, training, around, spill) -> list:
    """What PASSES passes give; training updates the weights behind each."""
    found = []
    for _ in range(PASSES):
        model.zero_grad()
        with contextlib.nullcontext() if training else torch.no_grad(), around(), spill():
            found.append(call(model, sample))
        if training:
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            with torch.no_grad():
                for param in model.parameters():
                    if param.grad is not None:
                        param -= param.grad / 16
        found.append([t.clone() for t in model.state_dict().values()])
    return found


def block_mode(model, budget):
    return StagehandRuntime(model, StagehandConfig(vram_budget=budget, telemetry_enabled=False),
                            block_pattern=r"^blocks\.\d$", device=card.open_device(budget))


def layer_mode(model, budget):
    stagehand.layer(model, vram_budget=budget, device=card.open_device(budget))
    return model._stagehand_layer_runtime


def smallest(model, sample, mode) -> int:
    """The smallest budget that runs a pass of a copy, from what is said about smaller ones."""
    budget = 512
    for _ in range(20):
        twin, runtime = copy.deepcopy(model), None
        try:
            runtime = mode(twin, budget)
            around = getattr(runtime, "managed_forward", contextlib.nullcontext)
            with torch.no_grad(), around():
                call(twin, sample)
            return budget
        except StagehandOOMError as error:
            numbers = [int(word) for word in str(error).replace("(", " ").split() if word.isdigit()]
            budget = max(budget + 512, numbers[-1])
        finally:
            if runtime is not None:
                runtime.shutdown()
    raise AssertionError(f"no budget up to {budget} bytes works")


def spilled():
    return activation.offload(1, device="sim")


def modes_of(model) -> list:
    """Ways to stream a model. Layer mode where it has layers beside the Linear; none where there are no parameters."""
    modes = [block_mode] if next(model.blocks[1].parameters(), None) is not None else []
    return modes + ([layer_mode] if discover_layers(model.blocks[1]) else []) or [None]


def check(info, sample, training, spill) -> None:
    begin, plain = models(info, sample, training)
    wanted = passes(plain, sample, training, contextlib.nullcontext, contextlib.nullcontext)
    for mode in modes_of(begin):
        model = copy.deepcopy(begin)
        runtime = mode(model, smallest(begin, sample, mode)) if mode else None
        try:
            around = getattr(runtime, "managed_forward", contextlib.nullcontext)
            found = passes(model, sample, training, around, spill)
            streamed = runtime is None or runtime.stats["copies"] > len(runtime.stats["units"])
        finally:
            if runtime is not None:
                runtime.shutdown()
        assert equal(found, wanted), mode
        assert list(model.state_dict()) == list(plain.state_dict())
        assert equal(list(model.state_dict().values()), list(plain.state_dict().values())), mode
        assert streamed, "everything stayed on the device"


def cases() -> list:
    found = []
    for info in module_db:
        for what in ("eval", "train", "spilled"):
            found.append(pytest.param(info, what, id=f"{info.name}-{what}"))
    return found


@pytest.mark.parametrize("info, what", cases())
def test_results_are_those_of_the_module_on_its_own(info, what):
    training = what != "eval"
    for number, sample in enumerate(some(samples(info, training), MOST[what])):
        try:
            check(info, sample, training, spilled if what == "spilled" else contextlib.nullcontext)
        except AssertionError as error:
            made = sample.constructor_input
            raise AssertionError(f"sample {number}, {sample.desc}: {made.args} {made.kwargs}") from error


@pytest.fixture(autouse=True)
def quiet():
    with threads(1), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
