"""Spilled activations: gradients bit-equal to the run without, with bytes spilled and the peak below the limit."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import random
import threading
import time

import pytest
import torch
import torch.nn.functional as F

import card
from support import Block, Stack, aligned_copy, device, made, same, tight_budget, wrap
from support import runtime as layer_runtime
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import stagehand
from stagehand import activation
from stagehand._torch import top_hooks
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig

pytestmark = pytest.mark.usefixtures("tensors_there")

LIMIT = 160 << 10
CONFIG = dict(enabled=True, slabs_per_class=None, telemetry_file=None, max_inflight_d2h=8, max_inflight_h2d=4,
              recompute_cheap=False)


@contextlib.contextmanager
def spilling(limit=LIMIT, low=None, smallest=256, link=None, **config):
    """A runtime with byte watermarks on a simulated device, so slow that a missing wait would show."""
    made_with = ActivationStagehandConfig(**{**CONFIG, **config})
    runtime = ActivationRuntime(made_with, device(1 << 30, link or 400e6), smallest=smallest, high=limit,
                                low=limit * 3 // 4 if low is None else low, ahead_bytes=limit // 2)
    try:
        yield runtime
    finally:
        runtime.shutdown()


def gradients(function, inputs) -> list:
    for tensor in inputs:
        tensor.grad = None
    function(*inputs).backward()
    return [tensor.grad.clone() for tensor in inputs if tensor.grad is not None]


def check(function, inputs, steps=3, limit=LIMIT, **options) -> dict:
    """Gradients of `steps` steps equal those without spilling; bytes went out in each, and the peak held."""
    want = gradients(function, inputs)
    with spilling(limit, **options) as runtime:
        for step in range(steps):
            runtime.step_begin(step)
            with runtime.managed_forward():
                found = gradients(function, inputs)
            metrics = runtime.step_end()
            assert same(found, want), f"step {step}"
            assert metrics.spill_bytes > 0 and metrics.restore_bytes > 0 or metrics.activations_recomputed > 0, metrics
            assert card.peak(metrics, runtime.stats) <= limit, metrics
            assert metrics.activations_saved == (
                metrics.activations_kept + metrics.activations_spilled + metrics.activations_dropped)
            if not runtime.config.recompute_cheap:
                assert metrics.spill_bytes > 0 and not metrics.activations_dropped
        gc.collect()
        stats = runtime.stats
        assert stats["records"] == 0 and stats["kept_bytes"] == 0 and stats["slab_bytes"] == 0
        return stats


def there(make):
    """Makes a plain model on the device of the tests."""
    return lambda *args, **kwargs: make(*args, **kwargs).to(card.TORCH)


def another_save() -> None:
    """Something else is saved: what nobody has any more may go."""
    leaf(8, 16).sin().exp()


def leaf(*shape, seed=0, dtype=torch.float32):
    at_random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=at_random, dtype=dtype, device="cpu").to(card.TORCH).requires_grad_()


def deep(x, layers=12, function=lambda x, i: (x * (1 + i / 10)).sin()):
    for i in range(layers):
        x = function(x, i)
    return x.float().pow(2).sum()


# ---------------------------------------------------------------------- layouts


LAYOUTS = {
    "contiguous": lambda x, i: x.sin(),
    "transposed": lambda x, i: x.t().exp().t().sin(),
    "view": lambda x, i: (x.reshape(32, 256).sin() * x.reshape(32, 256)).reshape(64, 128),
    "expanded": lambda x, i: x.sin() * x.mean(0, keepdim=True).expand(64, 128).cos(),
    "slices": lambda x, i: torch.cat([a.sin() * b.cos() for a, b in [x.sin().chunk(2, 1)]] * 2, 1),
    "strided": lambda x, i: x.sin()[:, ::2].exp().repeat(1, 2).sin(),
    "scalar": lambda x, i: x.sin() * x.mean(),
    "empty": lambda x, i: torch.cat([x.sin(), x[:0] * x[:0]]),
    "bool": lambda x, i: torch.where(x > 0, x.sin(), x.cos()),
    "index": lambda x, i: x.sin()[torch.arange(64).flip(0)],
    "gather": lambda x, i: x.sin().gather(1, x.argsort(1)),
    "bfloat16": lambda x, i: x.bfloat16().sin().float(),
    "double": lambda x, i: x.double().sin().float(),
    "complex": lambda x, i: torch.view_as_real(
        torch.view_as_complex(x.reshape(64, 64, 2)).exp()).reshape(64, 128).tanh(),
    "conjugate": lambda x, i: (torch.view_as_complex(x.reshape(64, 64, 2).sin()).conj() * torch.view_as_complex(
        x.reshape(64, 64, 2).cos())).real.repeat(1, 2),
    "softmax": lambda x, i: x.softmax(-1) + x.sin(),
    "layernorm": lambda x, i: F.layer_norm(x, (128,)).sin(),
    "dropout": lambda x, i: F.dropout(x.sin(), 0.0, True),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_of_every_layout_are_the_same(name):
    check(lambda x: deep(x, function=LAYOUTS[name]), [leaf(64, 128)])


def test_channels_last():
    conv = there(made)(nn.Conv2d, 8, 8, 3, padding=1, frozen=False).to(memory_format=torch.channels_last)
    x = leaf(2, 8, 16, 16).detach().to(memory_format=torch.channels_last).requires_grad_()
    check(lambda x, *rest: deep(x, function=lambda x, i: conv(x.sin()).sin()), [x, *conv.parameters()])


def test_forward_mode_inside_the_context():
    """Its zero tensors have no memory to copy."""
    weights = [leaf(64, 64, seed=i) for i in range(3)]

    def both(x):
        with forward_ad.dual_level():
            h = forward_ad.make_dual(x, torch.ones_like(x))
            for weight in weights:
                h = F.gelu(h @ weight)
            out, tangent = forward_ad.unpack_dual(h)
            return out.sum() + tangent.sum()

    check(both, [leaf(64, 64)], limit=9 * 64 * 64 * 4)  # h and its tangent are there, and what makes the next two


def test_float8():
    if not hasattr(torch, "float8_e4m3fn"):
        pytest.skip("this torch has no float8")

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.to(torch.float8_e4m3fn))
            return x.sin()

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            assert x.dtype == torch.float8_e4m3fn
            return grad * x.float().cos()

    check(lambda x: deep(x, 24, function=lambda x, i: Rounded.apply(x)), [leaf(64, 256)])


def test_a_restored_tensor_looks_as_it_was_saved():
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            ctx.looks = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad) for t in tensors]
            ctx.values = [t.clone() for t in tensors]
            return tensors[0].sum()

        @staticmethod
        def backward(ctx, grad):
            saved = ctx.saved_tensors
            for tensor, look, value in zip(saved, ctx.looks, ctx.values):
                assert (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype,
                        tensor.requires_grad) == look
                assert same(tensor, value)
                seen.append(tensor.untyped_storage().data_ptr())
            return (torch.zeros_like(saved[0]),) + (None,) * (len(ctx.looks) - 1)

    with spilling(18000, low=0) as runtime, runtime.managed_forward():
        base = torch.randn(40, 60)
        whole = leaf(40, 60).sin()
        nbytes = base.nbytes
        out = Look.apply(whole, base[3:, 5:].t(), base[:, ::3], base[0, 1:2].expand(7, 4, 1), base.view(2, 20, 60))
        del base, whole
        another_save()
        out.backward()
    assert runtime.stats["spill_bytes"] == 2 * nbytes and runtime.stats["restore_bytes"] == 2 * nbytes
    assert len(set(seen)) == 2  # views of one storage share one copy


def test_what_a_node_has_been_given_stays_while_it_asks_for_more():
    class Two(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            ctx.save_for_backward(x, y)
            ctx.values = x.clone(), y.clone()
            return x * y

        @staticmethod
        def backward(ctx, grad):
            given = ctx.saved_tensors  # there is no room for the second beside the first
            assert same(given, ctx.values)
            return grad, grad

    x = leaf(64, 64)
    with spilling(20000, low=20000) as runtime:
        with runtime.managed_forward():
            y, z = x.sin(), x.cos()
            loss = Two.apply(z, y).sum() + Two.apply(y, z).sum()
            del y, z
            another_save()
        assert runtime.stats["spilled"] > 0
        loss.backward()
        assert runtime.stats["restored"] > 0


# ---------------------------------------------------------------------- what stays, what is shared


def test_a_storage_is_spilled_once_however_many_views_of_it_are_saved():
    def run(x):
        y = x.sin()
        return (y.exp() + y.t().cos().t() * y.tanh() + y[:32].sin().sum()).sum()

    x = leaf(64, 64)
    want = gradients(run, [x])
    with spilling(low=0, limit=0) as runtime:
        with runtime.managed_forward():
            loss = run(x)
            another_save()
            x.grad = None
            loss.backward()
            assert same([x.grad], want)
        stats = runtime.stats
        assert stats["spilled"] == stats["saved"] - 1 and stats["tensors"] > stats["saved"]


def test_parameters_leaves_and_small_tensors_stay():
    model = there(made)(Stack, 4, 64, frozen=False)
    x = torch.randn(4, 64)
    lasting = {p.untyped_storage().data_ptr() for p in model.parameters()}
    spilled = []
    with spilling(limit=0, low=0, smallest=1) as runtime:
        spill = runtime.saver._spill
        runtime.saver._spill = lambda shared: (
            spilled.append(shared.record.tensor.untyped_storage().data_ptr()), spill(shared))
        with runtime.managed_forward():
            model(x).sum().backward()
        assert spilled and not lasting & set(spilled)
    with spilling(limit=0, low=0, smallest=1 << 20) as runtime:
        with runtime.managed_forward():
            model(x).sum().backward()
        assert runtime.stats["saved"] == 0


def test_what_outlives_its_graph_is_not_spilled():
    table = torch.randn(64, 64)  # neither a parameter nor a leaf that wants gradients
    x = leaf(64, 64)
    want = gradients(lambda x: (x.exp() * table).exp().sum(), [x])
    with spilling(limit=0, low=0) as runtime:
        for step in range(4):
            runtime.step_begin(step)
            with runtime.managed_forward():
                assert same(gradients(lambda x: (x.exp() * table).exp().sum(), [x]), want)
            assert 0 < runtime.step_end().spill_bytes <= 2 * table.nbytes  # of the results of exp


# ---------------------------------------------------------------------- graphs


def test_the_second_step_brings_back_ahead_of_need():
    with spilling() as runtime:
        x = leaf(64, 128)
        for step in range(4):
            runtime.step_begin(step)
            with runtime.managed_forward():
                gradients(deep, [x])
            metrics = runtime.step_end()
        assert card.ON_CARD or runtime.stats["ahead"] > 0  # what PyTorch uses on a card leaves no room
        assert metrics.pool_misses == 0 and metrics.pool_hits > 0


def test_retain_graph():
    x = leaf(64, 128)
    want = gradients(deep, [x])
    with spilling() as runtime:
        with runtime.managed_forward():
            loss = deep(x)
        for _ in range(3):
            x.grad = None
            loss.backward(retain_graph=True)
            assert same([x.grad], want)
        assert runtime.stats["records"] > 0 and runtime.stats["peak_bytes"] <= LIMIT
        del loss
        gc.collect()
        assert runtime.stats["records"] == 0 and runtime.stats["slab_bytes"] == 0


def test_double_backward():
    def second(x):
        first, = torch.autograd.grad(deep(x, 8), x, create_graph=True)
        return first.pow(2).sum()

    x = leaf(64, 128)
    want = gradients(second, [x])
    with spilling() as runtime:
        for _ in range(3):
            with runtime.managed_forward():
                assert same(gradients(second, [x]), want)
        assert runtime.stats["spill_bytes"] > 0
        gc.collect()
        assert runtime.stats["records"] == 0


def test_a_graph_that_is_dropped_gives_its_memory_back():
    x = leaf(64, 128)
    with spilling(link=20e6) as runtime:
        for _ in range(5):
            with runtime.managed_forward():
                loss = deep(x)
            assert runtime.stats["slab_bytes"] > 0
            del loss
            gc.collect()
            stats = runtime.stats
            assert stats["records"] == stats["kept_bytes"] == stats["slab_bytes"] == 0
        host = stats["host_bytes"]
        assert same(gradients(deep, [x]), gradients(deep, [x])) and runtime.stats["host_bytes"] == host


@pytest.mark.parametrize("limit", [0, 1 << 30])
def test_what_was_changed_in_place_raises_as_autograd_would(limit):
    x = leaf(64, 128)

    def wrong(x):
        y = x.sin()
        z = y.exp()
        z.add_(1)
        return z.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        wrong(x).backward()
    with spilling(limit, low=0) as runtime, runtime.managed_forward():
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            wrong(x).backward()
        assert same(gradients(lambda x: x.sin().exp().sum(), [x]), gradients(lambda x: x.sin().exp().sum(), [x]))


def test_saved_again_after_a_change_is_another_record():
    def run(x):
        y = x.detach().clone()
        first = x * y
        with torch.no_grad():
            z = y.clone()
        del y
        second = first * z
        del first
        return (second + x * z).sum()

    check(run, [leaf(256, 256)], limit=300 << 10)


def test_no_growth_over_500_steps():
    x = leaf(16, 128)
    want = gradients(deep, [x])
    with spilling(40 << 10) as runtime:
        for step in range(500):
            runtime.step_begin(step)
            with runtime.managed_forward():
                found = gradients(deep, [x])
            metrics = runtime.step_end()
            if step == 20:
                gc.collect()
                before, objects = runtime.stats, len(gc.get_objects())
            if step > 1:
                assert metrics.pool_misses == 0
        assert same(found, want)
        gc.collect()
        after = runtime.stats
        assert after["host_bytes"] == before["host_bytes"] and after["records"] == 0
        assert len(gc.get_objects()) - objects < 300
        assert runtime.telemetry.hit_rate() >= 0.98
        assert len(runtime.saver._storages) < 40 and len(runtime.saver._records) < 40  # until the next pass


# ---------------------------------------------------------------------- checkpointing, functions, autocast


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True])
def test_checkpointing(reentrant, inside):
    blocks = [there(made)(Block, 64, 0.5, frozen=False, seed=i) for i in range(6)]
    params = [p for b in blocks for p in b.parameters()]
    x = leaf(128, 64)

    def run(x, *_):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x.sum()

    want = gradients(run, [x, *params])
    with spilling(80 << 10) as runtime:
        for _ in range(3):
            for tensor in (x, *params):
                tensor.grad = None
            with runtime.managed_forward():
                loss = run(x)
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            assert same([t.grad for t in (x, *params)], want)
        assert runtime.stats["spill_bytes"] > 0
        # Nothing that a recomputation saves goes out: each block's input at most.
        assert runtime.stats["spilled"] <= 3 * len(blocks)


def test_a_region_below_the_threshold_is_computed_again():
    blocks = [there(made)(Block, 32 if i % 2 else 64, 0.5, frozen=False, seed=i) for i in range(6)]
    calls = []
    for block in blocks:
        block.register_forward_pre_hook(lambda block, args: calls.append(block))

    def run(x, call):
        for i, block in enumerate(blocks):
            x = call(block, x[:, ::2].repeat(1, 1) if i % 2 else x if i == 0 else x.repeat(1, 2))
        return x.sum()

    x = leaf(128, 64)
    params = [p for block in blocks for p in block.parameters()]
    want = gradients(lambda *_: run(x, lambda block, x: block(x)), [x, *params])
    small = 128 * 32 * 4 * 10  # more than a block of 32 saves, less than one of 64
    with spilling(400 << 10, recompute_threshold_bytes=small) as runtime:
        for step in range(3):
            calls.clear()
            with runtime.managed_forward():
                assert same(gradients(lambda *_: run(x, runtime.region), [x, *params]), want)
            assert [calls.count(block) for block in blocks] == ([1] * 6 if step == 0 else [1, 2] * 3)
        assert runtime.stats["spill_bytes"] > 0


def test_custom_functions():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, y):
            z = x * y
            ctx.save_for_backward(x, y, z)
            return z, x + 1

        @staticmethod
        def backward(ctx, a, b):
            x, y, z = ctx.saved_tensors
            return a * y + b + z * 0.1, a * x

    def run(x):
        y = x.sin()
        for _ in range(8):
            x, y = Twice.apply(x.sin(), y)
        return (x * y).sum()

    check(run, [leaf(64, 128)])


@pytest.mark.parametrize("cache", [False, True])
def test_autocast(cache):
    """Its cache has the casts of the weights until the region ends."""
    model = there(made)(Stack, 6, 64, frozen=False)
    params = list(model.parameters())

    def run(x, *_):
        with torch.autocast(card.TORCH.type, torch.bfloat16, cache_enabled=cache):
            return model(x).float().sum()

    check(run, [leaf(128, 64), *params], limit=LIMIT + cache * sum(p.nbytes // 2 for p in params))


def test_compiled_blocks():
    blocks = [there(made)(Block, 64, 0.5, frozen=False, seed=i) for i in range(2)]
    compiled = [torch.compile(block, backend="aot_eager") for block in blocks]

    def run(x, *_):
        for block in compiled * 2:
            x = block(x)
        return x.sum()

    check(run, [leaf(128, 64), *(p for b in blocks for p in b.parameters())], limit=300 << 10)


# ---------------------------------------------------------------------- random graphs


def random_graph(seed: int):
    def run(*leaves):
        rng = random.Random(seed)
        pool = [x.sin() for x in leaves]
        for _ in range(rng.randint(20, 40)):
            a, b = rng.choice(pool), rng.choice(pool[-4:])
            kind = rng.randrange(9)
            if kind == 0:
                c = a * b
            elif kind == 1:
                c = (a @ b.t()).tanh() @ a / 64
            elif kind == 2:
                c = torch.where(a > b, a.cos(), b.exp().clamp(max=2))
            elif kind == 3:
                c = a.t().contiguous().sin().t()
            elif kind == 4:
                left, right = a.sin().chunk(2, 1)
                c = torch.cat([right * left, left], 1)
            elif kind == 5:
                c = checkpoint(lambda a, b: (a.sin() * b.cos()).tanh(), a, b, use_reentrant=rng.random() < 0.5)
            elif kind == 6:
                c = F.layer_norm(a, a.shape[1:])
            elif kind == 7:
                c = a.bfloat16().sigmoid().float() * b[:1].expand_as(b)
            else:
                c = a.sin()[::2].repeat(2, 1).exp().clamp(max=2)
            pool = [*pool[-3:], c]  # the others are for backward alone
        return sum(x.mean() for x in pool[-3:])

    return run


@pytest.mark.parametrize("seed", range(30))
def test_random_graphs(seed):
    rng = random.Random(seed)
    leaves = [leaf(64, 64, seed=i) for i in range(rng.randint(1, 3))]
    check(random_graph(seed), leaves, limit=rng.choice([120, 140]) << 10, link=rng.choice([50e6, 400e6, 4e9]),
          max_inflight_d2h=rng.choice([1, 2, 8]), max_inflight_h2d=rng.choice([0, 1, 4]),
          debug_checksums=rng.random() < 0.3, recompute_cheap=seed % 2 == 1)


# ---------------------------------------------------------------------- failures, threads, life


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_exception_the_next_step_is_right(error):
    x = leaf(64, 128)
    want = gradients(deep, [x])

    def broken(x, at):
        def function(x, i):
            if i == at:
                raise error("on purpose")
            return (x * (1 + i / 10)).sin()
        return deep(x, function=function)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise error("on purpose")

    with spilling() as runtime:
        for at in (3, 8, 11):
            runtime.step_begin(at)
            with pytest.raises(error), runtime.managed_forward():
                broken(x, at).backward()
            with pytest.raises(error), runtime.managed_forward():
                deep(x, function=lambda x, i: Fails.apply(x.sin()) if i == at else x.sin()).backward()
            gc.collect()
            assert runtime.stats["records"] == 0
            runtime.step_begin(at)
            with runtime.managed_forward():
                assert same(gradients(deep, [x]), want)
            assert runtime.step_end().spill_bytes > 0


@pytest.mark.alone
def test_interrupts_at_any_time_leave_a_state_from_which_the_next_step_is_right():
    """As Ctrl-C: an exception that comes between any two steps of Python's, hooks included."""
    x = leaf(64, 128)
    want = gradients(deep, [x])
    rng, met = random.Random(0), 0
    raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc
    me = ctypes.c_ulong(threading.get_ident())
    with spilling() as runtime:
        for _ in range(60):
            timer = threading.Timer(rng.random() * 0.02, lambda: raise_in(me, ctypes.py_object(KeyboardInterrupt)))
            try:
                try:
                    timer.start()
                    with runtime.managed_forward():
                        gradients(deep, [x])
                    timer.join()
                    time.sleep(0.001)
                finally:
                    timer.join()
            except KeyboardInterrupt:
                met += 1
            while top_hooks(True) is not None:
                torch._C._autograd._pop_saved_tensors_default_hooks()  # torch's own context was cut in two
            gc.collect()
            with runtime.managed_forward():
                assert same(gradients(deep, [x]), want)
        gc.collect()
        stats = runtime.stats
        assert met > 15 and stats["records"] == stats["kept_bytes"] == stats["slab_bytes"] == 0


def test_forwards_without_backward_do_not_grow():
    x = leaf(16, 64)
    with spilling(20 << 10) as runtime:
        for i in range(300):
            with runtime.managed_forward():
                deep(x)
            if i == 100:
                gc.collect()
                before = len(gc.get_objects())
        assert len(gc.get_objects()) - before < 2000 and len(runtime.saver._seen_now) < 600


def test_threads_share_a_runtime():
    inputs = [leaf(64, 128, seed=i) for i in range(4)]
    want = [gradients(deep, [x]) for x in inputs]
    found, failed = [None] * 4, []

    def work(i):
        try:
            for _ in range(5):
                with runtime.managed_forward():
                    found[i] = gradients(deep, [inputs[i]])
        except BaseException as error:
            failed.append(error)

    with spilling() as runtime:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads]
        [t.join() for t in threads]
        assert not failed and all(same(a, b) for a, b in zip(found, want))
        assert runtime.stats["spill_bytes"] > 0 and runtime.stats["records"] == 0


def test_an_object_whose_tensor_has_ended_with_its_graph_is_passed_by():
    """In older versions a list of objects may hold one of a graph whose end, on any thread, ends the tensor."""
    x = leaf(64, 128)
    want = gradients(deep, [x])
    inner = x * 1
    out, at = inner.sin(), id(inner)
    del inner
    held = [thing for thing in gc.get_objects() if id(thing) == at]
    assert len(held) == 1
    del out
    with spilling() as runtime:
        with runtime.managed_forward():
            assert same(gradients(deep, [x]), want)
        assert runtime.stats["spill_bytes"] > 0
    del held


def test_two_runtimes_one_in_the_other():
    x = leaf(64, 128)
    want = gradients(deep, [x])
    with spilling() as a, spilling(LIMIT // 2) as b:
        with a.managed_forward():
            y = (x * 1).sin()
            with b.managed_forward():
                assert same(gradients(deep, [x]), want)
        assert b.stats["spill_bytes"] > 0
        del y


def test_shutdown_with_a_graph_alive():
    x = leaf(64, 128)
    want = gradients(deep, [x])
    with spilling() as runtime:
        with runtime.managed_forward():
            loss = deep(x)
    assert not runtime.enabled and runtime.stats["slab_bytes"] > 0
    x.grad = None
    loss.backward()
    assert same([x.grad], want)
    del loss
    assert card.ON_CARD or runtime.stats["host_bytes"] == 0  # or as soon as copies are over
    with runtime.managed_forward():
        assert same(gradients(deep, [x]), want)


def test_without_host_memory_tensors_stay():
    x = leaf(64, 128)
    want = gradients(deep, [x])
    with spilling(pinned_pool_classes_mb=(1,), slabs_per_class=1) as runtime:
        with runtime.managed_forward():
            assert same(gradients(deep, [x]), want)
        stats = runtime.stats
        assert stats["pool_hits"] == 1 and stats["fallbacks"] == stats["pool_misses"] > 0
        assert stats["host_bytes"] >= 1 << 20 if card.ON_CARD else stats["host_bytes"] == 1 << 20


def test_a_copy_back_that_fails_names_tensor_and_step_and_may_be_tried_again():
    x = leaf(64, 128)
    want = gradients(deep, [x])

    class Broken:
        def __init__(self, core):
            self.core, self.works = core, False

        def __getattr__(self, name):
            return getattr(self.core, name)

        def restore(self, record, address, stream):
            if not self.works:
                raise stagehand.TransferError("saved tensor 3 of step 7 is not what was spilled", "CHANGED_DATA")
            self.core.restore(record, address, stream)

    with spilling() as runtime:
        runtime.step_begin(7)
        with runtime.managed_forward():
            loss = deep(x)
        runtime.saver.core = Broken(runtime.saver.core)
        x.grad = None
        with pytest.raises(stagehand.TransferError, match=r"tensor 3 of step 7 .*; saved as torch.float32 \[64, 128\]"):
            loss.backward(retain_graph=True)
        x.grad = None
        runtime.saver.core.works = True
        loss.backward()
        assert same([x.grad], want)


def test_a_cap_of_none_spills_nothing():
    x = leaf(64, 128)
    with spilling() as runtime:
        runtime.transfer._max_d2h = 0
        with runtime.managed_forward():
            gradients(deep, [x])
        assert runtime.stats["spill_bytes"] == 0
        runtime.transfer._max_d2h = 1
        with runtime.managed_forward():
            gradients(deep, [x])
        assert runtime.stats["spill_bytes"] > 0


# ---------------------------------------------------------------------- with streamed weights


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_weights_are_streamed_and_activations_spilled(frozen, checkpointed):
    model = made(Stack, 8, 64, frozen=frozen)
    if checkpointed:
        for block in model.blocks:
            plain = block.forward
            block.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)
    reference = aligned_copy(model)
    if checkpointed:  # the copies' forwards are those of the first model
        for block in reference.blocks:
            block.forward = lambda x, block=block: checkpoint(
                lambda x: type(block).forward(block, x), x, use_reentrant=False)
    x = leaf(96, 64)

    def gradients_of(model):
        params = [p for p in model.parameters() if p.requires_grad]
        for tensor in (x, *params):
            tensor.grad = None
        model(x).sum().backward()
        return [t.grad.clone() for t in (x, *params)]

    want = gradients_of(reference)
    budget = tight_budget(reference)
    wrap(model, budget, 400e6)
    weights = layer_runtime(model)
    limit = (120 if checkpointed else 220) << 10
    with spilling(limit) as runtime:
        for step in range(4):
            runtime.step_begin(step)
            with runtime.managed_forward():
                found = gradients_of(model)
            metrics = runtime.step_end()
            assert same(found, want), step
            assert metrics.spill_bytes > 0 and card.peak(metrics, runtime.stats) <= limit
        with activation.offload(limit, device=card.NAME):
            assert same(gradients_of(model), want)
        gc.collect()
        assert runtime.stats["records"] == 0
    assert weights.stats["h2d_bytes"] > 0  # and the device of `wrap` has no more memory than the budget
    activation.shutdown()
    weights.shutdown()


# ---------------------------------------------------------------------- the one line, configuration, telemetry


def test_offload_is_one_line():
    model = there(made)(Stack, 6, 64, frozen=False)
    x = torch.randn(256, 64)
    params = list(model.parameters())
    want = gradients(lambda *_: model(x).sum(), params)
    for _ in range(3):
        with activation.offload(vram_budget="400KB", device=card.NAME) as runtime:
            assert same(gradients(lambda *_: model(x).sum(), params), want)
    with activation.offload(vram_budget="400KB", device=card.NAME) as again:  # round the whole loop
        assert again is runtime
        for _ in range(3):
            assert same(gradients(lambda *_: model(x).sum(), params), want)
    stats = runtime.stats
    assert stats["spill_bytes"] > 0 and stats["peak_bytes"] <= 400000
    assert card.ON_CARD or stats["ahead"] > 0  # what PyTorch uses on a card leaves no room
    activation.shutdown()
    assert not runtime.enabled


def test_on_cuda_the_watermark_follows_the_allocators_peak(monkeypatch):
    """What PyTorch uses between two hooks is in its peak alone, which counts where it moved during a pass."""
    said = {"current": 0, "peak": 20000}  # the peak of what was before, such as loading the model
    monkeypatch.setattr(
        torch._C, "_cuda_memoryStats", lambda index: {"allocated_bytes": {"all": dict(said)}}, raising=False)
    with spilling(6500, low=6300) as runtime:
        saver = runtime.saver
        gradients(lambda x: deep(x, 2), [leaf(16, 16)])
        with runtime.managed_forward():
            gradients(deep, [leaf(64, 64)])
        monkeypatch.setattr(saver.target, "simulated", False)
        monkeypatch.setattr(saver.target, "torch", torch.device("cuda", 0))
        saver.mark = stagehand._core.Watermark(6500, 6300, 7000)

        def passes(*peaks) -> int:
            for said["peak"] in peaks:
                saver.used()
            saver._follow()
            return saver.high

        assert passes(20000, 20000) == 6500  # nothing new
        assert passes(100, 7246) == 6200  # reset, then above the budget less a 128th by 300
        assert passes(100, 6946) == 6200
        assert passes(100, 6500) == 6200  # far below, but more was too much
        for _ in range(98):
            assert passes(100, 6946) == 6200
        # Which is forgotten at last.
        assert passes(100, 6546) == 6400 and passes(100, 6546) == 6600  # half of the difference
        assert saver.core.stats()["spilled"] > 0


def test_disabled_installs_nothing():
    runtime = ActivationRuntime()
    runtime.step_begin(0)
    with runtime.managed_forward():
        assert top_hooks(True) is None
    assert runtime.step_end().activations_saved == 0
    runtime.shutdown()


def test_telemetry_is_written_where_the_user_says(tmp_path):
    path = tmp_path / "activations.jsonl"
    x = leaf(64, 128)
    with spilling(telemetry_file=str(path)) as runtime:
        for step in (3, 4):
            runtime.step_begin(step)
            with runtime.managed_forward():
                gradients(deep, [x])
            runtime.step_end()
        with pytest.raises(stagehand.InvalidStateTransitionError):
            runtime.step_end()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 4]
    assert set(lines[0]) == {
        "step", "activations_saved", "activations_kept", "activations_spilled", "activations_dropped",
        "activations_restored", "activations_recomputed", "spill_bytes", "restore_bytes", "stall_time_ms",
        "stall_count", "pool_hits", "pool_misses", "vram_peak_mb"}
    assert lines[1]["activations_spilled"] > 0 and lines[1]["pool_hits"] > 0 and lines[1]["stall_time_ms"] >= 0


@pytest.mark.parametrize("given, error, message", [
    ({"vram_high_watermark_mb": "1"}, TypeError, "vram_high_watermark_mb"),
    ({"vram_low_watermark_mb": 30000}, ValueError, "vram_low_watermark_mb"),
    ({"pinned_pool_classes_mb": (4, 1), "slabs_per_class": 2}, ValueError, "pinned_pool_classes_mb"),
    ({"slabs_per_class": (1, 2)}, ValueError, "slabs_per_class"),
    ({"max_inflight_d2h": -1}, ValueError, "max_inflight_d2h"),
    ({"enabled": 1}, TypeError, "enabled"),
    ({"recompute_threshold_bytes": 1.5}, TypeError, "recompute_threshold_bytes"),
])
def test_the_configuration_is_checked_by_name(given, error, message):
    with pytest.raises(error, match=message):
        ActivationStagehandConfig(**given)


def test_defaults_are_those_of_the_contract():
    config = ActivationStagehandConfig()
    assert config.classes() == (tuple(mb << 20 for mb in (1, 4, 16, 64, 256)), (512, 2, 2, 2, 2))
    assert (config.vram_high_watermark_mb, config.vram_low_watermark_mb) == (20000, 16000)
    assert (config.max_inflight_d2h, config.max_inflight_h2d, config.enabled) == (1, 1, False)
    assert config.telemetry_file is None  # written only where told
