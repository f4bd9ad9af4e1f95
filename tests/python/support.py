"""For the tests with PyTorch: models, an aligned reference, a guard for host masters, budgets, forks.

The reference of a bit-equality test is `aligned_copy(model)`: results on a CPU depend on where tensors start,
and under stagehand every tensor starts at a multiple of 512 bytes.
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import signal
import time

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import card
import stagehand
from stagehand import _core
from stagehand._torch import graphs_keep_weights

ALIGN = 512
FULL = bool(os.environ.get("STH_TEST_FULL"))


def thinned(cases, few: int) -> list:
    """`cases` with STH_TEST_FULL=1. In `make test` `few` of them, at even distances from the first on: for cases that
    repeat what others show."""
    cases = list(cases)
    return cases if FULL else [cases[i * len(cases) // few] for i in range(min(few, len(cases)))]


# ---------------------------------------------------------------------- models


class Block(nn.Module):
    """Residual block with a 0-dim gain that differs from block to block, so that a mixed-up block shows."""

    def __init__(self, d, gain, wide=3):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, wide * d)
        self.down = nn.Linear(wide * d, d)
        self.gain = nn.Parameter(torch.tensor(gain))

    def forward(self, x):
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, n=6, d=48, wide=3):
        super().__init__()
        self.inp = nn.Linear(d, d)
        self.blocks = nn.ModuleList(Block(d, 0.5 + 0.1 * i, wide) for i in range(n))
        self.out = nn.Linear(d, d)

    def forward(self, x, blocks=None):
        x = self.inp(x)
        for block in self.blocks if blocks is None else blocks:
            x = block(x)
        return self.out(x)

    def example(self, batch=4):
        return (torch.randn(batch, self.inp.in_features),)


class Router(Stack):
    """Calls its blocks in the order given; `stop` ends early, `fail` raises in front of a block."""

    def forward(self, x, order=None, fail=None, error=ValueError):
        x = self.inp(x)
        for i in range(len(self.blocks)) if order is None else order:
            if i == fail:
                raise error("on purpose")
            x = self.blocks[i](x)
        return self.out(x)


class Crossed(nn.Module):
    """Registered from last to first, and two lists that are called in turns."""

    def __init__(self, d=40):
        super().__init__()
        self.named = nn.ModuleDict({str(i): nn.Linear(d, d) for i in reversed(range(6))})
        self.a = nn.ModuleList(nn.Linear(d, d) for _ in range(4))
        self.b = nn.ModuleList(nn.Linear(d, d) for _ in range(4))

    def forward(self, x):
        for i in range(6):
            x = self.named[str(i)](x)
        for a, b in zip(self.a, self.b):
            x = torch.tanh(b(a(x)))
        return x

    def example(self):
        return (torch.randn(3, 40),)


class TinyLM(nn.Module):
    """An embedding whose table is also the head. head_first: the head is registered in front of it."""

    def __init__(self, vocab=300, d=32, n=2, head_first=False, positions=64):
        super().__init__()
        if head_first:
            self.head = nn.Linear(d, vocab, bias=False)
        self.embed = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(positions, d)
        self.blocks = nn.ModuleList(Block(d, 0.5 + 0.1 * i) for i in range(n))
        self.norm = nn.LayerNorm(d)
        if not head_first:
            self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def example(self, batch=2):
        return (torch.randint(self.embed.num_embeddings, (batch, 7)),)


class RecurrentNet(nn.Module):
    """An LSTM of more than 1 MiB, so that layer mode manages it, and a GRU of two layers, both directions."""

    def __init__(self, d=32, hidden=256):
        super().__init__()
        self.inp = nn.Linear(d, d)
        self.lstm = nn.LSTM(d, hidden, batch_first=True)
        self.gru = nn.GRU(hidden, 200, num_layers=2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(400, d)

    def forward(self, x):
        x, _ = self.lstm(self.inp(x))
        x, _ = self.gru(x)
        return self.out(x)

    def example(self, batch=2):
        return (torch.randn(batch, 5, self.inp.in_features),)


class ConvNet(nn.Module):
    """Convolutions, one of them channels-last, batch norm with running statistics, a transposed one."""

    def __init__(self, c=24):
        super().__init__()
        self.a = nn.Conv2d(3, c, 3, padding=1)
        self.bn = nn.BatchNorm2d(c)
        self.b = nn.Conv2d(c, 2 * c, 3, padding=1).to(memory_format=torch.channels_last)
        self.up = nn.ConvTranspose2d(2 * c, c, 2, stride=2)
        self.c = nn.Conv2d(c, 2, 1)
        self.t = nn.Conv1d(16, 8, 3)
        with torch.no_grad():
            self.bn.running_mean.normal_()

    def forward(self, x):
        x = F.relu(self.bn(self.a(x)))
        x = self.c(self.up(F.relu(self.b(x))))
        return self.t(x.flatten(2)[:, :, :256].reshape(x.shape[0], 16, -1))

    def example(self, batch=2):
        return (torch.randn(batch, 3, 16, 16),)


class AttentionNet(nn.Module):
    """nn.MultiheadAttention reads out_proj from outside; its own projection is above 1 MiB."""

    def __init__(self, d=320, heads=4, n=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(d, heads, batch_first=True) for _ in range(n))
        self.encoder = nn.TransformerEncoderLayer(d, heads, dim_feedforward=96, batch_first=True, dropout=0.0)
        self.out = nn.Linear(d, 8)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x, x, x, need_weights=False)[0]
        return self.out(self.encoder(x))

    def example(self, batch=2):
        return (torch.randn(batch, 5, self.out.in_features),)


class RawNet(nn.Module):
    """Parameters held directly: by the root, by a block with a child, by a ParameterList and a ParameterDict."""

    def __init__(self, d=520, n=3):
        super().__init__()
        self.tokens = nn.Parameter(torch.randn(1, 2, d))
        self.mix = nn.Parameter(torch.randn(d, d) / d)
        self.tables = nn.ParameterList(nn.Parameter(torch.randn(d, d) / d) for _ in range(n))
        self.named = nn.ParameterDict({"scale": torch.randn(d), "turn": torch.randn(d, d) / d})
        self.lin = nn.Linear(d, d)
        self.other = nn.Linear(d, d, bias=False)

    def forward(self, x):
        x = torch.cat([self.tokens.expand(x.shape[0], -1, -1), x], 1) @ self.mix
        for table in self.tables:
            x = x + x @ table
        x = x * self.named["scale"] + x @ self.named["turn"]
        x = x.to(next(self.parameters()).dtype)
        return F.linear(self.lin(x), self.other.weight) + self.lin(x)

    def example(self, batch=2):
        return (torch.randn(batch, 3, self.mix.shape[0]),)


class NormedNet(nn.Module):
    """weight_norm, spectral_norm and parametrizations, old and new."""

    def __init__(self, d=48):
        super().__init__()
        with torch.no_grad():  # torch cannot deep-copy the computed weight otherwise
            self.old_weight_norm = nn.utils.weight_norm(nn.Linear(d, d))
            self.old_spectral = nn.utils.spectral_norm(nn.Linear(d, d))
        self.new_weight_norm = nn.utils.parametrizations.weight_norm(nn.Linear(d, d))
        self.new_spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(d, d))
        self.symmetric = nn.Linear(540, 540)
        nn.utils.parametrize.register_parametrization(self.symmetric, "weight", Symmetric())
        self.inp = nn.Linear(d, 540)
        self.out = nn.Linear(540, d)

    def forward(self, x):
        x = self.old_spectral(self.old_weight_norm(x))
        x = self.new_spectral(self.new_weight_norm(x))
        return self.out(self.symmetric(self.inp(x)))

    def example(self, batch=3):
        return (torch.randn(batch, self.inp.in_features),)


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


class Experts(nn.Module):
    """4 layers of 6 experts; each token goes to one, so that some idle."""

    def __init__(self, d=32, layers=4, experts=6):
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(d, experts) for _ in range(layers))
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(d, d) for _ in range(experts)) for _ in range(layers))

    def forward(self, x):
        self.used = 0
        for gate, experts in zip(self.gates, self.layers):
            choice = gate(x).argmax(-1)
            out = torch.zeros_like(x)
            for i in choice.unique().tolist():
                out[choice == i] = experts[i](x[choice == i])
                self.used += 1
            x = x + out
        return x

    def example(self, tokens=3):
        return (torch.randn(tokens, self.gates[0].in_features),)


class Adapted(nn.Module):
    """A Linear with a low-rank part beside it, as libraries put adapters into models."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def with_adapters(model, rank=4) -> nn.Module:
    """The model, its blocks' `up` and `down` Adapted."""
    for block in model.blocks:
        block.up, block.down = Adapted(block.up, rank), Adapted(block.down, rank)
    return model


def made(build, *args, seed=0, frozen=True, **kwargs) -> nn.Module:
    """A model from a seed, in eval mode, on the host."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        return build(*args, **kwargs).eval().requires_grad_(not frozen)


def random_model(rng: random.Random) -> nn.Module:
    """A model of a random kind and size."""
    kinds = [
        lambda: Stack(rng.randint(3, 9), rng.choice([17, 32, 48, 65])),
        lambda: Stack(rng.randint(3, 6), rng.choice([33, 64]), rng.choice([1, 2, 5])),
        lambda: TinyLM(rng.choice([150, 400]), rng.choice([16, 40]), rng.randint(1, 4), rng.random() < 0.5),
        lambda: RecurrentNet(rng.choice([24, 32])),
        lambda: ConvNet(rng.choice([8, 24])),
        lambda: AttentionNet(rng.choice([304, 320]), 4, rng.randint(1, 3)),
        lambda: RawNet(520, rng.randint(1, 4)),
        lambda: NormedNet(rng.choice([32, 48])),
        lambda: Experts(rng.choice([24, 40]), rng.randint(2, 5), rng.randint(2, 6)),
    ]
    torch.manual_seed(rng.randrange(1 << 30))
    with torch.device("cpu"):
        return rng.choice(kinds)().eval()


# ---------------------------------------------------------------------- the reference


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """The same values and strides in memory of its own that starts at a multiple of 512 bytes."""
    if type(data) is not torch.Tensor or data.layout is not torch.strided or data.numel() == 0:
        return data.clone().to(card.TORCH)
    span = sum((size - 1) * stride for size, stride in zip(data.shape, data.stride())) + 1
    buffer = torch.zeros(span * data.element_size() + ALIGN, dtype=torch.uint8, device=card.TORCH)
    skip = -buffer.data_ptr() % ALIGN
    source = torch.empty(0, dtype=torch.uint8, device=data.device).set_(
        data.untyped_storage(), data.storage_offset() * data.element_size(), (span * data.element_size(),), (1,))
    buffer[skip : skip + len(source)].copy_(source)
    out = torch.empty(0, dtype=data.dtype, device=card.TORCH)
    offset, rest = divmod(buffer.storage_offset() + skip, data.element_size())
    assert rest == 0
    return out.set_(buffer.untyped_storage(), offset, data.shape, data.stride())


def aligned_copy(model: nn.Module, takes_from_host: bool = True) -> nn.Module:
    """A deep copy on the device of the tests, whose tensors start at multiples of 512 bytes. Ties stay.
    takes_from_host: on a card its hooks take arguments from the host there, as a managed model does."""
    ref = copy.deepcopy(model)
    done = {}
    with torch.no_grad():
        # A deep copy parts Parameters over one memory.
        for original, param in zip(model.parameters(), ref.parameters()):
            key = id(param)
            if type(original.data) is torch.Tensor and original.layout is torch.strided and original.numel():
                key = (original.data_ptr(), original.shape, original.stride(), original.dtype)
            if key not in done:
                done[key] = _aligned(original.data)  # whose strides a deep copy may not have
            param.data = done[key]
            assert param.numel() == 0 or param.data_ptr() % ALIGN == 0
        for module in ref.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = done.setdefault(("buffer", id(buffer)), _aligned(buffer))
            if module.__dict__.get("_flat_weights") is not None:
                module._flat_weights = [getattr(module, n) for n in module._flat_weights_names]
    return card.as_managed(ref) if takes_from_host else ref


# ---------------------------------------------------------------------- budgets and devices


def nbytes(module: nn.Module) -> int:
    """Bytes of parameters and buffers, each rounded up as they lie on the device; tied ones once."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(-(-t.numel() * t.element_size() // ALIGN) * ALIGN for t in tensors.values())


def tight_budget(model: nn.Module) -> int:
    """What is outside the blocks, the two largest blocks, and 4 KiB: at least half of the blocks stream."""
    blocks = sorted(nbytes(block) for block in model.blocks)
    return nbytes(model) - sum(blocks) + sum(blocks[-2:]) + 4096


def smallest_budget(model: nn.Module, build=None) -> int:
    """The smallest budget with which layer mode wraps the model and runs it, by what its errors say. Where
    several units are in use at once, room for one more of the largest: how they lie in memory differs from
    step to step. build: makes models like it, where deep copies have other strides."""
    budget, example, spare = 1024, model.example(), 0
    for _ in range(30):
        twin = build() if build else copy.deepcopy(model)
        wrapped = False
        try:
            stagehand.layer(twin, vram_budget=budget, device="sim")
            wrapped = True
            with torch.no_grad():
                twin(*example)
            return budget + spare
        except stagehand.StagehandOOMError as error:
            last = str(error)
            numbers = [int(word) for word in last.replace("(", " ").split() if word.isdigit()]
            budget = max(budget + 512, numbers[-1])
            if wrapped:
                spare = max(unit.nbytes for unit in runtime(twin).session.units)
        finally:
            if "_stagehand_layer_runtime" in twin.__dict__:
                twin._stagehand_layer_runtime.shutdown()
    raise AssertionError(f"no budget up to {budget} works: {last}")


def device(budget: int, link: float | None = None, **options) -> _core.Device:
    """A simulated device of exactly the budget, or the card of the tests. link: bytes/s of the simulated one, so slow
    that a missing wait would show."""
    if link is not None:
        options["link_bytes_per_s"] = int(link)
    return card.open_device(budget, **options)


def wrap(model: nn.Module, budget: int, link: float | None = None, **options) -> nn.Module:
    return stagehand.layer(model, vram_budget=budget, device=device(budget, link), **options)


def needs_regions() -> None:
    """Skips a test of compiled blocks that stream, where PyTorch cannot have them."""
    if graphs_keep_weights():
        pytest.skip("this PyTorch's compiler keeps a module's weights in its graphs (docs/compile.md)")


def torch_at_least(version: str, reason: str):
    """A mark for a test of something that older versions of PyTorch do otherwise. reason: what they do."""
    here, least = (tuple(map(int, text.split("+")[0].split(".")[:2])) for text in (torch.__version__, version))
    return pytest.mark.skipif(here < least, reason=f"needs PyTorch {version}: before, {reason}")


QUIET_CASTS = "in this PyTorch a weight loses the gradient of a region in which it was used under no_grad before"


def autocast_keeps_gradients() -> bool:
    """Whether autocast gives a weight its gradient that it has cast under no_grad before. PyTorch 2.4 does not."""
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        return layer(x).requires_grad


def runtime(model: nn.Module):
    return stagehand.runtime(model)


# ---------------------------------------------------------------------- the guard


def tensors_in(values):
    """Those among an operator's arguments, in lists too. torch's tree_leaves would take most of a test's time."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


class HostMasterGuard(TorchDispatchMode):
    """Fails when an operator reads the host master of a streamed weight, as it would where the device is not
    the host. Tables of which embeddings look up rows in place are exempt."""

    METADATA = ("detach", "alias", "view", "set_", "_is_", "size", "stride", "numel")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        session = runtime(model).session
        self._masters = {}
        self._lazy = {id(entry.param): entry.name for unit in session.units if unit.packed for entry in unit.entries}
        for unit in session.units:
            for entry in unit.entries:
                if not unit.mapped and not unit.packed:
                    self._masters[entry.param.untyped_storage().data_ptr()] = entry

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for value in tensors_in((*args, *(kwargs or {}).values())):
            if id(value) in self._lazy:
                raise AssertionError(f"{func} decodes {self._lazy[id(value)]} from its file")
            if value.layout is torch.strided and not value.is_meta:
                address = value.untyped_storage().data_ptr()
                entry = self._masters.get(address)
                if entry is not None and not any(word in func._schema.name for word in self.METADATA):
                    # Memory of data that somebody gave a weight is free again once it has been copied.
                    if entry.param.untyped_storage().data_ptr() == address:
                        raise AssertionError(f"{func} reads the host master of {entry.name}")
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def threads(n: int):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu" if card.ON_CARD else tensor.device).contiguous().view(-1).view(torch.uint8)


def same(a, b) -> bool:
    """Bit-equal, NaN included. On a card wherever the tensors lie, and but for rounding."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and (
            torch.equal(_bytes(a), _bytes(b)) or (card.ON_CARD and card.close(a, b)))
    return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b))


def at_rest(value):
    """Tensors, in lists and tuples too, on the host, where those of the simulated device are."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    return type(value)(map(at_rest, value)) if isinstance(value, (list, tuple)) else value


def near(a: torch.Tensor, b: torch.Tensor, **limits) -> bool:
    """torch.allclose(), wherever the tensors lie."""
    return torch.allclose(at_rest(a), at_rest(b), **limits)


def assert_near(a, b, **limits) -> None:
    """torch.testing.assert_close(), wherever the tensors lie."""
    torch.testing.assert_close(at_rest(a), at_rest(b), **limits)


# ---------------------------------------------------------------------- forks


def wait_for(pid, limit=240):
    """The exit status of a child that was forked, or "no end" after `limit` seconds, when it is killed."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "no end"


def keeping_products() -> dict:
    """Arguments for checkpoint(): matrix products are kept and all else is computed again. None before PyTorch 2.5."""
    utils = torch.utils.checkpoint
    if not hasattr(utils, "CheckpointPolicy"):
        return {}
    products, policy = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default), utils.CheckpointPolicy
    return {"context_fn": lambda: utils.create_selective_checkpoint_contexts(
        lambda ctx, op, *args, **kwargs: policy.MUST_SAVE if op in products else policy.PREFER_RECOMPUTE)}
