"""What callgrind counts for calls with gradients (counts.py): a forward, then a backward that computes it again, of a
plain model and of one that is managed and fits, each in two sizes. One dump for each; on the simulated device.

Blocks are checkpointed. In each a frozen Linear has a small trained pair beside it, which stays on the device, as PEFT
has them. What a step costs once cancels out between the sizes."""

import gc

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import stagehand

WIDTH, SIZES = 64, (4, 16)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Blocks(nn.Module):
    def __init__(self, layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(Adapted() for _ in range(layers))) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def count(layers: int, managed: bool) -> None:
    model, x = Blocks(layers), torch.randn(2, WIDTH)
    if managed:
        stagehand.layer(model, vram_budget="4MiB", device="sim")
    for _ in range(6):
        model(x).sum().backward()
    gc.collect()
    gc.disable()
    torch._C._valgrind_toggle()
    out = model(x).sum()
    torch._C._valgrind_toggle_and_dump_stats()
    torch._C._valgrind_toggle()
    out.backward()
    torch._C._valgrind_toggle_and_dump_stats()
    gc.enable()


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for managed in (False, True):
        for layers in SIZES:
            count(layers, managed)
