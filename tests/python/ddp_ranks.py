"""The part of test_ddp.py that each rank runs, in a process of its own. Results are written to a file."""

import contextlib
import sys

import card
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import stagehand
from stagehand import _core

try:  # an older PyTorch has them elsewhere, or not at all
    from torch.distributed import fsdp, tensor
    from torch.distributed.tensor import parallel

    HAS_SHARDS = hasattr(fsdp, "fully_shard") and hasattr(tensor, "distribute_module")
except ImportError:
    HAS_SHARDS = False

D, BLOCKS, STEPS = 64, 6, 4


class Lora(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self, norm, recompute=False):
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(D) if norm else nn.Identity()
        self.base = nn.Linear(D, D).requires_grad_(False)
        self.down, self.up = nn.Linear(D, 4, bias=False), nn.Linear(4, D, bias=False)

    def forward(self, x):
        if self.recompute:
            return checkpoint(self.compute, x if x.requires_grad else x.requires_grad_(), use_reentrant=True)
        return self.compute(x)

    def compute(self, x):
        return self.norm(x + torch.tanh(self.base(x) + self.up(self.down(x))))


def net(seed=0, trained="adapters", norms=False, recompute=False):
    torch.manual_seed(seed)
    model = nn.Sequential(*(Lora(norms, recompute) for _ in range(BLOCKS)))
    return model.requires_grad_(True) if trained == "all" else model


def trained_of(model) -> list:
    return [param for param in model.parameters() if param.requires_grad]


def batch(step: int, rank: int, world: int) -> torch.Tensor:
    """The rank's part of the step's batch."""
    return torch.randn(8, D, generator=torch.Generator().manual_seed(step)).chunk(world)[rank]


def managed(seed=0, trained="adapters", norms=False, recompute=False, share=0.5, blocks=False, **options):
    model = net(seed, trained, norms, recompute)
    nbytes = sum(param.nbytes for param in model.parameters())
    device = card.open_device(8 * nbytes)
    if blocks:
        config = stagehand.StagehandConfig(vram_budget=int(nbytes * share), **options)
        stagehand.StagehandRuntime(model, config, r"^\d+$", device=device)  # DDP opens it
    else:
        stagehand.layer(model, vram_budget=int(nbytes * share), device=device, **options)
    return model


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "offloaded": lambda params: stagehand.OffloadedAdamW(params, lr=1e-2),
}


def train(model, params, optimizer, rank, world, accumulate=1, clip=None, overlap=False) -> None:
    """model: one that reduces gradients over ranks."""
    for step in range(STEPS * accumulate):
        last = step % accumulate == accumulate - 1
        with contextlib.ExitStack() as around:
            if not last:
                around.enter_context(model.no_sync())
            elif overlap:
                around.enter_context(optimizer.last_backward())
            model(batch(step, rank, world)).pow(2).mean().backward()
        if last:
            if clip:
                nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()
            optimizer.zero_grad()


def by_hand(params, model, optimizer, world, accumulate=1, clip=None, overlap=False) -> None:
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


# Options of `managed`, the optimizer, how it trains.
CASES = {
    "adapters": ({}, "sgd", {}),
    "adapters, adamw": ({}, "adamw", {}),
    "adapters on the host": ({"trainables": "host"}, "sgd", {}),
    "all": ({"trained": "all"}, "sgd", {}),
    "all, offloaded optimizer": ({"trained": "all"}, "offloaded", {}),
    "all, updates in the last backward": ({"trained": "all"}, "offloaded", {"overlap": True, "accumulate": 2}),
    "all, norms on the device": ({"trained": "all", "norms": True, "share": 0.6}, "sgd", {"accumulate": 2}),
    "all, norms on the device, reentrant checkpoints": (
        {"trained": "all", "norms": True, "recompute": True, "share": 0.6}, "sgd", {}),
    "all but the norms on the device": ({"norms": True, "trainables": "host", "share": 0.6}, "adamw", {}),
    "away from the device before": ({"norms": True, "trainables": "host", "share": 0.6, "guest": True}, "sgd", {}),
    "blocks": ({"blocks": True, "share": 0.7}, "adamw", {}),
    "clipping": ({}, "sgd", {"clip": 0.01}),
    "accumulation without reductions": ({}, "sgd", {"accumulate": 3}),
    "adapters on the device": ({"share": 0.8}, "adamw", {"accumulate": 2}),
    "less budget on one rank before": ({"share": 0.8, "before": 0.5}, "adamw", {}),
    "less budget on one rank behind": ({"share": 0.8, "behind": 0.7}, "adamw", {}),
}


def run(name: str, rank: int, world: int) -> tuple:
    """(the trained weights, bytes that went to the device, how many weights live on the device)."""
    options, optimizer, how = CASES[name]
    options = dict(options)
    before, behind, guest = (options.pop(name, 0) for name in ("before", "behind", "guest"))
    model = managed(**options)
    runtime, params = stagehand.runtime(model), trained_of(model)
    nbytes = sum(param.nbytes for param in model.parameters())
    with torch.no_grad():
        for param in params:  # all ranks begin with the first one's
            param.add_(rank)
    if rank and not options.get("blocks"):  # this one has its plan before the others
        model(batch(0, rank, world))
    if rank and before:
        runtime.set_vram_budget(int(nbytes * before))
    if guest:
        with runtime.as_guest():
            model(batch(0, rank, world))
        assert runtime.session.stay.away
    ddp = nn.parallel.DistributedDataParallel(model)
    assert not runtime.session.stay.away
    if rank and behind:
        runtime.set_vram_budget(int(nbytes * behind))
    train(ddp, params, OPTIMIZERS[optimizer](params), rank, world, **how)
    there = sum(each["home"] == "device" for each in runtime.trainables.values())
    h2d_bytes = runtime.stats["h2d_bytes"]
    stagehand.shutdown(model)
    return [param.detach().cpu().clone() for param in params], h2d_bytes, there


def refusal(call) -> str:
    try:
        call()
    except stagehand.StagehandError as error:
        return str(error)
    return ""


def refusals(rank: int, world: int) -> dict:
    """Errors by what was done."""
    def ddp_of(model):
        text = refusal(lambda: nn.parallel.DistributedDataParallel(model))
        stagehand.shutdown(model)
        return text

    found = {"other weights": ddp_of(managed(seed=rank)),}
    model = managed(trainables=("auto", "host")[rank % 2], share=0.8)
    held = model(batch(0, rank, world)).sum()  # its backward may come: weights stay where they are
    found["other homes"] = ddp_of(model)
    del held
    found["other budgets"] = ddp_of(managed(share=(0.5, 6.0)[rank % 2]))
    own = dist.get_backend_config
    if rank == 1:
        dist.get_backend_config = lambda group: "cuda:nccl"
    found["no backend for the host on one rank"] = ddp_of(managed(trained="all"))
    dist.get_backend_config = own
    plain = nn.parallel.DistributedDataParallel(net())
    found["wrapped behind"] = refusal(lambda: stagehand.layer(plain, device="sim"))
    found["its module wrapped behind"] = refusal(lambda: stagehand.layer(plain.module, device="sim"))
    plain(batch(0, rank, world)).sum().backward()  # it still works
    found["plain constructor"] = nn.parallel.DistributedDataParallel.__init__.__module__
    return found


# ---------------------------------------------------------------------- shards beside a managed block


def outer(seed=0):
    """A plain layer, a frozen block, a plain layer."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(D, D), net().requires_grad_(False), nn.Linear(D, D))


def manage_middle(model):
    nbytes = sum(param.nbytes for param in model[1].parameters())
    stagehand.layer(model[1], vram_budget=nbytes // 2, device=_core.Device("sim", memory_bytes=8 * nbytes))


def shard_around(model, mesh):
    fsdp.fully_shard(model, mesh=mesh, ignored_params=set(model[1].parameters()))


def shard_beside(model, mesh):
    for part in (model[0], model[2]):
        fsdp.fully_shard(part, mesh=mesh)


SHARDED = {"around": shard_around, "beside": shard_beside}
# Calls of PyTorch that are refused: (of the model with a managed block and a mesh).
SHARDING = {
    "fully_shard": lambda model, mesh: fsdp.fully_shard(model, mesh=mesh),
    "fully_shard of parts": lambda model, mesh: fsdp.fully_shard([model[0], model[1][2]], mesh=mesh),
    "FullyShardedDataParallel": lambda model, mesh: fsdp.FullyShardedDataParallel(model),
    "distribute_module": lambda model, mesh: tensor.distribute_module(model, mesh),
    "parallelize_module": lambda model, mesh: parallel.parallelize_module(
        model, mesh, {"0": parallel.ColwiseParallel(), "1.2.base": parallel.ColwiseParallel()}),
}


def sharded(name: str, rank: int, world: int) -> list:
    """The plain layers' weights."""
    model = outer()
    manage_middle(model)
    SHARDED[name](model, init_device_mesh("cpu", (world,)))
    params = trained_of(model)
    optimizer = OPTIMIZERS["sgd"](params)
    for step in range(STEPS):
        model(batch(step, rank, world)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert stagehand.runtime(model).plan["bytes_per_step"] > 0
    stagehand.shutdown(model)
    return [param.full_tensor().detach().clone() for param in params]


def refused_shards(world: int) -> dict:
    """(the error, whether something was changed) by call."""
    found, mesh = {}, init_device_mesh("cpu", (world,))
    for name, shards in SHARDING.items():
        model = outer()
        manage_middle(model)
        before = [(id(param), type(param)) for param in model.parameters()], list(map(type, model.modules()))
        text = refusal(lambda: shards(model, mesh))
        after = [(id(param), type(param)) for param in model.parameters()], list(map(type, model.modules()))
        found[name] = text, before != after
        stagehand.shutdown(model)
    return found


def main(rank: int, world: int, meeting: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    found = {name: run(name, rank, world) for name in CASES}
    found.update(refusals(rank, world))
    if HAS_SHARDS and not card.ON_CARD:
        found.update((f"sharded {name}", sharded(name, rank, world)) for name in SHARDED)
        found["shards"] = refused_shards(world)
    torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
