"""One trial: a random model and a random program, done to the model under Stagehand and to its plain twin.

`run(spec)` gives a Result. A spec is plain data, so that it can be printed, and made smaller entry by entry:
    {"setup": {...}, "layers": [{"kind", "seed", "wrap"}], "program": [{"do", "seed"}]}
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import re
import sys
import tempfile
import traceback
import warnings
from dataclasses import dataclass, field

import card
import support
import torch
from core_support import write_safetensors
from file_support import SIZES
from torch import nn

import stagehand
from random_actions import ACTIONS, Side
from random_layers import Checkpointed, Selective, Transformed, build_layer, detach_computed
from stagehand import _core

BLOCKS = r"^blocks\.\d+$"
TRIES = 60  # budgets that are tried, each from the error before; a weight that came late names but its own bytes

CHANGED = "was changed in place after|was written between|modified by an inplace operation"
# What the documents say is refused: the words of the error, and where it is said.
REFUSED = {
    r"was written during a pass, by a hook or by another module": "README, limits",
    r"whose bytes are streamed from a file|its bytes are streamed from a file": "docs/readers.md",
    r"cannot be written, because their bytes are streamed from a file": "docs/readers.md",
    r"its weights stream from files, which hold them in one dtype": "README, limits",
    r"was given the data of .*, another weight": "field-cases.md, C",
    r"not all of them were given the same": "field-cases.md, C",
    r"was given data of another shape or dtype": "README, limits",
    r"stagehand_saved_handles": "docs/training.md",
    r"is another tensor than the model's own": "field-cases.md, V",
    r"in which it is kept, does not have the values": "README, limits",
    r"was written inside a region of torch.autocast": "field-cases.md, 205",
    CHANGED: "docs/recipes.md",
}
# What the plain model alone raises, and why; it has no number that ours could differ from.
PLAIN_ALONE = {
    "not found in storage": "PyTorch: selective checkpointing and casts that autocast keeps",
    "Tensor cached during selective activation checkpoint has been mutated":
        "PyTorch computes a part again for its weights alone (docs/training.md)",
    "Trying to backward an extra time. You are only allowed to backward once on any region":
        "PyTorch computes a part again for its weights alone (docs/training.md)",
}
HELD = r"was written while its copy on the device is in use"


class Net(nn.Module):
    """Blocks in a row, each followed by tanh, between two layers outside of them."""

    def __init__(self, blocks: list, d: int) -> None:
        super().__init__()
        self.inp = nn.Linear(d, d)
        self.blocks = nn.ModuleList(blocks)
        self.out = nn.Linear(d, d, bias=False)

    def forward(self, x, order=None, stop=None, fail=None):
        x = self.inp(x)
        for place, i in enumerate(range(len(self.blocks)) if order is None else order):
            if place == stop:
                return x
            if place == fail:
                raise ValueError("on purpose")
            x = torch.tanh(self.blocks[i](x))
        return self.out(x)


def build(spec: dict) -> Net:
    """The model of a spec, on the host."""
    d, blocks = spec["setup"]["d"], []
    for described in spec["layers"]:
        torch.manual_seed(described["seed"])
        blocks.append(build_layer(described, d, random.Random(described["seed"])))
    torch.manual_seed(0)
    if not any(next(block.parameters(), None) is not None for block in blocks):
        blocks.append(nn.Linear(d, d))
    for a, b in spec["setup"]["shared"]:  # the same module in two places
        if a < len(blocks) and b < len(blocks):
            blocks[b] = blocks[a]
    net = Net(blocks, d)
    if spec["setup"]["tied"]:
        net.out.weight = net.inp.weight
    trained = spec["setup"]["trained"]
    for i, p in enumerate(net.parameters()):
        p.requires_grad_(trained == "all" or trained == "some" and i % 3 > 0)
    if spec["setup"]["double"]:  # on a card, whose kernels round otherwise than ours where they add in another order
        net.double()
    return net.train(spec["setup"]["train"])


@dataclass
class Result:
    outcome: str  # "passed", "refused", or what failed: "mismatch", "error", "leftover"
    detail: str = ""
    at: int = -1  # the program's entry
    trace: str = ""
    notes: list = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.outcome not in ("passed", "refused")

    @property
    def kind(self) -> str:
        """What is the same of failures of one kind."""
        text = re.sub(r"\b(inp|out|blocks|functional)\b[\w.]*|0x\w+|\d[\d,.]*", "#", self.detail)
        return f"{self.outcome}: {text[:110]}"


class PlainFails(Exception):
    """On a card a trial ends with an error of the plain model."""


class Failed(Exception):
    def __init__(self, outcome: str, detail: str, trace: str = "") -> None:
        super().__init__(detail)
        self.outcome, self.detail, self.trace = outcome, detail, trace


# ---------------------------------------------------------------------- the two sides


def _device(setup: dict):
    if setup["device"] != "sim":
        return setup["device"]
    link = {} if setup["link"] is None else {"link_bytes_per_s": setup["link"], "copy_latency_ns": setup["latency"]}
    return _core.Device("sim", memory_bytes=2 * setup["bytes"], **link)


def _wrap(net: Net, setup: dict, path: str | None, device) -> None:
    budget, mode, homes = setup["bytes"], setup["mode"], setup["trainables"]
    if mode == "block":
        config = stagehand.StagehandConfig(vram_budget=budget, trainables=homes, **setup["config"])
        stagehand.StagehandRuntime(net, config, block_pattern=BLOCKS, device=device)
    elif mode == "file_source":
        stagehand.layer(net, vram_budget=budget, device=device, source=path, trainables=homes)
    elif mode == "file_load":
        stagehand.load(net, path, vram_budget=budget, device=device, inference_mode=setup["trained"] == "none",
                       trainables=homes)
    else:
        stagehand.layer(net, vram_budget=budget, device=device, trainables=homes)


def _write_file(net: Net, folder: str) -> str:
    path = os.path.join(tempfile.mkdtemp(dir=folder), "model.safetensors")  # an earlier one may still be mapped
    tensors, seen = {}, set()
    for name, t in net.state_dict(keep_vars=True).items():
        if id(t) not in seen:
            seen.add(id(t))
            data = t.detach().contiguous()
            tensors[name] = (SIZES[t.dtype], list(t.shape), data.view(-1).view(torch.uint8).numpy().tobytes())
    write_safetensors(path, tensors)
    return path


def _contiguous(net: Net) -> None:
    """As a file has them, which tells no strides, not of dimensions of one element either."""
    for p in net.parameters():
        p.data = p.data.clone(memory_format=torch.contiguous_format)


@contextlib.contextmanager
def _small_layers(setup: dict):
    """Layer mode manages norms, recurrent layers and the like from 1 MiB on: here from a few bytes on."""
    module = sys.modules[stagehand.layer.__module__]
    before = module.OWNED_BYTES
    module.OWNED_BYTES = setup["owned"]
    try:
        yield
    finally:
        module.OWNED_BYTES = before


LOW = 2e-2  # of dtypes of two bytes


def _rounding(spec: dict) -> float:
    """What results of a card may differ by, whose kernels add in another order than their twins."""
    if spec["setup"]["device"] == "sim":
        return 0
    low = {"cast", "casting_hooks", "autocast"} & {wrap for layer in spec["layers"] for wrap in layer["wrap"]}
    return LOW if low or any(entry["do"] == "cast_model" for entry in spec["program"]) else 1e-3


def equal(a, b, rounding: float) -> bool:
    """rounding: relative, and of numbers near 1, that is allowed between two tensors; 0: none."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.layout is not torch.strided or b.layout is not torch.strided:
            return a.layout is b.layout and equal(a.to_dense(), b.to_dense(), rounding)
        a, b = a.detach().cpu(), b.detach().cpu()
        if not rounding:
            return support.same(a, b)
        rounding = rounding if a.dtype.itemsize > 2 else LOW
        return a.dtype == b.dtype and a.shape == b.shape and torch.allclose(
            a.double(), b.double(), rtol=rounding, atol=rounding, equal_nan=True)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y, rounding) for x, y in zip(a, b))
    return type(a) is type(b) and (a == b or a != a)


class Pair:
    """The managed model and its twin, and which Parameter of one is which of the other."""

    def __init__(self, net: Net, ref: Net, setup: dict, rounding: float) -> None:
        self.sides = Side(ref, setup, managed=False), Side(net, setup, managed=True)
        self.rounding = rounding
        self.known: dict = {}  # id of the twin's Parameter -> (it, ours)
        self.remember()

    def remember(self) -> None:
        ref, net = (side.net for side in self.sides)
        theirs, ours = (list(m.named_parameters(remove_duplicate=False)) for m in (ref, net))
        if [n for n, _ in theirs] != [n for n, _ in ours]:
            raise Failed("leftover", f"names of parameters differ: {[n for n, _ in ours]}")
        for (name, p), (_, q) in zip(theirs, ours):
            if self.known.setdefault(id(p), (p, q))[1] is not q:
                raise Failed("leftover", f"{name} is another object than it was")

    def forget(self) -> None:
        """Everything that the program holds beside the models."""
        self.known.clear()
        for side in self.sides:
            side.forget_graphs()
            detach_computed(side.net)
            side.opt = side.ema = None

    def compare(self, what: str = "") -> None:
        ref, net = (side.net for side in self.sides)
        self.remember()
        for (name, p), (_, q) in zip(ref.named_parameters(), net.named_parameters()):
            if not equal(p.data, q.data, self.rounding):
                raise Failed("mismatch", f"parameter {name}{what}: {_difference(p, q)}")
            if (p.grad is None) != (q.grad is None):
                raise Failed("mismatch", f"gradient {name}{what}: {_there(p.grad)} in the plain model, "
                                         f"{_there(q.grad)} here")
            if p.grad is not None and not equal(p.grad, q.grad, self.rounding):
                raise Failed("mismatch", f"gradient {name}{what}: {_difference(p.grad, q.grad)}")
            if p.requires_grad != q.requires_grad:
                raise Failed("mismatch", f"requires_grad of {name}{what}: {q.requires_grad} here")
        for (name, p), (other, q) in zip(ref.named_buffers(), net.named_buffers()):
            if name != other or not equal(p, q, self.rounding):
                raise Failed("mismatch", f"buffer {name}{what}")


def _there(grad) -> str:
    return "none" if grad is None else "one"


def _difference(a, b) -> str:
    if a.layout is not torch.strided or a.shape != b.shape or a.dtype != b.dtype:
        return f"{tuple(a.shape)} {a.dtype} there, {tuple(b.shape)} {b.dtype} here"
    a, b = a.detach().cpu().double(), b.detach().cpu().double()
    return f"largest difference {(a - b).abs().max().item():.2g} of {a.abs().max().item():.2g}"


# ---------------------------------------------------------------------- a run


def run(spec: dict) -> Result:
    """Runs a spec with the budget that it names: "least" begins too small and takes what errors name."""
    torch.set_num_threads(1)
    if spec["setup"]["device"] != "sim":
        card.settings()
    notes: list = []
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder, _small_layers(spec["setup"]):
        warnings.simplefilter("ignore")
        budget = spec["setup"]["budget"]
        net = build(spec)
        nbytes = {"least": 2048, "half": support.nbytes(net) // 2}.get(budget, 2 * support.nbytes(net) + (1 << 16))
        for _ in range(TRIES):
            spec["setup"]["bytes"] = nbytes
            try:
                return _with_notes(_once(spec, folder), notes)
            except stagehand.StagehandOOMError as error:
                if budget == "all":
                    return Result("error", f"OOM although all fits: {error}")
                numbers = [int(n.replace(",", "")) for n in re.findall(r"\b\d[\d,]*\b(?!\))", str(error))]
                least = re.search(r"at least ([\d,]+)", str(error))
                named = int(least[1].replace(",", "")) if least else max(numbers, default=0)
                notes.append("budget" if named > nbytes else "budget not named")
                nbytes = named if named > nbytes else nbytes + max(nbytes // 4, 4096)
        return Result("error", f"no budget up to {nbytes} works", notes=notes)


def _with_notes(result: Result, notes: list) -> Result:
    result.notes += notes
    return result


def _once(spec: dict, folder: str) -> Result:
    setup, at = spec["setup"], -1
    net = build(spec)
    if setup["mode"].startswith("file"):
        _contiguous(net)
    ref = support.aligned_copy(net, takes_from_host=False)
    path = _write_file(net, folder) if setup["mode"].startswith("file") else None
    if setup["device"] != "sim":
        ref.to(setup["device"])
    pair = Pair(net, ref, setup, _rounding(spec))
    plain, managed = pair.sides
    device = _device(setup)
    managed.rewrap = lambda: (_shut_down(net), _wrap(net, setup, path, device))
    if setup["optimizer_first"]:
        plain.optimizer(), managed.optimizer()
    result = Result("passed")
    try:
        _wrap(net, setup, path, device)
        if path and setup["mode"] == "file_load":
            pair.known.clear()
        for at, entry in enumerate(spec["program"]):
            _step(pair, entry, result)
            if result.outcome == "refused":
                break
        at = len(spec["program"])
        _shut_down(net)
        if result.outcome == "passed":
            pair.compare(" after shutdown")
            _compare_attributes(pair)
        pair.forget()
        if not (_has_failed(result) or result.detail.startswith((CHANGED.split("|")[0], HELD))):
            _check_device(device)
    except PlainFails as failed:
        result.notes.append(str(failed))
    except Failed as failed:
        result = Result(failed.outcome, failed.detail, at, failed.trace)
    except stagehand.StagehandOOMError:
        raise
    except Exception as error:  # noqa: BLE001: whatever it is, it should not have come
        if not (isinstance(error, stagehand.StagehandError) and _is_refused(error, result, _keeps_places(pair))):
            result = Result("error", f"{type(error).__name__}: {error}", at, traceback.format_exc())
    finally:
        with contextlib.suppress(Exception):
            _shut_down(net)
    result.at = at
    return result


def _step(pair: Pair, entry: dict, result: Result) -> None:
    function, seen = ACTIONS[entry["do"]][3], []
    for side in pair.sides:
        torch.manual_seed(entry["seed"])
        side.seen.clear()
        try:
            seen.append((function(side, random.Random(entry["seed"])), None, ""))
        except Exception as error:  # noqa: BLE001: the twin says what is right, errors too
            seen.append((None, error, traceback.format_exc()))
            error.__traceback__ = None
        seen[-1] += (list(side.seen), torch.get_rng_state())
    (theirs, their_error, _, their_seen, their_random), (ours, our_error, trace, our_seen, our_random) = seen
    if isinstance(our_error, stagehand.StagehandOOMError):
        if _has_failed(result):
            result.outcome, result.detail = "refused", "no room beside a graph that failed, which PyTorch keeps"
            return
        raise our_error
    if our_error is not None and their_error is None:
        _refused_or_failed(our_error, trace, result, _keeps_places(pair))
        return
    if their_error is not None and pair.rounding:  # what it leaves half done depends on where its tensors are
        raise PlainFails(f"the plain model raises in {entry['do']}: {type(their_error).__name__}")
    if their_error is not None and our_error is None:
        for words, why in PLAIN_ALONE.items():
            if words in str(their_error):
                result.outcome, result.detail = "refused", why
                return
        raise Failed("mismatch", f"the plain model raises {type(their_error).__name__}: {str(their_error)[:90]}")
    if isinstance(our_error, stagehand.StagehandError) and _is_refused(our_error, result, _keeps_places(pair)):
        return  # earlier than the plain model's error, whose writes ours has not made
    if their_error is not None:
        result.notes.append(f"both raise in {entry['do']}: {type(their_error).__name__}: {str(their_error)[:60]}")
        for side in pair.sides:
            side.forget_graphs()
            side.net.zero_grad()
        pair.compare(" after an error in both")
        return
    if not equal(theirs, ours, pair.rounding):
        raise Failed("mismatch", f"what {entry['do']} gives: {_first_difference(theirs, ours)}")
    if pair.rounding:  # hooks of gradients are called by the card's thread and by the caller's
        their_seen, our_seen = (sorted(seen, key=_size) for seen in (their_seen, our_seen))
    if _without_recomputing(pair, their_seen, our_seen):
        result.notes.append("a part was not computed again for its weights alone")
    elif not equal(their_seen, our_seen, pair.rounding):
        raise Failed("mismatch", f"what hooks saw in {entry['do']}: {len(their_seen)} and {len(our_seen)} times, "
                                 f"{_first_difference(their_seen, our_seen)}")
    if not pair.rounding and not torch.equal(their_random, our_random):
        raise Failed("mismatch", f"random numbers that {entry['do']} drew")
    if entry["seed"] % 2 == 0:
        pair.compare()


def _without_recomputing(pair: Pair, theirs: list, ours: list) -> bool:
    """Whether hooks saw the same, but for calls of a checkpointed part that PyTorch computes again for the sake of its
    frozen weights alone (docs/training.md)."""
    parts = [m for m in pair.sides[0].net.modules() if isinstance(m, (Checkpointed, Selective))]
    if len(ours) >= len(theirs) or not parts:
        return False
    left = iter(theirs)
    return all(any(equal([seen], [mine], pair.rounding) for seen in left) for mine in ours)


def _keeps_places(pair: Pair) -> bool:
    """Whether a graph may be alive that holds weights' places while they are written. A fused optimizer writes unseen:
    the plain model's backward of an earlier pass takes what is there."""
    side = pair.sides[1]
    return side.setup["optimizer"] == "fused" or any(
        isinstance(module, Transformed) or _keeps_a_graph(module) for module in side.net.modules())


def _keeps_a_graph(module) -> bool:
    """Whether a weight of it is computed of others, as weight_norm's is, and keeps the graph of that."""
    return any(isinstance(value, torch.Tensor) and value.grad_fn is not None for value in module.__dict__.values())


def _size(seen) -> float:
    """A number by which what hooks saw is put in order."""
    if isinstance(seen, torch.Tensor):
        return seen.detach().double().abs().sum().item()
    return sum(map(_size, seen)) if isinstance(seen, (list, tuple)) else 0.0


def _first_difference(theirs, ours) -> str:
    for i, (a, b) in enumerate(zip(theirs, ours)):
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and not equal(a, b, 0):
            return f"number {i}, {_difference(a, b)}"
    return f"{theirs} there, {ours} here"[:200]


def _refused_or_failed(error: Exception, trace: str, result: Result, kept: bool) -> None:
    """kept: graphs of the model may hold its weights' places (stagehand_saved_handles)."""
    if not _is_refused(error, result, kept):
        raise Failed("error", f"{type(error).__name__}: {error}", trace)


def _has_failed(result: Result) -> bool:
    """Whether both have raised: PyTorch keeps a graph whose backward failed, and what it saved."""
    return any(note.startswith("both raise") for note in result.notes)


def _is_refused(error: Exception, result: Result, kept: bool) -> bool:
    refused = dict(REFUSED)
    if kept or _has_failed(result):
        refused[HELD] = "README, limits"
    for words, where in refused.items():
        if re.search(words, str(error)):
            result.outcome, result.detail = "refused", f"{words.split('|')[0]} ({where})"
            return True
    return False


# ---------------------------------------------------------------------- the end


def _shut_down(net: Net) -> None:
    for name in ("_stagehand_layer_runtime", "_stagehand_runtime"):
        runtime = net.__dict__.get(name)
        if runtime is not None:
            runtime.shutdown()


def _attributes(module: nn.Module) -> list:
    return sorted(module.__dict__)


def _compare_attributes(pair: Pair) -> None:
    """Nothing of ours is left in the modules."""
    ref, net = (side.net for side in pair.sides)
    for (name, a), (_, b) in zip(ref.named_modules(), net.named_modules()):
        if _attributes(a) != _attributes(b):
            extra = sorted(set(b.__dict__) ^ set(a.__dict__))
            raise Failed("leftover", f"attributes of {name or 'the model'}: {extra}")
        if type(a) is not type(b):
            raise Failed("leftover", f"class of {name}: {type(b)}")
        for what in ("_parameters", "_buffers", "_modules"):
            if list(getattr(a, what)) != list(getattr(b, what)):
                raise Failed("leftover", f"order of {what} of {name}: {list(getattr(b, what))}")
        for key, value in b._parameters.items():
            if type(value) is not type(a._parameters[key]):
                raise Failed("leftover", f"class of {name}.{key}: {type(value)}")
            if value is not None and sorted(value.__dict__) != sorted(a._parameters[key].__dict__):
                raise Failed("leftover", f"attributes of the parameter {name}.{key}: {sorted(value.__dict__)}")
        for key, value in b.__dict__.items():
            if type(value) is not type(a.__dict__[key]):
                raise Failed("leftover", f"class of the attribute {name}.{key}: {type(value)}")


def _check_device(device) -> None:
    """Everything has been given back to a simulated device."""
    if isinstance(device, str):
        return
    gc.collect()
    info = device.info()
    if info["memory_free"] != info["memory_total"]:
        raise Failed("leftover", f"{info['memory_total'] - info['memory_free']} bytes are still on the device")
