"""Weights from files of every kind, in layer mode and in block mode, with a share in RAM: which way they are read, that
the bytes are the files', and what a user is told when they are not."""

import json
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from file_support import (  # noqa: E402
    BLOCKS, Stack, from_outside, made, nbytes, open_files, same_state, save, save_sharded, sim, state, tensor_bytes,
    tight_budget, twin,
)
from support import same  # noqa: E402

import stagehand  # noqa: E402
from card import simulated_only  # noqa: E402
from stagehand import CheckpointError, StagehandConfig, StagehandError, StagehandOOMError, TransferError  # noqa: E402

WAYS = ("io_uring", "direct", "page cache", "buffered")


def runtime_of(model):
    return getattr(model, "_stagehand_runtime", None) or model._stagehand_layer_runtime


def save_layer_index(folder, tensors):
    """Tensors at multiples of 4096 bytes in one raw file, in the order of the model."""
    entries, raw = [], bytearray()
    for name, tensor in tensors.items():
        raw.extend(bytes(-len(raw) % 4096))
        dtype = {torch.float32: "F32"}[tensor.dtype]
        entries.append({"layer_id": len(entries), "name": name, "path": "model.bin", "offset": len(raw),
                        "nbytes": tensor.nbytes, "dtype": dtype, "shape": list(tensor.shape)})
        raw += tensor_bytes(tensor)
    (folder / "model.bin").write_bytes(raw)
    (folder / "layers.json").write_text(json.dumps(entries))
    return folder / "layers.json"


def single(folder, tensors):
    save(folder / "model.safetensors", tensors)
    return folder / "model.safetensors"


KINDS = {
    "single": single,
    "index": lambda folder, tensors: save_sharded(folder, tensors, 3),
    "folder": lambda folder, tensors: save_sharded(folder, tensors, 3) and folder,
    "layers": save_layer_index,
}


def drop_cache(folder):
    """Takes the files out of the page cache, as far as their file system lets us."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def streamed(mode, model, path, budget, **options):
    """The model, its frozen weights streamed from `path`."""
    if mode == "layer":
        return stagehand.layer(model, source=path, vram_budget=budget, device=sim(budget), **options)
    runtime = stagehand.StagehandRuntime(model, StagehandConfig(vram_budget=budget), block_pattern=BLOCKS,
                                         device=sim(budget), **options)
    runtime.convert_registry_to_file_backed(path)
    return model


@pytest.fixture
def stack():
    model = made(Stack)
    return model, twin(model), torch.randn(3, 64)


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_source_streams_in_both_modes(stack, tmp_path, mode, kind):
    model, reference, x = stack
    path = KINDS[kind](tmp_path, state(model))
    if kind != "single":
        drop_cache(tmp_path)
    share = nbytes(model) // 3
    model = streamed(mode, model, path, tight_budget(model), inference_mode=True, ram_budget=share)
    with torch.no_grad():
        for _ in range(4):
            assert same(model(x), reference(x))
    runtime = runtime_of(model)
    stats = runtime.stats
    assert stats["files"] and all(file["way"] in WAYS and file["why"] for file in stats["files"])
    assert all(file["path"].startswith(str(tmp_path)) for file in stats["files"])
    assert share // 2 < stats["ram_bytes"] <= share
    assert stats["host_bytes"] == 0 and 0 < runtime.plan["disk_bytes_per_step"] < runtime.plan["bytes_per_step"]
    assert same_state(model, reference)
    runtime.shutdown()
    assert same(model(x), reference(x)) and open_files(tmp_path) == []


@pytest.mark.parametrize("mode", ["layer", "block"])
def test_frozen_weights_from_files_and_trainable_ones_from_ram(stack, tmp_path, mode):
    model, reference, x = stack
    path = single(tmp_path, state(model))
    for each in (model, reference):
        each.blocks[1].up.requires_grad_(True)
        each.blocks[4].down.requires_grad_(True)
    model = streamed(mode, model, path, tight_budget(model))
    runtime = runtime_of(model)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.1) for m in (model, reference)]
    for _ in range(3):
        for each, optimizer in zip((model, reference), optimizers):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    assert same(model(x), reference(x))
    assert runtime.stats["file_bytes"] > 0 and runtime.stats["host_bytes"] > 0
    runtime.shutdown()
    assert same_state(model, reference)


def test_a_weight_without_a_tensor_stays_in_ram_and_is_named(stack, tmp_path):
    model, reference, x = stack
    tensors = {name: tensor for name, tensor in state(model).items() if not name.startswith("blocks.3.up")}
    path = single(tmp_path, tensors)
    budget = tight_budget(model)
    with pytest.warns(RuntimeWarning, match="blocks.3.up.weight"):
        stagehand.layer(model, source=path, vram_budget=budget, device=sim(budget), inference_mode=True)
    for _ in range(2):
        assert same(model(x), reference(x))
    assert runtime_of(model).stats["host_bytes"] > 0
    runtime_of(model).shutdown()


@pytest.mark.parametrize("how", ["budget", "names", "shape", "trainable"])
def test_a_model_that_cannot_stream_is_as_it_was(stack, tmp_path, how):
    model, reference, x = stack
    tensors, budget, error = state(model), tight_budget(model), CheckpointError
    if how == "budget":
        budget, error = 20 << 10, StagehandOOMError
    elif how == "names":
        tensors = {f"other.{name}": tensor for name, tensor in tensors.items()}
        error = StagehandError  # NotFoundError
    elif how == "shape":
        tensors["blocks.2.up.weight"] = torch.zeros(3, 3)
    path = single(tmp_path, tensors)
    if how == "trainable":
        model.requires_grad_(True)
        error = StagehandError
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(error):
        stagehand.layer(model, source=path, vram_budget=budget, device=sim(1 << 20))
    assert [p.data_ptr() for p in model.parameters()] == addresses and open_files(tmp_path) == []
    assert same(model(x), reference(x)) and not hasattr(model, "_stagehand_layer_runtime")


@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["layer", "block"])
def test_what_is_all_in_ram_is_read_once(stack, tmp_path, blocks):
    _, reference, x = stack
    path = single(tmp_path, state(reference))
    drop_cache(tmp_path)
    budget = tight_budget(reference)
    model = stagehand.load(Stack, path, vram_budget=budget, ram_budget="1GB", blocks=blocks, device=sim(budget))
    runtime = runtime_of(model)
    read = []
    with torch.no_grad():
        for _ in range(5):
            assert same(model(x), reference(x))
            read.append(runtime.stats["file_bytes"])
    assert read[1] == read[-1], "nothing is read from the second step on"
    assert 0 < read[-1] <= 1.5 * nbytes(reference), "slabs that a new plan gives up are read again"
    assert runtime.stats["last_step"]["file_bytes"] == 0 and runtime.plan["disk_bytes_per_step"] == 0
    runtime.shutdown()


@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["layer", "block"])
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "cold"])
def test_a_file_that_is_cut_off_under_a_model_is_named(stack, tmp_path, blocks, cached):
    _, reference, x = stack
    path = single(tmp_path, state(reference))
    if not cached:
        drop_cache(tmp_path)
    budget = tight_budget(reference)
    model = stagehand.load(Stack, path, vram_budget=budget, blocks=blocks, device=sim(budget))
    with torch.no_grad():
        assert same(model(x), reference(x))
        from_outside(path, size=os.path.getsize(path) - 100_000)
        with pytest.raises(TransferError, match=r"unit '.*', tensor '.*': .*model\.safetensors: changed"):
            for _ in range(3):
                model(x)
    runtime_of(model).shutdown()


def test_a_file_that_is_replaced_keeps_its_bytes(stack, tmp_path):
    _, reference, x = stack
    path = single(tmp_path, state(reference))
    drop_cache(tmp_path)
    budget = tight_budget(reference)
    model = stagehand.load(Stack, path, vram_budget=budget, device=sim(budget))
    (tmp_path / "other").write_bytes(b"something else")
    os.replace(tmp_path / "other", path)
    with torch.no_grad():
        for _ in range(3):
            assert same(model(x), reference(x))
    runtime_of(model).shutdown()


MEMORY = """
import sys, threading, time
import torch, stagehand
from file_support import anonymous_bytes, save, sim
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1024, 2048, bias=False) for _ in range(16))
    def forward(self, x):
        for block in self.blocks:
            x = block(x)[:, :1024]
        return x

with torch.no_grad():
    folder, block = sys.argv[1], 1024 * 2048 * 4
    save(folder + "/small.safetensors", {"weight": torch.ones(64, 64)})  # what is loaded and started once
    small = stagehand.load(lambda: nn.Linear(64, 64, bias=False), folder + "/small.safetensors", vram_budget=1 << 20,
                           device="sim")
    small(torch.randn(2, 64))
    small._stagehand_layer_runtime.shutdown()
    base, peak, running = anonymous_bytes(), [0], True
    def watch():
        while running:
            peak[0] = max(peak[0], anonymous_bytes() - base)
            time.sleep(0.001)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    model = stagehand.load(Net, folder + "/model.safetensors", vram_budget=2 * block, ram_budget=4 * block,
                           device=sim(2 * block))
    for _ in range(3):
        model(torch.ones(1, 1024))
    stats = model._stagehand_layer_runtime.stats
    running = False
    thread.join()
print(peak[0], stats["device_peak"], stats["staging_bytes"], stats["ram_bytes"], block)
"""


@simulated_only  # a driver's own host memory, and PyTorch's for it, would count
def test_host_memory_is_slabs_and_the_share_in_ram(tmp_path):
    """128 MiB of weights, 32 MiB of them in RAM; the simulated device is host memory too."""
    save(tmp_path / "model.safetensors", {f"blocks.{i}.weight": torch.full((2048, 1024), i / 1e4) for i in range(16)})
    drop_cache(tmp_path)
    done = subprocess.run([sys.executable, "-c", MEMORY, tmp_path], capture_output=True, text=True, timeout=300,
                          cwd=os.path.dirname(__file__))
    assert done.returncode == 0, done.stderr
    peak, device, slabs, ram, block = map(int, done.stdout.split())
    assert ram == 4 * block
    assert peak < device + slabs + ram + (24 << 20), f"{(peak - device - slabs - ram) / 2**20:.0f} MiB too many"


# As containers do it: a filter under which io_uring_setup (425 on every architecture) fails with EPERM.
REFUSED = """
import ctypes, struct, sys
import torch, stagehand
from file_support import Stack, made, sim, tight_budget
from support import aligned_copy, same

libc = ctypes.CDLL(None, use_errno=True)
code = b"".join(struct.pack("HBBI", *i) for i in
                [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)])
keep = ctypes.create_string_buffer(code)
program = struct.pack("HxxxxxxP", 4, ctypes.addressof(keep))
assert libc.prctl(38, 1, 0, 0, 0) == 0
if libc.prctl(22, 2, program, 0, 0) != 0:
    print("no seccomp here")
    sys.exit()
reference = aligned_copy(made(Stack))
budget, x = tight_budget(reference), torch.ones(2, 64)
model = stagehand.load(Stack, sys.argv[1], vram_budget=budget, device=sim(budget))
with torch.no_grad():
    for _ in range(3):
        assert same(model(x), reference(x))
file, = model._stagehand_layer_runtime.stats["files"]
print(file["way"], "|", file["why"])
"""


def test_where_io_uring_is_refused_threads_read(stack, tmp_path):
    path = single(tmp_path, state(stack[0]))
    drop_cache(tmp_path)
    done = subprocess.run([sys.executable, "-c", REFUSED, path], capture_output=True, text=True, timeout=300,
                          cwd=os.path.dirname(__file__))
    assert done.returncode == 0, done.stderr
    if "no seccomp" in done.stdout:
        pytest.skip("this kernel has no seccomp filters")
    way, _, why = done.stdout.partition(" | ")
    if way in ("buffered", "page cache"):
        pytest.skip(f"files are read {way} here: {why.strip()}")
    assert way == "direct" and "io_uring is refused: Operation not permitted" in why
