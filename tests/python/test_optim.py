"""OffloadedAdamW against torch.optim.AdamW, alone and under stagehand: arithmetic, groups, state both ways, overlap
with backward, clipping, GradScaler, state in a file, and what is refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import math
import os
import pickle
import resource
import sys
import threading

import children
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import stagehand
from stagehand import _core
from stagehand.optim import OffloadedAdamW, adamw, clip_grad_norm_, flat
from support import Stack, TinyLM, aligned_copy, made, nbytes, same, tight_budget, wrap



@pytest.fixture(autouse=True, scope="module")
def one_thread_of_torchs():
    """Its threads and ours would only wait for each other on tensors as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


SHAPES = [(300, 257), (1,), (), (0, 3), (70001,), (5, 7)]


def params_of(dtype=torch.float32, shapes=SHAPES, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=g).to(dtype)) for shape in shapes]


def give_gradients(params, step, dtype=None, scale=1.0):
    g = torch.Generator().manual_seed(1000 + step)
    for p in params:
        grad = (torch.randn(p.shape, generator=g) * scale).to(dtype or p.dtype)
        p.grad = grad if grad.dtype == p.dtype else None
        if p.grad is None:
            p.grad = grad.to(p.dtype)


def run(optimizer, params, steps, first=0, **kwargs):
    for step in range(first, first + steps):
        give_gradients(params, step, **kwargs)
        optimizer.step()


def equal(a, b):
    return all(same(x, y) for x, y in zip(a, b))


def close(a, b, steps, lr):
    """Equal but for rounding: some float32 units of the weight and of the sizes of the steps."""
    for x, y in zip(a, b):
        error = (x.double() - y.double()).abs()
        assert (error <= 2e-7 * x.double().abs() + 1e-6 * lr * steps).all(), error.max()


# ---------------------------------------------------------------------- arithmetic


@pytest.mark.parametrize("steps", [1, 10, 100])
@pytest.mark.parametrize("options", [
    {},
    {"weight_decay": 0.0},
    {"maximize": True},
    {"betas": (0.4, 0.5), "eps": 1e-3},
], ids=str)  # fmt: skip
def test_float32_is_torchs_but_for_rounding(steps, options):
    a, b = params_of(), params_of()
    run(torch.optim.AdamW(a, lr=1e-2, **{"weight_decay": 0.1, **options}, foreach=False), a, steps)
    run(OffloadedAdamW(b, lr=1e-2, **{"weight_decay": 0.1, **options}), b, steps)
    close(a, b, steps, 1e-2)
    assert not equal(b, params_of())


def test_float64_is_torchs_but_for_rounding():
    a, b = params_of(torch.float64), params_of(torch.float64)
    run(torch.optim.AdamW(a, lr=1e-2, foreach=False), a, 20)
    run(OffloadedAdamW(b, lr=1e-2), b, 20)
    for x, y in zip(a, b):
        assert torch.allclose(x, y, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_are_rounded_float32_masters(dtype):
    low, wide = params_of(dtype), [nn.Parameter(p.detach().float()) for p in params_of(dtype)]
    ours, reference = OffloadedAdamW(low, lr=1e-3), OffloadedAdamW(wide, lr=1e-3)
    for step in range(30):
        give_gradients(low, step)
        for p, q in zip(low, wide):
            q.grad = p.grad.float()
        ours.step()
        reference.step()
    assert equal(low, [p.to(dtype) for p in wide])
    for p, q in zip(low, wide):
        assert torch.equal(ours.state[p]["master_param"], q) and ours.state[p]["exp_avg"].dtype == torch.float32


def test_small_steps_are_not_lost():
    def moved(**options):
        p = nn.Parameter(torch.ones(40000, dtype=torch.bfloat16))
        opt = OffloadedAdamW([p], lr=1e-4, weight_decay=0, **options)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            opt.step()
        return p.detach(), 1 - p.detach().double().mean().item()

    assert moved(master_dtype=None)[1] == 0  # rounded to nearest, a step of 1e-4 goes nowhere
    assert moved()[1] == pytest.approx(2e-3, abs=2**-9)
    weights, mean = moved(master_dtype=None, stochastic_rounding=True, seed=7)
    assert mean == pytest.approx(2e-3, rel=0.05)
    for threads in (1, 2, 7):
        again, _ = moved(master_dtype=None, stochastic_rounding=True, seed=7, threads=threads)
        assert torch.equal(weights, again)
    assert not torch.equal(weights, moved(master_dtype=None, stochastic_rounding=True, seed=8)[0])
    with pytest.raises(ValueError, match="stochastic_rounding is for bfloat16"):
        OffloadedAdamW(params_of(torch.float16), stochastic_rounding=True)


def test_moments_in_the_weights_own_dtype():
    p = nn.Parameter(torch.randn(1000).bfloat16())
    opt = OffloadedAdamW([p], master_dtype=None, state_dtype=None)
    run(opt, [p], 3)
    assert opt.state[p]["exp_avg"].dtype == torch.bfloat16 and set(opt.state[p]) == {"step", "exp_avg", "exp_avg_sq"}
    assert opt.state_bytes == (4000 + 4, 0, 0)
    with pytest.raises(ValueError, match="state_dtype is torch.float32 or None"):
        OffloadedAdamW([p], state_dtype=torch.float16)


def test_dense_layouts_keep_their_strides_and_others_work_too():
    def build():
        torch.manual_seed(1)
        last = nn.Parameter(torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last))
        turned = nn.Parameter(torch.randn(40, 30).t())
        holes = nn.Parameter(torch.randn(20, 10)[:, ::2])
        pair = nn.Parameter(torch.randn(6, 2, dtype=torch.complex64))
        return [last, turned, holes, pair]

    a, b = build(), build()
    assert [flat.is_dense(p) for p in b] == [True, True, False, True]
    reference, ours = torch.optim.AdamW(a, lr=1e-2, foreach=False), OffloadedAdamW(b, lr=1e-2)
    for step in range(5):
        for params, opt in ((a, reference), (b, ours)):
            g = torch.Generator().manual_seed(step)
            for p in params:
                p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype)  # contiguous, unlike the parameter
            opt.step()
    for x, y in zip(a, b):
        assert torch.allclose(x, y, rtol=1e-6, atol=1e-7)
    for p in b[:2]:
        assert ours.state[p]["exp_avg"].stride() == p.stride()


# ---------------------------------------------------------------------- parameters on a device


@pytest.fixture
def elsewhere(monkeypatch):
    """Parameters of an even position are taken for a device's: PyTorch's operators update them where they are."""
    real, chosen = flat.on_host, set()
    monkeypatch.setattr(flat, "on_host", lambda t: real(t) and t.data_ptr() not in chosen)
    return lambda params: chosen.update(p.data_ptr() for p in params[::2]) or params


def test_a_devices_parameters_are_updated_there(elsewhere, monkeypatch):
    def no_core(*args, **kwargs):
        raise AssertionError("the core was given a device's memory")

    a, b = params_of(), elsewhere(params_of())
    reference = torch.optim.AdamW(a, lr=1e-2, maximize=True, foreach=False)
    ours = OffloadedAdamW(b, lr=1e-2, maximize=True)
    run(reference, a, 10)
    run(ours, b, 10)
    close(a, b, 10, 1e-2)
    assert equal(a[::2], b[::2])  # torch's own arithmetic
    alone = b[:1]
    opt = OffloadedAdamW(alone)
    monkeypatch.setattr(opt, "_submit", no_core)
    run(opt, alone, 2)


def test_overlap_leaves_a_devices_parameters_to_step(elsewhere):
    def train(overlap):
        torch.manual_seed(0)
        a, b = elsewhere([nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(7))])
        opt = OffloadedAdamW([a, b], lr=1e-2)
        for _ in range(3):
            opt.zero_grad()
            before = a.detach().clone(), b.detach().clone()
            loss = (a * b).sin().sum()
            if overlap:
                with opt.last_backward():
                    loss.backward()
                assert torch.equal(a, before[0]) and not torch.equal(b, before[1])
            else:
                loss.backward()
            opt.step()
            assert not torch.equal(a, before[0])
        assert float(opt.state[a]["step"]) == float(opt.state[b]["step"]) == 3
        return a, b

    assert equal(train(False), train(True))


def test_masters_scales_and_norms_hold_on_a_device_too(elsewhere):
    host, device = params_of(torch.bfloat16), elsewhere(params_of(torch.bfloat16))
    one, two = OffloadedAdamW(host, lr=1e-2, max_grad_norm=4.0), OffloadedAdamW(device, lr=1e-2, max_grad_norm=4.0)
    for step in range(5):
        for params, opt in ((host, one), (device, two)):
            give_gradients(params, step)
            opt.grad_scale, opt.found_inf = torch.tensor(0.5), torch.tensor(float(step == 3))
            opt.step()
        assert one.grad_norm.item() == pytest.approx(two.grad_norm.item(), rel=1e-6)
    for p, q in zip(host, device):
        master, other = one.state[p]["master_param"], two.state[q]["master_param"]
        assert torch.allclose(master, other, rtol=1e-5, atol=1e-6) and torch.equal(other.bfloat16(), q)
        assert float(two.state[q]["step"]) == 4
    norm = clip_grad_norm_(host, 1.0), clip_grad_norm_(device, 1.0)
    assert norm[0].item() == pytest.approx(norm[1].item(), rel=1e-5)
    for p, q in zip(host, device):
        assert torch.allclose(p.grad, q.grad, rtol=2**-7)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    assert all(torch.equal(one.state[p]["exp_avg"], two.state[q]["exp_avg"]) for p, q in zip(host, device))


def test_random_rounding_on_a_device(elsewhere):
    def moved(seed):
        p = nn.Parameter(torch.ones(40000, dtype=torch.bfloat16))
        elsewhere([p])
        opt = OffloadedAdamW([p], lr=1e-4, weight_decay=0, master_dtype=None, stochastic_rounding=True, seed=seed)
        state = torch.get_rng_state()
        for _ in range(20):
            p.grad = torch.ones_like(p)
            opt.step()
        assert torch.equal(state, torch.get_rng_state())
        assert opt.state[p]["exp_avg"].dtype == torch.float32 and "master_param" not in opt.state[p]
        return p.detach()

    assert 1 - moved(1).double().mean().item() == pytest.approx(2e-3, rel=0.05)
    assert torch.equal(moved(1), moved(1)) and not torch.equal(moved(1), moved(2))


# ---------------------------------------------------------------------- what an optimizer is


def test_groups_schedulers_closures_and_hooks():
    def train(cls):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(9, 17), nn.Tanh(), nn.Linear(17, 3))
        opt = cls([{"params": model[0].parameters(), "lr": 1e-2, "weight_decay": 0.3}], lr=1e-3)
        opt.add_param_group({"params": model[2].parameters(), "maximize": True, "betas": (0.8, 0.9)})
        scheduler = StepLR(opt, 2, gamma=0.5)
        calls = []
        opt.register_step_pre_hook(lambda *a: calls.append("before"))
        opt.register_step_post_hook(lambda *a: calls.append("after"))
        losses = []
        for step in range(6):
            def closure():
                opt.zero_grad()
                loss = model(torch.full((2, 9), 0.1 * step)).square().mean()
                loss.backward()
                return loss
            losses.append(opt.step(closure).item())
            scheduler.step()
        assert calls == ["before", "after"] * 6
        assert [group["lr"] for group in opt.param_groups] == [1e-2 / 8, 1e-3 / 8]
        return [*model.parameters()], losses

    (a, losses_a), (b, losses_b) = train(torch.optim.AdamW), train(OffloadedAdamW)
    close(a, b, 6, 1e-2)
    assert losses_a == pytest.approx(losses_b, rel=1e-5)


def test_without_a_gradient_there_is_no_state_and_no_step():
    a, b = params_of(shapes=[(4,), (4,)])
    before = b.detach().clone()
    opt = OffloadedAdamW([a, b])
    opt.step()
    assert not opt.state
    for _ in range(3):
        a.grad = torch.ones(4)
        opt.step()
    b.grad = torch.ones(4)
    opt.step()
    assert float(opt.state[a]["step"]) == 4 and float(opt.state[b]["step"]) == 1
    assert opt.state[a]["step"].dtype == torch.float32 and opt.state[a]["step"].dim() == 0
    assert not torch.equal(b, before)
    opt.zero_grad()
    assert a.grad is None
    b.grad = torch.ones(4)
    opt.zero_grad(set_to_none=False)
    assert torch.equal(b.grad, torch.zeros(4))


def test_a_step_moves_the_version_counter():
    p = nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    version = p._version
    OffloadedAdamW([p]).step()
    assert p._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_fall_back_moves_the_version_counter(monkeypatch):
    """PyTorch without torch.autograd.graph.increment_version."""
    import importlib

    monkeypatch.delattr(torch.autograd.graph, "increment_version")
    old = importlib.util.module_from_spec(flat.__spec__)
    flat.__spec__.loader.exec_module(old)
    for p in (nn.Parameter(torch.ones(())), nn.Parameter(torch.randn(3, 4).t()), nn.Parameter(torch.ones(0))):
        before, version = p.detach().clone(), p._version
        old.mark_written(p)
        assert p._version == version + 1 and torch.equal(p, before)


def test_refuses_what_cannot_be():
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="empty parameter list"):
        OffloadedAdamW([])
    for options in ({"lr": -1.0}, {"betas": (1.0, 0.9)}, {"betas": (0.9, -0.1)}, {"eps": -1.0}, {"weight_decay": -1.0},
                    {"lr": math.nan}, {"threads": 0}, {"max_grad_norm": 0.0}, {"seed": -1},
                    {"master_dtype": torch.float64}):  # fmt: skip
        with pytest.raises(ValueError):
            OffloadedAdamW([p], **options)
    with pytest.raises(ValueError, match="amsgrad"):
        OffloadedAdamW([{"params": [p], "amsgrad": True}])
    opt = OffloadedAdamW([p])
    with pytest.raises(ValueError, match="eps of group 1"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(1))], "eps": -1.0})
    assert len(opt.param_groups) == 1
    table = nn.Embedding(5, 3, sparse=True)
    opt.add_param_group({"params": table.parameters()})
    table(torch.tensor([1])).sum().backward()
    p.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"parameter 0 of group 1 \(shape \[5, 3\]\) is sparse"):
        opt.step()
    assert torch.equal(p, torch.ones(3)) and not opt.state  # nothing was begun


# ---------------------------------------------------------------------- state


@pytest.mark.parametrize("path", [False, True])
def test_state_goes_both_ways_with_torchs(path, tmp_path):
    options = {"state_path": tmp_path} if path else {}
    a, b, c = params_of(), params_of(), params_of()
    theirs, ours = torch.optim.AdamW(a, lr=1e-2, foreach=False), OffloadedAdamW(b, lr=1e-2, **options)
    run(theirs, a, 3)
    run(ours, b, 3)
    close(a, b, 3, 1e-2)

    # theirs into ours, through a file
    buffer = io.BytesIO()
    torch.save(theirs.state_dict(), buffer)
    buffer.seek(0)
    loaded = OffloadedAdamW(c, lr=5.0, **options)
    with torch.no_grad():
        for p, q in zip(c, a):
            p.copy_(q)
    loaded.load_state_dict(torch.load(buffer))
    assert loaded.param_groups[0]["lr"] == 1e-2
    run(theirs, a, 3, first=3)
    run(loaded, c, 3, first=3)
    close(a, c, 3, 1e-2)
    assert float(loaded.state[c[0]]["step"]) == 6

    # ours into theirs
    theirs.load_state_dict(copy.deepcopy(loaded.state_dict()))  # PyTorch would share its tensors
    run(theirs, a, 2, first=6)
    run(loaded, c, 2, first=6)
    close(a, c, 8, 1e-2)


@pytest.mark.parametrize("path", [False, True])
def test_a_low_precision_weights_state_keeps_its_precision(path, tmp_path):
    options = {"state_path": tmp_path} if path else {}
    a, b = params_of(torch.bfloat16), params_of(torch.bfloat16)
    one, two = OffloadedAdamW(a, lr=1e-2), OffloadedAdamW(b, lr=1e-2, **options)
    run(one, a, 3)
    saved = copy.deepcopy(one.state_dict())
    with torch.no_grad():
        for p, q in zip(b, a):
            p.copy_(q)
    two.load_state_dict(saved)
    back = two.state_dict()["state"]
    for number, entry in saved["state"].items():
        assert set(back[number]) == {"step", "exp_avg", "exp_avg_sq", "master_param"}
        for key, value in entry.items():
            assert back[number][key].dtype == torch.float32 and torch.equal(back[number][key], value)
    run(one, a, 3, first=3)
    run(two, b, 3, first=3)
    assert equal(a, b)
    torch.optim.AdamW(params_of(torch.bfloat16)).load_state_dict(two.state_dict())  # the extra key is no error

    theirs = torch.optim.AdamW(params_of(torch.bfloat16))  # theirs has no masters
    run(theirs, theirs.param_groups[0]["params"], 1)
    two.load_state_dict(theirs.state_dict())
    run(two, b, 1, first=6)
    assert two.state_dict()["state"][0]["master_param"].dtype == torch.float32


def test_hooks_and_refusals_of_load_state_dict():
    a = params_of()
    theirs = torch.optim.AdamW(a, amsgrad=True)
    run(theirs, a, 1)
    opt = OffloadedAdamW(params_of())
    with pytest.raises(ValueError, match="amsgrad"):
        opt.load_state_dict(theirs.state_dict())
    other = [nn.Parameter(torch.ones(2)) for _ in SHAPES]
    wrong = torch.optim.AdamW(other)
    run(wrong, other, 1)
    with pytest.raises(ValueError, match="parameter 0 of group 0.*another shape"):
        opt.load_state_dict(wrong.state_dict())
    assert not opt.state
    good = OffloadedAdamW(a)
    run(good, a, 1)
    saved = good.state_dict()
    opt.register_load_state_dict_pre_hook(lambda o, d: {**d, "param_groups": [{**d["param_groups"][0], "lr": 0.5}]})
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 0.5
    mine, theirs = opt.state[opt.param_groups[0]["params"][0]]["exp_avg"], good.state[a[0]]["exp_avg"]
    assert torch.equal(mine, theirs) and mine.data_ptr() != theirs.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("way", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_copies_go_on_alone(way, path, dtype, tmp_path):
    a = params_of(dtype)
    opt = OffloadedAdamW(a, lr=1e-2, max_grad_norm=3.0, **({"state_path": tmp_path} if path else {}))
    run(opt, a, 2)
    twin = way(opt)
    b = twin.param_groups[0]["params"]
    assert equal(a, b) and twin.max_grad_norm == 3.0
    run(opt, a, 2, first=2)
    run(twin, b, 2, first=2)
    assert equal(a, b) and a[0].data_ptr() != b[0].data_ptr()
    assert equal(*([s["exp_avg"] for s in o.state_dict()["state"].values()] for o in (opt, twin)))


def in_place(weight):
    with torch.no_grad():
        weight.view(-1)[200:300] = 7.0


def through_data(weight):
    weight.data.view(-1)[200:300] = 7.0


def other_data(weight):
    weight.data = weight.data.clone()
    through_data(weight)


def by_vector(weight):
    value = nn.utils.parameters_to_vector([weight]).clone()
    value[200:300] = 7.0
    nn.utils.vector_to_parameters(value, [weight])


WRITES = [in_place, through_data, other_data, by_vector]


@pytest.mark.parametrize("rounding", [False, True], ids=["", "random"])
@pytest.mark.parametrize("path", [False, True], ids=["ram", "file"])
@pytest.mark.parametrize("write", WRITES)
def test_weights_written_by_others_win_over_masters(write, path, rounding, tmp_path):
    options = {"lr": 1e-3, "stochastic_rounding": rounding}
    p, q = (nn.Parameter(torch.linspace(-1, 1, 5000).bfloat16()) for _ in range(2))
    opt = OffloadedAdamW([p], **options, **({"state_path": tmp_path} if path else {}))
    run(opt, [p], 3)
    before = {key: value.clone() for key, value in opt.state_dict()["state"][0].items()}
    write(p)  # and leaves the others as they were
    run(opt, [p], 1, first=3)
    state = opt.state_dict()["state"][0]
    after = state["master_param"]
    assert (after[200:300] - 7).abs().max() < 0.01 and (p[200:300] - 7).abs().max() < 0.05
    untouched = OffloadedAdamW([q], **options)
    run(untouched, [q], 4)
    others = torch.ones(5000, dtype=torch.bool)
    others[200:300] = False
    assert torch.equal(after[others], untouched.state[q]["master_param"][others]) and torch.equal(p[others], q[others])
    assert torch.equal(state["exp_avg"], untouched.state[q]["exp_avg"]) and state["step"] == 4
    assert not torch.equal(before["master_param"][others], after[others])


@pytest.mark.parametrize("rounding", [False, True], ids=["", "random"])
@pytest.mark.parametrize("write", WRITES[:2])
def test_weights_on_a_device_win_over_their_masters(elsewhere, write, rounding):
    params = [nn.Parameter(torch.linspace(-1, 1, 5000).bfloat16()) for _ in range(2)]
    for p in params:
        elsewhere([p])
    optimizers = [OffloadedAdamW([p], lr=1e-3, stochastic_rounding=rounding) for p in params]
    for opt, p in zip(optimizers, params):
        run(opt, [p], 3)
    write(params[0])
    for opt, p in zip(optimizers, params):
        run(opt, [p], 1, first=3)
    after, untouched = (opt.state[p]["master_param"] for opt, p in zip(optimizers, params))
    others = torch.ones(5000, dtype=torch.bool)
    others[200:300] = False
    assert (after[200:300] - 7).abs().max() < 0.01
    assert torch.equal(after[others], untouched[others]) and torch.equal(params[0][others], params[1][others])


def test_one_step_of_a_weight_that_is_rounded_at_random_is_not_lost():
    """A write to the value next to what the master may be rounded to."""
    p = nn.Parameter(torch.ones(5000, dtype=torch.bfloat16))
    opt = OffloadedAdamW([p], lr=1e-5, weight_decay=0, stochastic_rounding=True)
    run(opt, [p], 1)
    p.data.fill_(1 + 2**-6)  # masters are about 1, and 1 + 2**-7 is the value next to it
    run(opt, [p], 1, first=1)
    assert (opt.state[p]["master_param"] - (1 + 2**-6)).abs().max() < 1e-4


def test_a_written_weight_that_did_not_change_leaves_its_master_alone():
    """Also where weights are rounded at random, and so are not their masters rounded to nearest."""
    results = []
    for touch in (False, True):
        p = nn.Parameter(torch.linspace(-1, 1, 5000).bfloat16())
        opt = OffloadedAdamW([p], lr=1e-4, stochastic_rounding=True)
        for step in range(5):
            run(opt, [p], 1, first=step)
            if touch:
                flat.mark_written(p)
        results.append((p, opt.state[p]["master_param"]))
    assert equal(results[0], results[1]) and not torch.equal(results[0][0], results[0][1].bfloat16())


def test_weights_may_change_their_dtype_between_steps():
    module = nn.Linear(8, 8)
    opt = OffloadedAdamW(module.parameters(), lr=1e-2)
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32):
        module.to(dtype)
        before = module.weight.detach().clone()
        module(torch.ones(1, 8, dtype=dtype)).sum().backward()
        opt.step()
        opt.zero_grad()
        assert 0 < (module.weight - before).abs().max() < 0.05
        assert ("master_param" in opt.state[module.weight]) == (dtype.itemsize == 2)
    assert float(opt.state[module.weight]["step"]) == 5


# ---------------------------------------------------------------------- overlap with backward


class Checked(Stack):
    """Its blocks are checkpointed, so that a small budget holds what backward needs at once."""

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


def small_budget(model):
    return tight_budget(model) + 3 * nbytes(model.blocks[0])


def trained(overlap, steps=4, micro=1, wrapped=None, before=True, build=Stack, dtype=torch.float32, link=None,
            **options):  # fmt: skip
    """Trains a model from a seed and returns its parameters. wrapped: the share of a budget."""
    model = made(build, frozen=False).to(dtype)
    opt = None
    if wrapped is None:
        model = aligned_copy(model)
    if before:
        opt = OffloadedAdamW(model.parameters(), lr=1e-3, **options)
    if wrapped is not None:
        wrap(model, wrapped(model), link)
    if not before:
        opt = OffloadedAdamW(model.parameters(), lr=1e-3, **options)
    torch.manual_seed(5)
    for _ in range(steps):
        for i in range(micro):
            inputs = [x.to(dtype) if x.is_floating_point() else x for x in model.example()]
            loss = model(*inputs).square().mean()
            if overlap and i == micro - 1:
                with opt.last_backward():
                    loss.backward()
            else:
                loss.backward()
        opt.step()
        opt.zero_grad()
    if wrapped is not None:
        model._stagehand_layer_runtime.shutdown()
    return [p.detach().clone() for p in model.parameters()], opt


@pytest.mark.parametrize("micro", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [Stack, TinyLM])
def test_overlap_changes_no_bit(micro, dtype, build, tmp_path):
    plain, _ = trained(False, micro=micro, dtype=dtype, build=build)
    early, opt = trained(True, micro=micro, dtype=dtype, build=build)
    assert equal(plain, early)
    assert all(float(state["step"]) == 4 for state in opt.state.values())
    assert equal(plain, trained(True, micro=micro, dtype=dtype, build=build, state_path=tmp_path)[0])


def test_updates_are_made_during_backward():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    opt = OffloadedAdamW(model.parameters())
    seen = []
    model[0].register_full_backward_hook(lambda *a: seen.append(float(opt.state[model[1].weight].get("step", 0))))
    with opt.last_backward():
        model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert seen == [1]
    before = [p.detach().clone() for p in model.parameters()]
    opt.step()  # nothing is left to do
    assert equal(before, model.parameters()) and all(float(s["step"]) == 1 for s in opt.state.values())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError("on purpose")


def test_an_exception_during_backward_leaves_a_defined_state():
    def build():
        torch.manual_seed(0)
        return nn.Linear(4, 4), nn.Linear(4, 4)

    first, second = build()
    opt = OffloadedAdamW([*first.parameters(), *second.parameters()], lr=0.1)

    def fail():
        with pytest.raises(ZeroDivisionError):
            with opt.last_backward():
                second(Fails.apply(first(torch.ones(1, 4)))).sum().backward()

    fail()
    made_early = second.weight.detach().clone()
    assert not torch.equal(made_early, build()[1].weight) and torch.equal(first.weight, build()[0].weight)
    first.weight.grad = torch.ones(4, 4)
    opt.step()  # the rest of the step
    assert torch.equal(second.weight, made_early) and float(opt.state[second.weight]["step"]) == 1
    assert not torch.equal(first.weight, build()[0].weight)
    opt.zero_grad()

    fail()
    with pytest.raises(RuntimeError, match="call step\\(\\), or zero_grad"):
        with opt.last_backward():
            pass
    opt.zero_grad()
    assert float(opt.state[second.weight]["step"]) == 2
    second(torch.ones(1, 4)).sum().backward()
    opt.step()
    assert float(opt.state[second.weight]["step"]) == 3

    opt.zero_grad()
    fail()
    first.zero_grad(), second.zero_grad()  # the model's: the gradients are gone, and the notes with them
    with opt.last_backward():
        second(torch.ones(1, 4)).sum().backward()
    opt.step()
    assert float(opt.state[second.weight]["step"]) == 5

    opt.zero_grad()
    with opt.last_backward():
        second(torch.ones(1, 4)).sum().backward()
    second.weight.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match="changed after its update"):
        opt.step()
    opt.zero_grad()
    opt.step()


def test_what_overlap_refuses():
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="max_grad_norm needs all gradients"):
        with OffloadedAdamW([p], max_grad_norm=1.0).last_backward():
            pass
    opt = OffloadedAdamW([p])
    with opt.last_backward():
        for call in (opt.zero_grad, opt.step, lambda: opt.clip_grad_norm_(1.0),
                     lambda: opt.load_state_dict(opt.state_dict()),
                     lambda: opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
                     lambda: opt.last_backward().__enter__()):  # fmt: skip
            with pytest.raises(RuntimeError, match="inside last_backward"):
                call()
        p.sum().backward()
        with pytest.raises(RuntimeError, match="accumulated twice"):
            p.sum().backward()
    with pytest.raises(RuntimeError, match="changed after"):
        opt.step()  # the second backward has added to it
    opt.zero_grad()
    with opt.last_backward():
        p.sum().backward()
    with pytest.raises(RuntimeError, match="used these gradients already"):
        opt.clip_grad_norm_(1.0)
    opt.grad_scale, opt.found_inf = torch.tensor(2.0), torch.tensor(0.0)
    with pytest.raises(RuntimeError, match="GradScaler had scaled"):
        opt.step()
    del opt.grad_scale, opt.found_inf
    opt.step()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="GradScaler unscales"):
        with opt.last_backward():
            pass

    table = nn.Embedding(5, 3, sparse=True)
    opt = OffloadedAdamW(table.parameters())
    with pytest.raises(RuntimeError, match="is sparse"):
        with opt.last_backward():
            table(torch.tensor([1])).sum().backward()


def test_checkpointed_blocks_overlap():
    assert equal(trained(False, build=Checked)[0], trained(True, build=Checked)[0])


# ---------------------------------------------------------------------- under stagehand


@pytest.mark.parametrize("before", [True, False], ids=["optimiser first", "wrapped first"])
@pytest.mark.parametrize("overlap", [False, True], ids=["after", "overlap"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_streamed_model_trains_to_the_same_bits(before, overlap, dtype):
    plain, _ = trained(False, dtype=dtype, build=Checked)
    streamed, _ = trained(overlap, wrapped=small_budget, before=before, dtype=dtype, build=Checked)
    assert equal(plain, streamed)


def unsampled(weight):
    """Elements that a look at samples of the weight does not see: lines of 64 bytes, 192 and more apart."""
    return weight.view(-1)[80 // weight.itemsize : 180 // weight.itemsize]


def write_in_place(weight):
    with torch.no_grad():
        unsampled(weight).add_(1)


def write_through_data(weight):
    unsampled(weight.data).add_(1)


def give_other_data(weight):
    value = weight.data.mul(0.5)
    weight.data = value.clone()  # of its own memory, which moves into the image


def write_by_vector(weight):
    with torch.no_grad():
        nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector([weight]), [weight])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("write", [write_in_place, write_through_data, give_other_data, write_by_vector])
def test_a_write_behind_the_step_is_in_the_next_pass_and_stays(write, dtype):
    """The passes between are looked at too: what they take in must not look old to the optimizer."""
    model = made(Checked, wide=6, frozen=False).to(dtype)
    assert max(p.nbytes for p in model.parameters()) > 16 << 10  # smaller ones are looked at whole
    reference = aligned_copy(model)
    wrap(model, small_budget(model))
    nets = model, reference
    optimizers = [OffloadedAdamW(net.parameters(), lr=1e-3) for net in nets]
    for step in range(4):
        for net, optimizer in zip(nets, optimizers):
            torch.manual_seed(step)
            net(torch.randn(16, 48).to(dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for block in net.blocks:
                write(block.up.weight)
                write(block.down.weight)
        x = torch.randn(4, 48).to(dtype)
        with torch.no_grad():
            assert same(model(x), reference(x))
        assert equal(*(list(net.parameters()) for net in nets))


def test_a_slow_link_shows_no_half_written_weight(tmp_path):
    plain, _ = trained(False, build=Checked, micro=2, steps=6)
    for overlap in (False, True):
        assert equal(plain, trained(overlap, build=Checked, micro=2, steps=6, wrapped=small_budget, link=3e7)[0])


def test_state_in_a_file_for_a_streamed_model(tmp_path):
    plain, _ = trained(False, micro=2, build=Checked)
    streamed, opt = trained(True, micro=2, wrapped=small_budget, state_path=tmp_path, build=Checked)
    assert equal(plain, streamed)
    assert opt.state_bytes.disk >= 8 * sum(p.numel() for p in plain)


# ---------------------------------------------------------------------- clipping and scaling


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_clipping_is_torchs_but_for_rounding(dtype):
    for max_norm in (1.0, 1e6):
        a, b, c = params_of(dtype), params_of(dtype), params_of(dtype)
        for params in (a, b, c):
            give_gradients(params, 0)
        reference = torch.nn.utils.clip_grad_norm_([nn.Parameter(p.detach().double()) for p in a], max_norm)
        wide = [nn.Parameter(p.detach().double()) for p in a]
        for p, q in zip(a, wide):
            q.grad = p.grad.double()
        reference = torch.nn.utils.clip_grad_norm_(wide, max_norm)
        norm = clip_grad_norm_(b, max_norm)
        assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and norm.dim() == 0
        assert norm.item() == pytest.approx(reference.item(), rel=1e-6)
        assert OffloadedAdamW(c).clip_grad_norm_(max_norm).item() == norm.item()
        for p, q, r in zip(wide, b, c):
            assert torch.allclose(p.grad.to(dtype), q.grad, rtol=torch.finfo(dtype).eps, atol=1e-7)
            assert torch.equal(q.grad, r.grad)


def test_clipping_at_its_edges():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))
    assert clip_grad_norm_([p], 1.0).item() == 0 and clip_grad_norm_(iter([]), 1.0).item() == 0
    p.grad = torch.tensor([3.0, 0.0, 4.0])
    version = p.grad._version
    assert clip_grad_norm_(p, 1.0).item() == 5
    assert p.grad._version > version and torch.allclose(p.grad, torch.tensor([0.6, 0.0, 0.8]), rtol=1e-5)
    q.grad = torch.tensor([math.inf, 1.0])
    with pytest.raises(RuntimeError, match="norm of the gradients is inf"):
        clip_grad_norm_([p, q], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_([p, q], 1.0).item() == math.inf
    assert q.grad.isnan().tolist() == [True, False]  # as torch does
    q.grad = torch.randn(4, 2)[::2, 0]  # not dense
    assert clip_grad_norm_(q, 1e-3).item() > 1e-3 and q.grad.norm().item() == pytest.approx(1e-3, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_max_grad_norm_clips_without_changing_gradients(dtype):
    a, b = params_of(dtype), params_of(dtype)
    reference, ours = OffloadedAdamW(a, lr=1e-2, eps=1e-2), OffloadedAdamW(b, lr=1e-2, eps=1e-2, max_grad_norm=2.0)
    for step in range(3):
        give_gradients(a, step)
        give_gradients(b, step)
        kept = [p.grad.clone() for p in b]
        norm = clip_grad_norm_(b, 1e9)
        for p in a:
            p.grad = p.grad  # unclipped; clipped below in float32, as the kernel does
        factor = 2.0 / (norm.item() + 1e-6)
        for p in a:
            p.grad.mul_(factor)
        reference.step()
        ours.step()
        assert ours.grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
        assert equal(kept, [p.grad for p in b])
    for x, y in zip(a, b):
        assert torch.allclose(x, y, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert not all(torch.equal(x.cpu(), y.cpu()) for x, y in zip(b, params_of(dtype)))


def test_a_grad_scaler_unscales_in_the_update_and_skips_bad_steps():
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    a, b = params_of(), params_of()
    reference, ours = OffloadedAdamW(a, lr=1e-2, max_grad_norm=5.0), OffloadedAdamW(b, lr=1e-2, max_grad_norm=5.0)
    for step in range(4):
        give_gradients(a, step)
        give_gradients(b, step)
        scaler.scale(torch.ones(()))
        with torch.no_grad():
            for p in b:
                p.grad.mul_(scaler.get_scale())
        if step == 2:
            b[0].grad[0, 0] = math.inf
        else:
            reference.step()
        if step == 3:
            scaler.unscale_(ours)
        before = [p.detach().clone() for p in b]
        scaler.step(ours)
        scaler.update()
        assert equal(before, b) == (step == 2)
    assert equal(a, b)  # scales are powers of two: no bit differs
    assert float(ours.state[b[0]]["step"]) == 3 and scaler.get_scale() == 512


# ---------------------------------------------------------------------- the file


def test_state_in_a_file_is_out_of_memory_and_leaves_nothing(tmp_path):
    a, b = params_of(), params_of()
    in_ram = OffloadedAdamW(a, lr=1e-2)
    gc.collect()
    fds = len(os.listdir("/proc/self/fd"))
    in_file = OffloadedAdamW(b, lr=1e-2, state_path=tmp_path)
    assert os.listdir(tmp_path) == []  # the file has no name
    count = sum(p.numel() for p in b)
    assert in_file.state_bytes.disk >= 8 * count  # taken already
    run(in_ram, a, 5)
    run(in_file, b, 5)
    assert equal(a, b)
    assert set(in_file.state[b[0]]) == {"step"} and in_file.state_bytes.host < 100
    assert in_ram.state_bytes.host >= 8 * count and in_ram.state_bytes.disk == 0
    one, two = in_ram.state_dict()["state"], in_file.state_dict()["state"]
    for number in one:
        assert equal(one[number].values(), two[number].values()) and one[number].keys() == two[number].keys()
    assert set(in_file.state[b[0]]) == {"step"}
    del in_file
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == fds

    named = OffloadedAdamW(params_of(), state_path=tmp_path / "state")
    assert os.listdir(tmp_path) == [] and named.state_bytes.disk > 0
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(ValueError, match="exists already"):
        OffloadedAdamW(params_of(), state_path=tmp_path / "mine")
    with pytest.raises(FileNotFoundError):
        OffloadedAdamW(params_of(), state_path=tmp_path / "no" / "where")
    assert (tmp_path / "mine").read_text() == "mine"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", ["deleted", "an empty one loaded"])
def test_a_parameter_that_begins_anew_finds_nothing_of_its_old_state_in_the_file(tmp_path, dtype, how):
    old, new = params_of(dtype), params_of(dtype)
    opt = OffloadedAdamW(old, lr=1e-2, state_path=tmp_path)
    empty = opt.state_dict()
    run(opt, old, 3)
    with torch.no_grad():
        for p, q in zip(old, new):
            p.copy_(q)
    if how == "deleted":
        opt.state.clear()
    else:
        opt.load_state_dict(empty)
    run(opt, old, 2)
    run(OffloadedAdamW(new, lr=1e-2, state_path=tmp_path), new, 2)
    assert equal(old, new)


def test_a_state_of_which_a_part_could_not_be_loaded_is_not_used(tmp_path):
    params = params_of()
    opt = OffloadedAdamW(params, lr=1e-2, state_path=tmp_path)
    run(opt, params, 2)
    state, weights = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
    run(opt, params, 1, first=2)
    want = [p.detach().clone() for p in params]
    _core._fault_arm("write", 3, False)
    try:
        with pytest.raises(stagehand.TransferError, match="cannot write the optimizer's state"):
            opt.load_state_dict(state)
    finally:
        _core._fault_disarm()
    with pytest.raises(RuntimeError, match="loading a state failed: .* Load weights and optimizer state"):
        opt.step()
    with torch.no_grad():
        for p, q in zip(params, weights):
            p.copy_(q)
    opt.load_state_dict(state)
    run(opt, params, 1, first=2)
    assert equal(params, want)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.5}])
def test_a_step_that_ran_out_of_memory_is_finished_by_the_next_one(options):
    a, b = params_of(), params_of()
    plain, failing = (OffloadedAdamW(p, lr=1e-2, **options) for p in (a, b))
    for step in range(3):
        run(plain, a, 1, first=step)
        give_gradients(b, step)
        _core._fault_arm("alloc", 3 + step, False)
        try:
            with pytest.raises(stagehand.StagehandOOMError):
                failing.step()
        finally:
            _core._fault_disarm()
        failing.step()
        assert equal(a, b)


class OutOfMemoryAt(TorchDispatchMode):
    """The n-th operator that makes new memory fails."""

    def __init__(self, n):
        super().__init__()
        self.left = n
        self.failed = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        schema = func._schema
        if func.namespace == "aten" and not (schema.is_mutable or any(out.alias_info for out in schema.returns)):
            self.left -= 1
            if self.left == 0:
                self.failed = func.overloadpacket.__name__
                raise torch.OutOfMemoryError("on purpose")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rounding", [False, True])
def test_a_step_that_ran_out_of_memory_between_dtypes_on_a_device_updates_none_twice(monkeypatch, rounding):
    """At each place in turn: the next step ends what this began, or the optimiser says that it cannot be ended."""
    monkeypatch.setattr(flat, "on_host", lambda t: False)
    monkeypatch.setattr(adamw, "unseen", contextlib.nullcontext)  # so that the mode sees what it lets fail

    def begun():
        params = params_of(shapes=[(5, 7), (3,)]) + params_of(torch.bfloat16, shapes=[(6, 2)])
        params += params_of(torch.float64, shapes=[(4,)])
        opt = OffloadedAdamW(params, lr=1e-2, master_dtype=None, stochastic_rounding=rounding)
        run(opt, params, 1)
        give_gradients(params, 1)
        return params, opt

    want, plain = begun()
    plain.step()
    finished, refused = 0, set()
    for n in range(1, 200):
        params, opt = begun()
        try:
            with OutOfMemoryAt(n) as memory:
                opt.step()
        except torch.OutOfMemoryError:
            pass
        if memory.failed is None:
            break
        try:
            opt.step()
        except RuntimeError as error:
            assert "in the middle: on purpose. Load weights" in str(error)
            refused.add(memory.failed)
            continue
        assert equal(params, want), (n, memory.failed)
        finished += 1
    assert memory.failed is None and finished >= 10
    assert rounding or "empty_like" not in refused, refused  # the room is taken before anything is written


def test_a_disk_that_is_full_is_an_error_before_the_first_step(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(stagehand.TransferError, match="optimizer's state takes .*RLIMIT_FSIZE"):
            OffloadedAdamW(params_of(), state_path=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    frozen = params_of(shapes=[(1000, 1000)])
    frozen[0].requires_grad_(False)
    assert OffloadedAdamW(frozen, state_path=tmp_path).state_bytes.disk == 0


def test_a_file_that_cannot_be_written_stops_the_optimiser_until_state_is_loaded(tmp_path):
    params = params_of(shapes=[(70001,)])
    opt = OffloadedAdamW(params, state_path=tmp_path)
    run(opt, params, 1)
    saved = copy.deepcopy(opt.state_dict())
    number = next(fd for fd in os.listdir("/proc/self/fd")
                  if os.path.realpath(f"/proc/self/fd/{fd}").startswith(f"{tmp_path}/stagehand-adamw"))  # fmt: skip
    os.ftruncate(int(number), 4096)  # somebody cuts the file short
    with pytest.raises(stagehand.TransferError, match="ends early"):
        run(opt, params, 1, first=1)
    with pytest.raises(RuntimeError, match="an update failed: .* Load weights"):
        opt.step()
    opt.load_state_dict(saved)
    run(opt, params, 1, first=1)
    assert float(opt.state[params[0]]["step"]) == 2


def test_layouts_may_change_between_steps(tmp_path):
    def train(**options):
        torch.manual_seed(0)
        p = nn.Parameter(torch.randn(6, 5, 4, 3))
        opt = OffloadedAdamW([p], lr=1e-2, **options)
        run(opt, [p], 2)
        p.data = p.data.to(memory_format=torch.channels_last)
        run(opt, [p], 2, first=2)
        return p.detach(), opt, p

    (a, in_ram, p), (b, in_file, q) = train(), train(state_path=tmp_path)
    c = params_of(shapes=[(1,)])[0]
    torch.manual_seed(0)
    c = nn.Parameter(torch.randn(6, 5, 4, 3))
    run(OffloadedAdamW([c], lr=1e-2), [c], 4)
    assert torch.equal(a, c) and torch.equal(b, c)
    assert in_ram.state[p]["exp_avg"].stride() == p.stride()
    p.data, q.data = torch.ones(3), torch.ones(3)
    for opt, param in ((in_ram, p), (in_file, q)):
        param.grad = torch.ones(3)
        with pytest.raises(RuntimeError, match="delete opt.state"):
            opt.step()


# ---------------------------------------------------------------------- threads and processes


def test_optimisers_of_several_threads_do_not_meet():
    expected = params_of()
    run(OffloadedAdamW(expected, lr=1e-2), expected, 5)
    results, errors = [], []

    def work():
        try:
            mine = params_of()
            run(OffloadedAdamW(mine, lr=1e-2, threads=2), mine, 5)
            results.append(mine)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and len(results) == 4 and all(equal(expected, result) for result in results)


def test_memory_of_updates_under_way_is_held():
    p = torch.zeros(1 << 20)
    core = _core.AdamW(threads=1)
    grad, m, v = torch.ones(1 << 20), torch.zeros(1 << 20), torch.zeros(1 << 20)
    core.submit((grad, m, v), count=1 << 20, param=p.data_ptr(), grad=grad.data_ptr(), step=1,
                exp_avg=m.data_ptr(), exp_avg_sq=v.data_ptr(), weight_decay=0.0, lr=0.5)  # fmt: skip
    grown = sys.getrefcount(grad)
    tuple_refs = gc.get_referrers(grad)
    assert any(isinstance(holder, tuple) for holder in tuple_refs) and grown >= 3
    del grad, m, v, tuple_refs
    del core  # finishes what was submitted
    assert torch.allclose(p, torch.full_like(p, -0.5))

    core = _core.AdamW(threads=1)
    core.close()
    core.close()
    with pytest.raises(stagehand.StagehandError, match="closed"):
        core.wait()
    with pytest.raises(ValueError, match="not the name of a dtype"):
        _core.AdamW().submit(None, count=1, param_dtype="F31")
    with pytest.raises(stagehand.StagehandError, match="NULL"):
        _core.AdamW().submit(None, count=1, step=1)


def test_a_forked_child_says_what_to_do_and_leaves_the_parent_alone(tmp_path):
    script = f"""
import os, torch
from torch import nn
from stagehand.optim import OffloadedAdamW, clip_grad_norm_
p = nn.Parameter(torch.ones(1000))
opt = OffloadedAdamW([p], state_path={str(tmp_path)!r})
p.grad = torch.ones(1000)
clip_grad_norm_([p], 1e9)
opt.step()
child = os.fork()
if child == 0:
    try:
        opt.step()
    except Exception as error:
        assert "forked" in str(error), error
        assert clip_grad_norm_([p], 1e9) > 0  # has threads of this process
        new = OffloadedAdamW([p])
        new.step()
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
opt.step()
assert float(opt.state[p]["step"]) == 2
"""
    done = children.run(script)
    assert done.status == 0, done.stderr


def test_it_is_found_where_it_is_looked_for():
    assert stagehand.OffloadedAdamW is OffloadedAdamW is stagehand.optim.OffloadedAdamW
    assert isinstance(OffloadedAdamW(params_of()), torch.optim.Optimizer)
    assert {"optim", "OffloadedAdamW"} <= set(dir(stagehand))
