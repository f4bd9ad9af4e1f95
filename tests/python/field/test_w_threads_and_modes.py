"""Field cases W: modes of the caller's, and several threads at once."""

from __future__ import annotations

import contextlib
import copy

import children
import file_support as f
import pytest
import quant_models as q
import support as s
import torch
from pairs import ends as ends  # noqa: PLC0414: a fixture
from pairs import pair
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from worlds import BLOCKS, Checkpointed, managed, run

import stagehand
from stagehand import activation
from stagehand.executor import Runner

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
    assert [name for name, *_ in got] == [name for name, *_ in want]
    assert sorted(got) == sorted(want)


def same_seen(do, model, ref, *args):
    """Modes see the same of do(model, *args) and do(ref, *args)."""
    got, want = seen(do, model, *args), seen(do, ref, *args)
    alike(got[0], want[0])
    if not any(isinstance(part, nn.RNNBase) for part in ref.modules()):  # it looks at each weight that is new to it
        alike(got[1], want[1])


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


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("build", BUILDS)
def test_209_modes_see_what_they_see_of_the_plain_model(build, mode):
    if mode == "block" and not hasattr(s.made(build), "blocks"):
        pytest.skip("it has no blocks")
    for frozen in (False, True):
        budget = None if build in TIGHT else s.nbytes(s.made(build)) + 65536
        model, ref = managed(build, frozen=frozen, mode=mode, link=None, budget=budget)
        x = model.example()
        for _ in range(3):
            same_seen(infer, model, ref, *x)
        if not frozen:
            for _ in range(2):
                same_seen(trained, model, ref, *x)
                for got, want in zip(train_in_parts(model, *x), train_in_parts(ref, *x)):
                    alike(got, want)
        run(model).shutdown()
        same_seen(infer, model, ref, *x)




def watched(do, *args):
    """What modes see of do(*args), as one list."""
    operators, functions = seen(do, *args)
    return operators + functions


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_209_modes_see_the_same_where_parts_are_computed_again(mode, reentrant, monkeypatch):
    monkeypatch.setattr(Checkpointed, "reentrant", reentrant)
    model, ref = managed(Checkpointed, 3, 32, frozen=False, mode=mode, link=None)
    x = model.example()[0].requires_grad_()
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


def test_209_modes_see_the_same_of_a_double_backward():
    model, ref = managed(s.Stack, 2, 32, frozen=False, link=None)
    same_seen(twice, model, ref, model.example()[0])


def test_209_modes_see_the_same_of_hooks_and_optimizers():
    """Optimizers that step behind backward and inside it, hooks of gradients, clipping."""
    model, ref = managed(s.Stack, 2, 32, frozen=False, link=None)
    x, order = model.example()[0], {model: [], ref: []}

    def behind(net):
        opt = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=False)
        for _ in range(2):
            train(net, x)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
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
    ref, x = s.aligned_copy(plain), plain.example()[0]
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
    ref, x = q.resident(plain, path), plain.example()[0]
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
    x = in_layers.example()[0]
    for model in (in_layers, in_blocks, from_file, in_files):
        infer(model, x)
    for model in (in_layers, in_blocks):
        for where in ("cpu", torch.float64, torch.float32):
            assert watched(model.to, where) in ([("_parse_to",)], [])
        assert watched(everything, model) == []
    for model in (from_file, in_files):
        assert watched(run(model).shutdown) == []
    seen_of_building = watched(s.Stack, 2, 32)
    assert watched(lambda: run(stagehand.load(lambda: s.Stack(2, 32), path, vram_budget=budget,
                                              device=s.device(budget))).shutdown()) == seen_of_building


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


@pytest.mark.parametrize("build", [s.Stack, s.AttentionNet])
def test_209_modes_see_the_same_where_saved_tensors_are_spilled(build):
    """With and without a pair of hooks of the user's round it, alone and of a managed model."""
    ref = s.made(build, frozen=False)
    x = ref.example()
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
    model, ref = managed(s.Stack, 2, 32, frozen=False, link=None)

    def doubled(net, x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2):
            train(net, x)

    got, want = (watched(doubled, net, model.example()[0]) for net in (model, ref))
    count = [[name for name, *_ in log].count("aten.div.Tensor") for log in (got, want)]
    # The weights that stream are with our hooks, and all else is with theirs.
    assert 0 < count[0] < count[1]
    assert {name for name, *_ in got} == {name for name, *_ in want}


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
    model, ref = managed(s.Stack, 2, 32, frozen=False, link=None)
    x, counts = model.example()[0], []
    for net in (model, ref):
        with FlopCounterMode(display=False) as flops:
            train(net, x)
        counts.append(flops.get_flop_counts())
    assert counts[0] == counts[1] and counts[0]["Global"]


def test_209_the_same_is_logged_by_torchs_own_debug_mode():
    debug = pytest.importorskip("torch.utils._debug_mode")
    model, ref = managed(s.Stack, 2, 32, frozen=False, link=None)
    x, logs = model.example()[0], []
    for net in (model, ref):
        with debug.DebugMode() as mode:
            train(net, x)
        logs.append(mode.debug_string())
    assert logs[0] == logs[1] and logs[0]


def test_209_fake_tensors_pass_through_as_through_the_plain_model():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, ref = managed(s.Stack, 2, 32, link=None)
    x = model.example()[0]
    want = ref(x)
    for net in (model, ref):
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            out = net(fake.from_tensor(x))
            assert out.shape == want.shape and type(out).__name__ == "FakeTensor"
        with torch.no_grad(), FakeTensorMode() as fake, pytest.raises(Exception, match="allow_non_fake_inputs"):
            net(fake.from_tensor(x))
        assert s.same(net(x), want)


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
            with activation.offload(vram_budget=4000, device="sim"):
                for _ in range(2):
                    model.zero_grad()
                    got = model(x)
                    got.backward(torch.ones_like(out, device="cpu"))
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


def test_209_a_function_for_layers_is_seen_and_nothing_round_it(tmp_path):
    model = s.made(s.Stack, 2, 32)
    f.save(tmp_path / "m.safetensors", {n: p for n, p in model.state_dict().items() if "up" in n})

    def layer(given, x):
        return torch.nn.functional.linear(x, given.weights["up.weight"], given.weights["up.bias"])[:, :32].contiguous()

    x = torch.randn(4, 32)
    with Runner(tmp_path / "m.safetensors", layer, device="sim", budget="1MB") as runner:
        weights = [(block.up.weight, block.up.bias) for block in model.blocks]

        def plain(x):
            for weight, bias in weights:
                x = torch.nn.functional.linear(x, weight, bias)[:, :32].contiguous()
            return x

        for _ in range(2):
            for got, want in zip(seen(runner, x), seen(lambda x: plain(x), x)):
                assert [name for name, *_ in got] == [name for name, *_ in want]
