"""Field cases X: steps, threads, first uses, budgets."""

from __future__ import annotations

import gc
import threading
import weakref

import card
import pytest
import support as s
import torch
from pairs import both, pair, same_grads, same_weights
from pairs import ends as ends  # noqa: PLC0414: a fixture
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import Checkpointed, infer, managed, run

import stagehand
from stagehand.weights import leftovers

TRAINED = {"frozen": False, "link": None}


def stop(model):
    run(model).shutdown()


# ---------------------------------------------------------------------- 223: what ends a step


@pytest.mark.parametrize("mode", ["block", "layer"])
def test_223_end_step_ends_the_step_whose_output_lives_on(mode):
    model, ref = managed(mode=mode, **TRAINED)
    runtime, x = run(model), model.example()[0]
    for step in range(1, 8):
        with runtime.managed_forward():
            out = model(x)
        runtime.end_step()
        card.finish()
        assert runtime.stats["steps"] == len(runtime.telemetry.history) == step
        assert s.same(out, ref(x))
    assert runtime.stats["demand_loads"] == 0 and runtime.stats["planned"]
    out.sum().backward()
    ref(x).sum().backward()
    same_grads(model, ref)
    stop(model)


@pytest.mark.parametrize("mode", ["block", "layer"])
@pytest.mark.parametrize("context", [False, True])
def test_223_without_end_step_the_next_pass_ends_it(mode, context):
    model, ref = managed(mode=mode, **TRAINED)
    runtime, x = run(model), model.example()[0]
    for step in range(4):
        if context:
            with runtime.managed_forward():
                out = model(x)
        else:
            out = model(x)
        assert s.same(out, ref(x)) and runtime.stats["steps"] == step
        assert runtime.stats["planned"] == (step > 0)
    if mode == "layer":
        assert runtime.mode == "scheduled"
    stop(model)


def passes(net, xs, after):
    outs = []
    for x in xs:
        outs.append(net(x))
        after(net)
    return outs


def ended(net):
    if "_stagehand_runtime" in net.__dict__:
        run(net).end_step()


BACKWARDS = {
    "first to last": lambda outs: [out.pow(2).sum().backward() for out in outs],
    "last to first": lambda outs: [out.pow(2).sum().backward() for out in outs[::-1]],
    "a sum": lambda outs: sum(out.pow(2).sum() for out in outs).backward(),
    "the first, twice": lambda outs: [outs[0].sum().backward(retain_graph=again) for again in (True, False)],
    "the first alone": lambda outs: outs[0].pow(2).sum().backward(),
    "with a graph of its own": lambda outs: [torch.autograd.grad(out.pow(2).sum(), out, create_graph=True)[0].sum()
                                             .backward() for out in outs],
}


@pytest.mark.combinations("each may be the only test of a fault")
@pytest.mark.parametrize("how", BACKWARDS)
@pytest.mark.parametrize("after", [ended, lambda net: None], ids=["end_step", "next pass"])
@pytest.mark.parametrize("build", [s.Stack, Checkpointed])
def test_223_backward_through_an_output_of_an_ended_step(how, after, build):
    model, ref = managed(build, mode="block", **TRAINED)
    xs = [model.example()[0] for _ in range(3)]
    for _ in range(2):
        for net in (model, ref):
            net.zero_grad()
            BACKWARDS[how](passes(net, xs, after))
        same_grads(model, ref)
    assert s.same(infer(model, xs[0]), infer(ref, xs[0]))
    stop(model)


def test_223_a_weight_written_behind_an_ended_step_is_refused_by_backward():
    model, ref = managed(mode="block", **TRAINED)
    x = model.example()[0]

    def written(net):
        out = net(x)
        ended(net)
        with torch.no_grad():
            net.blocks[1].up.weight.mul_(2)
        out.sum().backward()

    errors = both(model, ref, written)
    assert all(isinstance(e, RuntimeError) and "modified by an inplace operation" in str(e) for e in errors)
    assert s.same(infer(model, x), infer(ref, x))
    stop(model)


def test_223_passes_that_share_a_backward_are_one_step_once_that_is_known():
    """Two forwards and a backward through both: the first time they are two steps."""
    model, ref = managed(mode="layer", **TRAINED)
    a, b = model.example()[0], model.example()[0]
    counts = []
    for _ in range(6):
        for net in (model, ref):
            net.zero_grad()
            (net(a).sum() + net(b).pow(2).sum()).backward()
        same_grads(model, ref)
        counts.append((run(model).stats["steps"], run(model).stats["demand_loads"]))
    assert [steps for steps, _ in counts] == [2, 3, 4, 5, 6, 7]
    assert counts[-1][1] == counts[3][1], "the plan has both forwards"
    outs = [model(a) for _ in range(20)]  # now without a backward
    assert run(model).stats["steps"] >= 7 + 20 - 8
    del outs
    stop(model)


@pytest.mark.parametrize("gradients", [False, True])
def test_223_a_loop_that_stays_in_managed_forward_has_steps(gradients):
    model, ref = managed(mode="block", **TRAINED)
    runtime, x = run(model), model.example()[0]
    with runtime.managed_forward(), torch.set_grad_enabled(gradients):
        for _ in range(20):
            assert s.same(model(x), ref(x))
        assert runtime.stats["steps"] == 2 and runtime.stats["planned"]
        for step in range(3, 6):
            runtime.end_step()
            assert s.same(model(x), ref(x))
            assert runtime.stats["steps"] == step
    runtime.end_step()
    assert runtime.stats["steps"] == 6
    stop(model)


def test_223_end_step_inside_a_call_a_backward_or_a_step_ends_it_there():
    model, ref = managed(mode="block", **TRAINED)
    runtime, x = run(model), model.example()[0]
    runtime.end_step()
    assert runtime.stats["steps"] == 0, "there was none"
    hook = model.blocks[2].register_forward_hook(lambda *_: runtime.end_step())
    out = model(x)
    assert runtime.stats["steps"] == 1
    hook.remove()
    out.sum().backward()
    ref(x).sum().backward()
    same_grads(model, ref)
    out = model(x)
    model.blocks[2].up.weight.register_post_accumulate_grad_hook(lambda _: runtime.end_step())
    before = runtime.stats["steps"]
    out.sum().backward()
    assert runtime.stats["steps"] == before + 1
    runtime.begin_step()
    out = model(x)
    runtime.end_step()
    runtime.end_step()
    assert runtime.stats["steps"] == before + 2
    stop(model)
    runtime.end_step()


def test_223_end_step_by_another_thread_ends_a_pass_with_its_end():
    model, ref = managed(mode="block", frozen=True, link=None)
    runtime, x = run(model), model.example()[0]
    inside, go = threading.Event(), threading.Event()
    model.blocks[1].register_forward_hook(lambda *_: (inside.set(), go.wait(20)) and None)
    outs = []
    thread = threading.Thread(target=lambda: outs.append(infer(model, x)))
    thread.start()
    assert inside.wait(20)
    runtime.end_step()
    assert runtime.session.steps.is_open, "a call is under way"
    go.set()
    thread.join(20)
    assert s.same(outs[0], infer(ref, x)) and not runtime.session.steps.is_open
    stop(model)


def test_223_parts_called_by_hand_behind_end_step_leave_weights_that_may_be_written():
    model, ref = managed(mode="block", frozen=False, link=1e6)
    runtime, x = run(model), card.there(model.example()[0])
    for step in range(4):
        with runtime.managed_forward(), torch.no_grad():
            model(x)
            runtime.end_step()
            part = model.blocks[0](x)
        assert s.same(part, infer(ref.blocks[0], x))
        for net in (model, ref):
            for p in net.parameters():
                p.data.mul_(1.01)
    assert s.same(infer(model, x), infer(ref, x))
    stop(model)


# ---------------------------------------------------------------------- 238: lists of parameters behind a backward


class Listing(s.Stack):
    """Its forward lists its parameters, and notes what they are."""

    def forward(self, x):
        self.listed = [type(p).__name__ for p in self.blocks.parameters()]
        return super().forward(x)


def masters_of(model):
    """name -> Parameter, as outside of all contexts."""
    return dict(model.named_parameters())


def test_238_behind_a_backward_inside_a_step_lists_of_parameters_give_masters():
    model, ref = managed(Listing, mode="block", **TRAINED)
    runtime, x = run(model), model.example()[0]
    masters = masters_of(model)
    runtime.begin_step(0)
    with runtime.managed_forward(), runtime.managed_backward():
        out = model(x)
        names = set(model.listed)
        assert any(p is not masters[name] for name, p in model.named_parameters()), "a backward is to come"
        out.sum().backward()
        for name, p in model.named_parameters():
            assert p is masters[name] and p.grad is not None and p.grad.device == p.device, name
        assert all(p is q for p, q in zip(model.parameters(), masters.values()))
        part = model.blocks[1]
        assert all(p is part._parameters.get(key, p) or p is dict.get(m._parameters, key)
                   for m in part.modules() for key, p in m._parameters.items() if p is not None)
        model(x)
        assert set(model.listed) == names, "the forward of another pass sees what the first saw"
    runtime.end_step()
    stop(model)


def trainings():
    def clip(net, opt):
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        opt.step()

    def fresh(net, opt):
        torch.optim.SGD(net.parameters(), lr=0.1).step()

    def by_hand(net, opt):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(p.grad, alpha=-0.1)

    def in_data(net, opt):
        for p in net.parameters():
            p.data -= 0.1 * p.grad

    def by_module(net, opt):
        with torch.no_grad():
            for part in net.modules():
                for key, p in part.named_parameters(recurse=False):
                    p.copy_(p - 0.1 * p.grad)

    def groups(net, opt):
        torch.optim.Adam([{"params": [p]} for p in net.parameters()], lr=0.01).step()

    return [clip, fresh, by_hand, in_data, by_module, groups]


@pytest.mark.combinations("each may be the only test of a fault")
@card.on_the_host
@pytest.mark.parametrize("update", trainings(), ids=lambda f: f.__name__)
@pytest.mark.parametrize("where", ["backward", "forward", "step"])
def test_238_updates_inside_a_step_are_those_of_the_plain_model(update, where):
    model, ref = managed(mode="block", **TRAINED)
    runtime, x = run(model), model.example()[0]
    optimizers = {id(net): torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, ref)}
    average = [p.detach().clone() for p in ref.parameters()]
    averages = {id(net): [a.clone() for a in average] for net in (model, ref)}

    def learn(net):
        net(x).pow(2).mean().backward()
        update(net, optimizers[id(net)])
        with torch.no_grad():
            for mean, p in zip(averages[id(net)], net.parameters()):
                mean.lerp_(p, 0.1)
        net.zero_grad()

    for number in range(3):
        learn(ref)
        if where == "step":
            runtime.begin_step(number)
            learn(model)
            runtime.end_step()
        else:
            with runtime.managed_forward() if where == "forward" else runtime.managed_backward():
                learn(model)
        same_weights(model, ref)
    assert all(s.same(a, b) for a, b in zip(averages[id(model)], averages[id(ref)]))
    assert s.same(infer(model, x), infer(ref, x))
    stop(model)


def test_238_several_backwards_in_one_context_add_up():
    model, ref = managed(Listing, mode="block", **TRAINED)
    runtime, masters = run(model), masters_of(model)
    xs = [model.example()[0] for _ in range(3)]
    with runtime.managed_forward():
        for x in xs:
            model(x).pow(2).sum().backward()
            assert all(p is masters[name] for name, p in model.named_parameters())
    for x in xs:
        ref(x).pow(2).sum().backward()
    same_grads(model, ref)
    stop(model)


def test_238_a_hook_of_a_gradient_sees_masters_in_lists():
    model, ref = managed(mode="block", **TRAINED)
    runtime, x, masters = run(model), model.example()[0], masters_of(model)
    seen = []
    masters["blocks.1.up.weight"].register_post_accumulate_grad_hook(
        lambda p: seen.append(all(q is masters[name] for name, q in model.named_parameters())))
    with runtime.managed_forward(), runtime.managed_backward():
        model(x).sum().backward()
    assert seen == [True]
    stop(model)


# ---------------------------------------------------------------------- 239: what failed steps leave


class Fan(torch.autograd.Function):
    """Gradients of its weights are ready together; `given` has weakrefs of them."""

    given: list = []

    @staticmethod
    def forward(ctx, x, *weights):
        ctx.save_for_backward(*weights)
        return x + sum(weight.mean(0) for weight in weights)

    @staticmethod
    def backward(ctx, grad):
        grads = [(grad.sum(0) / len(w)).expand_as(w).clone() for w in ctx.saved_tensors]
        Fan.given += [weakref.ref(g) for g in grads]
        return grad, *grads


class Fanned(torch.nn.Module):
    def __init__(self, d=32, n=4):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.randn(2 * d, d)) for _ in range(n))
        self.lin = torch.nn.Linear(d, d)

    def forward(self, x):
        return Fan.apply(self.lin(x), *self.weights)


class FannedNet(torch.nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Fanned(d) for _ in range(3))

    def forward(self, x, fail=False):
        for i, block in enumerate(self.blocks):
            if fail and i == 2:
                raise Failed
            x = block(x)
        return x

    def example(self):
        return (torch.randn(4, 32),)


class Failed(Exception):
    pass


def tensors_alive():
    gc.collect()
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("held", [False, True])
def test_239_failed_steps_leave_no_tensors_and_no_leases(held):
    """An exception before, after and in backward, in turn. In backward gradients are under way."""
    model, ref = managed(FannedNet, mode="block", extra=1 << 16, **TRAINED)
    runtime, x = run(model), model.example()[0]
    failing = []

    def fails(_):
        if failing:
            raise Failed

    model.blocks[1].weights[3].register_post_accumulate_grad_hook(fails)

    def step(where):
        with runtime.managed_forward():
            out = model(x, where == "before")
        if where == "after":
            raise Failed
        failing.extend([1] * (where == "in"))
        with runtime.managed_backward():
            out.sum().backward()

    def take(where):
        if held:
            runtime.begin_step()
        try:
            step(where)
        except Failed:
            pass
        if held:
            runtime.end_step()
        failing.clear()
        model.zero_grad()
        card.settle_autograd()

    for where in (None, "before", "after", "in"):
        take(where)
    before = tensors_alive()
    Fan.given.clear()
    for _ in range(4):
        for where in ("before", "after", "in"):
            take(where)
    assert len(Fan.given) > 12 and not [g for g in Fan.given if g() is not None]
    assert tensors_alive() <= before
    runtime.session.core.poll()  # the ends of leases are noted there
    assert runtime.stats["leased_bytes"] == 0
    for net in (model, ref):
        net(x).sum().backward()
    same_grads(model, ref)
    stop(model)


def test_239_a_failed_backward_outside_of_contexts_leaves_nothing_behind_the_next_pass():
    model, _ = managed(FannedNet, mode="block", extra=1 << 16, **TRAINED)
    x = model.example()[0]

    def fails(_):
        raise Failed

    hook = model.blocks[1].weights[3].register_post_accumulate_grad_hook(fails)
    Fan.given.clear()
    with pytest.raises(Failed):
        model(x).sum().backward()
    assert Fan.given
    hook.remove()
    infer(model, x)
    card.settle_autograd()
    assert not [g for g in Fan.given if g() is not None]
    stop(model)


def test_239_what_is_done_about_leftovers_shows_to_no_mode_of_the_user():
    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Sees():
        leftovers.drop()
    assert not seen
