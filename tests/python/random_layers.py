"""Layers of random models: every kind maps (batch, T, D) to the same shape, and has a few numbers alone.

`LAYERS` has for each kind a topic, "" for the usual ones, by which a fuzzer leaves it out, and what builds it from a
width and a `random.Random`. `WRAPPERS` are modules round another layer: loops, checkpoints, casts, hooks.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.checkpoint import checkpoint

import support

T = 4

LAYERS: dict = {}
WRAPPERS: dict = {}


def kind(name: str, topic: str = ""):
    def register(build):
        LAYERS[name] = topic, build
        return build

    return register


def wrapper(name: str, topic: str = ""):
    def register(build):
        WRAPPERS[name] = topic, build
        return build

    return register


# Their weights are used several times within one call of the module that owns them. Gradients of one call are summed
# on the device, those of several calls on the host, so that a backward over several calls rounds otherwise than
# PyTorch.
SEVERAL_USES = {"recurrent", "recurrent_projected", "reader", "attention", "tied", "decoder", "old_spectral_norm",
                "parametrized"}


def build_layer(described: dict, d: int, rng) -> nn.Module:
    """described: {"kind": name, "wrap": names from the inside outwards}."""
    module = LAYERS[described["kind"]][1](d, rng)
    for name in described["wrap"]:
        module = WRAPPERS[name][1](module, rng)
    return module


def ids_of(x: torch.Tensor, n: int) -> torch.Tensor:
    """Indices below n, made of the numbers of x."""
    return x.detach().float().nan_to_num(0, 9, -9).mul(7).abs().long() % n


# ---------------------------------------------------------------------- plain layers


@kind("linear")
def _linear(d, rng):
    return nn.Linear(d, d, bias=rng.random() < 0.7)


class Mlp(nn.Module):
    def __init__(self, d, rng):
        super().__init__()
        wide = d * rng.choice([1, 2, 5])
        self.up, self.down = nn.Linear(d, wide), nn.Linear(wide, d)
        self.act = rng.choice([nn.ReLU(inplace=True), nn.GELU(), nn.SiLU(inplace=True), nn.Tanh(), nn.Dropout(0.3)])

    def forward(self, x):
        return self.down(self.act(self.up(x)))


kind("mlp")(Mlp)


class Convolution(nn.Module):
    """1, 2 or 3 dimensions, plain or transposed, in channels-last memory at times."""

    def __init__(self, d, rng):
        super().__init__()
        self.dims = rng.choice([1, 2, 3])
        transposed, c = rng.random() < 0.4, T if self.dims == 1 else 1
        name = f"Conv{'Transpose' if transposed else ''}{self.dims}d"
        self.conv = getattr(nn, name)(c, c if self.dims == 1 else 3, 3, padding=1, bias=rng.random() < 0.7)
        if self.dims == 2 and rng.random() < 0.5:
            self.conv.to(memory_format=torch.channels_last)

    def forward(self, x):
        if self.dims == 1:
            return self.conv(x)
        shape = (len(x), 1, T, -1) if self.dims == 2 else (len(x), 1, 2, T // 2, x.shape[-1])
        return self.conv(x.reshape(shape)).mean(1).reshape(x.shape)


kind("convolution")(Convolution)


class Lookup(nn.Module):
    def __init__(self, d, rng):
        super().__init__()
        self.n = rng.choice([5, 40])
        self.table = nn.Embedding(self.n, d, padding_idx=rng.choice([None, 0]),
                                  scale_grad_by_freq=rng.random() < 0.3)

    def forward(self, x):
        return x + self.table(ids_of(x[..., 0], self.n))


kind("embedding")(Lookup)


@kind("embedding_sparse", "sparse")
def _sparse(d, rng):
    layer = Lookup(d, rng)
    layer.table = nn.Embedding(layer.n, d, sparse=True)
    return layer


@kind("embedding_max_norm", "max_norm")
def _max_norm(d, rng):
    layer = Lookup(d, rng)
    layer.table = nn.Embedding(layer.n, d, max_norm=rng.choice([0.5, 2.0]))
    return layer


class Bag(nn.Module):
    def __init__(self, d, rng):
        super().__init__()
        self.bag = nn.EmbeddingBag(9, d, mode=rng.choice(["sum", "mean", "max"]))

    def forward(self, x):
        return x + self.bag(ids_of(x[..., 0], 9)).unsqueeze(1)


kind("embedding_bag")(Bag)


@kind("norm")
def _norm(d, rng):
    return rng.choice([lambda: nn.LayerNorm(d), lambda: nn.RMSNorm(d), lambda: nn.BatchNorm1d(T),
                       lambda: nn.BatchNorm1d(T, track_running_stats=False), lambda: nn.GroupNorm(2, T),
                       lambda: nn.InstanceNorm1d(T, affine=True), lambda: nn.PReLU(T),
                       lambda: nn.InstanceNorm1d(T, affine=True, track_running_stats=True)])()


class BilinearPair(nn.Module):
    def __init__(self, d, rng):
        super().__init__()
        self.pair = nn.Bilinear(d, d, d)

    def forward(self, x):
        return self.pair(x, x.flip(-1))


kind("bilinear")(BilinearPair)


# ---------------------------------------------------------------------- recurrent layers and attention


class Recurrent(nn.Module):
    def __init__(self, d, rng):
        super().__init__()
        make, both = rng.choice([nn.LSTM, nn.GRU, nn.RNN]), rng.random() < 0.4
        self.rnn = make(d, d // 2 if both else d, num_layers=rng.choice([1, 2]), bidirectional=both,
                        batch_first=True, dropout=rng.choice([0.0, 0.2]))

    def forward(self, x):
        return self.rnn(x)[0]


kind("recurrent")(Recurrent)


@kind("recurrent_projected")
def _projected(d, rng):
    layer = Recurrent(d, rng)
    layer.rnn = nn.LSTM(d, d + 3, proj_size=d, batch_first=True)
    return layer


class Cell(nn.Module):
    def __init__(self, d, rng):
        super().__init__()
        self.cell = rng.choice([nn.LSTMCell, nn.GRUCell, nn.RNNCell])(d, d)

    def forward(self, x):
        state, out = None, []
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
            out.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(out, 1)


kind("cell")(Cell)


class Attention(nn.Module):
    def __init__(self, d, rng):
        super().__init__()
        self.kdim = rng.choice([d, d + 2])
        self.mha = nn.MultiheadAttention(d, 2, batch_first=True, kdim=self.kdim, add_bias_kv=rng.random() < 0.3)
        self.weights = rng.random() < 0.5

    def forward(self, x):
        keys = F.pad(x, (0, self.kdim - x.shape[-1]))
        return x + self.mha(x, keys, x, need_weights=self.weights)[0]


kind("attention")(Attention)


@kind("encoder")
def _encoder(d, rng):
    return nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=rng.choice([0.0, 0.1]), batch_first=True,
                                      norm_first=rng.random() < 0.5)


class Decoder(nn.Module):
    def __init__(self, d, rng):
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(d, 2, d, dropout=0.0, batch_first=True)

    def forward(self, x):
        return self.decoder(x, x.flip(1))


kind("decoder")(Decoder)


# ---------------------------------------------------------------------- parameters that modules hold themselves


class Raw(nn.Module):
    """Parameters of odd shapes and strides, in the module, a list and a dictionary."""

    def __init__(self, d, rng):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(d))
        self.gain = nn.Parameter(torch.randn(()))
        self.mix = nn.Parameter((torch.randn(d, d) / d).t() if rng.random() < 0.5 else torch.randn(d, d) / d)
        self.tables = nn.ParameterList(torch.randn(d, d) / d for _ in range(rng.choice([1, 3])))
        self.named = nn.ParameterDict({"a": torch.randn(d), "none": torch.randn(0, d)})
        self.register_parameter("absent", None)

    def forward(self, x):
        x = x * self.scale + x @ self.mix * self.gain
        for table in self.tables:
            x = x + x @ table
        return x + self.named["a"] + self.named["none"].sum()


kind("raw")(Raw)


class Sliced(nn.Module):
    """Parameters that are parts of one memory, as flat parameters are."""

    def __init__(self, d, rng):
        super().__init__()
        flat = torch.randn(2 * d * d) / d
        self.a, self.b = (nn.Parameter(part.view(d, d)) for part in flat.chunk(2))

    def forward(self, x):
        return x + F.linear(F.linear(x, self.a), self.b)


kind("sliced", "sliced")(Sliced)


class Experts(nn.Module):
    """Each position goes to one of the experts, so that some idle."""

    def __init__(self, d, rng):
        super().__init__()
        self.gate = nn.Linear(d, 5)
        self.experts = nn.ModuleList(nn.Linear(d, d) for _ in range(5))

    def forward(self, x):
        choice, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for i in choice.unique().tolist():
            out[choice == i] = self.experts[i](x[choice == i]).to(out.dtype)
        return x + out


kind("experts")(Experts)


class Buffers(nn.Module):
    """Statistics that its forward writes, a constant, and one that is no part of the state."""

    def __init__(self, d, rng):
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.register_buffer("mean", torch.zeros(d))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("mask", torch.ones(d), persistent=False)
        self.replaces = rng.random() < 0.5

    def forward(self, x):
        if self.training:
            now = x.detach().float().mean((0, 1)).to(self.mean.dtype)
            if self.replaces:
                self.mean = self.mean * 0.9 + now * 0.1
            else:
                self.mean.mul_(0.9).add_(now, alpha=0.1)
            self.count += 1
        return self.lin(x * self.mask) + self.mean


kind("buffers")(Buffers)


# ---------------------------------------------------------------------- weights that are computed


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).transpose(-1, -2)


@kind("parametrized")
def _parametrized(d, rng):
    layer = nn.Linear(d, d)
    how = rng.choice([lambda: parametrize.register_parametrization(layer, "weight", Symmetric()),
                      lambda: parametrizations.weight_norm(layer), lambda: parametrizations.spectral_norm(layer),
                      lambda: parametrizations.orthogonal(layer)])
    how()
    return layer


def detach_computed(net: nn.Module) -> None:
    """Weights that old hooks have computed have graphs, which keep what they saved; torch cannot copy them."""
    for module in net.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, (WeightNorm, SpectralNorm)):
                module.__dict__[hook.name] = getattr(module, hook.name).detach().clone()


@kind("old_weight_norm", "old_weight_norm")
def _old_weight_norm(d, rng):
    with torch.no_grad():  # torch cannot copy the computed weight otherwise
        layer = nn.utils.weight_norm(nn.Linear(d, d))
    detach_computed(layer)
    return layer


@kind("old_spectral_norm", "old_spectral_norm")
def _old_spectral_norm(d, rng):
    with torch.no_grad():
        layer = nn.utils.spectral_norm(nn.Linear(d, d))
    detach_computed(layer)  # at first it is the original's memory, which wrapping leaves
    return layer


class Functional(nn.Module):
    """Calls its child with weights that it makes of the child's own."""

    def __init__(self, d, rng):
        super().__init__()
        self.lin, self.how = nn.Linear(d, d), rng.choice(["func", "dict", "attribute"])

    def forward(self, x):
        changed = self.lin.weight * 0.5
        if self.how == "func":
            return x + torch.func.functional_call(self.lin, {"weight": changed}, (x,))
        kept = self.lin._parameters.pop("weight")
        try:  # checkpointing ends a part that it computes again by an exception
            if self.how == "dict":
                self.lin._parameters["weight"] = changed
            else:
                self.lin.weight = changed
            return x + self.lin(x)
        finally:
            self.lin.__dict__.pop("weight", None)
            self.lin._parameters["weight"] = kept


kind("functional", "functional")(Functional)


class Reader(nn.Module):
    """Reads a child's weight without a call of the child, and calls it as well."""

    def __init__(self, d, rng):
        super().__init__()
        self.lin, self.calls = nn.Linear(d, d), rng.random() < 0.5
        self.how = rng.choice(["linear", "matmul", "dtype", "sum", "detached"])

    def forward(self, x):
        weight = self.lin.weight
        y = {"linear": lambda: F.linear(x, weight, self.lin.bias), "matmul": lambda: x @ weight.t(),
             "dtype": lambda: x.to(weight.dtype), "sum": lambda: x + weight.sum() / weight.numel(),
             "detached": lambda: x @ weight.detach()}[self.how]()
        return self.lin(y.to(weight.dtype)) if self.calls else y


kind("reader", "reads")(Reader)


class Writer(nn.Linear):
    """Writes its weight before it uses it."""

    def __init__(self, d, rng):
        super().__init__(d, d)
        self.how = rng.choice(["mul_", "data", "copy_"])

    def forward(self, x):
        with torch.no_grad():
            if self.how == "mul_":
                self.weight.mul_(0.9)
            elif self.how == "data":
                self.weight.data.mul_(0.9)
            else:
                self.weight.copy_(self.weight * 0.9)
        return super().forward(x)


kind("writer", "own_writes")(Writer)


class Transformed(nn.Module):
    """torch.func inside a layer, with what that needs."""

    def __init__(self, d, rng):
        super().__init__()
        self.lin = nn.Linear(d, d)
        self.lin.stagehand_saved_handles = self.stagehand_saved_handles = False

    def forward(self, x):
        return torch.func.vmap(self.lin)(x)


kind("vmap", "func")(Transformed)


class Keeps(torch.autograd.Function):
    """Saves the weight itself for its backward."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.flatten(0, 1).t() @ grad.flatten(0, 1)


class Custom(nn.Module):
    def __init__(self, d, rng):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(d, d) / d)
        self.lin = nn.Linear(d, d)

    def forward(self, x):
        return self.lin(Keeps.apply(x, self.mix.to(x.dtype)))


kind("custom")(Custom)


class Tied(nn.Module):
    """A table that is a head, too."""

    def __init__(self, d, rng):
        super().__init__()
        self.table, self.head = nn.Embedding(11, d), nn.Linear(d, 11, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x):
        return x + self.table(self.head(x).argmax(-1)) + self.head(x).mean(-1, keepdim=True)


kind("tied")(Tied)


class InPlace(nn.Module):
    """Edits activations in place."""

    def __init__(self, d, rng):
        super().__init__()
        self.a, self.b = nn.Linear(d, d), nn.Linear(d, d)
        self.how = rng.randrange(4)

    def forward(self, x):
        y = self.a(x)
        if self.how == 0:
            y = y.relu_()
        elif self.how == 1:
            y = y.add_(x)
        elif self.how == 2:
            y[:, 0] = 0
        else:
            y = y.mul_(0.5).sigmoid_()
        return self.b(y)


kind("in_place")(InPlace)


# ---------------------------------------------------------------------- round another layer


class Wrapped(nn.Module):
    def __init__(self, inner, rng):
        super().__init__()
        self.inner = inner
        self.choice = rng.randrange(4)


@wrapper("residual")
class Residual(Wrapped):
    def forward(self, x):
        return x + self.inner(x)


@wrapper("loop")
class Loop(Wrapped):
    def forward(self, x):
        for _ in range(1 + self.choice % 3):
            x = torch.tanh(self.inner(x))
        return x


@wrapper("recursion")
class Recursion(Wrapped):
    """Calls itself."""

    def forward(self, x, depth=2):
        x = torch.tanh(self.inner(x))
        return self(x, depth - 1) if depth else x


@wrapper("checkpoint")
class Checkpointed(Wrapped):
    def forward(self, x):
        if not torch.is_grad_enabled():
            return self.inner(x)
        if self.choice % 2:
            return checkpoint(self.inner, x, use_reentrant=False)
        return checkpoint(self.inner, x if x.requires_grad else x.detach().requires_grad_(), use_reentrant=True)


@wrapper("selective", "selective")
class Selective(Wrapped):
    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False, **support.keeping_products())


@wrapper("autocast", "autocast")
class Autocast(Wrapped):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).to(x.dtype)


@wrapper("no_grad")
class NoGrad(Wrapped):
    def forward(self, x):
        with torch.no_grad():
            return self.inner(x)


@wrapper("dropped")
class Dropped(Wrapped):
    """Calls its layer once more and drops the output."""

    def forward(self, x):
        self.inner(x * 0.5)
        return self.inner(x)


@wrapper("early")
class Early(Wrapped):
    """Leaves the layer out as data decides."""

    def forward(self, x):
        return x if x.detach().sum() > 0 else self.inner(x)


@wrapper("cast", "dtypes")
class Cast(Wrapped):
    """Its layer has another dtype than the rest."""

    def __init__(self, inner, rng):
        super().__init__(inner, rng)
        self.dtype = rng.choice([torch.double, torch.bfloat16])
        inner.to(self.dtype)

    def forward(self, x):
        kept = next((p.dtype for p in self.inner.parameters() if p.is_floating_point()), x.dtype)
        return self.inner(x.to(kept)).to(x.dtype)


@wrapper("hooked")
class Hooked(Wrapped):
    """Hooks of its own kind on the layer."""

    def __init__(self, inner, rng):
        super().__init__(inner, rng)
        if self.choice == 0:
            inner.register_forward_pre_hook(_half)
        elif self.choice == 1:
            inner.register_forward_hook(_plus)
        elif self.choice == 2:
            inner.register_full_backward_hook(_scaled)
        else:
            inner.register_full_backward_pre_hook(_scaled_before)

    def forward(self, x):
        return self.inner(x)


def _half(module, args):
    return (args[0] * 0.5,)


def _plus(module, args, out):
    return out + 0.25


def _scaled(module, grads, outputs):
    return tuple(g if g is None else g * 0.5 for g in grads)


def _scaled_before(module, outputs):
    return tuple(g if g is None else g * 0.5 for g in outputs)


@wrapper("saved_copies")
class SavedCopies(Wrapped):
    """Copies what autograd saves, as save_on_cpu does on a card. (On the CPU that keeps the tensor itself, and an
    output that its own node keeps is never freed.)"""

    def forward(self, x):
        with torch.autograd.graph.saved_tensors_hooks(_copied, _as_it_is):
            return self.inner(x)


def _copied(tensor):
    return tensor.detach().clone()


def _as_it_is(tensor):
    return tensor


@wrapper("casting_hooks", "casting_hooks")
class CastingHooks(Wrapped):
    """Hooks that change the layer's dtype round each of its calls. Autograd saves a Parameter itself, which is cast
    back by the time of backward: PyTorch trains such a Linear alone, of whose weight a view is saved."""

    def __init__(self, inner, rng):
        super().__init__(inner, rng)
        inner.to(torch.bfloat16)
        inner.register_forward_pre_hook(_to_float)
        inner.register_forward_hook(_to_bfloat16)

    def forward(self, x):
        trains = type(self.inner) is nn.Linear and "weight" in self.inner._parameters
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains):
            return self.inner(x)


def _to_float(module, args):
    module.to(torch.float32)


def _to_bfloat16(module, args, out):
    module.to(torch.bfloat16)
