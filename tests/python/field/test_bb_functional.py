"""Transforms of torch.func, compiled functions, and the budgets that errors name: the plain model's numbers, or one
error that says what to do."""

from __future__ import annotations

import copy
import gc
import re
import sys

import card
import pairs as p
import pytest
import random_trial
import support as s
import torch
from torch import func, nn
from torch.nn import functional as F
from torch.utils import _pytree

import stagehand

D = 16
X = torch.randn(3, D, generator=torch.Generator().manual_seed(1))
ONES = torch.ones(3, D)
BLOCKS = r"^blocks\.\d+$"


@pytest.fixture(autouse=True)
def small_layers(monkeypatch):
    """Layer mode manages modules of any type from a few bytes on, attention among them."""
    monkeypatch.setattr(sys.modules[stagehand.layer.__module__], "OWNED_BYTES", 256)


class Scaling(nn.Linear):
    """Writes its weight before it uses it."""

    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(0.9)
        return super().forward(x)


class Block(nn.Module):
    """Uses its weights as `how` says."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.l = Scaling(D, D) if how == "written" else nn.Linear(D, D)
        if how == "attention":
            self.attention = nn.MultiheadAttention(D, 4, batch_first=True)
        if how == "raw":
            self.a, self.b = (nn.Parameter(torch.randn(D, D) / D) for _ in range(2))
        if how == "hook":
            self.l.register_forward_hook(lambda module, args, out: out * module.weight.sum())

    def forward(self, x):
        weight = self.l.weight if self.how not in ("raw", "attention", "written", "hook") else None
        if self.how == "attention":
            return self.l(self.attention(x[None], x[None], x[None], need_weights=False)[0][0])
        if self.how == "raw":
            return self.l(x @ self.a) @ self.b
        if self.how == "outside":
            return F.linear(x, weight)
        if self.how == "dtype":
            return self.l(x.to(weight.dtype))
        if self.how == "detached":
            return self.l(x) + x @ weight.detach()
        if self.how == "listed":
            return self.l(x) + sum(param.sum() for param in self.parameters())
        if self.how == "functional":
            return x + func.functional_call(self.l, {"weight": weight * 0.5}, (x,))
        return self.l(x)


HOWS = ("attention", "raw", "outside", "dtype", "detached", "listed", "functional", "hook", "written")


class Net(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(how) for _ in range(3))
        self.out = nn.Linear(D, D)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


def given(net):
    return {name: param.detach() * 1.1 for name, param in net.named_parameters()}


def scalar(net):
    return lambda x: net(x).square().sum()


def through(net):
    return lambda params: func.functional_call(net, params, (X,)).square().sum()


def batch(net):
    state = given(net)
    return {name: torch.stack([value, value * 1.1]) for name, value in state.items()}


def backward(net, out):
    net.zero_grad()
    if out.requires_grad:
        out.sum().backward()
    return [param.grad for param in net.parameters() if param.grad is not None]


WAYS = {
    "grad": lambda net: func.grad(scalar(net))(X),
    "grad_and_value": lambda net: func.grad_and_value(scalar(net))(X),
    "vjp": lambda net: (lambda out, back: back(ONES.to(out.device)))(*func.vjp(net, X)),
    "jvp": lambda net: func.jvp(net, (X,), (ONES,)),
    "vmap": lambda net: func.vmap(net)(X[None]),
    "vmap of grad": lambda net: func.vmap(func.grad(lambda row: scalar(net)(row[None])))(X),
    "jacrev": lambda net: func.jacrev(net)(X[:1]),
    "jacfwd": lambda net: func.jacfwd(net)(X[:1]),
    "hessian": lambda net: func.hessian(scalar(net))(X[:1]),
    "grad of grad": lambda net: func.grad(lambda x: func.grad(scalar(net))(x).square().sum())(X),
    "grad of jvp": lambda net: func.grad(lambda x: func.jvp(net, (x,), (ONES,))[1].sum())(X),
    "functional_call": lambda net: func.functional_call(net, given(net), (X,)),
    "grad of weights": lambda net: func.grad(through(net))(given(net)),
    "batch of weights": lambda net: func.vmap(through(net))(batch(net)),
    "jvp of weights": lambda net: func.jvp(through(net), (given(net),), (given(net),)),
    "a part": lambda net: func.grad(scalar(net.blocks[1]))(X),
    "backward of grad": lambda net: backward(net, func.grad(scalar(net))(X)),
    "backward of vmap": lambda net: backward(net, func.vmap(net)(X[None])),
    "batched grads": lambda net: torch.autograd.functional.jacobian(net, X[:1], vectorize=True),
}


def managed(mode: str, net, budget: int, tmp_path=None):
    """The runtime of the model that streams."""
    device = s.device(budget)
    if mode == "block":
        return stagehand.StagehandRuntime(net, stagehand.StagehandConfig(vram_budget=budget), block_pattern=BLOCKS,
                                          device=device)
    if mode == "load":
        path = random_trial._write_file(net, str(tmp_path))
        stagehand.load(net, path, vram_budget=budget, device=device)
    else:
        stagehand.layer(net, vram_budget=budget, device=device)
    return net._stagehand_layer_runtime


def made(how: str, frozen: bool, dtype=torch.float32):
    net = s.made(Net, how, frozen=frozen).to(dtype)
    return net, s.aligned_copy(net)


def results(net, way):
    """What the way gives, or the type of its exception."""
    try:
        return _pytree.tree_leaves(WAYS[way](net))
    except Exception as error:  # noqa: BLE001: the reference says what is right, errors too
        return type(error)


def agrees(net, ref, way) -> None:
    for _ in range(2):
        got, want = results(net, way), results(ref, way)
        assert got == want if isinstance(want, type) else s.same(got, want), (way, got, want)
    assert s.same([q.data for q in net.parameters()], [q.data for q in ref.parameters()])


def leased(runtime) -> int:
    if runtime.session is None:  # block mode that has not opened
        return 0
    runtime.session.core.poll()
    return runtime.session.core.stats()["leased_bytes"]


@pytest.mark.parametrize("mode, frozen", [("layer", False), ("layer", True), ("block", False), ("load", True)])
@pytest.mark.parametrize("how", HOWS)
def test_214_transforms_round_models_that_read_weights_in_any_way(how, mode, frozen, tmp_path):
    """In block mode the first one takes the model over. Each way meets a third of the models, frozen and not."""
    if mode == "load" and how == "written":
        pytest.skip("a forward that writes weights of a file is refused")
    turn = (HOWS.index(how) + frozen) % 3
    ways = list(WAYS)[::4] if mode != "layer" else list(WAYS) if s.FULL or how == "attention" else list(WAYS)[turn::3]
    for way in ways[:3] if how == "attention" else ways:  # PyTorch lacks most of the others, or takes long
        net, ref = made(how, frozen)
        with managed(mode, net, 4 * s.nbytes(net), tmp_path) as runtime:
            agrees(net, ref, way)
            assert leased(runtime) == 0, way
        with torch.no_grad():
            assert s.same(s.aligned_copy(net)(X), ref(X)), way


@pytest.mark.parametrize("way", ["vmap", "jvp", "functional_call", "batch of weights", "batched grads"])
@pytest.mark.parametrize("how", ["raw", "dtype", "detached"])
def test_214_those_that_keep_no_weights_need_no_more_than_a_pass(how, way):
    net, ref = made(how, frozen=True)
    budget = s.tight_budget(net)
    p.managed(net, budget)
    agrees(net, ref, way)
    assert s.runtime(net).stats["copies"] > 0


@pytest.mark.parametrize("way", ["grad", "vmap of grad", "jvp", "jacrev", "backward of vmap"])
def test_214_the_guard_of_bf16_blocks_looks_at_values_behind_transforms(way, monkeypatch):
    monkeypatch.setitem(globals(), "X", X.bfloat16())
    monkeypatch.setitem(globals(), "ONES", ONES.bfloat16())
    net, ref = made("outside", False, torch.bfloat16)
    with managed("block", net, 4 * s.nbytes(net)) as runtime:
        agrees(net, ref, way)
        with torch.no_grad():
            net.blocks[1].l.weight[0] = ref.blocks[1].l.weight[0] = float("nan")
        with pytest.warns(RuntimeWarning, match=r"the output of blocks\.1 has \d+ NaN"):
            agrees(net, ref, way)
            runtime.session.steps.finish_step()
            runtime._watch.flush()


@pytest.mark.parametrize("how", ["raw", "attention", "dtype"])
@pytest.mark.parametrize("way", ["grad", "vmap", "jvp", "hessian", "grad of weights"])
def test_214_transforms_over_given_data(how, way):
    net, ref = made(how, False)
    managed("layer", net, 4 * s.nbytes(net))
    for mine, theirs in zip(net.parameters(), ref.parameters()):
        values = torch.randn_like(mine) / D
        mine.data, theirs.data = s._aligned(values), s._aligned(values)
    agrees(net, ref, way)
    s.runtime(net).shutdown()
    assert s.same([q.data for q in net.parameters()], [q.data for q in ref.parameters()])


def test_214_modules_that_are_registered_elsewhere_while_weights_are_exchanged():
    """A registration makes the next pass look at the whole model, where values of transforms stand for weights."""
    for way in ("batch of weights", "grad of weights", "jvp of weights", "functional_call"):
        net, ref = made("dtype", False)
        p.managed(net, 4 * s.nbytes(net))
        reserved = s.runtime(net).session.stay.reserved
        nn.Linear(2, 2)
        agrees(net, ref, way)
        agrees(net, ref, "vmap")
        assert s.runtime(net).session.stay.reserved == reserved


def test_214_block_mode_that_has_not_opened_runs_exchanged_weights_plainly():
    net, ref = made("raw", False)
    with managed("block", net, 4 * s.nbytes(net)) as runtime:
        for way in ("functional_call", "grad of weights", "batch of weights"):
            agrees(net, ref, way)
        assert runtime.session is None
        agrees(net, ref, "grad")
        assert runtime.session is not None


@pytest.mark.skipif(card.ON_CARD, reason="refused on a card, where such a call has tensors on two devices")
def test_214_block_mode_does_not_open_inside_a_call_that_is_plain():
    """Also where one weight is exchanged, and parts that come before and behind it have all of theirs."""
    net, ref = made("raw", False)
    with managed("block", net, 4 * s.nbytes(net)) as runtime:
        for name, value in list(ref.named_parameters()):
            given = {name: value.detach() * 2}
            assert s.same(func.functional_call(net, given, (X,)), func.functional_call(ref, given, (X,))), name
            assert runtime.session is None, name
        agrees(net, ref, "grad")
        assert runtime.session is not None


def test_214_linearize_is_refused_with_what_to_use():
    net, ref = made("dtype", True)
    p.managed(net, 4 * s.nbytes(net))
    with pytest.raises(stagehand.StagehandError, match="Use torch.func.jvp instead of linearize"):
        func.linearize(net, X)
    agrees(net, ref, "jvp")


# ---------------------------------------------------------------------- budgets that errors name


class Reader(nn.Module):
    """Reads weights of its layers without calling them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        if self.how == "one by one":
            return F.linear(torch.relu(F.linear(x, self.up.weight, self.up.bias)), self.down.weight)
        if self.how == "in a method":
            return self.helped(torch.relu(self.helped(x, self.up)), self.down)
        if self.how == "by a function":
            return helped(torch.relu(helped(x, self.up)), self.down)
        if self.how == "two at once":
            up, down = self.up.weight, self.down.weight
            return F.linear(F.linear(x, up), down)
        if self.how == "held round a call":
            weight = self.up.weight
            return self.down(self.up(x)) + weight.sum()
        if self.how == "listed":
            return self.down(self.up(x)) + sum(param.sum() for param in self.parameters())
        return self.down(self.up(x))

    def helped(self, x, layer):
        return F.linear(x, layer.weight)


def helped(x, layer):
    return x @ layer.weight.t()


class Readers(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Reader(how) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


class AllAtOnce(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(6))

    def forward(self, x):
        return F.linear(x, torch.stack([block.weight for block in self.blocks]).sum(0))


def infer(net, x):
    with torch.no_grad():
        return [net(x)]


def train(net, x):
    net.zero_grad()
    out = net(x.clone().requires_grad_())
    out.pow(2).sum().backward()
    return [out.detach(), *(param.grad for param in net.parameters() if param.grad is not None)]


def gradient_of_gradient(net, x):
    x = x.clone().requires_grad_()
    grad, = torch.autograd.grad(net(x).pow(2).sum(), x, create_graph=True)
    return [grad.detach(), *torch.autograd.grad(grad.pow(2).sum(), x)]


USES = {"infer": infer, "train": train, "double": gradient_of_gradient,
        "func": lambda net, x: [func.grad(scalar(net))(x)]}
READERS = ("one by one", "in a method", "by a function", "two at once", "held round a call", "listed", "calls")
MODES = {"layer": {}, "block": {"policy": "planned"}, "static": {"policy": "static"}}


def named(error) -> int:
    """The budget that an error names: the last number of bytes."""
    return int(re.findall(r"(\d+) bytes", str(error))[-1])


def tried(build, mode: str, use, budget: int, frozen: bool):
    """What two uses give with the budget, or its refusal."""
    net = s.made(build, frozen=frozen)
    try:
        if mode == "layer":
            stagehand.layer(net, vram_budget=budget, device="sim")
            runtime = net._stagehand_layer_runtime
        else:
            runtime = stagehand.StagehandRuntime(net, stagehand.StagehandConfig(vram_budget=budget, **MODES[mode]),
                                                 block_pattern=BLOCKS, device="sim")
    except stagehand.StagehandOOMError as error:
        return error
    with runtime:
        try:
            return [use(net, X) for _ in range(2)]
        except stagehand.StagehandOOMError as error:
            return error


def refusals(build, mode: str, use, frozen: bool) -> list:
    """Those on the way from a tiny budget, each time with the one that the error before named. The last try works."""
    found, budget = [], 1024
    ref = s.aligned_copy(s.made(build, frozen=frozen))
    while isinstance(got := tried(build, mode, use, budget, frozen), Exception):
        assert named(got) > budget, got
        found.append((got, budget))
        budget = named(got)
    assert s.same(got, [use(ref, X) for _ in range(2)])
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["one by one", "in a method", "listed", "calls"])
def test_220_the_first_error_names_a_budget_that_works_where_weights_are_read_outside(how, mode):
    for use in (infer, train):
        for frozen in (False, True):
            assert len(refusals(lambda: Readers(how), mode, use, frozen)) == 1, (use, frozen)


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("how", [*READERS, "all at once"])
def test_220_the_error_of_a_pass_names_a_budget_that_works(how, use):
    """The call that wraps cannot know what a pass holds together; the pass asks once."""
    build = AllAtOnce if how == "all at once" else lambda: Readers(how)
    for mode in MODES if how in ("two at once", "all at once") else ("layer",):
        found = refusals(build, mode, USES[use], frozen=False)
        assert len(found) <= 2, [str(error) for error, _ in found]


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("how", ["two at once", "held round a call", "all at once"])
def test_220_with_less_than_what_an_error_calls_least_the_pass_is_refused(how, use):
    build = AllAtOnce if how == "all at once" else lambda: Readers(how)
    for error, budget in refusals(build, "layer", USES[use], frozen=False)[1:]:
        least = int(re.search(r"at least [^(]*\((\d+) bytes\)", str(error))[1])
        assert budget < least <= named(error)
        for less in (1, (least - budget) // 2):
            assert isinstance(tried(build, "layer", USES[use], least - less, False), stagehand.StagehandOOMError)


def test_220_a_reader_lets_hooks_of_the_caller_and_checkpoints_be():
    net, ref = (copy.deepcopy(s.made(Readers, "one by one", frozen=False)) for _ in range(2))
    ref = s.aligned_copy(ref)
    p.managed(net, s.nbytes(net) * 3 // 4)  # a node of backward holds a weight while a checkpoint runs again
    seen = []
    for model in (net, ref):
        packed = []
        pack = lambda t, packed=packed: packed.append(tuple(t.shape)) or t.clone()  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = model(X)
        out.sum().backward()
        x = X.clone().requires_grad_()
        for block in model.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        x.sum().backward()
        seen.append([out, *(param.grad for param in model.parameters() if param.grad is not None)])
        weights = {tuple(param.shape) for param in net.parameters()} | {tuple(q.t().shape) for q in net.parameters()
                                                                         if q.dim() == 2}
        seen[-1].append(torch.tensor(len([shape for shape in packed if shape not in weights])))
    assert s.same(seen[0], seen[1])


def test_220_a_reader_with_torch_func_inside_runs_or_says_what_to_do():
    class Maps(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.Linear(D, D)
            self.blocks = nn.ModuleList([Mapped()])
            self.idle = nn.ModuleList(nn.Linear(D, D) for _ in range(6))

        def forward(self, x):
            return self.blocks[0](F.linear(x, self.l.weight))

    class Mapped(nn.Module):
        def forward(self, x):
            return func.grad(scalar(torch.tanh))(x) if self.training else mapped(x)

    def mapped(x):
        return func.grad(scalar(torch.tanh))(x)

    net, ref = (s.made(Maps, frozen=False) for _ in range(2))
    p.managed(net, s.nbytes(net) // 2)
    assert s.same(net(X), s.aligned_copy(ref)(X))

    Mapped.forward = lambda self, x: mapped(x)  # which its code does not name
    s.runtime(net).shutdown()
    sys.modules["stagehand.weights.reading"]._read_by.cache_clear()
    p.managed(net, s.nbytes(net) // 2)
    with pytest.raises(RuntimeError, match="stagehand_saved_handles = False"):
        net(X)
    net.stagehand_saved_handles = False
    assert s.same(net(X), s.aligned_copy(ref)(X))


# ---------------------------------------------------------------------- compiled functions


@pytest.fixture
def dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_forwards(net, **options) -> None:
    for block in net.blocks:
        block.forward = torch.compile(block.forward, **options)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_219_forwards_that_are_compiled_by_themselves_are_regions(fullgraph, backend, dynamo):
    s.needs_regions()
    net, ref = (s.made(Readers, "calls", frozen=False) for _ in range(2))
    ref = s.aligned_copy(ref)
    compile_forwards(net, backend=backend, fullgraph=fullgraph)
    p.managed(net, s.nbytes(net) * 3 // 4)
    assert s.runtime(net).compiled == [f"blocks.{i}" for i in range(4)]
    for use in (infer, train):
        for _ in range(2):
            assert s.same(use(net, X), use(ref, X))
    s.runtime(net).shutdown()
    assert s.same(train(net, X), train(ref, X))


def test_219_one_graph_of_managed_modules_is_refused_with_the_way_out(dynamo):
    net, ref = (s.made(Readers, "calls", frozen=False) for _ in range(2))
    p.managed(net, s.nbytes(net) * 3 // 4)
    compile_forwards(net, backend="eager", fullgraph=True)
    with pytest.raises(stagehand.StagehandError, match=r"compile blocks by block.compile\(fullgraph=True\)"):
        infer(net, X)
    for block in net.blocks:
        del block.forward
    s.runtime(net).shutdown()
    p.managed(net, s.nbytes(net) * 3 // 4)
    for block in net.blocks:
        block.compile(backend="eager", fullgraph=True)
    assert s.same(infer(net, X), infer(s.aligned_copy(ref), X))


@s.torch_at_least("2.7", "one graph of a function takes no weight of a subclass")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_219_compiled_functions_over_weights_that_train(backend, dynamo):
    function = torch.compile(lambda x, weight: torch.relu(x @ weight), backend=backend, fullgraph=True)

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block("raw") for _ in range(2))
            self.own = nn.Parameter(torch.randn(D, D) / D)

        def forward(self, x):
            for block in self.blocks:
                x = function(function(block(x), block.l.weight), self.own)
            return x

    net, ref = (s.made(Uses, frozen=False) for _ in range(2))
    ref = s.aligned_copy(ref)
    p.managed(net, 2 * s.nbytes(net))
    for _ in range(3):
        assert s.same(train(net, X), train(ref, X))
        for model in (net, ref):
            with torch.no_grad():
                for param in model.parameters():
                    param.mul_(0.9)


# ---------------------------------------------------------------------- found by random programs


@pytest.mark.parametrize("run", [False, True])
def test_214_exchanged_data_is_on_the_host_after_shutdown(run):
    """A weight that stays on the device and one that streams are given each other's memory."""
    net = s.made(Net, "dtype", frozen=False)
    ref = s.aligned_copy(net)
    budget = 4 * s.nbytes(net)
    device = s.device(budget)
    runtime = stagehand.StagehandRuntime(net, stagehand.StagehandConfig(vram_budget=budget), block_pattern=BLOCKS,
                                         device=device)
    runtime.prepare()
    for model in (net, ref):
        stays, streams = model.out.weight, model.blocks[1].l.weight
        stays.data, streams.data = streams.data, stays.data
    if run:
        assert s.same(infer(net, X), infer(ref, X))
    runtime.shutdown()
    assert s.same(infer(s.aligned_copy(net), X), infer(ref, X))
    del runtime
    gc.collect()
    assert card.ON_CARD or device.info()["memory_free"] == device.info()["memory_total"]


@pytest.mark.parametrize("assign", [False, True])
def test_201_a_table_that_is_looked_up_in_host_memory_is_given_another_parameter(assign):
    """While somebody holds the old one, so that the new one gets an image of its own."""
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Embedding(40, D)])
            self.out = nn.Linear(D, D)

        def forward(self, x):
            return self.out(self.blocks[0](x.abs().sum(-1).long() % 40))

    net, ref = (s.made(Lookup, frozen=False) for _ in range(2))
    ref = s.aligned_copy(ref)
    with managed("block", net, s.nbytes(net)):
        kept = []
        for model in (net, ref):
            train(model, X)
            kept += list(model.parameters())
            model.load_state_dict({name: s._aligned(value) * 0.5 for name, value in model.state_dict().items()},
                                  assign=assign)
        assert s.same(infer(net, X), infer(ref, X))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.LSTM(D, D) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)[0]
        return x


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_214_the_list_of_a_recurrent_layer_has_its_own_weights_after_the_end(mode):
    """functional_call leaves the weights that it gave in that list until the layer's next pass."""
    net = Recurrent()
    with managed(mode, net, 4 * s.nbytes(net)) as runtime:
        if mode == "block":
            runtime.prepare()  # it does not open in the call below
        given = {name: q.detach() * 0.5 for name, q in list(net.named_parameters())[-3:]}
        with torch.no_grad():
            func.functional_call(net, given, (card.there(torch.randn(3, 2, D)),))
    for lstm in net.blocks:
        assert all(a is b for a, b in zip(lstm._flat_weights, lstm.parameters(), strict=True))
