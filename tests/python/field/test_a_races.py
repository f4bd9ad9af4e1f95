"""Field cases, section A: races, and numbers that are wrong without an error."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext

import card
import pytest
import support as s
import torch
from file_support import save
from file_support import state as saved_state
from pairs import agree, blocks, close, cuda, ends, managed, pair, same_grads, same_weights, within  # noqa: F401
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand
from stagehand import _core
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig

SLOW = 5e7  # bytes/s
LEAVES = r"^blocks\.\d+\.(norm|up|down)$"


@pytest.mark.combinations("window and grain decide what waits")
@pytest.mark.parametrize("grain", ["leaf", "block"])
@pytest.mark.parametrize("window", [0, 1, 3])
@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_2_the_disk_tier_waits_as_the_ram_tier_does(tmp_path, tier, window, grain):
    """Copies and calls are held up at random. Reads are held up too: readers find no slab until one is given back."""
    model = s.made(s.Stack, 8, 32)
    ref, x = s.aligned_copy(model), model.example()[0]
    save(tmp_path / "w.safetensors", saved_state(model))
    budget = s.tight_budget(model)
    device = _core.Device(f"delay(seed={window},call_us=100,stream_us=2000)+sim", memory_bytes=budget)
    pool = stagehand.PinnedPool(2, 1)
    options = {"pool": pool} if tier == "disk" else {}
    runtime = blocks(model, budget, LEAVES if grain == "leaf" else r"^blocks\.\d+$", device, inference_mode=True,
                     config={"policy": "static", "prefetch_window_blocks": window}, **options)
    if tier == "disk":
        runtime.convert_registry_to_file_backed(tmp_path / "w.safetensors")
    with torch.no_grad():
        for _ in range(3):
            held = [pool.acquire(1), pool.acquire(1)] if tier == "disk" and runtime.session is None else []
            free = threading.Timer(0.005, pool.release, (held,))
            free.start()
            assert s.same(model(x), ref(x))
            free.join()
    stats = runtime.stats
    assert stats["copies"] > len(stats["units"]) and stats["device_peak"] + stats["reserved_bytes"] <= budget
    runtime.shutdown()
    pool.shutdown()


SANITIZED = """
import torch, stagehand
from support import Stack
torch.backends.cuda.matmul.allow_tf32 = False
torch.manual_seed(0)
model = Stack(12, 256).requires_grad_(False)
import copy
ref = copy.deepcopy(model).cuda()
stagehand.layer(model, vram_budget=sum(p.nbytes for p in model.parameters()) // 3)
side = torch.cuda.Stream()
host = torch.empty(50 << 20, dtype=torch.uint8, pin_memory=True)
sink = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
x = torch.randn(16, 256, device="cuda")
with torch.no_grad():
    want = ref(x)
    side.wait_stream(torch.cuda.current_stream())  # for the memory of `sink`
    for _ in range(100):
        with torch.cuda.stream(side):
            sink.copy_(host, non_blocking=True)
        assert (model(x) - want).abs().max() <= 1e-5 + 1e-4 * want.abs().max()
"""


@cuda
@pytest.mark.alone
def test_3_the_compute_stream_waits_for_the_copy():
    """Under torch's sanitizer of streams, with the link kept busy by other copies."""
    done = subprocess.run([sys.executable, "-c", SANITIZED], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == 0, done.stderr
    assert "CSAN" not in done.stderr and "data race" not in done.stderr, done.stderr


class Dequantised(torch.autograd.Function):
    """x @ (q * scale).T, which keeps the dequantised weight for backward."""

    @staticmethod
    def forward(ctx, x, q, scale):
        weight = q.float() * scale
        ctx.save_for_backward(weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        weight, = ctx.saved_tensors
        return grad @ weight, None, None


class Int8Block(nn.Module):
    def __init__(self, d=48, rank=4):
        super().__init__()
        self.q = nn.Parameter(torch.randint(-99, 99, (d, d), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(d, 1) / 700, requires_grad=False)
        self.a, self.b = nn.Linear(d, rank, bias=False), nn.Linear(rank, d, bias=False)

    def forward(self, x):
        return x + Dequantised.apply(x, self.q, self.scale) + self.b(self.a(x))


class Int8Net(nn.Module):
    def __init__(self, between=None):
        super().__init__()
        self.blocks = nn.ModuleList(Int8Block() for _ in range(8))
        self.between = between

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            if self.between is not None:
                self.between(x)
        return x


def int8_net(between):
    model = s.made(Int8Net, between)
    for block in model.blocks:
        block.a.requires_grad_(), block.b.requires_grad_()
    return model


def adapters(model):
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("streamed", [0, 4, 8])
def test_5_a_dequantised_weight_that_is_saved_for_backward(streamed):
    """Memory that the runtime lets go reads as NaN; between blocks more of it is made and dropped."""
    def between(x):
        torch.full((48, 48), float("nan"))

    model = int8_net(between)
    ref = s.aligned_copy(model)
    own = s.nbytes(model.blocks[0])
    budget = {0: 2 * s.nbytes(model), 4: s.nbytes(model) - 3 * own, 8: 2 * own + 1024}[streamed]
    runtime = blocks(model, budget, device=s.device(budget, 3e8))
    optimizers = [torch.optim.SGD(adapters(net), lr=1e-3) for net in (model, ref)]
    for _ in range(15):
        x = torch.randn(3, 48)
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x).pow(2).mean().backward()
        same_grads(model, ref)
        for optimizer in optimizers:
            optimizer.step()
    resident = sum(unit["resident"] for unit in runtime.stats["units"])
    assert (resident == len(runtime.stats["units"])) == (streamed == 0)
    runtime.shutdown()


@cuda
@pytest.mark.alone
@pytest.mark.parametrize("share", [2.0, 0.6, 0.3])
def test_5_on_a_card(share):
    torch.backends.cuda.matmul.allow_tf32 = False
    model = int8_net(lambda x: torch.full((1 << 16,), float("nan"), device="cuda"))
    ref = s.aligned_copy(model).cuda()
    budget = int(share * s.nbytes(model))
    runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), device="cuda")
    for _ in range(300):
        x = torch.randn(3, 48, device="cuda")
        for net in (model, ref):
            net.zero_grad()
            net(x).pow(2).mean().backward()
        for mine, theirs in zip(adapters(model), adapters(ref)):
            close(mine.grad.cpu(), theirs.grad.cpu())
    runtime.shutdown()


class Sized(nn.Module):
    """Each block has a hidden width of its own, so that the bytes of a saved tensor say whose it is."""

    def __init__(self, spill, d=48):
        super().__init__()
        self.spill = spill
        self.up = nn.ModuleList(nn.Linear(d, 64 + 16 * i) for i in range(12))
        self.down = nn.ModuleList(nn.Linear(64 + 16 * i, d) for i in range(12))

    def forward(self, x):
        for i, (up, down) in enumerate(zip(self.up, self.down)):
            with self.spill(i):
                x = x + down(torch.tanh(up(x)))
        return x


def test_6_activations_of_the_chosen_blocks_and_no_others_are_spilled():
    config = ActivationStagehandConfig(enabled=True, slabs_per_class=None, recompute_cheap=False, max_inflight_d2h=4)
    activations = ActivationRuntime(config, s.device(1 << 30), smallest=0, high=0, low=0)
    chosen, spilled = range(3, 7), []
    inner = activations.saver.pack
    activations.saver.pack = lambda tensor: spilled.append(tensor.untyped_storage().nbytes()) or inner(tensor)
    model = s.made(Sized, lambda i: activations.managed_forward() if i in chosen else nullcontext(), frozen=False)
    ref = s.made(Sized, lambda i: nullcontext(), frozen=False)
    model, ref, x = model.to(card.TORCH), ref.to(card.TORCH), card.there(torch.randn(8, 48))
    for step in range(3):
        spilled.clear()
        activations.step_begin(step)
        loss = model(x).pow(2).mean()
        hidden = sorted(n // 32 for n in set(spilled) if n // 32 > 48 and n < 48 * 64 * 4)
        assert hidden == [64 + 16 * i for i in chosen]
        out = activations.stats["spill_bytes"]
        assert out > 0
        loss.backward()
        metrics = activations.step_end()
        assert metrics.spill_bytes >= 32 * sum(hidden) and metrics.spill_bytes <= 32 * (sum(hidden) + 48 * 5)
    for _ in range(3):
        ref(x).pow(2).mean().backward()
    same_grads(model, ref)
    activations.shutdown()


class Chunking(nn.Module):
    """Splits its input in two where little memory is free."""

    def __init__(self, asks, d=48):
        super().__init__()
        self.asks = asks
        self.lin = nn.Linear(d, d)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        few = self.asks()
        parts = x.chunk(2) if few else [x]
        return x + torch.cat([self.out(torch.tanh(self.lin(part))) for part in parts])


class Checkpointed(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.blocks = nn.ModuleList(Chunking(asks) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


@card.on_the_host
def test_9_free_memory_is_the_same_in_forward_and_recomputation():
    seen, device = [], []

    def asks():
        if device:
            seen.append(device[0].info()["memory_free"])
        return bool(seen) and seen[-1] < 4096 * 1024

    model = s.made(Checkpointed, asks, frozen=False)
    ref = s.made(Checkpointed, lambda: True, frozen=False)
    ref.load_state_dict(model.state_dict())
    ref = s.aligned_copy(ref)
    budget = s.tight_budget(model)
    managed(model, budget, 3e8)
    device.append(s.runtime(model).session.target.core)
    for _ in range(5):
        x = torch.randn(4, 48)
        del seen[:]
        for net in (model, ref):
            net(x).pow(2).mean().backward()
        same_grads(model, ref)
        assert len(seen) == 16 and max(seen) - min(seen) <= s.nbytes(model.blocks[0])
    assert within(model, budget)


@cuda
def test_9_on_a_card():
    free = []  # by this process's count: others may be on the card
    model = s.made(Checkpointed, lambda: bool(free.append(-torch.cuda.memory_reserved())), frozen=False)
    stagehand.layer(model, vram_budget=s.tight_budget(model))
    for step in range(5):
        model(torch.randn(4, 48, device="cuda")).pow(2).mean().backward()
        if step:  # the allocator's first segments come in the first step
            assert max(free) - min(free) <= max(s.nbytes(model.blocks[0]), 2 << 20)
        free.clear()
    s.runtime(model).shutdown()


# ---------------------------------------------------------------------- own


def test_own_a_held_up_device_trains_to_the_same_bits():
    """Copies both ways, gradients among them, are late at random; writes of the optimizer come between."""
    model = s.made(s.Router, 6, 40, frozen=False)
    ref = s.aligned_copy(model)
    budget = s.tight_budget(model)
    device = _core.Device("delay(seed=3,call_us=100,stream_us=1500)+sim", memory_bytes=budget)
    stagehand.layer(model, vram_budget=budget, device=device)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.01) for net in (model, ref)]
    for order in (None, None, [5, 4, 3, 2, 1, 0], [0, 0, 3, 3], None, [2], [], None):
        x = model.example()[0]
        for net, optimizer in zip((model, ref), optimizers):
            optimizer.zero_grad()
            net(x, order=order).pow(2).sum().backward()
            optimizer.step()
        same_grads(model, ref)
    s.runtime(model).shutdown()
    same_weights(model, ref)


class Growing(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.mul_(1.25)
        return super().forward(x)


def test_own_a_layer_that_writes_itself_and_runs_again_before_the_write_is_at_home():
    """The second use comes after the layer has left the device: what the first wrote must have been brought back."""
    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Growing(48, 48) for _ in range(6))

        def forward(self, x):
            for i in (0, 1, 2, 3, 4, 5, 0, 3, 0, 1, 5, 5):
                x = torch.tanh(self.blocks[i](x))
            return x

        def example(self):
            return (torch.randn(2, 48),)

    model, ref = pair(Again, frozen=True, budget=lambda m: 2 * s.nbytes(m.blocks[0]) + 2048, link=SLOW)
    agree(model, ref, 4)
    same_weights(model, ref)


def test_own_another_thread_asks_and_changes_while_passes_run():
    """Statistics, waits and budgets of one thread, passes of another."""
    model, ref = pair(s.Stack, 6, 40, frozen=True, budget=s.nbytes, link=SLOW)
    own, errors, over = s.runtime(model), [], threading.Event()
    budgets = (s.tight_budget(model), s.nbytes(model), s.tight_budget(model) + 8192)

    def asks():
        turn = 0
        while not over.is_set():
            try:
                own.stats, own.plan, own.report, own.telemetry.history
                own.synchronize()
                model.state_dict()
                own.set_vram_budget(budgets[turn % 3])
                turn += 1
            except stagehand.InvalidStateTransitionError:
                pass  # a step is open: said, and nothing is done
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

    thread = threading.Thread(target=asks)
    thread.start()
    try:
        agree(model, ref, 25, guard=False)
    finally:
        over.set()
        thread.join()
    assert not errors, errors


def test_own_a_pass_of_one_thread_and_its_backward_on_another():
    """What forward leased on one thread is leased again, and let go, on another, while the next forward runs."""
    model, ref = pair(s.Stack, 6, 40, link=3e8)
    for _ in range(4):
        x = model.example()[0]
        losses = [net(x).pow(2).sum() for net in (model, ref)]
        threads = [threading.Thread(target=loss.backward) for loss in losses]
        for thread in threads:
            thread.start()
        with torch.no_grad():
            got = model(x)
        for thread in threads:
            thread.join()
        assert s.same(got, ref(x))
        same_grads(model, ref)


@card.on_the_host
def test_own_a_shutdown_from_another_thread_between_two_passes():
    """A pass that waits for its turn while the runtime ends is one of a plain model: right, and no error."""
    found = []
    for _ in range(10):
        model, ref = pair(s.Stack, 4, 40, frozen=True, link=SLOW)
        x, begun = model.example()[0], threading.Event()

        def passes(model=model, ref=ref, x=x, begun=begun):
            try:
                with torch.no_grad():
                    for _ in range(4):
                        begun.set()
                        found.append(torch.allclose(model(x), ref(x)))
            except BaseException as error:  # noqa: BLE001
                found.append(error)

        thread = threading.Thread(target=passes)
        thread.start()
        begun.wait()
        s.runtime(model).shutdown()
        thread.join()
    assert found == [True] * 40, [what for what in found if what is not True]


@pytest.mark.parametrize("part", [False, True])
def test_own_a_call_while_another_thread_is_shutting_down_waits_until_all_is_plain(part, monkeypatch):
    """It read norms and biases whose memory on the device was just given back: NaN, once in some 700 tries."""
    model, ref = pair(s.Stack, 3, 24, frozen=True)
    x, run = model.example()[0], s.runtime(model)
    called, twin = (model.blocks[0], ref.blocks[0]) if part else (model, ref)
    session, moving, found = run.session, threading.Event(), []
    inner = session.takeover.unmanaged_to_host

    def slowly():
        moving.set()
        thread.join(0.3)  # the call must not get through meanwhile
        found.append(thread.is_alive())
        inner()

    def call():
        moving.wait()
        with torch.no_grad():
            found.append(s.same(called(x), twin(x)))

    monkeypatch.setattr(session.takeover, "unmanaged_to_host", slowly)
    thread = threading.Thread(target=call)
    thread.start()
    run.shutdown()
    thread.join()
    assert found == [True, True]
