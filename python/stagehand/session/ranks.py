"""DistributedDataParallel over a managed model (docs/distributed.md).

DDP broadcasts all weights from the first rank when it is made, and wants them on devices of one kind. Frozen weights of
a managed model stream: DDP leaves them out, and ranks compare samples of them. Trained weights stay where they are,
on the host or on the device, while DDP lives. It reduces the gradients of the larger part, and Beside those of the
other (beside.py). While a model is managed the constructor below asks first. A problem of one rank is an error
on all ranks, for a rank that went on would wait for the others.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import inspect
import os

from .._torch import torch
from ..errors import StagehandError, some_of
from ..managed import runtime_of
from ..weights.units import plain_reason
from . import standins
from .beside import Beside

DDP = torch.nn.parallel.DistributedDataParallel
IGNORED = "_ddp_params_and_buffers_to_ignore"  # PyTorch's name
SAMPLES = 64  # of a weight


def share_the_host() -> bool:
    """Whether this process is one of several on its node, which hold frozen weights in RAM once. STAGEHAND_HOST_COPY,
    "shared" or "own", says it where neither the launcher nor a process group does."""
    told = os.environ.get("STAGEHAND_HOST_COPY", "")
    if told not in ("", "shared", "own"):
        raise ValueError(f"STAGEHAND_HOST_COPY is 'shared' or 'own', not {told!r:.200}")
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    dist = torch.distributed
    if told or count.isdecimal():
        return told == "shared" or not told and int(count) > 1
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def stand_in() -> None:
    """DDP asks from now on."""
    with standins.lock:
        own = vars(DDP)["__init__"]
        if not standins.stands(own):
            standins.replace(DDP, "__init__", _asks_first(own), own)


def refuse_wrapped(model) -> None:
    """StagehandError for a model that is in DistributedDataParallel already, or has one inside."""
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return
    mine = {id(module) for module in model.modules()}
    if _in_ddp(mine):
        gc.collect()  # one that nobody holds is none
    if _in_ddp(mine):
        name = type(model).__name__
        raise StagehandError(
            f"{name} is in a DistributedDataParallel, which has made its buckets for weights where they are. Take it "
            f"off: stagehand.layer(model) first, then DistributedDataParallel(model), or accelerate's prepare()",
            object=name)


def _in_ddp(modules: set[int]) -> bool:
    """`issubclass` and no `isinstance`, which would ask proxies for their class."""
    all_ddp = [found for found in gc.get_objects() if issubclass(type(found), DDP)]
    inner = [ddp.module for ddp in all_ddp if hasattr(ddp, "module")]  # made, and not only begun
    return any(id(part) in modules for module in inner for part in module.modules())


def _asks_first(own):
    signature = inspect.signature(own)

    @functools.wraps(own)
    def init(self, module, *args, **kwargs):
        runtimes = [found for found in map(runtime_of, module.modules()) if found is not None]
        if not runtimes:
            return own(self, module, *args, **kwargs)
        sessions = [runtime.session or runtime.prepare() for runtime in runtimes]
        for session in sessions:
            session.steps.close_finished_step()
            session.steps.between(session.stay.come_back)  # where another model had the device
        given = signature.bind(self, module, *args, **kwargs).arguments
        mesh = given.get("device_mesh")
        group = mesh.get_group(0) if mesh is not None else given.get("process_group")
        synced = given.get("init_sync", True)
        trained = {name: param for name, param in module.named_parameters() if param.requires_grad}
        if synced:
            _agree(trained, sessions, group)
        homes = _homes(trained, sessions)
        reduced, beside = _divided(trained, homes)
        with left_out(module, group, homes, beside, synced):
            if "host" in {homes[name] for name in reduced}:
                given.update(device_ids=None, output_device=None)  # for inputs, which a managed model takes along
            own(**given)
        if beside:
            other = Beside(self, list(beside.values()), list(reduced.values()), group)
            if synced:
                other.broadcast()
        for session in sessions:
            session.trained.stay_for(self)

    return init


def _homes(trained: dict, sessions: list) -> dict:
    """name -> "host" or "device": where the weight's gradient arrives."""
    kinds = {session.target.torch.type for session in sessions}

    def home(param) -> str:
        streams = any(session.writes.entry_of(param) is not None for session in sessions)
        return "host" if streams or param.device.type not in kinds else "device"

    return {name: home(param) for name, param in trained.items()}


def _agree(trained: dict, sessions: list, group) -> None:
    """A weight that lives on the host on one rank, for the room on the device was needed, lives there on all."""
    ranks = _gathered(_homes(trained, sessions), group)
    away = [param for name, param in trained.items() if any(homes.get(name) == "host" for homes in ranks)]
    for session in sessions if away else ():
        session.steps.close_finished_step()
        session.steps.between(lambda session=session: session.trained.bring_home(away))


def _gathered(mine, group) -> list:
    """What each rank gives."""
    ranks: list = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(ranks, mine, group=group)
    return ranks


def _divided(trained: dict, homes: dict) -> tuple[dict, dict]:
    """(name -> weight that DDP reduces, name -> weight that it does not): it takes the home with more bytes."""
    nbytes = {home: sum(param.nbytes for name, param in trained.items() if homes[name] == home)
              for home in ("host", "device")}
    larger = max(nbytes, key=nbytes.get)
    return tuple({name: param for name, param in trained.items() if (homes[name] == larger) is taken}
                 for taken in (True, False))


@contextlib.contextmanager
def left_out(module, group=None, homes=None, beside=None, compared: bool = True):
    """Inside it PyTorch neither broadcasts nor reduces weights of managed models.

    homes: name -> "host" or "device" of those that are reduced all the same, but for `beside`: name -> weight.
    compared: ranks compare the others with each other, and all of it in one collective; StagehandError on all ranks.
    """
    homes, beside = homes or {}, beside or {}
    roots = [name for name, part in module.named_modules() if runtime_of(part) is not None]
    aside = {name: param for name, param in module.named_parameters() if name not in homes
             and any(not root or name.startswith(f"{root}.") for root in roots)}
    if compared:
        prints = {name: _print_of(param) for name, param in aside.items()}
        prints.update((name, _print_of(param, False)) for name, param in beside.items())
        _check({"problem": _problem(homes, group), "prints": prints, "homes": homes}, group)
    before = vars(module).get(IGNORED)
    setattr(module, IGNORED, [*(before or ()), *aside, *beside])
    try:
        yield
    finally:
        if before is None:
            delattr(module, IGNORED)
        else:
            setattr(module, IGNORED, before)


def _check(mine: dict, group) -> None:
    """Ranks that have other weights, other homes of them, or a problem of their own fail together."""
    ranks = _gathered(mine, group)
    for rank, found in enumerate(ranks):
        if found["problem"] is not None:
            text, name = found["problem"]
            raise StagehandError(f"rank {rank}: {text}", object=name)
    others = _others(ranks, "homes")
    if others:
        homes = ", ".join(f"{found['homes'].get(others[0], 'not trained')} on rank {rank}"
                          for rank, found in enumerate(ranks))
        raise StagehandError(
            f"{some_of(others, 2)} must live in the same place on all ranks, for gradients to be reduced: {homes}. "
            f"Wrap the model with trainables='host' on all ranks, or make the DistributedDataParallel before the first "
            f"pass", object=others[0])
    others = _others(ranks, "prints")
    if others:
        raise StagehandError(
            f"{some_of(others, 2)} differ between ranks. Streamed weights are not broadcast when "
            f"DistributedDataParallel is made: load the same ones in each process, or seed each before it makes them",
            object=others[0])


def _others(ranks: list, key: str) -> list:
    """Names of which ranks have found different things."""
    names = sorted(set().union(*(found[key] for found in ranks)))
    return [name for name in names if any(found[key].get(name) != ranks[0][key].get(name) for found in ranks)]


def _problem(homes: dict, group) -> tuple[str, str] | None:
    """(text, name of a weight) of this rank alone."""
    backends = torch.distributed.get_backend_config(group)
    host = [name for name, home in homes.items() if home == "host"]
    if host and "cpu:" not in backends:
        return (f"{some_of(host, 1)} {'have their masters' if len(host) > 1 else 'has its master'} on the host, where "
                f"gradients are reduced then, and the process group has no backend for the host ({backends}): "
                f"torch.distributed.init_process_group('cpu:gloo,cuda:nccl')"), host[0]
    return None


def _print_of(param, with_values: bool = True) -> str:
    found = hashlib.sha256(f"{tuple(param.shape)} {param.dtype} {type(param).__name__}".encode())
    if with_values and not plain_reason(param) and not param.is_meta and param.numel():
        with torch.no_grad():
            values = param.detach().reshape(-1)
            values = values[::max(1, values.numel() // SAMPLES)].contiguous().cpu()
            found.update(bytes(values.view(torch.uint8).tolist()))
    return found.hexdigest()[:16]
