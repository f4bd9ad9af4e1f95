"""Field cases, section J: hooks, conversions, compiling."""

import functools
import warnings

import card
import pytest
import support as s
import torch
from pairs import agree, both, cuda, ends, managed, pair, same_grads, same_weights, within  # noqa: F401
from torch import nn
from torch.nn import functional as F

import stagehand

# ---------------------------------------------------------------------- 61: conversions of a wrapped model


@card.on_the_host
@pytest.mark.parametrize("move", [
    lambda m: m.to("cpu"), lambda m: m.half(), lambda m: m.double(), lambda m: m.float(),
    lambda m: m.to(torch.bfloat16), lambda m: m.type(torch.float64), lambda m: m.apply(lambda module: None)])
def test_61_moves_and_conversions_with_a_tight_budget(move):
    """With a budget that holds all of the new dtype (double needs twice the bytes), or else nothing is changed."""
    model, ref = pair(s.Stack, 6, 40, frozen=True)
    budget = s.runtime(model).session.budget
    agree(model, ref, 1)
    results = both(model, ref, move)
    if isinstance(results[0], Exception):
        assert isinstance(results[0], stagehand.StagehandOOMError) and "smallest budget" in str(results[0])
        ref = s.aligned_copy(s.made(s.Stack, 6, 40))
    else:
        assert results[0] is model
    dtype = ref.inp.weight.dtype
    assert {p.dtype for p in model.parameters()} == {dtype}
    agree(model, ref, 3, inputs=(torch.randn(2, 40, dtype=dtype),))
    assert within(model, budget)


@cuda
@pytest.mark.alone
def test_61_on_a_card():
    model = s.made(s.Stack, 6, 256)
    ref = s.aligned_copy(model).cuda()
    stagehand.layer(model, vram_budget=s.tight_budget(model))
    with torch.no_grad():
        model(torch.randn(2, 256, device="cuda"))  # PyTorch's own memory for products is there
    before = torch.cuda.memory_allocated()
    for move in (lambda: model.cuda(), lambda: model.to("cuda"), lambda: model.to(torch.device("cuda", 0))):
        assert move() is model
        assert torch.cuda.memory_allocated() <= before + 4096
        with torch.no_grad():
            x = torch.randn(2, 256, device="cuda")
            assert torch.equal(model(x), ref(x))
    with pytest.raises(stagehand.StagehandError, match="under stagehand"):
        model.cpu()
    s.runtime(model).shutdown()


# ---------------------------------------------------------------------- 63, 65: compiled models


class Counter:
    """A backend of torch.compile that counts its graphs and runs them as they are."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return graph.forward


@pytest.mark.parametrize("way", ["model", "blocks"])
def test_63_compiled_models_with_two_batch_sizes(way):
    """A compiled block stays so. A model that is compiled round the wrapping runs uncompiled, which is said once."""
    if way == "blocks":
        s.needs_regions()
    torch._dynamo.reset()
    model, ref = pair(s.Stack, 6, 40)
    counter = Counter()
    call = torch.compile(model, backend=counter) if way == "model" else model
    if way == "blocks":
        for block in model.blocks:
            block.compile(backend=counter)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for batch in (4, 4, 7, 4, 7):
            x = model.example(batch)[0]
            for net, run in ((model, call), (ref, ref)):
                net.zero_grad()
                run(x).pow(2).sum().backward()
            same_grads(model, ref)
            with torch.no_grad():
                assert s.same(call(x), ref(x))
    assert sum("torch.compile has no effect" in str(warning.message) for warning in seen) == (way == "model")
    assert len(s.runtime(model).compiled) == (len(model.blocks) if way == "blocks" else 0)
    assert counter.graphs <= 2 * len(model.blocks)


def test_63_inductor_gives_the_same_values():
    torch._dynamo.reset()
    model, ref = pair(s.Stack, 4, 40, frozen=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", RuntimeWarning)
        call = torch.compile(model, backend="inductor", fullgraph=False)
        for batch in (4, 7, 4):
            x = model.example(batch)[0]
            assert s.same(call(x), ref(x))


def test_65_budgets_that_change_compile_nothing_anew():
    torch._dynamo.reset()
    model, ref = pair(s.Stack, 6, 40, frozen=True, budget=lambda m: 2 * s.nbytes(m))
    counter = Counter()

    def around(x):
        return torch.sin(model(torch.cos(x)))

    compiled = torch.compile(around, backend=counter)
    budgets = [s.tight_budget(model), s.nbytes(model), s.tight_budget(model) + 30_000]
    x = model.example()[0]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore", RuntimeWarning)
        first = None
        for turn in range(10):
            s.runtime(model).set_vram_budget(budgets[turn % 3])
            assert s.same(compiled(x), torch.sin(ref(torch.cos(x))))
            first = counter.graphs if first is None else first
    assert counter.graphs == first


# ---------------------------------------------------------------------- own


def scaled(self, x):
    return F.linear(x, self.weight, self.bias) * 2


def test_own_a_forward_behind_functools_wraps_that_writes_its_weight_counts():
    """functools.wraps copies where a function says that it is from."""
    model, ref = pair(s.Stack, 4, 40, frozen=True)
    before = nn.Linear.forward

    @functools.wraps(before)
    def halving(self, x):
        self.weight.data.mul_(0.5)
        return before(self, x)

    agree(model, ref, 2)
    nn.Linear.forward = halving
    try:
        agree(model, ref, 3)
    finally:
        nn.Linear.forward = before
    agree(model, ref, 2)
    same_weights(model, ref)


class Twice(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


@pytest.mark.parametrize("frozen", [True, False])
def test_own_a_class_whose_forward_is_patched_after_wrapping(frozen):
    """`nn.Linear.forward = ...`, as extensions do it for all models at once, and back."""
    model, ref = pair(s.Stack, 5, 40, frozen=frozen, link=1e8)
    before = nn.Linear.forward
    for patched in (True, False, True, False):
        nn.Linear.forward = scaled if patched else before
        try:
            agree(model, ref, 2)
            x = model.example()[0]
            for net in (model, ref):
                net(x.clone().requires_grad_()).pow(2).sum().backward()
            same_grads(model, ref)
        finally:
            nn.Linear.forward = before


@card.on_the_host
def test_own_a_module_that_is_given_another_class():
    model, ref = pair(s.Stack, 5, 40, frozen=True, link=1e8)
    agree(model, ref, 1)
    for net in (model, ref):
        net.blocks[1].up.__class__ = Twice
        net.blocks[3].__class__ = type("Quiet", (s.Block,), {"forward": lambda self, x: x + self.up(x)[:, :40]})
    agree(model, ref, 3)
    for net in (model, ref):
        net.blocks[1].up.__class__ = nn.Linear
    agree(model, ref, 2)
    s.runtime(model).shutdown()
    with torch.no_grad():
        x = model.example()[0]
        assert s.near(model(x), ref(x), atol=1e-6 if card.ON_CARD else 1e-8)


@pytest.mark.parametrize("calls_old", [True, False])
def test_own_a_forward_that_is_replaced_on_the_instance_and_outlives_the_runtime(calls_old):
    model, ref = pair(s.Stack, 5, 40, frozen=True, link=1e8)
    agree(model, ref, 1)
    for net in (model, ref):
        for part in (net.blocks[1].up, net.blocks[2], net):
            old = part.forward
            if calls_old:
                part.forward = lambda *args, old=old: old(*args) * 1.5
            elif isinstance(part, nn.Linear):
                part.forward = lambda x, part=part: F.linear(x, part.weight) - part.bias
    agree(model, ref, 3)
    s.runtime(model).shutdown()
    with torch.no_grad():
        x = model.example()[0]
        assert s.near(model(x), ref(x), atol=1e-6 if card.ON_CARD else 1e-8)
    managed(model, s.tight_budget(model))
    agree(model, ref, 2)


def test_own_every_kind_of_hook_fires_as_often_and_in_the_same_order():
    model, ref = pair(s.Stack, 4, 40, link=1e8)
    logs = []
    for net in (model, ref):
        log = []
        logs.append(log)
        names = {module: name for name, module in net.named_modules()}

        def note(kind, log=log, names=names):
            return lambda module, *args, **kwargs: log.append((kind, names[module]))

        for module in net.modules():
            module.register_forward_pre_hook(note("pre"), with_kwargs=True)
            module.register_forward_hook(note("after"), always_call=True)
            module.register_full_backward_pre_hook(note("backward pre"))
            module.register_full_backward_hook(note("backward"))
        net.blocks[1].register_forward_hook(lambda module, args, out: out * 2)
        net.blocks[2].register_full_backward_hook(lambda module, grads, outs: tuple(g * 0.5 for g in grads))
        net.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    for _ in range(3):
        x = model.example()[0]
        for net in (model, ref):
            net(x).pow(2).sum().backward()
        same_grads(model, ref)
    assert logs[0] == logs[1] and len(logs[0]) > 100


def test_own_calls_of_the_runtime_inside_a_pass():
    """What cannot be done there is refused and changes nothing; the rest answers; the pass is right either way."""
    calls = {
        "set_vram_budget": lambda r: r.set_vram_budget(r.session.budget + 4096), "free": lambda r: r.free(1),
        "none": lambda r: r.set_vram_budget(None), "stats": lambda r: r.stats, "plan": lambda r: r.plan,
        "report": lambda r: r.report, "synchronize": lambda r: r.synchronize(), "begin_step": lambda r: r.begin_step(),
        "end_step": lambda r: r.end_step(), "shutdown": lambda r: r.shutdown(),
        "managed_forward": lambda r: r.managed_forward().__enter__, "telemetry": lambda r: r.telemetry.hit_rate(),
        "half": lambda r: r.model.half(), "layer": lambda r: stagehand.layer(r.model, vram_budget=10**6, device="sim"),
        "state_dict": lambda r: r.model.state_dict(), "move": lambda r: r.model.to("meta"),
    }
    refused = set()
    for name, call in calls.items():
        model, ref = pair(s.Stack, 4, 40, frozen=True)

        def hook(module, args, out, name=name, call=call, model=model):
            try:
                call(s.runtime(model))
            except stagehand.StagehandError:
                refused.add(name)

        handle = model.blocks[2].register_forward_hook(hook)
        agree(model, ref, 2)
        handle.remove()
        agree(model, ref, 2)
        s.runtime(model).shutdown()
    assert {"set_vram_budget", "free", "shutdown", "half", "layer", "move"} <= refused
    assert not refused & {"stats", "plan", "report", "synchronize", "state_dict", "telemetry"}


@card.on_the_host
def test_own_tracers_are_refused_by_name_and_work_after_shutdown():
    """A traced graph would hold the tensors of its pass: places for ever, and old values."""
    model, ref = pair(s.Stack, 3, 40, frozen=True)
    x = model.example()
    with torch.no_grad():
        for trace in (lambda: torch.jit.trace(model, x), lambda: torch.export.export(model, x),
                      lambda: torch.export.export(model, x, strict=False),
                      lambda: torch.jit.trace(model.blocks[1], x)):
            with pytest.raises(stagehand.StagehandError, match="traced or exported.*shutdown"):
                trace()
            agree(model, ref, 2)
        s.runtime(model).shutdown()
        assert torch.allclose(torch.jit.trace(model, x)(*x), ref(*x))


def test_own_a_forward_has_the_attributes_of_what_it_stands_for():
    class Marked(nn.Linear):
        def forward(self, x):
            return super().forward(x)

        forward.needs_mask = True

    model = s.made(lambda: nn.Sequential(*(Marked(48, 48) for _ in range(4))))
    code, self_of = model[0].forward.__code__, model[0].forward.__self__
    managed(model, 3 * s.nbytes(model[0]))
    assert model[0].forward.__code__ is code and model[0].forward.__self__ is self_of
    assert model[0].forward.needs_mask and not hasattr(model[0].forward, "unknown")


def test_own_modes_of_dispatch_see_the_same_operators():
    """Profilers and counters of operations stand round a pass: the counts of the unwrapped model, and right values."""
    from torch.utils.flop_counter import FlopCounterMode

    model, ref = pair(s.Stack, 5, 40, link=1e8)
    counts = []
    for net in (model, ref):
        with FlopCounterMode(display=False) as flops:
            net(model.example()[0]).sum().backward()
        counts.append(flops.get_total_flops())
    assert counts[0] == counts[1] > 0
    model.zero_grad(), ref.zero_grad()
    x = model.example()[0]
    with torch.autograd.profiler.profile():
        for net in (model, ref):
            net(x).sum().backward()
    same_grads(model, ref)
