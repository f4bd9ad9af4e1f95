"""Field cases M: spilled activations."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import weakref

import card
import pytest
import support as s
import torch
import stagehand
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig
from torch import nn
from worlds import needs_cuda

pytestmark = pytest.mark.usefixtures("tensors_there")


@contextlib.contextmanager
def spilling(limit=0, low=0, link=4e8, device=None, smallest=64, **config):
    """Everything that may go goes."""
    config = {"enabled": True, "slabs_per_class": None, "max_inflight_d2h": 8, "max_inflight_h2d": 4,
              "recompute_cheap": False, **config}
    runtime = ActivationRuntime(ActivationStagehandConfig(**config), device or s.device(1 << 30, link),
                                smallest=smallest, high=limit, low=low, ahead_bytes=1 << 20)
    try:
        yield runtime
    finally:
        runtime.shutdown()


class Keep(torch.autograd.Function):
    """Saves all its tensors and hands them to `seen` in backward."""

    @staticmethod
    def forward(ctx, seen, x, *tensors):
        ctx.seen = seen
        ctx.save_for_backward(*tensors)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.seen.append(ctx.saved_tensors)
        return (None, grad, *(None for _ in ctx.saved_tensors))


def kinds(device):
    """Tensors of every kind that a graph may save, each in memory of its own."""
    base = torch.randn(12, 10, device=device)
    return {
        "float": base.clone(), "double": base.double(), "half": base.half(), "bfloat16": base.bfloat16(),
        "int64": base.mul(100).long(), "int8": base.mul(10).to(torch.int8), "bool": base > 0,
        "empty": base[:0].clone(), "scalar": base[0, 0].clone(), "zero-size": base.new_empty(3, 0, 2),
        "transposed": base.clone().t(), "every other": base.clone()[:, ::2],
        "expanded": base[:, :1].clone().expand(12, 7), "complex": torch.complex(base, base.flip(0)),
        "conjugated": torch.complex(base, base.flip(0)).conj(),
        "negative": torch.complex(base, base.flip(0)).conj().imag, "channels last": base.clone().view(1, 3, 8, 5).to(
            memory_format=torch.channels_last),
    }


def comes_back_as_it_was(make, runtime):
    """What is saved is held by nobody else, or it would stay."""
    seen, x = [], torch.ones(4, requires_grad=True)
    torch.manual_seed(0)
    tensors = make()
    torch.manual_seed(0)
    with runtime.managed_forward():
        out = Keep.apply(seen, x, *(t.detach() for t in make().values()))
    out.sum().backward()
    for (name, was), now in zip(tensors.items(), seen[0], strict=True):
        assert now.device == was.device and now.dtype == was.dtype and now.shape == was.shape, name
        assert now.is_conj() == was.is_conj() and now.is_neg() == was.is_neg(), name
        assert now.stride() == was.stride() or not now.numel(), name
        assert torch.equal(now.resolve_conj().resolve_neg(), was.resolve_conj().resolve_neg()), name


def test_80_every_kind_of_tensor_comes_back_as_it_was():
    with spilling() as runtime:
        for step in range(3):
            comes_back_as_it_was(lambda: kinds(card.TORCH.type), runtime)
        assert runtime.stats["spilled"] > 20


@needs_cuda
def test_80_on_cuda_each_tensor_comes_back_where_it_was():
    with spilling(device="cuda") as runtime:
        for step in range(3):
            comes_back_as_it_was(lambda: {
                f"{where} {name}": t for where in ("cpu", "cuda") for name, t in kinds(where).items()}, runtime)
        assert runtime.stats["spilled"] > 20


def live_bytes():
    gc.collect()
    return sum(t.untyped_storage().nbytes() for t in gc.get_objects() if type(t) is torch.Tensor)


def test_82_forwards_that_are_dropped_leave_nothing():
    model, census = s.made(s.Stack, 4, 64, frozen=False).to(card.TORCH), {}
    with spilling() as runtime:
        for i in range(30):
            with runtime.managed_forward():
                out = model(torch.randn(8, 64))
                if i % 3 == 0:
                    out.sum().backward()
            del out
            if i in (8, 29):
                stats = runtime.stats
                census[i] = live_bytes(), stats["records"], stats["slab_bytes"], stats["kept_bytes"]
        assert census[8] == census[29] and census[29][1] == 0


def test_82_backward_may_run_outside_of_the_context():
    model = s.made(s.Stack, 4, 64, frozen=False)
    ref = s.aligned_copy(model)
    model = s.aligned_copy(model)
    x = torch.randn(8, 64)
    ref(x).pow(2).sum().backward()
    with spilling() as runtime:
        for _ in range(3):
            model.zero_grad()
            with runtime.managed_forward():
                loss = model(x).pow(2).sum()
            with runtime.managed_forward():  # another pass between them
                model(x + 1).sum()
            loss.backward()
            assert s.same([p.grad for p in model.parameters()], [p.grad for p in ref.parameters()])
        assert runtime.stats["spilled"] > 0


class Wide(nn.Module):
    """n products whose inputs are saved: 4 * side * side bytes each."""

    def __init__(self, n, side):
        super().__init__()
        self.side = side
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1 + i / n)) for i in range(n))

    def forward(self, x):
        for scale in self.scales:
            x = (x * scale).sin()
        return x


@needs_cuda
def test_83_on_cuda_neither_forward_nor_backward_holds_more_than_a_few_blocks():
    net, side = Wide(24, 2048).cuda(), 2048  # 16 MiB for a saved tensor, two a block
    x = torch.randn(side, side, device="cuda", requires_grad=True)
    saved = 2 * 4 * side * side
    with spilling(device="cuda", limit=3 * saved, low=2 * saved, max_inflight_d2h=2, max_inflight_h2d=2) as runtime:
        for step in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            peaks = []
            torch.cuda.reset_peak_memory_stats()
            with runtime.managed_forward():
                loss = net(x).sum()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            torch.cuda.reset_peak_memory_stats()
            loss.backward()
            peaks.append(torch.cuda.max_memory_allocated() - before)
            x.grad = None
        assert max(peaks) < 6 * saved, peaks
        assert runtime.stats["spilled"] > 0


def test_83_tensors_in_flight_are_bounded_in_backward_too():
    net, side = Wide(24, 64), 64
    x = torch.randn(side, side, requires_grad=True)
    net(x).sum().backward()
    want, saved = x.grad.clone(), 4 * side * side
    for ahead in (1, 2, 4):
        with spilling(limit=4 * saved, low=2 * saved, link=2e8, max_inflight_h2d=ahead) as runtime:
            for step in range(3):
                x.grad = None
                runtime.step_begin(step)
                with runtime.managed_forward():
                    net(x).sum().backward()
                assert s.same(x.grad, want)
                assert card.peak(runtime.step_end(), runtime.stats) <= 4 * saved
            assert runtime.stats["spilled"] > 24


def test_85_weights_and_views_of_them_stay_and_a_storage_crosses_once():
    w = nn.Parameter(torch.randn(16, 16))
    net = nn.Module()
    net.w = w
    seen, x = [], torch.randn(16, 16, requires_grad=True)
    with spilling() as runtime:
        with runtime.managed_forward():
            y = x * 2
            out = Keep.apply(seen, y, w, w.t(), w[:4], w.detach(), w.view(-1)[3:], y, y.t(), y[2:], y)
            del y
        y = x * 2
        assert runtime.stats["spilled"] == 1 and runtime.stats["spill_bytes"] == y.nbytes
        out.sum().backward()
        *weights, a, b, c, d = seen[0]
        for now, was in zip(weights, (w, w.t(), w[:4], w, w.view(-1)[3:])):
            assert now.data_ptr() == was.data_ptr() and now.stride() == was.stride() and now.shape == was.shape
        assert a.data_ptr() == b.data_ptr() == d.data_ptr() and c.data_ptr() == a.data_ptr() + 2 * 16 * 4
        assert s.same([a, b, c], [y.detach(), y.t().detach(), y[2:].detach()])


@needs_cuda
@pytest.mark.alone
def test_86_on_cuda_a_captured_step_has_right_gradients_or_is_refused():
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
    x = torch.randn(32, 64, device="cuda")

    def step():
        net.zero_grad(set_to_none=False)
        net(x).pow(2).sum().backward()

    side = torch.cuda.Stream()
    with spilling(device="cuda") as runtime:
        with torch.cuda.stream(side):
            for _ in range(3):
                with runtime.managed_forward():
                    step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                with runtime.managed_forward():
                    step()
        except stagehand.StagehandError as error:
            assert "captur" in str(error)
            return
        for i in range(3):
            x.copy_(torch.randn(32, 64))
            graph.replay()
            found = [p.grad.clone() for p in net.parameters()]
            step()
            for mine, plain in zip(found, (p.grad for p in net.parameters())):
                torch.testing.assert_close(mine, plain)


# ---------------------------------------------------------------------- own cases


def test_own_every_bit_pattern_comes_back():
    """Signalling NaNs, subnormals, negative zero: moved as bytes, not as numbers."""
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    tensors = {"half": bits.view(torch.half), "bfloat16": bits.view(torch.bfloat16),
               "float": torch.randint(-(1 << 31), 1 << 31, (4096,)).to(torch.int32).view(torch.float32),
               "double": torch.randint(-(1 << 62), 1 << 62, (2048,)).view(torch.float64),
               "bool": torch.randint(0, 2, (999,)).bool()}
    seen, x = [], torch.ones(4, requires_grad=True)
    with spilling() as runtime:
        with runtime.managed_forward():
            copies = [t.clone() for name, t in tensors.items() if name != "bfloat16"]
            out = Keep.apply(seen, x, copies[0], copies[0].view(torch.bfloat16), *copies[1:])
            del copies
        out.sum().backward()
        assert runtime.stats["spilled"] == 4  # both 16-bit ones see one storage
    for was, now in zip(tensors.values(), seen[0]):
        assert s.same(was, now)


def test_own_a_part_of_a_large_storage_takes_the_device_no_longer_than_the_whole():
    """A saved slice keeps its whole storage: it crosses once, and nothing of it stays when the rest is dropped."""
    seen, x = [], torch.ones(4, requires_grad=True)
    big = torch.randn(256, 1024)
    with spilling() as runtime:
        with runtime.managed_forward():
            out = Keep.apply(seen, x, big[3], big[200:202], big[:, 5])
            want, weak = [big[3].clone(), big[200:202].clone(), big[:, 5].clone()], weakref.ref(big)
            nbytes = big.nbytes
            del big
            gc.collect()
        assert weak() is None and runtime.stats["spill_bytes"] == nbytes
        out.sum().backward()
        assert s.same(list(seen[0]), want)
        assert len({t.untyped_storage().data_ptr() for t in seen[0]}) == 1
        seen.clear()
        del out
        gc.collect()
        assert runtime.stats["records"] == 0


def test_own_backward_on_another_thread_than_forward():
    model = s.made(s.Stack, 4, 32, frozen=False)
    ref, x = s.aligned_copy(model), torch.randn(8, 32)
    model = s.aligned_copy(model)
    ref(x).pow(2).sum().backward()
    with spilling(link=1e8) as runtime:
        for _ in range(3):
            model.zero_grad()
            with runtime.managed_forward():
                loss = model(x).pow(2).sum()
            threads = [threading.Thread(target=lambda: loss.backward())]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert s.same([p.grad for p in model.parameters()], [p.grad for p in ref.parameters()])


@card.simulated_only
def test_own_a_forked_child_with_spilled_tensors_ends(tmp_path):
    """At the moment of the fork copies are under way; the child drops the graph, and may not run it."""
    x = torch.randn(64, 64, requires_grad=True)
    with spilling(link=1e7) as runtime:
        with runtime.managed_forward():
            out = x
            for _ in range(7):
                out = (out * 1.1).sin()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(240)
            code = 1
            try:
                try:
                    out.sum().backward()
                except (stagehand.StagehandError, RuntimeError) as error:
                    # torch's own where its engine has threads for a card
                    torchs = torch.cuda.is_available() and "fork" in str(error)
                    refused = isinstance(error, stagehand.StagehandError) or torchs
                    del error
                del out
                runtime.shutdown()
                gc.collect()
                code = 0 if refused else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        out.sum().backward()
        assert x.grad.isfinite().all()


def test_own_gradients_of_a_graph_that_is_kept_while_steps_go_on():
    """retain_graph over several later steps: its records are not those of the pass that is expected next."""
    net = s.aligned_copy(s.made(s.Stack, 4, 32, frozen=False))
    x, y = torch.randn(8, 32), torch.randn(8, 32)
    params = list(net.parameters())
    want_x = torch.autograd.grad(net(x).pow(2).sum(), params)
    want_y = torch.autograd.grad(net(y).pow(2).sum(), params)
    with spilling(link=2e8) as runtime:
        with runtime.managed_forward():
            old = net(x).pow(2).sum()
        for step in range(4):
            runtime.step_begin(step)
            with runtime.managed_forward():
                loss = net(y).pow(2).sum()
                assert s.same(list(torch.autograd.grad(old, params, retain_graph=True)), list(want_x))
                assert s.same(list(torch.autograd.grad(loss, params)), list(want_y))
            runtime.step_end()
        del old, loss
        gc.collect()
        assert runtime.stats["records"] == 0
