"""What is cheap to compute again is dropped in place of being spilled: gradients bit-equal, and no tensor is taken for
another."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch
import torch.nn.functional as F

import card
from support import device, made, runtime, same, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

from stagehand import StagehandError
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig, proof, recompute

pytestmark = pytest.mark.usefixtures("tensors_there")

BYTES = 64 * 64 * 4  # of one activation below


@contextlib.contextmanager
def dropping(limit, **config):
    options = dict(enabled=True, slabs_per_class=None, max_inflight_d2h=8, max_inflight_h2d=4)
    made_with = ActivationStagehandConfig(**{**options, **config})
    at_work = ActivationRuntime(made_with, device(1 << 30, 4e9), smallest=256, high=limit, low=limit * 7 // 8,
                                ahead_bytes=limit // 2)
    try:
        yield at_work
    finally:
        at_work.shutdown()


def leaf(*shape, seed=0, dtype=torch.float32):
    at_random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=at_random, dtype=dtype, device="cpu").to(card.TORCH).requires_grad_()


def gradients(run, params) -> list:
    for param in params:
        param.grad = None
    run().backward()
    return [param.grad.clone() for param in params]


def steps(run, params, limit, count=4, **config) -> list:
    """Steps equal to those without hooks; the records of each."""
    want = gradients(run, params)
    found = []
    with dropping(limit, **config) as at_work:
        for step in range(count):
            at_work.step_begin(step)
            with at_work.managed_forward():
                got = gradients(run, params)
            assert same(got, want), f"step {step}"
            found.append(at_work.step_end())
        gc.collect()
        assert at_work.stats["records"] == 0 and at_work.stats["kept_bytes"] == 0
    return found


def layers(function, count=6, width=64, seed=0):
    """(a loss, its parameters): `count` times a linear layer and `function`."""
    weights = [leaf(width, width, seed=seed + i) for i in range(count)]
    x = leaf(width, width, seed=99)

    def run():
        h = x
        for i, weight in enumerate(weights):
            h = function(h @ weight, i)
        return h.pow(2).mean()

    return run, [x, *weights]


class Normed(nn.Module):
    def __init__(self, eps=1e-5, affine=True, bias=True) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(64, eps, affine, bias) for _ in range(6))
        with torch.no_grad():
            for param in self.parameters():
                param.add_(torch.randn(64, generator=torch.Generator().manual_seed(5), device="cpu").to(param) * 0.1)


KINDS = {
    "gelu": lambda: layers(lambda h, i: F.gelu(h)),
    "gelu tanh": lambda: layers(lambda h, i: F.gelu(h, approximate="tanh")),
    "silu": lambda: layers(lambda h, i: F.silu(h)),
    "swiglu": lambda: layers(lambda h, i: F.silu(h) * h.cos()),
    "product": lambda: layers(lambda h, i: h.sin() * h.cos()),
    "view": lambda: layers(lambda h, i: F.gelu(h.view(8, 8, 64)).view(64, 64)),
    "chunks": lambda: layers(lambda h, i: torch.cat([F.gelu(part) for part in h.chunk(2, 1)], 1)),
    "norm": lambda: layers(lambda h, i: F.layer_norm(h, (64,))),
    "in place after": lambda: layers(lambda h, i: F.gelu(h) + 1),
}


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_the_same(name):
    run, params = KINDS[name]()
    found = steps(run, params, 8 * BYTES)
    if name not in ("chunks", "in place after"):  # nothing there is the output of an operator as it is
        assert all(m.activations_recomputed >= 2 for m in found[1:]), found


def test_dropped_first_so_that_nothing_crosses_the_link():
    run, params = layers(lambda h, i: F.gelu(h), count=10)
    moved = steps(run, params, 14 * BYTES, recompute_cheap=False)
    dropped = steps(run, params, 14 * BYTES)
    assert all(m.spill_bytes >= 4 * BYTES for m in moved)
    if not card.ON_CARD:  # where all that PyTorch has counts
        assert all(m.spill_bytes == 0 and m.activations_dropped == 6 for m in dropped), dropped
        assert all(m.vram_peak_mb * 2**20 <= 14 * BYTES for m in moved + dropped)


@pytest.mark.parametrize("eps", [1e-5, 3e-4])
@pytest.mark.parametrize("affine,bias", [(True, True), (True, False), (False, False)])
def test_layer_norms_of_modules_with_their_eps(eps, affine, bias):
    model = Normed(eps, affine, bias)
    run, params = layers(lambda h, i: model.norms[i](h))
    found = steps(run, [*params, *model.parameters()], 8 * BYTES)
    assert all(m.activations_recomputed >= 3 for m in found[1:])


def test_an_eps_that_changes_from_step_to_step():
    """The n-th save of a pass may be another norm's next time."""
    weights = [leaf(64, 64, seed=i) for i in range(6)]
    with dropping(8 * BYTES) as at_work:
        for eps in (1e-5, 0.0625, 1e-5, 1e-6):
            def run(eps=eps):
                h = weights[0]
                for weight in weights:
                    h = F.layer_norm(h @ weight * 1e-3, (64,), eps=eps)
                return h.pow(2).mean()

            want = gradients(run, weights)
            with at_work.managed_forward():
                assert same(gradients(run, weights), want), eps
        assert at_work.stats["recomputed"] >= 8


def test_an_eps_that_is_not_known_is_not_guessed():
    run, params = layers(lambda h, i: torch.layer_norm(h, (64,), eps=1e-5))
    assert not any(m.activations_dropped for m in steps(run, params, 8 * BYTES))


def test_a_cast_that_reorders_is_none_to_compute_again():
    """In one step to another memory format, in the others not."""
    x, weights = leaf(2, 8, 4, 64), [leaf(64, 64, seed=i) for i in range(8)]
    formats = torch.contiguous_format, torch.contiguous_format, torch.channels_last, torch.preserve_format
    with dropping(6 * BYTES) as at_work:
        for step, memory_format in enumerate(formats):
            def run(memory_format=memory_format):
                h = x
                for weight in weights:
                    h = F.silu(h @ weight).to(torch.float64, memory_format=memory_format).sin().float()
                return h.pow(2).mean()

            want = gradients(run, [x, *weights])
            with at_work.managed_forward():
                assert same(gradients(run, [x, *weights]), want), step
        assert at_work.stats["recomputed"] > 0


def test_an_output_that_is_saved_again_when_its_graph_is_freed():
    a, b, v = leaf(32, 1), leaf(1, 32, seed=1), leaf(32, 32, seed=2)
    with dropping(1 << 10) as at_work, at_work.managed_forward():
        y = a.sin() * b.sin()  # of inputs that are too small for the store
        y.sum().backward()
        grad, = torch.autograd.grad((y * v).sum(), [v])
    assert torch.equal(grad, y)


def test_passes_of_small_tensors_do_not_grow(monkeypatch):
    monkeypatch.setattr(recompute, "SAVES", 100)
    x = leaf(4, 4)
    with dropping(1 << 20) as at_work, at_work.managed_forward():
        known = at_work.saver._recipes
        for _ in range(300):
            x.sin().cos()
            assert 0 < len(known._saves) <= 100


def test_changes_that_autograd_does_not_see_are_found():
    def sly(h, i):
        out = F.gelu(h)
        out.data.mul_(1.5)
        return out

    run, params = layers(sly)
    assert not any(m.activations_dropped for m in steps(run, params, 8 * BYTES))


def in_data(h):
    out = F.gelu(h)
    out.data.mul_(1.5)
    return out


def before_a_cast(h):
    out = F.gelu(h)
    with torch.no_grad():
        out.mul_(1.5)
    return out.double()


@pytest.mark.parametrize("changed", [in_data, before_a_cast])
def test_changes_that_autograd_does_not_see_in_a_later_step_raise(changed):
    """What was tried without them is believed and dropped: an error, never a wrong gradient."""
    weights = [leaf(64, 64, seed=i) for i in range(8)]
    with dropping(8 * BYTES) as at_work:
        for step in range(6):
            def run(step=step):
                h = weights[0]
                for weight in weights:
                    plain = (lambda h: F.gelu(h).double()) if changed is before_a_cast else F.gelu
                    h = (changed if step >= 2 else plain)(h @ weight).sin().float()
                return h.pow(2).mean()

            want = gradients(run, weights)
            at_work.step_begin(step)
            with at_work.managed_forward():
                if step == 2:
                    with pytest.raises(StagehandError, match="gradients are wrong.*Gelu.*repeat the step"):
                        gradients(run, weights)
                        card.finish()
                        at_work.saver.look()
                else:
                    assert same(gradients(run, weights), want)
            found = at_work.step_end()
            assert (found.activations_dropped > 0) == (step <= 2)


def test_inputs_changed_where_autograd_does_not_see_it_raise():
    run, params = layers(lambda h, i: inputs.append(h) or F.gelu(h))
    inputs = []
    with dropping(8 * BYTES) as at_work, at_work.managed_forward():
        for late in (False, False, True):
            inputs.clear()
            loss = run()
            if late:
                for h in inputs:
                    h.data.mul_(1.5)
                with pytest.raises(StagehandError, match="gradients are wrong"):
                    loss.backward()
                    card.finish()
                    at_work.saver.look()
            else:
                loss.backward()


def test_what_others_have_may_be_written_and_is_not_dropped():
    run, params = layers(lambda h, i: outputs.append(F.gelu(h)) or outputs[-1])
    outputs = []

    def written(*_):
        outputs.clear()
        loss = run()
        for out in outputs:
            out.data.mul_(1.5)
        return loss

    want = gradients(written, params)
    with dropping(8 * BYTES) as at_work, at_work.managed_forward():
        for _ in range(3):
            assert same(gradients(written, params), want)


@card.simulated_only
def test_where_the_device_is_behind_the_next_pass_raises(monkeypatch):
    run, params = layers(lambda h, i: in_data(h) if late else F.gelu(h))
    late, behind = False, []
    with dropping(8 * BYTES) as at_work:
        compare = at_work.saver._proof.compare
        monkeypatch.setattr(at_work.saver._proof, "compare", lambda *samples: behind.append(samples))
        for late in (False, False, True):
            behind.clear()
            with at_work.managed_forward():
                gradients(run, params)
        for samples in behind:
            compare(*samples)
        with at_work.managed_forward():
            with pytest.raises(StagehandError, match="gradients are wrong"):
                run()
            gradients(run, params)


def test_outputs_changed_in_place_are_not_recomputed():
    def changed(h, i):
        out = F.gelu(h)
        with torch.no_grad():
            out.add_(1.0)
        return out

    run, params = layers(changed)
    assert not any(m.activations_dropped for m in steps(run, params, 8 * BYTES))
    run, params = layers(lambda h, i: F.gelu(h).mul_(2.0))
    assert not any(m.activations_dropped for m in steps(run, params, 8 * BYTES))


def test_an_input_changed_after_it_was_used_raises():
    run, params = layers(lambda h, i: F.gelu(h), count=8)
    kept = []

    def spoilt():
        h = params[0]
        for weight in params[1:]:
            h = h @ weight
            kept.append(h)
            h = F.gelu(h)
        return h.pow(2).mean()

    with dropping(8 * BYTES) as at_work:
        for _ in range(2):
            kept.clear()
            with at_work.managed_forward():
                spoilt().backward()
        kept.clear()
        with at_work.managed_forward():
            loss = spoilt()
        with torch.no_grad():
            kept[0].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_input_changed_before_the_output_is_saved():
    """Autograd minds only where the operator's own backward runs."""
    weights = [leaf(64, 64, seed=i) for i in range(8)]

    def run(changed):
        h = weights[0]
        for weight in weights[:-1]:
            a = h @ weight
            h = F.gelu(a)
        if changed:
            with torch.no_grad():
                a.mul_(1.5)
        weights[-1].grad = None
        out = h @ weights[-1]
        del h
        out.pow(2).mean().backward(inputs=[weights[-1]])
        return [weights[-1].grad]

    want = run(False)
    with dropping(2 * BYTES) as at_work:
        for step in range(4):
            with at_work.managed_forward():
                assert same(run(step >= 2), want), step
        assert at_work.stats["recomputed"] > 0


def test_not_a_number_and_negative_zero():
    def odd(h, i):
        h = h.clone()
        with torch.no_grad():
            h[0, 0], h[0, 1], h[1, :] = float("nan"), -0.0, float("inf")
        return F.gelu(h)

    weights = [leaf(64, 64, seed=i) for i in range(6)]

    def run():
        return sum((odd(weight.sin(), i) @ weight).nan_to_num().mean() for i, weight in enumerate(weights))

    want = gradients(run, weights)
    with dropping(8 * BYTES) as at_work:
        for step in range(3):
            at_work.step_begin(step)
            with at_work.managed_forward():
                got = gradients(run, weights)
            found = at_work.step_end()
            for a, b in zip(got, want):
                assert torch.equal(a.view(torch.int32), b.view(torch.int32))
        assert found.activations_recomputed >= 2


def test_the_output_of_a_checkpointed_region_is_left_alone():
    """What its last operator saved is with the checkpoint's hooks, which would compute the region again."""
    weights = [leaf(64, 64, seed=i) for i in range(8)]
    x = leaf(64, 64, seed=9)
    runs = [0]

    def region(h, weight):
        runs[0] += 1
        return F.gelu(h @ weight)

    def run():
        h = x
        for weight in weights:
            h = checkpoint(region, h, weight, use_reentrant=False)
        return h.pow(2).mean()

    want = gradients(run, [x, *weights])
    runs[0] = 0
    with dropping(5 * BYTES) as at_work:
        for _ in range(3):
            with at_work.managed_forward():
                assert same(gradients(run, [x, *weights]), want)
    assert runs[0] == 3 * 2 * len(weights)


@pytest.mark.parametrize("told_by", ["frames", "hooks"])
def test_what_a_function_saves_is_not_taken_for_an_operators(told_by, monkeypatch):
    """A Function saves when it is over. The last operator inside it is not the one that saves, and what that one saved
    is with other hooks."""
    if told_by == "hooks":
        torch_tells_hooks()
        monkeypatch.setattr(recompute, "FUNCTION", None)
    elif recompute.FUNCTION is None:
        pytest.skip("this PyTorch has Function.apply in C: no frame tells")
    asked, inner = [], []

    def unpack(saved):
        asked.append(saved.shape)
        return saved

    class Inside(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack):
                inner.append(F.gelu(x))
            return x.detach().clone()

        @staticmethod
        def backward(ctx, grad):
            return grad

    weights = [leaf(64, 64, seed=i) for i in range(8)]
    with dropping(2 * BYTES) as at_work:
        for _ in range(3):
            with at_work.managed_forward():
                h = leaf(64, 64, seed=9)
                for weight in weights:
                    through = Inside.apply(h * 1)
                    h = inner.pop() @ weight + through
                assert not asked
                h.sum().backward()
            assert len(asked) == len(weights)
            asked.clear()


def torch_tells_hooks() -> None:
    """Skips a test where PyTorch does not tell which hook has a saved tensor."""
    if not hasattr(torch._C._autograd.SavedTensor, "unpack_hook"):
        pytest.skip("this PyTorch does not tell which hook has a saved tensor")


def test_autocast_casts_are_computed_again():
    weights = [leaf(64, 64, seed=i) for i in range(8)]
    x = leaf(64, 64, seed=9)

    def run():
        with torch.autocast("cpu", torch.bfloat16):
            h = x
            for weight in weights:
                h = F.layer_norm(F.linear(h, weight), (64,))
            return h.float().pow(2).mean()

    found = steps(run, [x, *weights], 8 * BYTES)
    assert any(m.activations_recomputed for m in found)


def test_second_backward_and_double_backward():
    run, params = layers(lambda h, i: F.silu(h))
    want = gradients(run, params)

    def twice():
        for param in params:
            param.grad = None
        loss = run()
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in params]
        for param in params:
            param.grad = None
        loss.backward()
        return first, [p.grad.clone() for p in params]

    def penalty():
        found = torch.autograd.grad(run(), params, create_graph=True)
        return sum(g.pow(2).sum() for g in found)

    want_penalty = gradients(penalty, params)
    with dropping(8 * BYTES) as at_work:
        for _ in range(3):
            with at_work.managed_forward():
                first, second = twice()
                assert same(first, want) and same(second, want)
        for _ in range(2):
            with at_work.managed_forward():
                assert same(gradients(penalty, params), want_penalty)
        assert at_work.stats["recomputed"] > 10


def test_lengths_that_change_from_step_to_step():
    weights = [leaf(64, 64, seed=i) for i in range(8)]
    with dropping(8 * BYTES) as at_work:
        for step, length in enumerate((64, 80, 48, 96, 64)):
            x = leaf(length, 64, seed=step)

            def run(x=x):
                h = x
                for weight in weights:
                    h = F.gelu(F.layer_norm(h @ weight, (64,)))
                return h.pow(2).mean()

            want = gradients(run, [x, *weights])
            before = at_work.stats["recomputed"]
            with at_work.managed_forward():
                assert same(gradients(run, [x, *weights]), want)
            assert at_work.stats["recomputed"] > before
        assert at_work.saver._recipes._tries > 4000  # what was believed once is not compared again


def test_chains_do_not_grow():
    """Each output from the one before would be computed anew down to the first: two at most."""
    calls = [0]

    def run():
        h = x
        for _ in range(12):
            h = F.silu(h)
        return h.sum()

    x = leaf(64, 64)
    steps(run, [x], 6 * BYTES)
    with dropping(6 * BYTES) as at_work:
        for _ in range(3):
            with at_work.managed_forward():
                gradients(run, [x])
        assert at_work.stats["recomputed"] <= 3 * 2 * 12
    assert calls == [0]


def test_with_streamed_weights():
    """Norms whose weights are streamed are spilled as others; activations are dropped."""
    def build():
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(8)))

    plain = made(build, frozen=False).to(card.TORCH)
    x = leaf(64, 64, seed=7)
    want = gradients(lambda: plain(x).pow(2).mean(), [*plain.parameters()])
    model = made(build, frozen=False)
    layer_budget = 3 * 64 * 65 * 4
    wrap(model, layer_budget)
    with dropping(8 * BYTES) as at_work:
        for step in range(4):
            at_work.step_begin(step)
            with at_work.managed_forward():
                got = gradients(lambda: model(x).pow(2).mean(), [*model.parameters()])
            found = at_work.step_end()
            assert same(got, want), f"step {step}"
        assert found.activations_recomputed >= 3
    runtime(model).shutdown()


def test_where_all_fits_nothing_is_looked_for():
    run, params = layers(lambda h, i: F.gelu(h))
    with dropping(1 << 28) as at_work:
        for _ in range(6):
            with at_work.managed_forward():
                gradients(run, params)
        assert at_work.saver._search == 0 and not at_work.stats["dropped"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_sample_of_a_large_tensor_sees_rows_columns_and_all(dtype):
    x = torch.randn(4096, 2048, dtype=dtype)
    assert x.untyped_storage().nbytes() > 8 * 64 * proof.RUNS * proof.RUN
    before = proof.sample(x)
    assert torch.equal(proof.sample(x.clone()), before)
    for part in (x[:], x[2048:], x[:, 3], x[:, ::512], x[17:57]):
        kept = part.clone()
        part.mul_(1.5)
        assert not torch.equal(proof.sample(x), before)
        part.copy_(kept)
    assert torch.equal(proof.sample(x), before)
