"""For the tests of block mode and file-backed weights: models, checkpoints on disk, budgets, memory."""

import copy
import ctypes
import json
import os
import re

import torch
from core_support import write_safetensors
from support import same
from torch import nn

import card
from stagehand.files.checkpoint import _TORCH_NAMES

SIZES = {getattr(torch, name): safetensors for safetensors, name in _TORCH_NAMES.items() if hasattr(torch, name)}
BLOCKS = r"^blocks\.\d+$"


def from_outside(path, data=b"", at=0, size=None):
    """Writes a file as another process does: unseen by this one's interpreter. size: what the file is cut off to."""
    libc = ctypes.CDLL(None, use_errno=True)
    name = os.fsencode(path)
    if size is not None:
        assert libc.truncate(name, ctypes.c_long(size)) == 0
    descriptor = libc.open(name, os.O_WRONLY)
    assert libc.pwrite(descriptor, data, ctypes.c_size_t(len(data)), ctypes.c_long(at)) == len(data)
    assert libc.close(descriptor) == 0


class Block(nn.Module):
    """Residual block whose gain differs from block to block, so that a mixed-up block shows at once."""

    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 3 * d)
        self.down = nn.Linear(3 * d, d)
        self.gain = nn.Parameter(torch.randn(()))

    def forward(self, x):
        return x + self.gain * self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, n=6, d=64):
        super().__init__()
        self.inp = nn.Linear(d, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
        self.out = nn.Linear(d, d)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class TinyLM(nn.Module):
    """An embedding whose table is also the head."""

    def __init__(self, n=2, d=32, vocabulary=500):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
        self.head = nn.Linear(d, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def made(build, *args, seed=0, **kwargs):
    torch.manual_seed(seed)
    with torch.device("cpu"):
        return build(*args, **kwargs).requires_grad_(False)


def nbytes(module):
    return sum(p.numel() * p.element_size() for p in module.parameters())


def tight_budget(model):
    """What is outside the blocks and two of the blocks: most of them stream."""
    blocks = sum(nbytes(block) for block in model.blocks)
    alignment = 512 * sum(1 for _ in model.parameters())
    return nbytes(model) - blocks + 2 * max(nbytes(block) for block in model.blocks) + alignment + 4096


def tensor_bytes(tensor):
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def save(path, tensors):
    """Writes {name: tensor} as a safetensors file. Returns {name: offset of its bytes}."""
    return write_safetensors(
        path, {n: (SIZES[t.dtype], t.shape, tensor_bytes(t)) for n, t in tensors.items()}
    )


def save_sharded(folder, tensors, count):
    """The same in `count` shards with an index. Returns the index's path."""
    os.makedirs(folder, exist_ok=True)
    names, index = list(tensors), {}
    for i in range(count):
        shard = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: tensors[name] for name in names[i::count]}
        save(os.path.join(folder, shard), part)
        index.update(dict.fromkeys(part, shard))
    path = os.path.join(folder, "model.safetensors.index.json")
    with open(path, "w") as file:
        json.dump({"metadata": {}, "weight_map": index}, file)
    return path


def state(model):
    """Copies of what state_dict gives, by name; a tied tensor once, as safetensors files have it."""
    found, seen = {}, set()
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen or tensor.numel() == 0:
            found[name] = tensor.detach().clone()
        seen.add(tensor.data_ptr())
    return found


def sim(budget, **options):
    """A simulated device that refuses more than the budget, or the card of the tests."""
    return card.open_device(budget, **options)


def open_files(folder):
    """Paths under `folder` that this process has open descriptors for."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


def anonymous_bytes():
    """Memory of this process that no file backs, peak where the kernel tells (RssAnon now)."""
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\s*(\d+) kB", file.read())[1]) * 1024


def same_state(model, reference):
    ours, theirs = model.state_dict(), reference.state_dict()
    return list(ours) == list(theirs) and all(same(ours[k], theirs[k]) for k in theirs)


def twin(model):
    """The reference: a deep copy made before the model is given away, on the device of the tests."""
    return card.as_managed(copy.deepcopy(model).to(card.TORCH))
