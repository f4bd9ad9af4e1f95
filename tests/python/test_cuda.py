"""On a real CUDA device: the same answers as the resident model, bit for bit, whatever the timing.

Skipped where there is none. Run them on a machine with a GPU:
    python -m pytest tests/python/test_cuda.py
"""

from __future__ import annotations

import copy
import gc
import json
import re
import struct

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import stagehand  # noqa: E402
from cuda_support import size_of, wrapped  # noqa: E402, F401

pytestmark = pytest.mark.alone  # there is one card, and its memory is measured

torch.backends.cuda.matmul.allow_tf32 = False
torch.backends.cudnn.allow_tf32 = False
torch.backends.cudnn.deterministic = True


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 3 * d)
        self.down = nn.Linear(3 * d, d)
        self.gain = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return x + self.gain * self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, n=8, d=512, between=None):
        super().__init__()
        self.first = nn.Linear(d, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
        self.last = nn.Linear(d, d)
        self.between = between

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            if self.between:
                self.between()
        return self.last(x)


class Odd(nn.Module):
    """A convolution, an LSTM, attention whose out_proj is used by function, and a table that is sliced."""

    def __init__(self, d=256):
        super().__init__()
        self.pos = nn.Embedding(64, d)
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.lstm = nn.LSTM(d, d, batch_first=True)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.head = nn.Linear(d, d)

    def forward(self, x):
        x = x + self.pos.weight[: x.shape[1]]
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x, _ = self.lstm(x)
        x, _ = self.attn(x, x, x)
        return self.head(x)


def same(model, ref, *inputs, steps=5):
    with torch.no_grad():
        want = ref(*inputs)
        for i in range(steps):
            got = model(*inputs)
            assert torch.equal(got, want), f"step {i}: largest error {(got - want).abs().max().item()}"


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9, 2.0])
@pytest.mark.parametrize("inference_mode", [False, True])
def test_equal_to_resident(wrapped, share, inference_mode):
    torch.manual_seed(0)
    model = Stack()
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget=int(size_of(model) * share), inference_mode=inference_mode)
    same(model, ref, torch.randn(64, 512, device="cuda"))
    stats = model._stagehand_layer_runtime.stats
    assert stats["host_waits"] == 0
    assert stats["device_peak"] + stats["reserved_bytes"] <= stats["budget"]
    if share < 1:
        assert stats["h2d_bytes"] > size_of(model)


def test_every_kind_of_module(wrapped):
    torch.manual_seed(0)
    model = Odd().eval()
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget=int(size_of(model) * 0.8))  # the LSTM alone is half of the model
    same(model, ref, torch.randn(4, 48, 256, device="cuda"))


def test_freed_memory_full_of_nan_does_not_show(wrapped):
    """Tensors full of NaN are made and dropped between blocks, and copies are held up by other copies."""
    torch.manual_seed(0)
    host = torch.empty(50 << 20, dtype=torch.uint8, pin_memory=True)
    sink = torch.empty(50 << 20, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()

    def churn():
        torch.full((1 << 20,), float("nan"), device="cuda")
        with torch.cuda.stream(side):
            sink.copy_(host, non_blocking=True)

    ref = Stack().cuda()
    model = Stack(between=churn)
    model.load_state_dict(ref.state_dict())
    wrapped(model, vram_budget=int(size_of(model) * 0.3), inference_mode=True)
    same(model, ref, torch.randn(64, 512, device="cuda"), steps=20)


def test_budgets_changed_in_between(wrapped):
    torch.manual_seed(0)
    model = Stack()
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget=size_of(model) // 2)
    x = torch.randn(64, 512, device="cuda")
    for share in (0.3, 0.8, 0.25, 1.5):
        model._stagehand_layer_runtime.set_vram_budget(int(size_of(model) * share))
        same(model, ref, x, steps=3)


def test_on_another_stream(wrapped):
    torch.manual_seed(0)
    model = Stack()
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget=int(size_of(model) * 0.3))
    x = torch.randn(64, 512, device="cuda")
    same(model, ref, x)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        same(model, ref, x)
        torch.cuda.current_stream().synchronize()
    same(model, ref, x)


def test_an_output_that_is_the_weight(wrapped):
    class Leak(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512, bias=False) for _ in range(6))

        def forward(self, x):
            kept = None
            for i, layer in enumerate(self.layers):
                x = layer(x)
                kept = layer.weight[:2] if i == 2 else kept
            return x, kept

    torch.manual_seed(0)
    model = Leak()
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget="4MiB")
    x = torch.randn(8, 512, device="cuda")
    with torch.no_grad():
        views = [model(x)[1] for _ in range(2)]
        for _ in range(3):
            assert torch.equal(model(x)[0], ref(x)[0])
        assert all(torch.equal(v, ref.layers[2].weight[:2]) for v in views)


def test_writes_reach_the_device(wrapped):
    torch.manual_seed(0)
    model = Stack()
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget=int(size_of(model) * 0.5))
    x = torch.randn(64, 512, device="cuda")
    for i in range(6):
        same(model, ref, x, steps=1)
        with torch.no_grad():
            for mine, theirs in zip(model.parameters(), ref.parameters()):
                mine.mul_(1.0 + 0.125 * (i % 2))
                theirs.mul_(1.0 + 0.125 * (i % 2))
    same(model, ref, x, steps=2)


def test_embedding_rows_cross_by_mapped_memory(wrapped):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20000, 256), nn.Linear(256, 256), nn.Linear(256, 256))
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget="1MB", inference_mode=True)
    ids = torch.randint(0, 20000, (8, 128), device="cuda")
    same(model, ref, ids)
    stats = model._stagehand_layer_runtime.stats
    assert stats["mapped_bytes"] == 5 * 8 * 128 * 256 * 4
    assert stats["device_peak"] < 1_000_000


def test_shutdown_gives_everything_back(wrapped):
    torch.manual_seed(0)
    model = Stack()
    ref = copy.deepcopy(model)
    before = None
    for i in range(60):
        stagehand.layer(model, vram_budget=int(size_of(model) * 0.5))
        with torch.no_grad():
            model(torch.randn(4, 512, device="cuda"))
        model._stagehand_layer_runtime.shutdown()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        if i == 20:
            before = torch.cuda.memory_reserved()  # of this process: others may share the card
    assert torch.cuda.memory_reserved() <= before
    assert all(p.device.type == "cpu" for p in model.parameters())
    for mine, theirs in zip(model.parameters(), ref.parameters()):
        assert torch.equal(mine, theirs)


def test_exception_in_the_middle(wrapped):
    torch.manual_seed(0)
    fuse = [0]

    def bang():
        fuse[0] -= 1
        if fuse[0] == 0:
            raise RuntimeError("bang")

    ref = Stack().cuda()
    model = Stack(between=bang)
    model.load_state_dict(ref.state_dict())
    wrapped(model, vram_budget=int(size_of(model) * 0.3))
    x = torch.randn(64, 512, device="cuda")
    for k in (1, 4, 8):
        fuse[0] = k
        with pytest.raises(RuntimeError, match="bang"), torch.no_grad():
            model(x)
        same(model, ref, x, steps=2)


def write_safetensors(path, tensors) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else tensor.numpy().tobytes()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_streamed_from_a_file(tmp_path):
    torch.manual_seed(0)
    ref = Stack()
    write_safetensors(tmp_path / "model.safetensors", ref.state_dict())
    ref = ref.cuda()
    model = stagehand.load(Stack, tmp_path / "model.safetensors", vram_budget=int(size_of(ref) * 0.3))
    same(model, ref, torch.randn(64, 512, device="cuda"), steps=6)


def test_block_mode():
    torch.manual_seed(0)
    model = Stack()
    ref = copy.deepcopy(model).cuda()
    config = stagehand.StagehandConfig(vram_budget=int(size_of(model) * 0.4))
    runtime = stagehand.StagehandRuntime(model, config, block_pattern=r"^blocks\.\d+$", inference_mode=True)
    x = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        for _ in range(5):
            with runtime.managed_forward():
                got = model(x)
            assert torch.equal(got, ref(x))
    assert runtime.stats["h2d_bytes"] > 0 and runtime.stats["host_waits"] == 0
    runtime.shutdown()


def test_a_transformer_with_a_tied_head(wrapped):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=5000, bos_token_id=None,
                                     eos_token_id=None)
    model = transformers.GPT2LMHeadModel(config).eval()
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget=int(size_of(model) * 0.6), inference_mode=True)
    ids = torch.randint(0, 5000, (2, 16), device="cuda")
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(model(ids).logits, ref(ids).logits)
        got = model.generate(ids, max_new_tokens=8, do_sample=False)
        assert torch.equal(got, ref.generate(ids, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_of_adapters_through_frozen_weights(wrapped, checkpointed):
    from torch.utils.checkpoint import checkpoint

    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.ModuleList(nn.Linear(512, 512) for _ in range(6)).requires_grad_(False)
            self.down = nn.ModuleList(nn.Linear(512, 8, bias=False) for _ in range(6))
            self.up = nn.ModuleList(nn.Linear(8, 512, bias=False) for _ in range(6))

        def one(self, i, x):
            return torch.tanh(self.base[i](x) + self.up[i](self.down[i](x)))

        def forward(self, x):
            for i in range(6):
                x = checkpoint(self.one, i, x, use_reentrant=False) if checkpointed else self.one(i, x)
            return x

    torch.manual_seed(0)
    model = Adapted()
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget="4MB" if checkpointed else "8MB")
    x = torch.randn(16, 512, device="cuda")
    for _ in range(3):
        for m in (model, ref):
            m.zero_grad()
            m(x).pow(2).sum().backward()
        for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
            if mine.requires_grad:
                assert torch.equal(mine.grad.cpu(), theirs.grad.cpu()), name


def trained(net, x, scaler=None):
    for param in net.parameters():
        param.grad = None
    loss = net(x).pow(2).mean()
    (loss if scaler is None else scaler.scale(loss)).backward()


def grads_equal(model, ref):
    for (name, mine), theirs in zip(model.named_parameters(), ref.parameters()):
        assert mine.grad.device == mine.device and mine.grad.stride() == theirs.grad.stride(), name
        assert torch.equal(mine.grad.cpu(), theirs.grad.cpu()), name


def test_gradients_come_to_the_host(wrapped):
    """Compute is held up before each gradient, and the link by other copies: a copy that did not wait for its
    gradient, or a reader for its copy, would show."""
    torch.manual_seed(0)
    host = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    busy = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()

    def hold_up(module, given, out):
        def late(grad):
            torch.cuda._sleep(2_000_000)
            with torch.cuda.stream(side):
                host.copy_(busy, non_blocking=True)
        out.register_hook(late)

    model = Stack(6)
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget=size_of(model) * 3)
    handles = [module.register_forward_hook(hold_up) for module in model.modules() if isinstance(module, nn.Linear)]
    x = torch.randn(64, 512, device="cuda")
    for _ in range(5):
        trained(model, x), trained(ref, x)
        grads_equal(model, ref)
        assert all(p.grad.is_pinned() for p in model.parameters() if not p.is_cuda)
    for handle in handles:
        handle.remove()
    for _ in range(3):  # accumulated
        model(x).sum().backward(), ref(x).sum().backward()
        grads_equal(model, ref)
    stats = model._stagehand_layer_runtime.session.grads.stats()
    assert stats["tickets"] == 0 and stats["pageable_copies"] == 0 and stats["d2h_bytes"] > size_of(model)


def test_the_device_thread_does_not_wait_for_gradients(wrapped):
    """The thread that starts copies gets through all of them while the device has not begun with the first."""
    import threading
    import time

    torch.manual_seed(0)
    model = Stack(6)
    wrapped(model, vram_budget=size_of(model) * 3)
    x = torch.randn(64, 512, device="cuda")
    for _ in range(2):
        trained(model, x)
    grads = model._stagehand_layer_runtime.session.grads
    starts, start = [], grads.start

    def noted(grad):
        starts.append((time.perf_counter(), threading.get_ident()))
        return start(grad)

    grads.start = noted
    for param in model.parameters():
        param.grad = None
    loss = model(x).pow(2).mean()
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second
    begin = time.perf_counter()
    loss.backward()
    end = time.perf_counter()
    del grads.start
    assert len(starts) > 10 and all(ident != threading.get_ident() for _, ident in starts)
    assert starts[-1][0] - begin < 0.3 < end - begin


@pytest.mark.parametrize("ours", [False, True])
def test_scaled_gradients_are_unscaled_by_the_right_scale(wrapped, ours):
    torch.manual_seed(0)
    model = Stack(4)
    ref = copy.deepcopy(model).cuda()
    wrapped(model, vram_budget=size_of(model) * 3)
    scalers = [stagehand.amp.GradScaler("cuda") if ours else torch.amp.GradScaler("cuda"), torch.amp.GradScaler("cuda")]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, ref)]
    x = torch.randn(64, 512, device="cuda")
    for _ in range(5):
        for net, scaler, optimizer in zip((model, ref), scalers, optimizers):
            trained(net, x, scaler)
            torch.cuda._sleep(20_000_000)  # the scale is late
            scaler.unscale_(optimizer)
        grads_equal(model, ref)
        for net, scaler, optimizer in zip((model, ref), scalers, optimizers):
            scaler.step(optimizer)
            scaler.update()
        with torch.no_grad():  # steps on the host and on the device may round differently
            for mine, theirs in zip(model.parameters(), ref.parameters()):
                torch.testing.assert_close(mine.cpu(), theirs.cpu(), rtol=1e-5, atol=1e-6)
                mine.copy_(theirs)
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_torchs_scaler_and_a_fused_optimizer_skip_a_step_with_an_infinity(wrapped):
    """As transformers' Trainer does with fp16 and its default optimizer."""
    torch.manual_seed(0)
    model = Stack(4)
    wrapped(model, vram_budget=size_of(model) * 3)
    before = [param.detach().clone() for param in model.parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    x = torch.randn(64, 512, device="cuda")
    for clipped in (True, False) * 3:
        scaler = torch.amp.GradScaler("cuda", init_scale=float("inf"))
        trained(model, x, scaler)
        if clipped:
            scaler.unscale_(optimizer)
        torch.cuda._sleep(20_000_000)  # what tells of the infinity is late
        scaler.step(optimizer)
        assert all(torch.equal(param, value) for param, value in zip(model.parameters(), before))
        optimizer.zero_grad()


def activations(budget, model, x, steps=6, between=None):
    """Gradients and peak of each step, spilled above `budget`."""
    found = []
    with stagehand.activation.offload(budget) as runtime:
        for _ in range(steps):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            model.zero_grad()
            model(x).float().pow(2).mean().backward()
            if between:
                between()
            found.append(([p.grad.clone() for p in model.parameters()], torch.cuda.max_memory_allocated()))
    return found, runtime


@pytest.mark.parametrize("stream", [False, True])
def test_spilled_activations_give_the_same_gradients_below_the_budget(stream):
    torch.manual_seed(0)
    model = Stack(n=12, d=512).cuda()
    x = torch.randn(8192, 512, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream() if stream else torch.cuda.current_stream()):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model(x).float().pow(2).mean().backward()
        want = [p.grad.clone() for p in model.parameters()]
        torch.cuda.reset_peak_memory_stats()
        model.zero_grad()
        model(x).float().pow(2).mean().backward()
        resident = torch.cuda.max_memory_allocated()
        budget = before + (resident - before) * 2 // 3
        steps, runtime = activations(budget, model, x)
        stats = runtime.stats
        assert all(torch.equal(a, b) for got, _ in steps for a, b in zip(got, want))
        assert stats["spill_bytes"] > 0 and stats["restore_bytes"] > 0 and stats["ahead"] > 0
        assert steps[-1][1] <= budget, (steps[-1][1], budget, resident)
    stagehand.activation.shutdown()
    gc.collect()
    assert runtime.stats["records"] == 0 and runtime.stats["host_bytes"] == 0


def test_memory_that_a_spill_gave_back_is_not_written_before_the_copy():
    """Kernels that follow take the memory at once and fill it with NaN; copies are slowed down by more copies."""
    torch.manual_seed(0)
    model = Stack(n=8, d=512).cuda()
    x = torch.randn(4096, 512, device="cuda")
    model(x).float().pow(2).mean().backward()
    want = [p.grad.clone() for p in model.parameters()]
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    busy, side = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()

    def between():
        for size in (1 << 20, 2 << 20, 6 << 20):
            for _ in range(4):
                torch.full((size,), float("nan"), device="cuda")
        with torch.cuda.stream(side):
            host.copy_(busy, non_blocking=True)

    model.between = between
    steps, runtime = activations(torch.cuda.memory_allocated() + (64 << 20), model, x, between=between)
    assert runtime.stats["spill_bytes"] > 0
    assert all(torch.equal(a, b) for got, _ in steps for a, b in zip(got, want))
    stagehand.activation.shutdown()


def test_dropped_activations_are_computed_again_to_the_same_bits():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)) for _ in range(8)]
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    x = torch.randn(16384, 256, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    model(x).float().pow(2).mean().backward()
    want = [p.grad.clone() for p in model.parameters()]
    resident = torch.cuda.max_memory_allocated()
    model.zero_grad()
    kept = 8 * sum(p.numel() * p.element_size() for p in model.parameters())  # gradients of each step
    budget = before + kept + (resident - before) * 3 // 5
    steps, runtime = activations(budget, model, x, steps=8)
    stats = runtime.stats
    assert all(torch.equal(a, b) for got, _ in steps for a, b in zip(got, want))
    assert stats["dropped"] > 30 and stats["recomputed"] == stats["dropped"], stats
    assert steps[-1][1] <= budget, (steps[-1][1], budget, resident)
    stagehand.activation.shutdown()


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_a_pipeline_of_several_models_under_one_cap(mode):
    """A text encoder that is kept, a main model larger than the cap that is reserved, two guests each larger than what
    is left: the same answers, the cap never passed, and a guest's memory is back when it has left."""
    torch.manual_seed(0)
    models = [Stack(n=n, d=512) for n in (3, 24, 8, 9)]
    refs = [copy.deepcopy(model).cuda() for model in models]
    text_size, main_size, *guest_sizes = [size_of(model) for model in models]
    x = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        want = [ref(x) for ref in refs]
    del refs
    cap = text_size + main_size // 4 + 32 * 1024 * 1024
    assert main_size > cap
    card = stagehand.Device("cuda", budget=cap)

    def run(i):
        with torch.no_grad():
            got = models[i](x)
        assert torch.equal(got, want[i]), f"model {i}"

    runtimes = []
    for model, budget in zip(models, (text_size + (4 << 20), main_size // 4, cap, cap)):
        if mode == "layer":
            stagehand.layer(model, vram_budget=budget, device=card, inference_mode=True)
            runtimes.append(model._stagehand_layer_runtime)
        else:
            runtimes.append(stagehand.StagehandRuntime(
                model, stagehand.StagehandConfig(vram_budget=budget), inference_mode=True, device=card))
    text, main, *guests = runtimes
    try:
        with text.keep_resident():
            run(0)
            main.reserve_for_resident()
            for _ in range(2):
                run(1)
            yields = main.session.core.stats()["yields"]
            for _ in range(2):
                for i, guest in enumerate(guests, 2):
                    assert guest_sizes[i - 2] > card.residency()["free"]
                    torch.cuda.synchronize()
                    before = torch.cuda.memory_allocated(), card.residency()["occupied"]
                    with main.as_guest(guest):
                        for _ in range(3):
                            run(i)
                            run(1)
                    gc.collect()
                    assert guest.session.core.stats()["device_bytes"] == 0 and guest.session.stay.away
                    assert card.residency()["occupied"] <= before[1]
                    assert torch.cuda.memory_allocated() <= before[0] + (1 << 20)
            run(0)
        assert main.session.core.stats()["yields"] == yields
        assert card.residency()["peak"] <= cap
    finally:
        for runtime in runtimes:
            runtime.shutdown()
    assert card.residency()["occupied"] == 0


def test_models_on_one_card_share_its_account():
    a, b = Stack(n=3), Stack(n=3)
    stagehand.layer(a, vram_budget=size_of(a) * 2)
    stagehand.layer(b, vram_budget=size_of(b) * 2, device="cuda:0" if torch.cuda.current_device() == 0 else None)
    first, second = (m._stagehand_layer_runtime for m in (a, b))
    try:
        account = first.session.target.core
        assert account is second.session.target.core
        first.reserve_for_resident(second)
        info = account.residency()
        assert info["runtimes"] == 2 and 0 < info["primary"] < info["occupied"] <= info["cap"]
        second.release_reservation()
    finally:
        first.shutdown()
        second.shutdown()


# ---------------------------------------------------------------------- quantised transfer


def decoded(weight: torch.Tensor, encoding: str) -> torch.Tensor:
    """What the CPU's reference makes of a weight on the host."""
    from stagehand import _core

    name = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[weight.dtype]
    data = weight.detach().contiguous().clone()
    tensors = [(encoding, name, 0, data.shape[0], data[0].numel())]
    segments, packed_bytes, _ = _core.transfer_layout(tensors, 1 << 20)
    packed = torch.zeros(packed_bytes, dtype=torch.uint8)
    _core.transfer_encode(segments, data.data_ptr(), packed.data_ptr())
    _core.transfer_decode(segments, packed.data_ptr(), data.data_ptr())
    return data


def with_decoded(model, names, encoding):
    ref = copy.deepcopy(model)
    params = dict(ref.named_parameters())
    with torch.no_grad():
        for name in names:
            params[name].copy_(decoded(params[name], encoding))
    return ref.cuda()


@pytest.mark.parametrize("d", [512, 500])  # rows of whole vectors, and others
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", ["int8", "fp8", "int4"])
def test_kernels_have_the_bits_of_the_reference(wrapped, encoding, dtype, d):
    torch.manual_seed(0)
    model = Stack(8, d).to(dtype).requires_grad_(False)
    plain = copy.deepcopy(model)
    wrapped(model, vram_budget=int(size_of(model) * 0.4), transfer=encoding)
    runtime = model._stagehand_layer_runtime
    names = list(runtime.quantised["error"])
    stats = runtime.stats
    assert len(names) >= 6 and stats["expand_error"] == ""
    same(model, with_decoded(plain, names, encoding), torch.randn(64, d, device="cuda", dtype=dtype), steps=8)
    stats = runtime.stats
    assert stats["host_waits"] == 0 and stats["device_peak"] + stats["reserved_bytes"] <= stats["budget"]
    assert all(unit["transfer_bytes"] < 0.6 * unit["bytes"] for unit in stats["units"]
               if unit["name"] + ".weight" in names)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["svdquant", "svdquant-smooth", "hybrid", "v3-int4", "v3-nvfp4"])
def test_four_bit_files_expand_to_the_bits_of_the_decoder(tmp_path, form, dtype):
    from quant_models import differing_weights

    for rank in (8, 5):  # factors of whole vectors, and others
        (tmp_path / str(rank)).mkdir()
        wrong, told, stats = differing_weights(tmp_path / str(rank), form, dtype, "cuda", rank=rank)
        assert not wrong and stats["expand_error"] == ""
        assert len(told["files"]) >= 4 and not told["decoded"] and stats["host_bytes"] == 0
        assert stats["device_peak"] + stats["reserved_bytes"] <= stats["budget"]


def test_adapters_over_quantised_weights_train(wrapped):
    torch.manual_seed(0)
    model = Stack(6, 512).requires_grad_(False)
    model.last.requires_grad_(True)
    model.blocks[0].gain.requires_grad_(True)
    plain = copy.deepcopy(model)
    wrapped(model, vram_budget=int(size_of(model) * 0.5), transfer="int8")
    ref = with_decoded(plain, list(model._stagehand_layer_runtime.quantised["error"]), "int8")
    x = torch.randn(16, 512, device="cuda")
    for _ in range(3):
        trained(model, x)
        trained(ref, x)
        assert torch.equal(model.blocks[0].gain.grad.cpu(), ref.blocks[0].gain.grad.cpu())
        assert torch.equal(model.last.weight.grad.cpu(), ref.last.weight.grad.cpu())


def test_without_a_compiler_the_host_expands(monkeypatch, wrapped):
    """In a process of its own: kernels are compiled once for a device."""
    import os
    import subprocess
    import sys

    code = (
        "import copy, torch, warnings, stagehand\n"
        "torch.manual_seed(0)\n"
        "m = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8))).requires_grad_(False)\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    stagehand.layer(m, vram_budget='4MB', transfer='int8')\n"
        "assert any('expanded on the host' in str(w.message) for w in said), [str(w.message) for w in said]\n"
        "with torch.no_grad():\n"
        "    y = [m(torch.ones(4, 512, device='cuda')) for _ in range(4)]\n"
        "assert all(torch.equal(y[0], other) for other in y)\n"
        "assert m._stagehand_layer_runtime.quantised['error']\n"
        "m._stagehand_layer_runtime.shutdown()\n"
    )
    env = {**os.environ, "STAGEHAND_NVRTC_LIBRARY": "/nowhere/libnvrtc.so"}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_another_card_leaves_the_current_one_current():
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).requires_grad_(False)
    ref = copy.deepcopy(model).to("cuda:1")
    with torch.cuda.device(0), torch.no_grad():
        own = stagehand.layer(model, vram_budget="2MB", device="cuda:1")._stagehand_layer_runtime
        assert torch.cuda.current_device() == 0
        for _ in range(4):
            x = torch.randn(4, 256, device="cuda:1")
            assert torch.equal(model(x), ref(x))
            assert torch.cuda.current_device() == 0 and torch.zeros(1, device="cuda").device.index == 0
        own.shutdown()
        assert torch.cuda.current_device() == 0


# ---------------------------------------------------------------------- weights that are tensors around tensors


def around(nested, adapters=False, n=8, d=512):
    """Linears whose weights are int8 and a scale by row inside a tensor subclass; with adapters that train."""
    from support import with_adapters
    from wrapping_support import quantised

    torch.manual_seed(0)
    model = quantised(Stack(n, d).requires_grad_(False), nested)
    return with_adapters(model, rank=8) if adapters else model


def budget_around(model):
    """What is outside the blocks, and three of these."""
    from wrapping_support import held

    return held(model) - sum(held(block) for block in model.blocks) + 3 * held(model.blocks[0]) + 16384


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("inference_mode", [False, True])
def test_weights_around_tensors_stream_bit_equal(nested, inference_mode):
    model = around(nested)
    ref = copy.deepcopy(model).cuda()
    weights = list(model.parameters())
    budget = budget_around(model)
    stagehand.layer(model, vram_budget=budget, inference_mode=inference_mode)
    runtime = model._stagehand_layer_runtime
    with torch.no_grad():
        for _ in range(10):
            x = torch.randn(64, 512, device="cuda")
            churn = torch.full((1 << 20,), float("nan"), device="cuda")
            del churn
            assert torch.equal(model(x), ref(x))
    stats = runtime.stats
    assert stats["copies"] > 50 and stats["device_peak"] + stats["reserved_bytes"] <= budget
    assert not [name for name, why in runtime.report.items() if "subclass" in why]
    runtime.shutdown()
    assert all(a is b for a, b in zip(weights, model.parameters()))
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    with torch.no_grad():
        assert torch.equal(model.cuda()(x), ref(x))


def test_adapters_train_over_weights_around_tensors():
    def train(model):
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses = []
        for step in range(12):
            x = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)).cuda()
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            torch.full((1 << 20,), float("nan"), device="cuda")
        return losses

    model = around(True, adapters=True)
    want = train(copy.deepcopy(model).cuda())
    budget = budget_around(model)
    stagehand.layer(model, vram_budget=budget)
    runtime = model._stagehand_layer_runtime
    assert train(model) == pytest.approx(want, rel=1e-5)
    stats = runtime.stats
    assert stats["copies"] > 100 and stats["device_peak"] + stats["reserved_bytes"] <= budget
    assert runtime.session.core.stats()["leased_bytes"] == 0
    runtime.shutdown()


def test_one_that_cannot_stream_lies_on_the_card_and_comes_back():
    model = around(False)
    stays = model.blocks[2].up.weight.requires_grad_(True)
    ref = copy.deepcopy(model).cuda()
    stagehand.layer(model, vram_budget=2 * budget_around(model))
    assert "takes a gradient" in model._stagehand_layer_runtime.report["blocks.2.up.weight"]
    assert stays.device.type == stays.codes.device.type == "cuda"
    x = torch.randn(64, 512, device="cuda")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), ref(x))
    model._stagehand_layer_runtime.shutdown()
    assert model.blocks[2].up.weight is stays and stays.device.type == stays.codes.device.type == "cpu"


# ---------------------------------------------------------------------- what a budget counts


class Cast(nn.Linear):
    """Takes a weight of any dtype."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype), self.bias)


def test_a_weight_that_was_replaced_is_counted_and_never_above_the_budget():
    torch.manual_seed(0)
    model = Stack(8, 1024).requires_grad_(False)
    for block in model.blocks:
        block.up.__class__ = Cast
    ref = copy.deepcopy(model).cuda()
    x, budget = torch.randn(64, 1024, device="cuda"), size_of(model) // 2
    stagehand.layer(model, vram_budget=budget)
    runtime = model._stagehand_layer_runtime
    same(model, ref, x)
    before = runtime.stats["reserved_bytes"]
    for net in (model, ref):
        net.blocks[2].up.weight = nn.Parameter(net.blocks[2].up.weight.detach().bfloat16(), requires_grad=False)
    with pytest.warns(RuntimeWarning, match=r"blocks\.2\.up\.weight streamed and was replaced"):
        same(model, ref, x)
    stats = runtime.stats
    assert stats["reserved_bytes"] - before == 3 * 1024 * 1024 * 2
    assert stats["device_bytes"] + stats["reserved_bytes"] <= budget
    assert model.blocks[2].up.weight.device.type == "cuda"
    streams = model.blocks[3].up.weight
    model.blocks[3].up.weight = nn.Parameter(torch.zeros(3 * 1024, 16 * 1024), requires_grad=False)
    with pytest.raises(stagehand.StagehandOOMError, match=r"up\.weight.* came after wrapping"):
        model(x)
    assert model.blocks[3].up.weight.device.type == "cpu"
    model.blocks[3].up.weight = streams
    same(model, ref, x)
    runtime.shutdown()
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@pytest.mark.parametrize("encoding", [None, "int8", "fp8", "int4"])
def test_the_smallest_budget_that_an_error_names_works(encoding):
    torch.manual_seed(0)
    plain = Stack(6, 1024).requires_grad_(False)

    def smallest(budget):
        with pytest.raises(stagehand.StagehandOOMError, match="smallest budget that") as info:
            stagehand.layer(copy.deepcopy(plain), vram_budget=budget, transfer=encoding)
        return int(re.findall(r"(\d+) bytes", str(info.value))[-1])

    least = smallest(4000)
    assert smallest(least - 512) == smallest(least - 1) == least
    model = stagehand.layer(copy.deepcopy(plain), vram_budget=least, transfer=encoding)
    runtime = model._stagehand_layer_runtime
    names = list(runtime.quantised["error"])
    same(model, with_decoded(plain, names, encoding), torch.randn(64, 1024, device="cuda"), steps=8)
    stats = runtime.stats
    assert stats["device_peak"] + stats["reserved_bytes"] <= least
    runtime.shutdown()
