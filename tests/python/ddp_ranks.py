"""The part of test_ddp.py that each rank runs, in a process of its own. Results are written to a file."""

import contextlib
import sys

import torch
import torch.distributed as dist
from torch import nn

import stagehand
from stagehand import _core

D, BLOCKS, STEPS = 64, 6, 4


class Lora(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 4, bias=False), nn.Linear(4, D, bias=False)

    def forward(self, x):
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def net(seed=0, trained="adapters"):
    torch.manual_seed(seed)
    model = nn.Sequential(*(Lora() for _ in range(BLOCKS)))
    return model.requires_grad_(True) if trained == "all" else model


def trained_of(model) -> list:
    return [param for param in model.parameters() if param.requires_grad]


def batch(step: int, rank: int, world: int) -> torch.Tensor:
    """The rank's part of the step's batch."""
    return torch.randn(8, D, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]


def managed(seed=0, trained="adapters", share=2, **options):
    model = net(seed, trained)
    nbytes = sum(param.nbytes for param in model.parameters())
    device = _core.Device("sim", memory_bytes=4 * nbytes)
    stagehand.layer(model, vram_budget=nbytes // share, device=device, **options)
    return model


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "offloaded": lambda params: stagehand.OffloadedAdamW(params, lr=1e-2),
}


def train(model, params, optimizer, rank, world, accumulate=1, clip=None) -> None:
    """model: one that reduces gradients over ranks."""
    for step in range(STEPS * accumulate):
        last = step % accumulate == accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():
            model(batch(step, rank, world)).pow(2).mean().backward()
        if last:
            if clip:
                nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()
            optimizer.zero_grad()


def by_hand(params, model, optimizer, world, accumulate=1, clip=None) -> None:
    """What ranks do together, in one process: each adds up its own gradients, DDP divides them and adds them up."""
    for step in range(STEPS):
        total = [torch.zeros_like(param) for param in params]
        for rank in range(world):
            for part in range(accumulate):
                model(batch(step * accumulate + part, rank, world)).pow(2).mean().backward()
            for found, param in zip(total, params):
                found += param.grad / world
                param.grad = None
        for param, found in zip(params, total):
            param.grad = found
        if clip:
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        optimizer.zero_grad()


CASES = {
    "adapters": ({}, "sgd", {}),
    "adapters, adamw": ({}, "adamw", {}),
    "adapters on the host": ({"trainables": "host"}, "sgd", {}),
    "all": ({"trained": "all"}, "sgd", {}),
    "all, offloaded optimizer": ({"trained": "all"}, "offloaded", {}),
    "clipping": ({}, "sgd", {"clip": 0.01}),
    "accumulation without reductions": ({}, "sgd", {"accumulate": 3}),
}


def run(name: str, rank: int, world: int) -> list:
    """The trained weights."""
    options, optimizer, how = CASES[name]
    model = managed(**options)
    params = trained_of(model)
    ddp = nn.parallel.DistributedDataParallel(model)
    train(ddp, params, OPTIMIZERS[optimizer](params), rank, world, **how)
    stats = stagehand.runtime(model).stats
    stagehand.shutdown(model)
    return [[param.detach().clone() for param in params], stats["h2d_bytes"]]


def refusal(call) -> str:
    try:
        call()
    except stagehand.StagehandError as error:
        return str(error)
    return ""


def main(rank: int, world: int, meeting: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    found = {name: run(name, rank, world) for name in CASES}
    model = managed(seed=rank)
    found["other weights"] = refusal(lambda: nn.parallel.DistributedDataParallel(model))
    stagehand.shutdown(model)
    plain = nn.parallel.DistributedDataParallel(net())
    found["wrapped behind"] = refusal(lambda: stagehand.layer(plain, device="sim"))
    plain(batch(0, rank, world)).sum().backward()  # it still works
    found["plain constructor"] = nn.parallel.DistributedDataParallel.__init__.__module__
    torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
