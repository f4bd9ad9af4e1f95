"""What a random program does to a model: passes, backwards, optimizers, writes, changes of the model.

An action is a function of a `Side` (the managed model, or its plain twin) and a `random.Random`; it does the same to
both
and returns what must be the same of both. `ACTIONS` has for each its topic, how often it is drawn, and what it is.
"""

from __future__ import annotations

import contextlib
import copy
import threading

import torch
from support import _aligned, aligned_copy
from torch import nn
from torch.nn.utils import clip_grad_norm_

import stagehand
from random_layers import CastingHooks, T, Transformed, detach_computed
from stagehand.optim import OffloadedAdamW

ACTIONS: dict = {}
OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.05, foreach=False),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.02, momentum=0.9, nesterov=True, foreach=False),
    "adam": lambda ps: torch.optim.Adam(ps, lr=0.01, foreach=False),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=0.01, foreach=False),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01, foreach=False),
    "offloaded": lambda ps: OffloadedAdamW(ps, lr=0.01, threads=1),
}


class Side:
    """One of the two models, and what a program keeps beside it."""

    def __init__(self, net: nn.Module, setup: dict, managed: bool) -> None:
        self.net, self.setup, self.managed = net, setup, managed
        self.without = frozenset(setup["without"])
        self.opt = None
        self.dtype = torch.float64 if setup["double"] else torch.float32
        self.passes = 0
        self.graphs: list = []  # losses whose backward is still to come
        self.handles: list = []
        self.seen: list = []  # what hooks saw
        self.ema: list | None = None
        self.rewrap = None  # set by who wraps

    @property
    def runtime(self):
        return self.net.__dict__.get("_stagehand_layer_runtime") or self.net.__dict__.get("_stagehand_runtime")

    def optimizer(self):
        if self.opt is None:
            self.opt = OPTIMIZERS[self.setup["optimizer"]]([p for p in self.net.parameters() if p.is_leaf])
        return self.opt

    def prepare(self) -> None:
        """Block mode takes the model over, if it has not yet."""
        if self.managed and self.setup["mode"] == "block" and self.runtime is not None and self.runtime.session is None:
            self.runtime.prepare()

    def example(self, rng) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
        x = torch.randn(rng.choice([1, 2, 3]), T, self.setup["d"], generator=generator)
        return x.to(self.setup["device"] if self.setup["device"] != "sim" else "cpu", self.dtype)

    def call(self, rng, x=None, **options):
        """A pass; block mode may mark it as a step of its own."""
        x = self.example(rng) if x is None else x
        marked = rng.random() < 0.5
        self.passes += 1
        runtime = self.runtime
        if not marked or not hasattr(runtime, "managed_forward") or self.setup["mode"] != "block":
            return self.net(x, **options)
        with runtime.managed_forward():
            return self.net(x, **options)

    def end_step(self, rng) -> None:
        if rng.random() < 0.3 and self.setup["mode"] == "block" and self.runtime is not None:
            self.runtime.end_step()

    def parameters(self, rng, most=3) -> list:
        """Some of the parameters that can be written, by name."""
        named = [(n, p) for n, p in self.net.named_parameters() if p.is_leaf and p.numel() and p.is_floating_point()]
        return rng.sample(named, min(len(named), rng.randint(1, most)))

    def forget_graphs(self) -> None:
        self.graphs.clear()


def action(name: str, weight: int = 2, topic: str = "", writes: bool = False):
    def register(function):
        ACTIONS[name] = topic, weight, writes, function
        return function

    return register


def like(data: torch.Tensor, rng) -> torch.Tensor:
    """Other numbers of the same shape, dtype and strides, aligned as those of a managed model are."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return _aligned(data.detach()).copy_(torch.randn(data.shape, generator=generator).mul(0.3))


def align(net: nn.Module) -> None:
    """Moves a plain model's tensors to multiples of 512 bytes, as `aligned_copy` does."""
    for p in net.parameters():
        p.data = _aligned(p.data)


# ---------------------------------------------------------------------- passes


def _path(side, rng) -> dict:
    """Which blocks a pass calls."""
    n = len(side.net.blocks)
    how = rng.random()
    if how < 0.6:
        return {}
    if how < 0.75:
        return {"stop": rng.randrange(n + 1)}
    in_order = how < 0.9 or not side.setup["repeats"]
    order = list(range(n)) if in_order else [rng.randrange(n) for _ in range(rng.randint(1, n + 1))]
    rng.shuffle(order)
    return {"order": order}


@action("infer", 8)
def infer(side, rng):
    mode = rng.choice([torch.no_grad, torch.no_grad, torch.inference_mode])
    if "inference_first" in side.without and not side.passes:
        mode = torch.no_grad
    if any(isinstance(m, CastingHooks) for m in side.net.modules()):  # PyTorch casts to inference tensors there, for
        mode = torch.no_grad  # which it takes other kernels, and which cannot be written after
    with mode():
        return [side.call(rng, **_path(side, rng)).clone() for _ in range(rng.choice([1, 1, 2]))]


@action("forward_dropped", 2)
def forward_dropped(side, rng):
    """A pass that records, and no backward."""
    return [side.call(rng, **_path(side, rng)).detach().clone()]


@action("infer_in_thread", 1)
def infer_in_thread(side, rng):
    out, errors = [], []

    def work():
        torch.set_num_threads(1)  # each thread has its number
        try:
            with torch.no_grad():
                out.append(side.call(rng))
        except Exception as error:  # noqa: BLE001: raised below
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for error in errors:
        raise error
    return out


@action("fail", 2)
def fail(side, rng):
    """An exception in the middle of a pass."""
    with torch.set_grad_enabled(rng.random() < 0.6):
        try:
            side.call(rng, fail=rng.randrange(len(side.net.blocks)))
        except ValueError as error:
            return [str(error)]
    return ["nothing was raised"]


# ---------------------------------------------------------------------- training


def _offload(side, rng):
    """Spills what autograd saves, where the setup says so: only of the managed model."""
    if rng.random() < 0.3 or not side.managed or not side.setup["offload"]:
        return contextlib.nullcontext()
    return stagehand.activation.offload(vram_budget=side.setup["offload"], device=side.setup["device"])


def _loss(side, rng, x=None, **options):
    autocast = "autocast" not in side.without and rng.random() < 0.1
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        out = side.call(rng, x, **options)
    return out.float().pow(2).mean()


def _backward(loss, **options) -> None:
    if loss.requires_grad:
        loss.backward(**options)


def _trained(side) -> list:
    return [p for p in side.net.parameters() if p.requires_grad and p.is_leaf]


@action("train", 12)
def train(side, rng):
    """A step: passes, one backward or more, and the optimizer."""
    if rng.random() < 0.7:
        side.optimizer().zero_grad(set_to_none=rng.random() < 0.7)
    how = rng.choice(["plain", "plain", "several", "in_turn", "reversed", "twice", "inputs", "x"])
    losses, xs = [], []
    with _offload(side, rng):
        for _ in range(1 if how in ("plain", "twice", "inputs", "x") else rng.choice([2, 3])):
            x = side.example(rng).requires_grad_(how == "x")
            loss = _loss(side, rng, x, **_path(side, rng))
            losses.append(loss)
            xs.append(x)
            if how == "in_turn":
                _backward(loss)
        if how == "plain" or how == "x":
            _backward(losses[0])
        elif how == "several" and side.setup["repeats"]:
            _backward(sum(losses))
        elif how in ("several", "reversed"):
            for loss in losses[::-1]:
                _backward(loss)
        elif how == "twice":
            _backward(losses[0], retain_graph=True)
            _backward(losses[0])
        elif how == "inputs":
            some = _trained(side)
            some = rng.sample(some, min(len(some), 2))
            _backward(losses[0], **({"inputs": some} if some else {}))
    side.end_step(rng)
    seen = [loss.detach().clone() for loss in losses] + [x.grad for x in xs if x.grad is not None]
    del loss, losses, xs
    if rng.random() < 0.7:
        seen += optimize(side, rng)
    return seen


@action("optimize", 1)
def optimize(side, rng):
    seen = []
    if rng.random() < 0.3:
        seen.append(clip_grad_norm_(side.net.parameters(), 0.5).detach().clone())
    side.optimizer().step()
    return seen


@action("train_as_gradients_arrive", 1)
def train_as_gradients_arrive(side, rng):
    """OffloadedAdamW.last_backward, where that is the optimizer."""
    opt = side.optimizer()
    opt.zero_grad()
    loss = _loss(side, rng)
    with opt.last_backward() if hasattr(opt, "last_backward") else contextlib.nullcontext():
        _backward(loss)
    opt.step()
    return [loss.detach().clone()]


@action("gradients_of", 2)
def gradients_of(side, rng):
    some = _trained(side)
    some = rng.sample(some, min(len(some), 3))
    loss = _loss(side, rng, **_path(side, rng))
    return list(torch.autograd.grad(loss, some, allow_unused=True)) if some and loss.requires_grad else []


@action("penalty", 2, "double_backward")
def penalty(side, rng):
    """A gradient of gradients."""
    some = _trained(side)
    if not some:
        return []
    with _offload(side, rng) if "offload_double" not in side.without else contextlib.nullcontext():
        x = side.example(rng).requires_grad_()
        loss = side.call(rng, x).float().pow(2).mean()
        grads = torch.autograd.grad(loss, [x, *some], create_graph=True, allow_unused=True)
        total = sum(g.float().pow(2).sum() for g in grads if g is not None)
        if total.requires_grad:
            total.backward()
    return [total.detach().clone()]


@action("begin", 3)
def begin(side, rng):
    """A pass whose backward comes later."""
    with _offload(side, rng):
        side.graphs.append(_loss(side, rng, **_path(side, rng)))
    return [side.graphs[-1].detach().clone()]


@action("finish", 4)
def finish(side, rng):
    if side.graphs:
        _backward(side.graphs.pop(rng.randrange(len(side.graphs))))
    return []


@action("zero_grad", 1)
def zero_grad(side, rng):
    side.net.zero_grad(set_to_none=rng.random() < 0.5)
    return []


@action("func_grad", 1, "func")
def func_grad(side, rng):
    x = side.example(rng)
    try:
        return [torch.func.grad(lambda x: side.net(x).float().pow(2).mean())(x)]
    finally:
        detach_computed(side.net)


@action("functional_pass", 1, "functional")
def functional_pass(side, rng):
    """The whole model called with other weights."""
    x = side.example(rng)
    changed = {name: p.detach().to(x.device) * 0.5 for name, p in side.parameters(rng)}
    with torch.no_grad():
        return [torch.func.functional_call(side.net, changed, (x,))]


# ---------------------------------------------------------------------- writes between passes


@action("write", 3, writes=True)
def write(side, rng):
    side.forget_graphs()
    for _, p in side.parameters(rng):
        how = rng.choice(["mul_", "copy_", "index", "init", "foreach"])
        with torch.no_grad():
            if how == "mul_":
                p.mul_(0.9)
            elif how == "copy_":
                p.copy_(like(p, rng))
            elif how == "index":
                p.view(-1)[rng.randrange(p.numel())] = 0.7 if p.is_contiguous() else 0
            elif how == "foreach":
                torch._foreach_mul_([p], 0.8)
            else:
                nn.init.constant_(p, 0.1)
    return []


@action("write_data", 3, "data_writes", writes=True)
def write_data(side, rng):
    side.forget_graphs()
    for _, p in side.parameters(rng):
        how = rng.choice(["mul_", "add_", "numpy", "slice"])
        if how == "mul_":
            p.data.mul_(0.9)
        elif how == "add_":
            p.data += 0.01
        elif how == "numpy" and p.dtype in (torch.float32, torch.float64):
            data = p.detach()
            if data.is_cpu:
                data = data.numpy()
            data[...] *= 0.9
        else:
            p.data[...] = like(p, rng)
    return []


@action("give_data", 3, "given_data", writes=True)
def give_data(side, rng):
    side.forget_graphs()
    for _, p in side.parameters(rng):
        p.data = like(p, rng).to(p.device)
    return []


@action("exchange_data", 1, "swaps", writes=True)
def exchange_data(side, rng):
    side.forget_graphs()
    for _, p in side.parameters(rng, 1):
        others = [q for q in side.net.parameters() if q is not p and q.shape == p.shape and q.dtype == p.dtype
                  and q.stride() == p.stride() and q.is_leaf]
        if side.setup["device"] != "sim":  # one that streams and one that stays have other devices
            others = []
        if others:
            q = rng.choice(others)
            p.data, q.data = q.data, p.data
    return []


@action("average", 2, "swaps", writes=True)
def average(side, rng):
    """Averages of the weights: kept, run with, and the weights put back."""
    side.forget_graphs()
    ps = [p for p in side.net.parameters() if p.is_leaf]
    if side.ema is None or [(e.shape, e.dtype) for e in side.ema] != [(p.shape, p.dtype) for p in ps]:
        side.ema = [_aligned(p.detach()) for p in ps]
        return []
    with torch.no_grad():
        for e, p in zip(side.ema, ps):
            e.lerp_(p.to(e.device), 0.3) if e.is_floating_point() else None
    kept = [p.data for p in ps]
    for p, e in zip(ps, side.ema):
        p.data = _aligned(e)
    with torch.no_grad():
        out = side.call(rng)
    for p, data in zip(ps, kept):
        p.data = data
    return [out]


def _into_vectors(ps: list) -> list[torch.Tensor]:
    """The parameters become parts of the vectors that come back, one a device, as by vector_to_parameters, and start at
    multiples of 64 bytes: results change with the place of a weight, and a copy on the device has another one."""
    vectors = []
    for device in {p.device for p in ps}:
        here = [p for p in ps if p.device == device]
        slots = [-(-p.numel() // 64) * 64 for p in here]
        vectors.append(torch.zeros(sum(slots), dtype=here[0].dtype, device=device))
        for part, p in zip(vectors[-1].split(slots), here):
            part[:p.numel()] = p.detach().reshape(-1)
            p.data = part[:p.numel()].view(p.shape)
    return vectors


@action("vector", 1, "vector", writes=True)
def vector(side, rng):
    side.forget_graphs()
    detach_computed(side.net)
    side.prepare()  # which gives the weights memory of their own
    ps = [p for p in side.net.parameters() if p.dtype == side.dtype and p.is_leaf
          and p.stride() == torch.empty(p.shape, device="meta").stride()]  # a weight that streams keeps its strides
    vectors = _into_vectors(ps)
    x = side.example(rng)
    with torch.no_grad():
        seen = [side.net(x)]
        for v in vectors:
            v.mul_(0.9)
        seen.append(side.net(x))
    return seen


@action("load_state", 2, writes=True)
def load_state(side, rng):
    side.forget_graphs()
    state = {name: _aligned(value) for name, value in side.net.state_dict().items()}
    for value in state.values():
        if value.is_floating_point():
            value.mul_(0.95)
    assign = rng.random() < 0.3 and "replaced" not in side.without
    if assign:
        side.opt = None
    side.net.load_state_dict(state, assign=assign)
    return []


@action("replace", 1, "replaced", writes=True)
def replace(side, rng):
    """Another Parameter under the same name."""
    side.forget_graphs()
    side.opt = None
    for name, p in side.parameters(rng, 2):
        owner = side.net.get_submodule(name.rpartition(".")[0])
        if not hasattr(owner, "_flat_weights"):
            setattr(owner, name.rpartition(".")[2], nn.Parameter(like(p, rng), requires_grad=p.requires_grad))
    return []


# ---------------------------------------------------------------------- changes of the model


@action("freeze", 2)
def freeze(side, rng):
    side.forget_graphs()
    if rng.random() < 0.2:
        side.net.requires_grad_(rng.random() < 0.5)
    for _, p in side.parameters(rng):
        p.requires_grad_(not p.requires_grad)
    return []


@action("mode", 2)
def mode(side, rng):
    side.net.train(rng.random() < 0.5)
    return []


@action("cast_model", 1, "dtypes", writes=True)
def cast_model(side, rng):
    side.forget_graphs()
    detach_computed(side.net)
    side.net.zero_grad()
    side.opt = side.ema = None
    side.dtype = rng.choice([torch.float32, torch.bfloat16, torch.float64, torch.float16])
    side.prepare()  # until then the model is plain, and not aligned
    side.net.to(side.dtype)
    if not side.managed:
        align(side.net)
    return []


class Adapted(nn.Module):
    """A Linear with a low-rank part beside it."""

    def __init__(self, base, rng):
        super().__init__()
        self.base = base
        like_base = base.weight
        self.down, self.up = (nn.Parameter(like(like_base.detach()[:2] if i == 0 else like_base.detach()[:, :2], rng))
                              for i in range(2))

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + (x @ self.down.t()) @ self.up.t()


def _modules(side, wanted) -> list:
    return [(n, m) for n, m in side.net.named_modules() if n and wanted(m)]


def _put(side, name, module) -> None:
    parent, _, key = name.rpartition(".")
    setattr(side.net.get_submodule(parent), key, module)


@action("adapt", 2, "adapters")
def adapt(side, rng):
    side.forget_graphs()
    side.opt = None
    found = [(n, m) for n, m in _modules(side, lambda m: type(m) is nn.Linear)
             if type(side.net.get_submodule(n.rpartition(".")[0])) is not Adapted]
    for name, module in rng.sample(found, min(len(found), 2)):
        _put(side, name, Adapted(module, rng))
    return []


@action("merge", 1, "adapters", writes=True)
def merge(side, rng):
    """Takes adapters out, their product added to the weight or not."""
    side.forget_graphs()
    side.opt = None
    for name, module in _modules(side, lambda m: type(m) is Adapted):
        if rng.random() < 0.5:
            with torch.no_grad():
                weight = module.base.weight
                weight.add_(module.up.to(weight.device) @ module.down.to(weight.device))
        _put(side, name, module.base)
    return []


@action("hook", 2)
def hook(side, rng):
    """Hooks on modules and parameters that look, or change what they see."""
    how = rng.choice(["forward", "pre", "full_backward", "parameter", "accumulated", "weight_in_hook"])
    outer = _modules(side, lambda m: isinstance(m, Transformed))
    batched = {part for _, m in outer for part in m.lin.modules()}  # whose values must stay there
    names = _modules(side, lambda m: m not in batched)
    _, module = rng.choice(names)
    seen = side.seen
    if how == "forward":
        handle = module.register_forward_hook(lambda m, a, out: seen.append(_sum(out)))
    elif how == "pre":
        handle = module.register_forward_pre_hook(lambda m, a: seen.append(_sum(a)))
    elif how == "weight_in_hook":
        handle = module.register_forward_hook(lambda m, a, out: seen.append([_sum(p.detach()) for p in m.parameters()]))
    elif how == "full_backward":
        handle = module.register_full_backward_hook(lambda m, g, o: seen.append(_sum(o)))
    else:
        trained = _trained(side)
        if not trained:
            return []
        p = rng.choice(trained)
        handle = p.register_hook(lambda g: g * 0.5) if how == "parameter" else \
            p.register_post_accumulate_grad_hook(lambda p: seen.append(_sum(p.grad)))
    side.handles.append(handle)
    return []


def _sum(value):
    if isinstance(value, torch.Tensor):
        return value.detach().float().cpu().abs().sum().clone()
    return [_sum(v) for v in value] if isinstance(value, (tuple, list)) else type(value).__name__


@action("unhook", 1)
def unhook(side, rng):
    while side.handles:
        side.handles.pop().remove()
    return []


# ---------------------------------------------------------------------- looking, and the runtime itself


@action("look", 1)
def look(side, rng):
    state = side.net.state_dict()
    return [list(state), [tuple(v.shape) for v in state.values()], [p.requires_grad for p in side.net.parameters()]]


@action("copy", 1, "copies")
def copied(side, rng):
    """A copy of a managed model is a plain one."""
    detach_computed(side.net)
    twin = aligned_copy(side.net)
    with torch.no_grad():
        return [twin(side.example(rng))]


@action("budget", 1)
def budget(side, rng):
    """A larger budget for a while."""
    side.forget_graphs()
    detach_computed(side.net)
    more = rng.random() < 0.5
    opened = side.managed and side.runtime is not None
    if opened and (side.setup["mode"] != "block" or side.runtime.session is not None):
        base = side.setup["bytes"]
        side.runtime.set_vram_budget(base * 3 // 2 if more else base)
    return []


@action("wrap_again", 1)
def wrap_again(side, rng):
    """Ends the runtime and begins another."""
    side.forget_graphs()
    if side.managed and not side.setup["mode"].startswith("file"):
        side.rewrap()
    return []
