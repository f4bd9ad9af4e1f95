"""Field cases W: modes of the caller's, and several threads at once."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import threading

import card
import children
import file_support as f
import pytest
import quant_models as q
import support as s
import torch
from pairs import ends as ends  # noqa: PLC0414: a fixture
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from worlds import BLOCKS, Checkpointed, managed, run

import stagehand
import stagehand.conductor
from stagehand import activation, claims, sessions
from stagehand.executor import Runner
from stagehand.files.filesource import FileSource
from stagehand.modes import block
from stagehand.modes.block import StagehandRuntime, _OpensAtCall
from stagehand.session import optimizers
from stagehand.session.choosing import Choosing
from stagehand.session.opening import Takeover
from stagehand.session.session import Session
from stagehand.session.staying import Staying
from stagehand.session.steps import Steps

# ---------------------------------------------------------------------- 209: what modes of the caller's see


class Operators(TorchDispatchMode):
    """Names of the operators that it sees, with the shapes that they are given."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.log.append((str(func), *(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Names of the functions that it sees; of attributes that are read, too."""

    def __init__(self):
        super().__init__()
        self.log = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__qualname__", str(func))
        self.log.append((func.__self__.__name__ if name.startswith("getset_descriptor") else name,))
        return func(*args, **(kwargs or {}))


def seen(do, *args):
    """(operators, functions) that modes round do(*args) see."""
    with Operators() as operators, Functions() as functions:
        do(*args)
    return operators.log, functions.log


def alike(got, want):
    """The same operators or functions in the same order. Gradients of one operator may be accumulated in any order."""
    assert want, "nothing was seen"
    if not card.ON_CARD:  # whose backward is a thread of its own, beside the caller's, which adds gradients up
        assert [name for name, *_ in got] == [name for name, *_ in want]
    assert sorted(got) == sorted(want)


def same_seen(do, model, ref, *args):
    """Modes see the same of do(model, *args) and do(ref, *args)."""
    got, want = seen(do, model, *args), seen(do, ref, *args)
    alike(got[0], want[0])
    if not any(isinstance(part, nn.RNNBase) for part in ref.modules()):  # it looks at each weight that is new to it
        alike(got[1], want[1])


# On a card gradients cross to the host, where weights have optimizers of the host's.
gradients_stay = card.simulated_only


def watched_pair(*args, **options):
    """As `managed`. The reference takes nothing from the host, which modes would see."""
    return managed(*args, takes_from_host=False, **options)


def example(net) -> tuple:
    return tuple(map(card.there, net.example()))


def infer(net, *inputs):
    with torch.no_grad():
        net(*inputs)


def train(net, *inputs):
    out = net(*inputs)
    out = out[0] if isinstance(out, tuple) else out
    out.float().pow(2).sum().backward()


def train_in_parts(net, *inputs):
    """Each part under modes of its own: what is begun under some may end under others, or none."""
    logs = []
    with Operators() as forward:
        out = net(*inputs)
    loss = out.float().pow(2).sum()
    with Operators() as backward, Functions() as functions:
        loss.backward()
    logs += [forward.log, backward.log, functions.log]
    return logs


def trained(net, *inputs):
    """A pass that finds no gradients."""
    for param in net.parameters():
        param.grad = None
    for x in inputs:
        x.grad = None
    train(net, *inputs)


class Strided(s.Stack):
    """Reads its parts' weights in unusual ways."""

    def forward(self, x):
        x = self.inp(x) + self.out.weight[0] * self.blocks[0].up.bias[: x.shape[-1]]
        for block in self.blocks:
            x = block(x) + block.down.weight.data.sum() * 1e-3
        return nn.functional.linear(x, self.out.weight.t(), self.out.bias.detach())


TIGHT = (s.Stack, s.TinyLM, Strided)
BUILDS = [*TIGHT, s.ConvNet, s.AttentionNet, s.NormedNet, s.Experts, s.RecurrentNet]


@s.torch_at_least("2.13", "Tensor.detach() is two operators, and modes see `detach` at other times")
@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("build", BUILDS)
def test_209_modes_see_what_they_see_of_the_plain_model(build, mode):
    if mode == "block" and not hasattr(s.made(build), "blocks"):
        pytest.skip("it has no blocks")
    for frozen in (False, True):
        budget = None if build in TIGHT else s.nbytes(s.made(build)) + 65536
        model, ref = watched_pair(build, frozen=frozen, mode=mode, link=None, budget=budget)
        x = example(model)
        for _ in range(3):
            same_seen(infer, model, ref, *x)
        if not frozen:
            for _ in range(2):
                same_seen(trained, model, ref, *x)
                for got, want in zip(train_in_parts(model, *x), train_in_parts(ref, *x)):
                    alike(got, want)
        run(model).shutdown()
        same_seen(infer, model.to(card.TORCH), ref, *x)


def watched(do, *args):
    """What modes see of do(*args), as one list."""
    operators, functions = seen(do, *args)
    return operators + functions


@s.torch_at_least("2.13", "Tensor.detach() is two operators, and modes see `detach` at other times")
@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_209_modes_see_the_same_where_parts_are_computed_again(mode, reentrant, monkeypatch):
    monkeypatch.setattr(Checkpointed, "reentrant", reentrant)
    model, ref = watched_pair(Checkpointed, 3, 32, frozen=False, mode=mode, link=None)
    x = example(model)[0].requires_grad_()
    for _ in range(2):
        if reentrant:
            same_seen(trained, model, ref, x)
            continue
        # Hooks of torch's checkpoint detach what they are given, and weights that stream are not given to them.
        got, want = (watched(trained, net, x) for net in (model, ref))
        assert len(got) < len(want)
        assert [name for name in got if "detach" not in name[0]] == [name for name in want if "detach" not in name[0]]


def twice(net, x):
    grads = torch.autograd.grad(net(x).pow(2).sum(), list(net.parameters()), create_graph=True)
    sum(grad.pow(2).sum() for grad in grads).backward()


@gradients_stay
def test_209_modes_see_the_same_of_a_double_backward():
    model, ref = watched_pair(s.Stack, 2, 32, frozen=False, link=None)
    same_seen(twice, model, ref, example(model)[0])


@gradients_stay
def test_209_modes_see_the_same_of_hooks_and_optimizers():
    """Optimizers that step behind backward and inside it, hooks of gradients, clipping."""
    model, ref = watched_pair(s.Stack, 2, 32, frozen=False, link=None)
    x, order = example(model)[0], {model: [], ref: []}

    def behind(net):
        opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=False, foreach=False)
        for _ in range(2):
            train(net, x)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0, foreach=False)
            opt.step()
            opt.zero_grad()

    same_seen(behind, model, ref)
    for net in (model, ref):
        for name, param in net.named_parameters():
            opt = torch.optim.SGD([param], lr=1e-2, foreach=False)
            param.register_hook(lambda grad: grad * 0.5)

            def step(param, opt=opt, name=name, order=order[net]):
                order.append(name)
                opt.step()
                opt.zero_grad()

            param.register_post_accumulate_grad_hook(step)
    same_seen(train, model, ref, x)
    assert sorted(order[model]) == sorted(order[ref]) and order[model]
    assert all(s.same(a, b) for a, b in zip(model.state_dict().values(), ref.state_dict().values()))


def test_209_modes_see_the_same_of_models_from_files(tmp_path):
    plain = s.made(s.Stack, 3, 32)
    f.save(tmp_path / "m.safetensors", f.state(plain))
    ref, x = s.aligned_copy(plain, False), example(plain)[0]
    budget = s.tight_budget(plain)
    for options in ({}, {"blocks": BLOCKS}, {"transfer": "int8"}):
        model = stagehand.load(lambda: s.Stack(3, 32), tmp_path / "m.safetensors", vram_budget=budget,
                               device=s.device(budget), **options)
        for _ in range(2):
            same_seen(infer, model, ref, x)
        run(model).shutdown()


def test_209_modes_see_the_same_of_quantised_files(tmp_path):
    plain = s.made(s.Stack, 2, 64)
    path = q.write(tmp_path, plain, "v2")
    model = stagehand.load(lambda: s.Stack(2, 64), path, vram_budget="1MB", device=s.device(1 << 20))
    ref, x = q.resident(plain, path, False), example(plain)[0]
    assert run(model).quantised["files"]
    for _ in range(2):
        same_seen(infer, model, ref, x)
    run(model).shutdown()


def everything(model):
    """What a user asks of a runtime beside calls of the model."""
    run(model).set_vram_budget(1 << 19)
    with run(model).keep_resident(), run(model).as_guest():
        pass
    run(model).reserve_for_resident()
    run(model).release_reservation()
    with run(model).writing():
        pass
    run(model).synchronize()
    assert run(model).stats and run(model).report is not None
    with run(model).managed_forward():
        pass
    run(model).begin_step()
    run(model).end_step()
    run(model).shutdown()


def test_209_modes_see_nothing_of_a_runtimes_own_work(tmp_path):
    """Set-up, all that is asked of a runtime, a conversion, and the end."""
    path, budget = tmp_path / "m.safetensors", 1 << 20

    def build():
        return s.made(s.Stack, 2, 32)

    f.save(path, f.state(build()))
    in_layers, in_blocks, from_file, in_files = (build() for _ in range(4))

    def wrap():
        stagehand.layer(in_layers, vram_budget=budget, device=s.device(budget))
        stagehand.layer(from_file, vram_budget=budget, device=s.device(budget), source=path)
        config = stagehand.StagehandConfig(vram_budget=budget)
        stagehand.StagehandRuntime(in_blocks, config, block_pattern=BLOCKS, device=s.device(budget)).prepare()
        runtime = stagehand.StagehandRuntime(in_files, config, block_pattern=BLOCKS, device=s.device(budget))
        runtime.convert_registry_to_file_backed(path)
        runtime.prepare()

    assert watched(wrap) == []
    x = example(in_layers)[0]
    for model in (in_layers, in_blocks, from_file, in_files):
        infer(model, x)
    for model in (in_layers, in_blocks):
        for where in (card.TORCH, torch.float64, torch.float32):
            assert watched(model.to, where) in ([("_parse_to",)], [])
        assert watched(everything, model) == []
    for model in (from_file, in_files):
        assert watched(run(model).shutdown) == []
    seen_of_building = watched(s.Stack, 2, 32)
    assert watched(lambda: run(stagehand.load(lambda: s.Stack(2, 32), path, vram_budget=budget,
                                              device=s.device(budget))).shutdown()) == seen_of_building


def test_209_modes_see_nothing_of_a_sessions_own_work():
    """Weights, spilled activations, the optimizer and a conductor over them."""
    model = s.made(s.Stack, 2, 32, frozen=False)
    parts = {"activation_stagehand": {"enabled": True}, "conductor_config": {"enabled": True},
             "optimizer": {"enabled": True, "lr": 0.01}}
    config = {"memory": {"strategy": "stagehand", "stagehand": {"vram_budget": 1 << 20, **parts}}}
    sessions_of = []

    def begin():
        sessions_of.append(stagehand.session(model, config, device=s.device(1 << 22)))

    begun = watched(begin)
    assert {name for name, *_ in begun} <= {"is_leaf", "requires_grad"}  # torch.optim.Optimizer's own
    session, x = sessions_of[0], example(model)[0]
    ref = s.aligned_copy(model, False)

    def round_it(step):
        with step:
            pass

    assert watched(round_it, session.step()) == [] == watched(round_it, session.keep_resident())
    with session.step():
        same_seen(trained, model, ref, x)
        assert watched(session.enter_optimizer) == []
    assert watched(session.shutdown) == []


@pytest.mark.parametrize("options", [{}, {"master_dtype": None, "state_dtype": None}])
def test_209_modes_see_nothing_of_the_offloaded_optimizer(options, tmp_path):
    params = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(4).bfloat16())]
    opts = []

    def work():
        opt = stagehand.OffloadedAdamW(params, lr=0.1, **options)
        opts.append(opt)
        opt.clip_grad_norm_(1.0)
        stagehand.optim.clip_grad_norm_(params, 1.0)
        state = opt.state_dict()
        opt.load_state_dict(state)

    for param in params:
        param.grad = torch.ones_like(param)
    torchs = {"_record_function_enter_new", "_record_function_exit"}
    assert [name for name, *_ in watched(work) if not any(part in name for part in torchs)
            and name not in ("is_leaf", "requires_grad")] == []
    got = [name for name, *_ in watched(opts[0].step) if not any(part in name for part in torchs)]
    assert got == []
    assert opts[0].state[params[0]]["exp_avg"].abs().sum() > 0


@s.torch_at_least("2.13", "Tensor.detach() is two operators, and modes see `detach` at other times")
@pytest.mark.parametrize("build", [s.Stack, s.AttentionNet])
def test_209_modes_see_the_same_where_saved_tensors_are_spilled(build):
    """With and without a pair of hooks of the user's round it, alone and of a managed model."""
    ref = s.made(build, frozen=False).to(card.TORCH)
    x = example(ref)
    device = s.device(1 << 24)

    def spilled(net, *inputs):
        with activation.offload(vram_budget=4000, device=device) as runtime:
            trained(net, *inputs)
        stats.update(runtime.stats)

    stats = {}
    for _ in range(3):
        for got, want in zip(seen(spilled, ref, *x), seen(trained, ref, *x)):
            alike(got, want)
    assert stats["tensors_spilled"] > 0
    activation.shutdown()


def test_209_modes_see_what_the_users_own_hooks_do():
    model, ref = watched_pair(s.Stack, 2, 32, frozen=False, link=None)

    def doubled(net, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            train(net, x)

    got, want = (watched(doubled, net, example(model)[0]) for net in (model, ref))
    count = [[name for name, *_ in log].count("aten.div.Tensor") for log in (got, want)]
    # The weights that stream are with our hooks, and all else is with theirs.
    assert 0 < count[0] < count[1]
    assert {name for name, *_ in got} == {name for name, *_ in want}


@pytest.mark.skipif(not hasattr(torch.utils.checkpoint, "CheckpointPolicy"), reason="PyTorch 2.5 and newer")
def test_209_selective_checkpointing_in_the_first_trained_pass_of_a_process():
    done = children.run("""
        import torch
        from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, CheckpointPolicy as P
        aten = torch.ops.aten
        kept = (aten.mm.default, aten.addmm.default)
        policy = lambda ctx, op, *a, **k: P.MUST_SAVE if op in kept else P.PREFER_RECOMPUTE
        contexts = lambda: create_selective_checkpoint_contexts(policy)
        def step(net, x):
            y = x
            for block in net.blocks:
                y = checkpoint(block, y, use_reentrant=False, context_fn=contexts).tanh()
            y.sum().backward()
            return [p.grad for p in net.parameters() if p.grad is not None]
        for mode in ("layer", "block"):
            model = support.made(support.Stack, 3, 32, frozen=False)
            ref = support.aligned_copy(model)
            budget = support.tight_budget(model)
            if mode == "layer":
                runtime = support.runtime(support.wrap(model, budget))
            else:
                config = stagehand.StagehandConfig(vram_budget=budget)
                runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\\.\\d+$",
                                                     device=support.device(budget))
                runtime.prepare()
            x = model.example()[0]
            got, want = step(model, x), step(ref, x)
            assert len(got) == len(want) and all(map(support.same, got, want))
            runtime.shutdown()
    """)
    assert done.status == 0, done.stderr


def test_209_flops_are_those_of_the_plain_model():
    model, ref = watched_pair(s.Stack, 2, 32, frozen=False, link=None)
    x, counts = example(model)[0], []
    for net in (model, ref):
        with FlopCounterMode(display=False) as flops:
            train(net, x)
        counts.append(flops.get_flop_counts())
    assert counts[0] == counts[1] and counts[0]["Global"]


def test_209_the_same_is_logged_by_torchs_own_debug_mode():
    debug = pytest.importorskip("torch.utils._debug_mode")
    model, ref = watched_pair(s.Stack, 2, 32, frozen=False, link=None)
    x, logs = example(model)[0], []
    for net in (model, ref):
        with debug.DebugMode() as mode:
            train(net, x)
        logs.append(mode.debug_string())
    if card.ON_CARD:  # two threads
        logs = [sorted(log.splitlines()) for log in logs]
    assert logs[0] == logs[1] and logs[0]


def test_209_fake_tensors_pass_through_as_through_the_plain_model():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, ref = watched_pair(s.Stack, 2, 32, link=None)
    x = example(model)[0]
    want = ref(x)
    for net in (model, ref):
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            out = net(fake.from_tensor(x))
            assert out.shape == want.shape and type(out).__name__ == "FakeTensor"
        with torch.no_grad(), FakeTensorMode() as fake, pytest.raises(Exception, match="allow_non_fake_inputs"):
            net(fake.from_tensor(x))
        assert s.same(net(x), want)


def test_209_a_graph_of_proxies_would_keep_weights_and_is_refused():
    from torch.fx.experimental.proxy_tensor import make_fx

    model, ref = watched_pair(s.Stack, 2, 32, link=None)
    x = example(model)[0]
    with torch.no_grad():
        assert s.same(make_fx(ref)(x)(x), ref(x))
        with pytest.raises(stagehand.StagehandError, match="traced or exported"):
            make_fx(model)(x)
        assert s.same(model(x), ref(x))


@pytest.mark.combinations("each may be the only test of a fault")
@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("how", ["meta", "float64", "both"])
def test_209_defaults_for_new_tensors_are_not_for_ours(how, mode):
    model = s.made(s.Stack, 2, 32, frozen=False)
    ref, x = s.aligned_copy(model), model.example()[0]
    out = ref(x)
    out.sum().backward()
    budget = s.tight_budget(model)
    before = torch.get_default_dtype()
    with torch.device("meta") if how != "float64" else contextlib.nullcontext():
        torch.set_default_dtype(before if how == "meta" else torch.float64)
        try:
            if mode == "layer":
                s.wrap(model, budget)
            else:
                config = stagehand.StagehandConfig(vram_budget=budget)
                stagehand.StagehandRuntime(model, config, block_pattern=BLOCKS, device=s.device(budget)).prepare()
            with activation.offload(vram_budget=4000, device=card.NAME):
                for _ in range(2):
                    model.zero_grad()
                    got = model(x)
                    got.backward(torch.ones_like(out, device=card.TORCH))
            run(model).shutdown()
        finally:
            torch.set_default_dtype(before)
            activation.shutdown()
    assert s.same(got, out)
    assert all(s.same(p.grad, r.grad) for p, r in zip(model.parameters(), ref.parameters()))
    assert all(not t.is_meta and t.dtype == torch.float32 for t in (*model.parameters(), *model.buffers()))


class Failing(s.Stack):
    where = "forward"

    def forward(self, x):
        if self.where == "forward":
            raise ValueError("on purpose")
        return super().forward(x)


@pytest.mark.parametrize("where", ["forward", "backward", "budget"])
def test_209_the_modes_are_in_place_behind_an_exception(where):
    model, _ = managed(Failing, 2, 32, frozen=False, link=None)
    model.where, x = where, model.example()[0]
    with Operators() as outer, Operators() as inner, Functions() as functions:
        with pytest.raises((ValueError, stagehand.StagehandOOMError)):
            if where == "budget":
                run(model).set_vram_budget(1000)
            out = model(x).sum()
            out.register_hook(lambda grad: exec("raise ValueError('on purpose')"))
            out.backward()
        logs = [len(outer.log), len(inner.log), len(functions.log)]
        torch.ones(1).add(1)
        assert [len(outer.log), len(inner.log), len(functions.log)] > logs
        assert inner.log[-1][0] == outer.log[-1][0] == "aten.add.Tensor"


def test_209_the_end_of_offload_shows_nothing_of_ours():
    """What the forward held until then is dropped there, and a sample of it is taken."""
    weights = [torch.randn(64, 64, requires_grad=True) for _ in range(6)]

    def forward():
        kept, h = [], weights[0]
        for weight in weights:
            h = torch.nn.functional.gelu(h @ weight)
            kept.append(h)
        return h.sum()

    with activation.offload(vram_budget=30000, device="sim") as runtime:
        for _ in range(3):
            forward().backward()
    dropped = runtime.stats["dropped"]
    with Operators() as mode:
        context = activation.offload(vram_budget=30000, device="sim")
        with context:
            loss = forward()
            before = len(mode.log)
        assert len(mode.log) == before and runtime.stats["dropped"] > dropped
    loss.backward()
    activation.shutdown()


def layers_in_a_file(folder):
    """A model whose layers are in m.safetensors, a function for a Runner of these, and its input."""
    model = s.made(s.Stack, 2, 32)
    f.save(folder / "m.safetensors", {n: p for n, p in model.state_dict().items() if "up" in n})

    def layer(given, x):
        return torch.nn.functional.linear(x, given.weights["up.weight"], given.weights["up.bias"])[:, :32].contiguous()

    return model, layer, torch.randn(4, 32)


def test_209_a_function_for_layers_is_seen_and_nothing_round_it(tmp_path):
    model, layer, x = layers_in_a_file(tmp_path)
    with Runner(tmp_path / "m.safetensors", layer, device="sim", budget="1MB") as runner:
        weights = [(block.up.weight, block.up.bias) for block in model.blocks]

        def plain(x):
            for weight, bias in weights:
                x = torch.nn.functional.linear(x, weight, bias)[:, :32].contiguous()
            return x

        for _ in range(2):
            for got, want in zip(seen(runner, x), seen(lambda x: plain(x), x)):
                assert [name for name, *_ in got] == [name for name, *_ in want]


# ---------------------------------------------------------------------- 207: several threads at once

LIMIT_S = 60


class Noticed:
    """A lock that says when a thread has to wait for it."""

    def __init__(self, lock):
        self.lock = lock
        self.waited_for = threading.Event()

    def acquire(self, blocking=True):
        if self.lock.acquire(blocking=False):
            return True
        self.waited_for.set()
        return blocking and self.lock.acquire()

    def release(self):
        self.lock.release()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()


class NoticedCondition(threading.Condition):
    def __init__(self):
        super().__init__()
        self.waited_for = threading.Event()

    def wait(self, timeout=None):
        self.waited_for.set()
        return super().wait(timeout)


class Hold:
    """Stands for a method: the first thread that comes stays in front of it until `until` is set, or a second thread
    has come as far. inside: the first is there. comers: all that came."""

    def __init__(self, monkeypatch, owner, name, until):
        self.inside, self.until, self.comers = threading.Event(), until, []
        original = getattr(owner, name)

        def held(*args, **kwargs):
            self.comers.append(threading.get_ident())
            if len(self.comers) == 1:
                self.inside.set()
                assert self.until.wait(LIMIT_S)
            else:
                self.until.set()
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, held)


def at_once(first, second, hold=None):
    """[result or exception] of the two, each on a thread of its own; the second begins when the first is held."""
    results = [None, None]

    def run_it(index, do):
        try:
            results[index] = do()
        except BaseException as error:  # noqa: BLE001: the test looks at it
            results[index] = error

    threads = [threading.Thread(target=run_it, args=pair, daemon=True) for pair in enumerate((first, second))]
    threads[0].start()
    if hold is not None:
        assert hold.inside.wait(LIMIT_S)
    threads[1].start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive(), f"no end: {results}"
    return results


def right(*results):
    for result in results:
        if isinstance(result, BaseException):
            raise result


def is_plain(model, ref, params, x):
    """The model after its runtime's end: the same Parameters, nothing of ours, the same numbers."""
    assert [id(p) for p in model.parameters()] == params
    for module in model.modules():
        kind = type(nn.Module()._parameters)  # of PyTorch 2.4 an OrderedDict
        assert type(module._parameters) is kind and type(module._buffers) is kind
        assert "forward" not in module.__dict__ and "__getstate__" not in module.__dict__
    assert not any(name.startswith("_stagehand") for name in model.__dict__)
    with torch.no_grad():
        assert s.same(model(x), ref(x))


def unopened(frozen=True):
    """(model, reference, runtime of block mode that has not opened, input, ids of the Parameters)."""
    model = s.made(s.Stack, 3, 32, frozen=frozen)
    ref = s.aligned_copy(model)
    budget = s.tight_budget(model)
    params = [id(p) for p in model.parameters()]
    runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), block_pattern=BLOCKS,
                                         device=s.device(budget))
    return model, ref, runtime, model.example()[0], params


def called(model, runtime, x):
    with torch.no_grad():
        return model(x)


def in_context(model, runtime, x):
    with runtime.managed_forward():
        return called(model, runtime, x)


def in_step(model, runtime, x):
    runtime.begin_step()
    try:
        return called(model, runtime, x)
    finally:
        runtime.end_step()


def kept(model, runtime, x):
    with runtime.keep_resident():
        return called(model, runtime, x)


def prepared(model, runtime, x):
    runtime.prepare()
    return called(model, runtime, x)


def reserved(model, runtime, x):
    runtime.reserve_for_resident()
    return called(model, runtime, x)


USES = [called, in_context, in_step, prepared]


@pytest.mark.parametrize("use", USES)
def test_207_two_threads_that_use_block_mode_first_open_it_once(use, monkeypatch):
    for other in USES:
        model, ref, runtime, x, params = unopened()
        runtime._life = Noticed(runtime._life)
        with monkeypatch.context() as patch:
            hold = Hold(patch, Session, "open", runtime._life.waited_for)
            got = at_once(lambda: use(model, runtime, x), lambda other=other: other(model, runtime, x), hold)
        right(*got)
        with torch.no_grad():
            assert all(s.same(out, ref(x)) for out in got)
        assert len(hold.comers) == 1
        assert sessions.opened().count(runtime.session) == 1
        stats = runtime.stats
        assert stats["device_peak"] + stats["reserved_bytes"] <= stats["budget"]
        runtime.shutdown()
        is_plain(model, ref, params, x)


@pytest.mark.parametrize("use", [kept, reserved])
def test_207_two_threads_that_keep_a_model_first_open_it_once(use, monkeypatch):
    model, ref, runtime, x, params = unopened()
    runtime._life = Noticed(runtime._life)
    hold = Hold(monkeypatch, Session, "open", runtime._life.waited_for)
    got = at_once(lambda: use(model, runtime, x), lambda: use(model, runtime, x), hold)
    right(*got)
    with torch.no_grad():
        assert all(s.same(out, ref(x)) for out in got)
    assert len(hold.comers) == 1
    runtime.release_reservation()
    account = runtime.session.target.core.residency()
    assert account["runtimes"] == 1 and account["kept"] == account["primary"] == 0
    runtime.shutdown()
    is_plain(model, ref, params, x)


def test_207_where_the_first_cannot_open_the_second_does(monkeypatch):
    model, ref, runtime, x, params = unopened()
    runtime._life = Noticed(runtime._life)
    hold = Hold(monkeypatch, Session, "open", runtime._life.waited_for)
    original, fails = Takeover.wrap, [RuntimeError("on purpose")]

    def wrap(takeover):
        if fails:
            raise fails.pop()
        return original(takeover)

    monkeypatch.setattr(Takeover, "wrap", wrap)
    error, out = at_once(lambda: runtime.prepare(), lambda: in_context(model, runtime, x), hold)
    assert "on purpose" in str(error)
    with torch.no_grad():
        assert s.same(out, ref(x))
    runtime.shutdown()
    is_plain(model, ref, params, x)


def test_207_two_threads_that_make_weights_file_backed_do_it_once(monkeypatch, tmp_path):
    model, ref, runtime, x, params = unopened()
    f.save(tmp_path / "m.safetensors", f.state(model))
    runtime._life = Noticed(runtime._life)
    hold = Hold(monkeypatch, FileSource, "bind", runtime._life.waited_for)
    convert = functools.partial(runtime.convert_registry_to_file_backed, tmp_path / "m.safetensors")
    count, error = at_once(convert, convert, hold)
    assert count > 0 and "file-backed already" in str(error)
    assert s.same(called(model, runtime, x), called(ref, None, x))
    runtime.shutdown()
    is_plain(model, ref, params, x)


def layer_it(model, budget, path):
    stagehand.layer(model, vram_budget=budget, device=s.device(budget))


def layer_from_file(model, budget, path):
    stagehand.layer(model, vram_budget=budget, device=s.device(budget), source=path)


def block_it(model, budget, path):
    stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), block_pattern=BLOCKS,
                               device=s.device(budget))


def session_it(model, budget, path):
    settings = {"mode": "layer", "vram_budget": budget, "source": str(path)}
    stagehand.session(model, {"memory": {"strategy": "stagehand", "stagehand": settings}}, device=s.device(budget))


def load_it(model, budget, path):
    stagehand.load(model, path, vram_budget=budget, device=s.device(budget))


WRAPS = [layer_it, layer_from_file, block_it, session_it, load_it]


@pytest.mark.parametrize("wrap", WRAPS)
def test_207_of_two_threads_that_wrap_one_model_one_does(wrap, monkeypatch, tmp_path):
    path = tmp_path / "m.safetensors"
    f.save(path, f.state(s.made(s.Stack, 3, 32)))
    for other in WRAPS:
        model = s.made(s.Stack, 3, 32)
        ref, x, budget = s.aligned_copy(model), model.example()[0], s.tight_budget(model)
        params = [id(p) for p in model.parameters()]
        with monkeypatch.context() as patch:
            patch.setattr(claims, "_changed", NoticedCondition())
            if wrap is block_it:  # it takes the model over when it is used
                hold = Hold(patch, block, "find_blocks", claims._changed.waited_for)
            else:
                hold = Hold(patch, Session, "open", claims._changed.waited_for)
            done, error = at_once(*(functools.partial(do, model, budget, path) for do in (wrap, other)), hold)
        right(done)
        assert isinstance(error, stagehand.StagehandError) and "under stagehand already" in str(error)
        assert not claims._owners
        for _ in range(2):
            assert s.same(called(model, None, x), called(ref, None, x))
        stats = run(model).stats
        assert stats["device_peak"] + stats["reserved_bytes"] <= budget
        run(model).shutdown()
        is_plain(model, ref, params, x)


def test_207_a_model_that_the_first_could_not_wrap_is_the_seconds(monkeypatch, tmp_path):
    path = tmp_path / "m.safetensors"
    model = s.made(s.Stack, 3, 32)
    f.save(path, f.state(model))
    ref, x, budget = s.aligned_copy(model), model.example()[0], s.tight_budget(model)
    params = [id(p) for p in model.parameters()]
    monkeypatch.setattr(claims, "_changed", NoticedCondition())
    hold = Hold(monkeypatch, Session, "open", claims._changed.waited_for)
    error, done = at_once(*(functools.partial(layer_from_file, model, size, path) for size in (1000, budget)), hold)
    assert isinstance(error, stagehand.StagehandOOMError)
    right(done)
    assert s.same(called(model, None, x), called(ref, None, x))
    run(model).shutdown()
    is_plain(model, ref, params, x)


def test_207_a_part_and_the_whole_are_wrapped_one_after_the_other(monkeypatch):
    """Two models that share modules: what the second thread finds is what it would find later."""
    model = s.made(s.Stack, 3, 32)
    part, budget = nn.Sequential(model.blocks[0], model.blocks[1]), s.tight_budget(model)
    monkeypatch.setattr(claims, "_changed", NoticedCondition())
    hold = Hold(monkeypatch, Session, "open", claims._changed.waited_for)
    at_once(lambda: layer_it(model, budget, None), lambda: layer_it(part, budget, None), hold)
    assert claims._changed.waited_for.is_set() and not claims._owners
    for net in (part, model):
        if "_stagehand_layer_runtime" in net.__dict__:
            run(net).shutdown()


def test_207_models_that_two_threads_open_at_once_have_names_of_their_own(monkeypatch):
    models = [s.made(s.Stack, 2, 32) for _ in range(2)]
    both_there = threading.Event()
    hold = Hold(monkeypatch, Choosing, "check", both_there)
    right(*at_once(*(functools.partial(layer_it, model, 1 << 20, None) for model in models), hold))
    assert len(hold.comers) == 2
    assert run(models[0]).name != run(models[1]).name
    ended = [run(model).session for model in models]
    for model in models:
        run(model).shutdown()
    assert not set(ended) & set(sessions.members(sessions._named))


def test_207_models_that_two_threads_build_for_load_are_on_meta_each(tmp_path):
    """The first to begin is the first to end; whoever builds beside them gets real parameters."""
    plain = s.made(s.Stack, 2, 32)
    path = tmp_path / "m.safetensors"
    f.save(path, f.state(plain))
    ref, x = s.aligned_copy(plain), plain.example()[0]
    before, budget = nn.Module.register_parameter, s.tight_budget(plain)
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def build(here, wait_for):
        model = s.Stack(2, 32)
        here.set()
        assert wait_for.wait(LIMIT_S)
        model.extra = nn.Linear(2, 2)
        metas = [p.is_meta for p in model.parameters()]
        del model.extra
        assert all(metas)
        return model

    def load(here, wait_for):
        model = stagehand.load(lambda: build(here, wait_for), path, vram_budget=budget, device=s.device(budget))
        first_is_out.set()
        assert not nn.Linear(2, 2).weight.is_meta
        return model

    got = at_once(lambda: load(first_is_in, second_is_in), lambda: load(second_is_in, first_is_out))
    right(*got)
    assert nn.Module.register_parameter is before
    for model in got:
        assert s.same(called(model, None, x), called(ref, None, x))
        run(model).shutdown()


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_207_two_threads_shut_down_at_once(mode, monkeypatch):
    for _ in range(3):
        model, ref = managed(s.Stack, 3, 32, mode=mode, link=None)
        x, params, runtime = model.example()[0], [id(p) for p in model.parameters()], run(model)
        called(model, None, x)
        runtime._life = Noticed(runtime._life)
        with monkeypatch.context() as patch:
            hold = Hold(patch, Session, "_restore", runtime._life.waited_for)
            right(*at_once(runtime.shutdown, runtime.shutdown, hold))
        assert len(hold.comers) == 1
        assert runtime.session not in sessions.opened()
        runtime.shutdown()
        is_plain(model, ref, params, x)
        s.wrap(model, s.tight_budget(model))
        assert s.same(called(model, None, x), called(ref, None, x))
        run(model).shutdown()


def test_207_a_shutdown_while_another_thread_opens_comes_after_it(monkeypatch):
    model, ref, runtime, x, params = unopened()
    runtime._life = Noticed(runtime._life)
    hold = Hold(monkeypatch, Session, "open", runtime._life.waited_for)
    done, ended = at_once(lambda: called(model, runtime, x), runtime.shutdown, hold)
    right(done, ended)
    assert s.same(done, called(ref, None, x))
    is_plain(model, ref, params, x)
    with pytest.raises(stagehand.InvalidStateTransitionError, match="shut down"):
        runtime.prepare()


def test_207_a_first_call_that_waits_for_a_shutdown_is_one_of_the_plain_model(monkeypatch):
    model, ref, runtime, x, params = unopened()
    runtime._life = Noticed(runtime._life)
    hold = Hold(monkeypatch, StagehandRuntime, "_drop_own_pool", runtime._life.waited_for)
    forward = model.forward
    monkeypatch.setattr(runtime, "_closed", False)
    original = _OpensAtCall.remove

    def remove(of):  # the other thread's call has found the stand, and asks before the runtime has begun to end
        hold.until = runtime._life.waited_for
        original(of)

    monkeypatch.setattr(_OpensAtCall, "remove", remove)
    ended, out = at_once(runtime.shutdown, lambda: forward(x), hold)
    right(ended, out)
    assert s.same(out, called(ref, None, x))
    is_plain(model, ref, params, x)


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_207_a_shutdown_waits_for_the_pass_of_another_thread_which_may_not_shut_down(mode):
    """The thread in the pass would wait for the other, which waits for the pass: it is told so."""
    model, ref = managed(s.Stack, 3, 32, mode=mode, link=None)
    x, params, runtime = model.example()[0], [id(p) for p in model.parameters()], run(model)
    runtime.session.steps.pass_lock = Noticed(runtime.session.steps.pass_lock)
    told, in_pass = [], threading.Event()

    def inside(module, args):
        in_pass.set()
        assert runtime.session.steps.pass_lock.waited_for.wait(LIMIT_S)
        with pytest.raises(stagehand.InvalidStateTransitionError, match="inside a call") as error:
            runtime.shutdown()
        told.append(error)

    hook = model.blocks[1].register_forward_pre_hook(inside)
    out, ended = at_once(lambda: called(model, None, x), lambda: (in_pass.wait(LIMIT_S), runtime.shutdown()))
    hook.remove()
    right(out, ended)
    assert told and s.same(out, called(ref, None, x))
    is_plain(model, ref, params, x)


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("first", ["convert", "shutdown"])
def test_207_a_conversion_and_a_shutdown_come_one_after_the_other(mode, first, monkeypatch):
    model, ref = managed(s.Stack, 3, 32, mode=mode, link=None)
    x, runtime = model.example()[0].double(), run(model)
    runtime._life, session = Noticed(runtime._life), runtime.session
    session.steps.pass_lock = Noticed(session.steps.pass_lock)
    session.steps.pass_lock.waited_for = runtime._life.waited_for
    hold = Hold(monkeypatch, Session, "_restore", runtime._life.waited_for)
    do = {"convert": model.double, "shutdown": runtime.shutdown}
    right(*at_once(do.pop(first), *do.values(), hold))
    assert "_stagehand_layer_runtime" not in model.__dict__ and "_stagehand_runtime" not in model.__dict__
    assert s.same(called(model, None, x), called(ref.double(), None, x))
    assert all(p.dtype is torch.float64 for p in model.parameters()) and not sessions.opened().count(runtime.session)


def test_207_two_threads_that_begin_a_step_leave_none_open(monkeypatch):
    model, ref, runtime, x, params = unopened()
    runtime.prepare()
    runtime._held_lock = Noticed(runtime._held_lock)
    with monkeypatch.context() as patch:
        hold = Hold(patch, Steps, "begin_step", runtime._held_lock.waited_for)
        right(*at_once(runtime.begin_step, runtime.begin_step, hold))
    runtime.end_step()
    assert not runtime.session.steps.under_way
    before = runtime.stats["steps"]
    called(model, runtime, x)
    assert runtime.stats["steps"] == before + 1
    runtime.shutdown()
    is_plain(model, ref, params, x)


@pytest.mark.parametrize("mode", ["layer", "block", "file"])
def test_207_first_passes_of_two_threads(mode, tmp_path):
    for number in range(3):
        if mode == "file":
            plain, path = s.made(s.Stack, 3, 32), tmp_path / f"{number}.safetensors"
            f.save(path, f.state(plain))
            budget, ref = s.tight_budget(plain), s.aligned_copy(plain)
            model = stagehand.load(lambda: s.Stack(3, 32), path, vram_budget=budget, device=s.device(budget))
            frozen = True
        else:
            frozen = False
            model, ref = managed(s.Stack, 3, 32, mode=mode, frozen=False, link=None)
        x, start = model.example()[0], threading.Barrier(2)

        def passes(model=model, x=x, start=start, frozen=frozen):
            start.wait(LIMIT_S)
            if frozen:
                return called(model, None, x)
            x = x.clone().requires_grad_()
            out = model(x)
            return out.detach(), torch.autograd.grad(out.pow(2).sum(), x)[0]

        got = at_once(passes, passes)
        right(*got)
        want = at_once(functools.partial(passes, ref), functools.partial(passes, ref))[0]
        assert all(s.same(a, b) for result in got for a, b in zip(as_tuple(result), as_tuple(want)))
        runtime = run(model)
        assert runtime.stats["device_peak"] + runtime.stats["reserved_bytes"] <= runtime.stats["budget"]
        runtime.shutdown()


def as_tuple(value):
    return value if isinstance(value, tuple) else (value,)


def test_207_optimizers_are_watched_by_one_pair_of_hooks(monkeypatch):
    """Two models that open at once; then the last one ends while another begins."""
    models = [s.made(s.Stack, 2, 32, frozen=False) for _ in range(3)]
    gc.collect()
    for session in sessions.opened():  # that other tests have left
        session.close()
    optimizers.unwatch()
    assert not sessions.opened() and not optimizers._handles
    with monkeypatch.context() as patch:
        patch.setattr(optimizers, "_lock", Noticed(threading.Lock()))
        where = importlib.import_module("torch.optim.optimizer")
        hold = Hold(patch, where, "register_optimizer_step_pre_hook", optimizers._lock.waited_for)
        right(*at_once(*(functools.partial(layer_it, model, 1 << 20, None) for model in models[:2]), hold))
    assert len(optimizers._handles) == 2
    run(models[0]).shutdown()
    with monkeypatch.context() as patch:
        patch.setattr(optimizers, "_lock", Noticed(threading.Lock()))
        hold = Hold(patch, optimizers.sessions, "opened", optimizers._lock.waited_for)
        patch.setattr(Staying, "make_way", lambda stay: None)  # which asks for sessions as well
        right(*at_once(run(models[1]).shutdown, lambda: layer_it(models[2], 1 << 20, None), hold))
    assert len(optimizers._handles) == 2
    model, x = models[2], models[2].example()[0]
    ref = s.aligned_copy(model)
    for net in (model, ref):
        opt = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
        for _ in range(2):
            trained(net, x)
            opt.step()
    assert s.same(called(model, None, x), called(ref, None, x))
    run(model).shutdown()
    assert not optimizers._handles


def test_207_two_threads_inside_one_context_of_offload(monkeypatch):
    """It is entered by both, left by the one that came first, and its runtime is shut down while the other packs."""
    ref = s.made(s.Stack, 3, 32, frozen=False)
    x = ref.example()[0]
    want = torch.autograd.grad(ref(x).pow(2).sum(), list(ref.parameters()))
    context = activation.offload(vram_budget=2000, device="sim")
    saver = context.runtime.saver
    start, end = threading.Barrier(2), threading.Barrier(2)

    def grads(last):
        with context:
            start.wait(LIMIT_S)
            loss = ref(x).pow(2).sum()
            if last:
                end.wait(LIMIT_S)
        if not last:
            end.wait(LIMIT_S)
        return torch.autograd.grad(loss, list(ref.parameters()))

    for _ in range(3):
        for got in at_once(lambda: grads(True), lambda: grads(False)):
            right(got)
            assert all(map(s.same, got, want))
    assert saver.stats()["spill_bytes"] > 0
    closing = threading.Event()
    original = saver._may_go

    def may_go(tensor):
        goes = original(tensor)
        if goes and not saver.closed:
            closing.set()
            assert ended.wait(LIMIT_S)
        return goes

    ended = threading.Event()
    monkeypatch.setattr(saver, "_may_go", may_go)

    def shut_down():
        assert closing.wait(LIMIT_S)
        activation.shutdown()
        ended.set()

    def once():
        with context:
            return torch.autograd.grad(ref(x).pow(2).sum(), list(ref.parameters()))

    got, done = at_once(once, shut_down)
    right(got, done)
    assert all(map(s.same, got, want)) and not context.runtime.enabled


def test_207_two_threads_attach_one_runtime_to_a_conductor_once():
    model, _ = managed(s.Stack, 2, 32, link=None)
    conductor = stagehand.conductor.ConductorRuntime(stagehand.conductor.ConductorConfig(enabled=True))
    conductor._lock = Noticed(conductor._lock)
    start = threading.Barrier(2)

    def attach():
        start.wait(LIMIT_S)
        return conductor.attach(run(model))

    got = at_once(attach, attach)
    assert sum(isinstance(result, stagehand.InvalidStateTransitionError) for result in got) == 1
    assert len(conductor._adapters) == 1
    conductor.shutdown()
    run(model).shutdown()


def test_207_two_threads_run_a_runner_first(tmp_path):
    _, layer, x = layers_in_a_file(tmp_path)
    with Runner(tmp_path / "m.safetensors", layer, device="sim", budget="1MB") as runner:
        runner._lock = Noticed(runner._lock)
        hold = threading.Event()
        inside = []

        def slow(given, x):
            if not inside:
                inside.append(given)
                hold.set()
                assert runner._lock.waited_for.wait(LIMIT_S)
            return layer(given, x)

        runner._function = runner._shapes = slow
        got = at_once(lambda: runner(x), lambda: (hold.wait(LIMIT_S), runner(x))[1])
        right(*got)
        assert s.same(got[0], got[1])
    with pytest.raises(stagehand.StagehandError):
        runner(x)
