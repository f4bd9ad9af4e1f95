"""Captured passes on a real CUDA device: the same answers as the resident model, whatever comes between replays.

Skipped where there is none. Run them on a machine with a GPU:
    python -m pytest tests/python/test_cuda_graphs.py
"""

from __future__ import annotations

import copy
import gc
import os
import threading
import time

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device on this machine", allow_module_level=True)

import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import stagehand  # noqa: E402
from cuda_support import size_of, wrapped  # noqa: E402, F401
from stagehand.errors import StagehandError  # noqa: E402
from support import Adapted  # noqa: E402

pytestmark = pytest.mark.alone  # there is one card

D = 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, n=8):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(n))
        self.last = nn.Linear(D, D)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Many(nn.Module):
    def __init__(self, n=240):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=False) for _ in range(n))

    def forward(self, x):
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x


@pytest.fixture
def pair(wrapped):  # noqa: F811
    """pair(share, **options) -> (managed model, resident twin)."""

    def make(share=0.4, model=None, **options):
        torch.manual_seed(0)
        model = (model or Stack()).requires_grad_(False)
        twin = copy.deepcopy(model).cuda()
        options.setdefault("inference_mode", True)
        return wrapped(model, vram_budget=int(size_of(model) * share), **options), twin

    return make


def inputs(n=6, rows=64):
    torch.manual_seed(1)
    return [torch.randn(rows, D, device="cuda") for _ in range(n)]


def check(step, twin, xs):
    with torch.no_grad():
        for x in xs:
            assert torch.equal(step(x), twin(x))


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 2.0])
@pytest.mark.parametrize("inference_mode", [False, True])
def test_replays_equal_the_resident_model(pair, share, inference_mode):
    model, twin = pair(share, inference_mode=inference_mode)
    xs = inputs()
    step = stagehand.capture(model, xs[0])
    check(step, twin, xs)
    with torch.no_grad():  # without a look at the results between: replays queue up
        outs = [step(x).clone() for x in xs * 3]
        for x, out in zip(xs * 3, outs):
            assert torch.equal(out, twin(x))
    assert step.stats["captures"] == 1
    assert step.stats["h2d_bytes"] + step.stats["read_bytes"] >= 0.9 * size_of(model)
    assert (step.stats["h2d_bytes"] > 0) == (share < 1)


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_small_neighbours_that_are_copied_together(pair, share):
    model, twin = pair(share, Many().bfloat16())
    xs = [x.bfloat16() for x in inputs()]
    step = stagehand.capture(model, xs[0])
    stats = model._stagehand_layer_runtime.stats
    assert 3 * stats["joined_copies"] > stats["copies"]
    check(step, twin, xs)
    check(model, twin, xs)
    check(step, twin, xs)


def test_replays_and_calls_take_turns(pair):
    model, twin = pair(0.4)
    xs = inputs()
    step = stagehand.capture(model, xs[0])
    for i in range(4):
        check(step, twin, xs)
        check(model, twin, xs[: 1 + i])
    check(model, twin, [torch.randn(7, D, device="cuda")])  # another length
    check(step, twin, xs)


def test_two_graphs_and_two_models(pair):
    model, twin = pair(0.4)
    other, other_twin = pair(0.4)
    xs, short = inputs(), inputs(3, 5)
    step, short_step = stagehand.capture(model, xs[0]), stagehand.capture(model, short[0])
    other_step = stagehand.capture(other, xs[0])
    for _ in range(3):
        check(step, twin, xs[:2])
        check(other_step, other_twin, xs[:2])
        check(short_step, twin, short)
        check(other, other_twin, xs[:1])


@pytest.mark.parametrize("inference_mode", [False, True])
def test_written_weights_are_seen(pair, inference_mode):
    model, twin = pair(0.4, inference_mode=inference_mode)
    xs = inputs(2)
    step = stagehand.capture(model, xs[0])
    check(step, twin, xs)
    for i, (p, q) in enumerate(zip(model.parameters(), twin.parameters())):
        with torch.no_grad():
            if inference_mode:
                with model._stagehand_layer_runtime.writing():
                    p.add_(0.001 * i)
            else:
                p.add_(0.001 * i)
            q.add_(0.001 * i)
        if i % 7 == 0:
            check(step, twin, xs)
    check(step, twin, xs)
    assert step.stats["captures"] == 1
    model.blocks[2].up.weight.data = twin.blocks[2].up.weight.data.cpu() * 2  # other memory
    twin.blocks[2].up.weight.data.mul_(2)
    check(step, twin, xs)


def test_writes_of_trainable_weights_do_not_overtake_a_replay(pair):
    torch.manual_seed(0)
    model = Stack()
    twin = copy.deepcopy(model).cuda()
    model, _ = pair(0.3, model=model, inference_mode=False)
    model.requires_grad_(True)
    with torch.no_grad():
        xs = inputs(4)
        step = stagehand.capture(model, xs[0])
        for x in xs:
            out = step(x).clone()
            want = twin(x)
            for p, q in zip(model.parameters(), twin.parameters()):
                p.mul_(1.01)
                q.mul_(1.01)
            assert torch.equal(out, want)


def test_a_new_budget_captures_again(pair):
    """What fits stays; of a budget that is short any share may stream, where the copies hide behind the eager passes
    that the plan was made for, but no less than what has no room."""
    model, twin = pair(2.0)
    xs = inputs(2)
    step = stagehand.capture(model, xs[0])
    check(step, twin, xs)
    assert step.stats["h2d_bytes"] == 0
    for captures, share in ((2, 0.6), (3, 0.3)):
        model._stagehand_layer_runtime.set_vram_budget(int(size_of(model) * share))
        check(step, twin, xs)
        stats = step.stats
        assert stats["captures"] == captures
        assert stats["read_bytes"] <= size_of(model) * share
        assert stats["h2d_bytes"] >= size_of(model) * (1 - share) * 0.9
    model._stagehand_layer_runtime.set_vram_budget(int(size_of(model) * 2))
    check(step, twin, xs)
    assert step.stats["captures"] == 4 and step.stats["h2d_bytes"] == 0


def test_added_modules_and_modes_capture_again(pair):
    model, twin = pair(0.4)
    xs = inputs(2)
    step = stagehand.capture(model, xs[0])
    check(step, twin, xs)

    torch.manual_seed(3)
    adapted = Adapted(twin.last, rank=8).requires_grad_(False).cuda()
    twin.last = adapted
    mine = Adapted(model.last, rank=8).requires_grad_(False)
    mine.down.weight.data, mine.up.weight.data = adapted.down.weight.data.clone(), adapted.up.weight.data.clone()
    model.last = mine
    check(step, twin, xs)
    assert step.stats["captures"] == 2
    model.eval()
    check(step, twin, xs)
    assert step.stats["captures"] == 3


def test_after_shutdown_there_is_an_error(pair):
    model, twin = pair(0.4)
    xs = inputs(1)
    step = stagehand.capture(model, xs[0])
    model._stagehand_layer_runtime.shutdown()
    with pytest.raises(StagehandError, match="not under stagehand"):
        step(xs[0])


def test_other_inputs_are_refused(pair):
    model, twin = pair(0.4)
    xs = inputs(1)
    step = stagehand.capture(model, xs[0])
    for wrong in (xs[0][:3], xs[0].half(), None):
        with pytest.raises(StagehandError, match="input 0"):
            step(wrong)
    with pytest.raises(StagehandError, match="other arguments"):
        step(xs[0], xs[0])
    with pytest.raises(StagehandError, match="no backward"):
        step(xs[0].clone().requires_grad_())
    check(step, twin, xs)


def test_training_is_refused(pair):
    model, _ = pair(0.4, inference_mode=False)
    model.requires_grad_(True)
    with pytest.raises(StagehandError, match="training"):
        stagehand.capture(model, inputs(1)[0])


def test_a_capture_of_the_users_own_says_what_to_do(pair):
    model, twin = pair(0.4)
    xs = inputs(1)
    check(model, twin, xs)
    graph = torch.cuda.CUDAGraph()
    y = torch.zeros(8, device="cuda")
    with torch.cuda.graph(graph):
        with pytest.raises(StagehandError, match=r"Stack.*stagehand\.capture"):
            model(xs[0])
        with pytest.raises(StagehandError, match=r"stagehand\.capture"):
            model._stagehand_layer_runtime.begin_step()
        z = y + 1
    graph.replay()
    assert torch.equal(z, torch.ones(8, device="cuda"))  # the capture is as if nothing had been
    check(model, twin, xs)


def test_an_error_inside_a_capture_leaves_the_model_usable(pair):
    class Odd(Stack):
        angry = False

        def forward(self, x):
            for i, block in enumerate(self.blocks):
                x = block(x)
                if self.angry and i == 3 and torch.cuda.is_current_stream_capturing():
                    raise KeyboardInterrupt
            return self.last(x)

    model, twin = pair(0.4, model=Odd())
    xs = inputs(2)
    model.angry = True
    with pytest.raises(KeyboardInterrupt):
        stagehand.capture(model, xs[0])
    check(model, twin, xs)
    model.angry = False
    check(stagehand.capture(model, xs[0]), twin, xs)


def test_quantised_transfer(pair):
    model, _ = pair(0.4, transfer="int8")
    xs = inputs(3)
    with torch.no_grad():
        want = [model(x).clone() for x in xs]
        step = stagehand.capture(model, xs[0])
        for _ in range(2):
            for x, out in zip(xs, want):
                assert torch.equal(step(x), out)


def test_a_model_that_was_made_to_give_way(pair):
    model, twin = pair(0.4)
    xs = inputs(2)
    step = stagehand.capture(model, xs[0])
    with model._stagehand_layer_runtime.as_guest():
        check(step, twin, xs)
    assert model._stagehand_layer_runtime.session.core.parked
    check(step, twin, xs)
    step.release()
    check(step, twin, xs)


class Odd(nn.Module):
    """A convolution, an LSTM, attention whose out_proj is used by function, a table that is sliced, and one that is
    looked up in host memory."""

    def __init__(self, d=256):
        super().__init__()
        self.table = nn.Embedding(1000, d)
        self.pos = nn.Embedding(64, d)
        self.conv = nn.Conv1d(d, d, 3, padding=1)
        self.lstm = nn.LSTM(d, d, batch_first=True)
        self.attn = nn.MultiheadAttention(d, 4, batch_first=True)
        self.head = nn.Linear(d, d)

    def forward(self, ids):
        x = self.table(ids) + self.pos.weight[: ids.shape[1]]
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        x, _ = self.lstm(x)
        x, _ = self.attn(x, x, x)
        return self.head(x)


@pytest.mark.parametrize("trainable", [False, True])
def test_every_kind_of_module(pair, trainable):
    model, twin = pair(0.8, model=Odd().eval(), inference_mode=not trainable)
    model.requires_grad_(trainable)
    ids = [torch.randint(0, 1000, (4, 48), device="cuda") for _ in range(3)]
    with torch.no_grad():
        step = stagehand.capture(model, ids[0])
        check(step, twin, ids)
        check(model, twin, ids)
        check(step, twin, ids)


def test_calls_on_several_streams_wait_for_each_other(pair):
    model, twin = pair(0.4)
    xs = inputs(12)
    want = [twin(x) for x in xs]
    step = stagehand.capture(model, xs[0])
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outs = []
    for i, x in enumerate(xs):
        with torch.cuda.stream(streams[i % 3]):
            outs.append(step(x).clone())
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(outs, want))


def test_in_inference_mode(pair):
    model, twin = pair(0.4)
    xs = inputs(3)
    with torch.inference_mode():
        step = stagehand.capture(model, xs[0])
        for x in xs:
            assert torch.equal(step(x), twin(x))
    check(step, twin, xs)


def test_eager_calls_of_other_lengths_and_captures_settle_down(pair):
    model, twin = pair(0.4)
    xs, long = inputs(3), inputs(3, 4000)
    step, long_step = stagehand.capture(model, xs[0]), stagehand.capture(model, long[0])
    for _ in range(12):
        check(step, twin, xs)
        check(long_step, twin, long)
        check(model, twin, [xs[0], long[0]])
    assert step.stats["captures"] + long_step.stats["captures"] < 12


def test_an_output_that_is_a_view_of_a_weight_is_refused(pair):
    class Shows(Stack):
        def forward(self, x):
            return super().forward(x), self.blocks[5].down.weight[:2]

    model, _ = pair(0.3, model=Shows())
    x = inputs(1)[0]
    with pytest.raises(StagehandError, match="a view of"):
        stagehand.capture(model, x)
    gc.collect()
    with torch.no_grad():
        assert torch.isfinite(model(x)[0]).all()


def test_weights_in_files_are_refused(pair, tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch.manual_seed(0)
    source = Stack()
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    model = stagehand.load(Stack, tmp_path / "model.safetensors", vram_budget=int(size_of(source) * 0.3))
    x = inputs(1)[0]
    with torch.no_grad():
        model(x)
    with pytest.raises(StagehandError, match="a graph cannot wait for the host"):
        stagehand.capture(model, x)
    with torch.no_grad():
        assert torch.equal(model(x), source.cuda()(x))
    model._stagehand_layer_runtime.shutdown()


def test_a_budget_that_is_found(pair):
    """As much of the card as the model needs, and then less of it."""
    torch.manual_seed(0)
    model = Stack().requires_grad_(False)
    twin = copy.deepcopy(model).cuda()
    xs = inputs(2)
    check(twin, twin, xs)
    torch.cuda.empty_cache()
    taken = torch.cuda.memory_reserved()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((taken + size_of(model) * 0.7 + (64 << 20)) / total)
    try:
        stagehand.layer(model, inference_mode=True)
        step = stagehand.capture(model, xs[0])
        for _ in range(30):
            check(step, twin, xs)
            time.sleep(0.02)
        assert step.stats["captures"] < 8
        check(model, twin, xs)
        check(step, twin, xs)
        model._stagehand_layer_runtime.shutdown()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_beside_threads_that_call_this_model_and_another(pair):
    model, twin = pair(0.4)
    other, other_twin = pair(0.3)
    xs, stop, wrong = inputs(3), threading.Event(), []

    def call(called, reference):
        x = torch.randn(9, D, device="cuda")
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            want = reference(x)
            while not stop.is_set():
                try:
                    if not torch.equal(called(x), want):
                        wrong.append(called)
                except Exception as error:  # noqa: BLE001 - shown below
                    wrong.append(error)
                    return

    with torch.no_grad():
        want = [twin(x) for x in xs]
    torch.cuda.synchronize()
    threads = [threading.Thread(target=call, args=(model, twin)),
               threading.Thread(target=call, args=(other, other_twin))]
    for thread in threads:
        thread.start()
    try:
        step = stagehand.capture(model, xs[0])
        for i in range(60):
            if i % 20 == 0:
                step.recapture()
            assert torch.equal(step(xs[i % 3]), want[i % 3])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not wrong, wrong


@pytest.mark.skipif("STAGEHAND_TEST_COMPILE" not in os.environ,
                    reason="compiles for half a minute: STAGEHAND_TEST_COMPILE=1")
def test_compiled_blocks(pair):
    model = Stack(3)
    for block in model.blocks:
        block.compile()
    model, twin = pair(0.6, model=model)
    xs = inputs(3)
    step = stagehand.capture(model, xs[0])
    with torch.no_grad():
        want = [model(x).clone() for x in xs]
        for _ in range(2):
            for x, out in zip(xs, want):
                assert torch.equal(step(x), out)


def test_a_model_that_asks_the_device_inside_a_capture(pair):
    """The driver ends such a capture with an error, in which our streams are as well."""

    class Asks(Stack):
        asks = True

        def forward(self, x):
            for i, block in enumerate(self.blocks):
                x = block(x)
                if self.asks and i == 3 and x.sum().item() > 1e9:
                    return x
            return self.last(x)

    model, twin = pair(0.4, model=Asks())
    xs = inputs(2)
    with pytest.raises(RuntimeError, match="captur"):
        stagehand.capture(model, xs[0])
    torch.cuda.synchronize()
    check(model, twin, xs)
    model.asks = twin.asks = False
    check(stagehand.capture(model, xs[0]), twin, xs)
    check(model, twin, xs)
