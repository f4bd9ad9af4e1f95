"""Usual calls of modules with one weight, which the extension makes by itself, with gradients recorded and without:
what they show, keep and let go of."""

import contextlib
import gc
import importlib
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter

import card
import pytest
import torch
from support import aligned_copy, runtime, same, torch_at_least, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from stagehand._torch import top_hooks
from stagehand.weights.hooks import Frame

WIDTH = 64


class Own(nn.Linear):
    """A layer with a forward that is not torch's. todo: called with the layer and its input."""

    todo = None

    def __init__(self):
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        if self.todo is not None:
            self.todo(x)
        return x @ self.weight


def chain(kind, count=6, grad=False):
    torch.manual_seed(3)
    layers = [Own() if kind is Own else nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count)]
    return nn.Sequential(*layers).requires_grad_(grad)


def wrapped(model, places=3):
    """Streams through so many places; a ring of equal units brings each back to its place."""
    ref = aligned_copy(model)
    wrap(model, places * WIDTH * WIDTH * 4)
    return ref


def test_calls_take_no_reference_that_is_not_theirs():
    """PyTorch 2.6 and 2.7 have a function that returns None without a reference to it: enough calls end the process."""
    model = chain(nn.Linear)
    wrapped(model)
    x = torch.ones(2, WIDTH)
    with torch.no_grad():
        model(x)
        before = sys.getrefcount(None)
        for _ in range(50):
            model(x)
    assert sys.getrefcount(None) > before - 40  # 350 calls of modules; Python's own come and go


@pytest.fixture
def made(monkeypatch):
    """A list that gets an item with each tensor that is made for a call."""
    found, session = [], importlib.import_module("stagehand.session.session")
    before = session.device_copy

    def counted(*args):
        found.append(args[0].shape)
        return before(*args)

    monkeypatch.setattr(session, "device_copy", counted)
    return found


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [Own, nn.Linear])
def test_no_tensor_is_made_anew_where_units_come_back_to_their_places(kind, grad, mode, made):
    model, x = chain(kind, grad=grad), torch.randn(2, WIDTH)
    ref = wrapped(model)
    counts = []
    with mode():
        for _ in range(20):  # a plan that is made anew moves the places
            made.clear()
            assert same(model(x), ref(x))
            counts.append(len(made))
    assert runtime(model).stats["copies"] > 40
    assert counts.count(0) > 3, counts


def graph_over(weight):
    with torch.inference_mode(False), torch.enable_grad():
        return torch.ones(1, requires_grad=True, device=weight.device) * weight


HOLD = {
    "itself": lambda weight: weight, "view": lambda weight: weight[1:3], "detached": lambda weight: weight.detach(),
    "storage": lambda weight: weight.untyped_storage(),
    **({} if card.ON_CARD else {"array": lambda weight: weight.detach().numpy()}),
    "capsule": lambda weight: torch.from_dlpack(weight.detach()), "graph": graph_over}


@pytest.mark.parametrize("how", HOLD)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_whatever_holds_a_weight_holds_its_place(how, mode):
    model, x, held = chain(Own), torch.randn(2, WIDTH), []
    ref = wrapped(model, places=4)
    with mode():
        for _ in range(4):
            model(x)
        for layer, wanted in zip(model, ref):  # some are resident, others have their places taken by the next
            layer.todo = lambda x, layer=layer: held.append(HOLD[how](layer.weight))
            model(x)
            layer.todo = None
            for _ in range(2):
                assert same(model(x), ref(x))
            found, wanted = held.pop(), wanted.weight.detach()
            if how == "storage":
                assert found.tolist() == wanted.reshape(-1).view(torch.uint8).tolist()
            elif how == "graph":
                assert same(found.grad_fn._saved_other, wanted)
            else:
                assert same(torch.as_tensor(found), HOLD[how](wanted) if how == "view" else wanted)
            del found
        assert same(model(x), ref(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_weak_reference_ends_with_the_call(mode):
    model, x, held = chain(Own), torch.randn(2, WIDTH), []
    wrapped(model)
    layer = model[1]
    layer.todo = lambda x: held.append(weakref.ref(layer.weight))
    with mode():
        for _ in range(4):
            model(x)
    assert len(held) == 4 and all(ref() is None for ref in held)


WRITES = {
    "in place": lambda weight: weight.mul_(1.5), "by data": lambda weight: weight.data.mul_(1.5),
    "other data": lambda weight: setattr(weight, "data", weight.data * 1.5)}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_what_a_call_writes_is_in_the_master(how, mode):
    model, x = chain(Own), torch.randn(2, WIDTH)
    ref = wrapped(model)
    with mode():
        for step in range(6):
            model[2].todo = ref[2].todo = None
            if step in (2, 4):
                model[2].todo = lambda x: WRITES[how](model[2].weight)
                ref[2].todo = lambda x: WRITES[how](ref[2].weight)
            assert same(model(x), ref(x))
            assert same(model[2].weight, ref[2].weight)


@pytest.mark.parametrize("kind", [Own, nn.Linear])
def test_masters_that_change_between_passes_are_seen(kind):
    model, x = chain(kind), torch.randn(2, WIDTH)
    ref = wrapped(model)
    changes = [
        lambda layer: layer.weight.mul_(0.5), lambda layer: layer.weight.data.add_(0.25),
        lambda layer: layer.weight.requires_grad_(True), lambda layer: setattr(layer.weight, "mark", "here"),
        lambda layer: setattr(layer.weight, "data", layer.weight.data * 2),
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH) / 4)),
        lambda layer: layer.weight.requires_grad_(False)]
    with torch.no_grad():
        for change in changes:
            for _ in range(3):
                assert same(model(x), ref(x))
            change(model[3])
            change(ref[3])
            assert same(model(x), ref(x))


def test_attributes_go_both_ways():
    model, x, seen = chain(Own), torch.randn(2, WIDTH), []
    wrapped(model)
    layer = model[3]
    with torch.no_grad():
        for _ in range(4):
            model(x)
        layer.weight.mark = "given"
        layer.todo = lambda x: seen.append(layer.weight.mark)
        model(x)
        del layer.weight.mark
        layer.todo = lambda x: setattr(layer.weight, "other", 5)
        model(x)
        assert layer.weight.other == 5 and not hasattr(layer.weight, "mark")
        layer.todo = lambda x: seen.append((layer.weight.other, hasattr(layer.weight, "mark")))
        model(x)
    assert seen == ["given", (5, False)]


def test_gradients_may_be_switched_on_inside():
    model, x, seen = chain(Own, grad=True), torch.randn(2, WIDTH), []
    ref = wrapped(model)

    def look(layer):
        def inside(x):
            with torch.enable_grad():
                seen.append(torch.autograd.grad((x @ layer.weight).square().sum(), layer.weight)[0])
        return inside

    model[2].todo, ref[2].todo = look(model[2]), look(ref[2])
    with torch.no_grad():
        for _ in range(4):
            assert same(model(x), ref(x))
            assert same(*seen[-2:])


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_comes_and_goes(grad):
    model, x = chain(nn.Linear, grad=grad), torch.randn(2, WIDTH)
    ref = wrapped(model)
    with torch.no_grad():
        for step in range(8):
            with torch.autocast("cpu", torch.bfloat16) if step % 3 == 1 else contextlib.nullcontext():
                for _ in range(2):
                    assert same(model(x), ref(x))
                with torch.no_grad():
                    model[1].weight.mul_(1.5)
                    ref[1].weight.mul_(1.5)


@pytest.mark.combinations("each kind of error leaves a call by another way")
@pytest.mark.parametrize("error", [ValueError, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_call_that_fails_lets_go(error, mode):
    model, x, held = chain(Own), torch.randn(2, WIDTH), []
    ref = wrapped(model)

    def fail(x):
        held.append(model[2].weight)
        raise error("on purpose")

    with mode():
        for _ in range(4):
            model(x)
        model[2].todo = fail
        for _ in range(3):
            with pytest.raises(error, match="on purpose") as caught:
                model(x)
        assert caught.value.__context__ is None
        assert all(tensor.numel() == 0 for tensor in held)
        assert not runtime(model).session.local.frames
        assert top_hooks is None or top_hooks(True) is None
        model[2].todo = None
        assert same(model(x), ref(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_an_error_at_the_end_of_a_call_has_its_error_as_context(mode):
    model, x = chain(Own), torch.randn(2, WIDTH)
    wrapped(model)

    def fail(x):
        model[2].weight.data = torch.zeros(3)
        raise ValueError("on purpose")

    model[2].todo = fail
    with mode(), pytest.raises(stagehand.StagehandError, match="another shape") as caught:
        model(x)
    assert isinstance(caught.value.__context__, (ValueError, stagehand.StagehandError))


def test_a_module_may_call_itself():
    model, x = chain(Own), torch.randn(2, WIDTH)
    ref = wrapped(model)

    def again(layer):
        def inside(x):
            todo, layer.todo = layer.todo, None
            try:
                layer(x).sum()
                layer.weight.add_(1e-3)
            finally:
                layer.todo = todo
        return inside

    model[2].todo, ref[2].todo = again(model[2]), again(ref[2])
    with torch.no_grad():
        for _ in range(4):
            assert same(model(x), ref(x))


def test_other_threads_see_masters_meanwhile():
    model, x, seen = chain(Own), torch.randn(2, WIDTH), []
    wrapped(model)
    layer = model[2]
    master = layer.weight

    def look(x):
        other = threading.Thread(target=lambda: seen.append((layer.weight, layer.weight is master)))
        other.start()
        other.join()
        seen.append(layer.weight is master)

    layer.todo = look
    with torch.no_grad():
        model(x)
        model(x)
    assert [second for _, second in seen[::2]] == [True, True] and seen[1::2] == [False, False]


def test_a_weight_that_is_replaced_inside_its_call_is_the_new_one():
    model, x = chain(Own), torch.randn(2, WIDTH)
    ref = wrapped(model)

    def replace(layer):
        def inside(x):
            layer.todo = None
            layer.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 0.125, device=card.TORCH), requires_grad=False)
        return inside

    with torch.no_grad():
        for step in range(5):
            if step == 2:
                model[2].todo, ref[2].todo = replace(model[2]), replace(ref[2])
            assert same(model(x), ref(x))


def test_a_closed_model_that_is_still_held_is_plain():
    model, x = chain(nn.Linear), torch.randn(2, WIDTH)
    ref = wrapped(model)
    forward = model[1].forward
    with torch.no_grad():
        for _ in range(3):
            model(x)
        runtime(model).shutdown()
        assert same(forward(x), ref[1](x))


@pytest.mark.parametrize("grad", [False, True])
def test_another_thread_may_assign_a_weight_while_a_call_waits_for_it(grad):
    model, x, ended = chain(nn.Linear, 8, grad), torch.randn(2, WIDTH), threading.Event()
    ref = aligned_copy(model)
    wrap(model, 4 * WIDTH * WIDTH * 4, link=2e8)
    weights, want, errors, assigned = [layer.weight for layer in model], ref(x), [], 0

    def assign():
        nonlocal assigned
        try:
            while not ended.is_set():
                for layer, weight in zip(model, weights):
                    layer.weight = weight
                    assigned += 1
        except Exception as error:
            errors.append(error)

    before, thread = sys.getswitchinterval(), threading.Thread(target=assign)
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        passes = 0
        while thread.is_alive() and (passes < 40 or assigned <= 100):
            with torch.set_grad_enabled(grad):
                assert same(model(x), want)
            passes += 1
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(before)
    assert not errors and assigned > 100


def test_a_call_that_goes_on_while_another_thread_shuts_down_is_told():
    model, x, raised = chain(Own), torch.randn(2, WIDTH), []
    wrapped(model)
    parameters = model[3]._parameters

    def shut_down(x):
        model[2].todo = None
        other = threading.Thread(target=runtime(model).shutdown)
        other.start()
        other.join(20)
        for read in (lambda: parameters["weight"], lambda: list(parameters.values())):
            with pytest.raises(stagehand.StagehandError, match="shut") as error:
                read()
            raised.append(error)

    model[2].todo = shut_down
    with torch.no_grad(), pytest.raises(RuntimeError) if card.ON_CARD else contextlib.nullcontext():
        model[2](x)  # goes on with the weight on the host, which a card's input cannot be multiplied by
    assert len(raised) == 2


# ---------------------------------------------------------------------- with gradients


class Scale(nn.Linear):
    """Saves its input, too, where that takes a gradient."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return torch.tanh(x @ self.weight) * x


class Adapted(nn.Module):
    """A frozen layer with a small trained one beside it, as LoRA has it."""

    def __init__(self, kind=nn.Linear):
        super().__init__()
        self.base = (kind() if kind is not nn.Linear else nn.Linear(WIDTH, WIDTH, bias=False)).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Adapters(nn.Module):
    def __init__(self, count=6, checkpointed=True, kind=nn.Linear):
        super().__init__()
        self.blocks = nn.ModuleList(Adapted(kind) for _ in range(count))
        self.checkpointed = checkpointed

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


def adapters(*args, places=3):
    torch.manual_seed(5)
    model = Adapters(*args)
    ref = aligned_copy(model)
    wrap(model, places * WIDTH * WIDTH * 4 + 16384)
    return model, ref


def trained(model):
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(7), requires_grad=True)
    for param in model.parameters():
        param.grad = None
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), x.grad, *(param.grad for param in model.parameters() if param.requires_grad)]


@pytest.mark.parametrize("places", [3, 100])
@pytest.mark.parametrize("kind", [nn.Linear, Own, Scale])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_beside_frozen_weights_are_those_of_the_plain_model(checkpointed, kind, places):
    """Scale inside a checkpoint ends its part of the recomputation in the middle of its call."""
    model, ref = adapters(6, checkpointed, kind, places=places)
    for _ in range(4):
        assert all(same(a, b) for a, b in zip(trained(model), trained(ref), strict=True))
    assert not runtime(model).session.local.frames


@pytest.mark.parametrize("places", [3, 100])
def test_a_weight_that_its_own_call_sets_free_takes_a_gradient_from_there_on(places):
    model, ref = adapters(4, False, Own, places=places)
    for step in range(9):
        for net in (model, ref):
            layer = net.blocks[1].base
            layer.todo = (lambda x, layer=layer: layer.weight.requires_grad_(True)) if step in (2, 6) else None
        assert all(same(a, b) for a, b in zip(trained(model), trained(ref), strict=True))
        with torch.no_grad():
            for net in (model, ref):
                if step == 3:  # the next call after a write is no usual one
                    net.blocks[1].base.weight.mul_(0.75)
                if step in (3, 7):
                    net.blocks[1].base.weight.requires_grad_(False)
        kept = [frame for frame in gc.get_objects() if type(frame) is Frame]
        assert not any(frame.uploads or frame.saver for frame in kept)


def test_a_frozen_weight_that_is_written_before_backward_is_an_error_and_the_next_step_is_right():
    model, ref = adapters(4, False)
    trained(model)
    x = torch.randn(3, WIDTH, requires_grad=True)
    loss = model(x).sum()
    with torch.no_grad():
        for net in (model, ref):
            net.blocks[1].base.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*blocks\.1\.base\.weight"):
        loss.backward()
    del loss
    for _ in range(2):
        assert all(same(a, b) for a, b in zip(trained(model), trained(ref), strict=True))


def python_calls(work):
    """Names of the package's functions that run on this thread during the work, with their counts."""
    found = Counter()
    package = os.path.dirname(stagehand.__file__)

    def seen(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(package):
            found[frame.f_code.co_name] += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        result = work()
    finally:
        sys.setprofile(before)
    return result, found


@torch_at_least("2.8", "the compiler is told by a function of ours, and checkpoints walk their arguments")
@pytest.mark.parametrize("checkpointed", [False, True])
def test_more_frozen_layers_run_no_more_python_of_ours(checkpointed):
    counts = {}
    for layers in (4, 9):
        model, _ = adapters(layers, False, places=100)
        outer = nn.Sequential(model) if not checkpointed else model
        model.checkpointed = False
        x = torch.randn(3, WIDTH, requires_grad=True, device=card.TORCH)
        for _ in range(4):
            run = checkpoint(outer, x, use_reentrant=False) if checkpointed else outer(x)
            run.sum().backward()
        inside = (lambda: checkpoint(outer, x, use_reentrant=False)) if checkpointed else (lambda: outer(x))
        out, forward = python_calls(inside)
        _, backward = python_calls(out.sum().backward)
        counts[layers] = forward, backward
        runtime(model).shutdown()
    more = [counts[9][i] - counts[4][i] for i in range(2)]
    for found in more:
        found.pop("_hear", None)  # a plan that changes is logged, once
        if card.ON_CARD:
            found.pop("stream", None)  # PyTorch is asked which stream is current
    assert more == [Counter(), Counter()], more


def test_a_backward_on_a_daemon_thread_stops_at_its_next_weight_when_the_interpreter_ends():
    code = """
import atexit, sys, threading, time

def report():
    print(sys._current_frames()[thread.ident].f_code.co_name)

atexit.register(report)  # runs behind Stagehand's
import torch, stagehand
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(400)]).requires_grad_(False)
stagehand.layer(model, vram_budget="64MiB", device="sim")
begun = threading.Event()

def slow(grad):
    begun.set()
    time.sleep(0.02)

def work():
    x = torch.randn(2, 64, requires_grad=True)
    for layer in model:
        layer.register_forward_hook(lambda module, args, out: out.register_hook(slow) and None)
    model(x).sum().backward()

thread = threading.Thread(target=work, daemon=True)
thread.start()
begun.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.strip()) == (0, "_park"), done.stderr
