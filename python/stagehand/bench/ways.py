"""The ways by which a step runs, and the runs that the tool asks for."""

from __future__ import annotations

import gc
import platform
import time

import torch

import stagehand

from . import peers
from .stack import Stack, fill, nbytes, spread, timed, twin_on

SIM_LINK = int(4e9)  # bytes per second
PACKAGES = ("diffusers", "accelerate")


def versions() -> dict:
    found = {package: version for package in PACKAGES if (version := peers.version_of(package)) != "unknown"}
    return {"python": platform.python_version(), "torch": torch.__version__,
            **{package: found.get(package) for package in PACKAGES}}


class Device:
    """The device of all runs. name: as the tool was given it, or None."""

    def __init__(self, name: str | None) -> None:
        self.cuda = torch.cuda.is_available() and (name or "cuda").split(":")[0] in ("cuda", "hip")
        index = (name or "").partition(":")[2] or "0"
        self.torch = torch.device(f"cuda:{index}" if self.cuda else "cpu")
        self.name = name or "cuda"
        if self.cuda:
            torch.cuda.set_device(self.torch)

    def target(self, weights: int):
        """For `stagehand.layer`."""
        if self.cuda:
            return self.name
        return stagehand.Device("sim", memory_bytes=2 * weights, link_bytes_per_s=SIM_LINK)

    def begin(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int | None:
        """Bytes that PyTorch's allocator gave out at the most since `begin`."""
        return torch.cuda.max_memory_allocated() if self.cuda else None


class Way:
    """A model that is prepared. begin: model, budget, device -> a Way."""

    def __init__(self, step, end=lambda: None, extra=dict) -> None:
        self.step, self.end, self.extra = step, end, extra


def resident(model, budget: int, device: Device) -> Way:
    return Way(twin_on(model, device.torch))


def ours(model, budget: int, device: Device) -> Way:
    stagehand.layer(model, vram_budget=budget, inference_mode=True, device=device.target(nbytes(model.parameters())))
    runtime = stagehand.runtime(model)

    def extra() -> dict:
        plan = runtime.plan  # its ring is mapped outside of PyTorch's allocator
        return {"budget": budget, "predicted": plan["step_ns"] / 1e6, "ring": plan["ring_bytes"]}

    return Way(model, lambda: stagehand.shutdown(model), extra)


def diffusers(model, budget: int, device: Device) -> Way:
    peers.diffusers_leaf(model, str(device.torch))
    return Way(model)


def accelerate(model, budget: int, device: Device) -> Way:
    peers.accelerate(model, str(device.torch))
    return Way(model)


WAYS = {"resident": resident, "stagehand": ours, "diffusers group offload": diffusers,
        "accelerate cpu_offload": accelerate}


class Ways:
    def __init__(self) -> None:
        self.device: Device | None = None
        self.wanted: dict[tuple[int, int, int], torch.Tensor] = {}  # outputs of the resident model

    def answer(self, run: dict) -> dict:
        """{"rows": [a row for each length]} or {"why": the reason for none}. run: what cli/bench.c sends."""
        end = time.perf_counter() + run["seconds"]
        self.device = self.device or Device(run["device"])
        try:
            return {"rows": self._rows(run, end)}
        except ImportError as error:
            return {"why": f"{error.name or error} is not installed"}
        except Exception as error:  # noqa: BLE001 - a way that fails must not end the others
            return {"why": f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"}
        finally:
            gc.collect()
            if self.device.cuda:
                torch.cuda.empty_cache()

    def _rows(self, run: dict, end: float) -> list[dict]:
        begun = time.perf_counter()
        torch.manual_seed(0)
        model = fill(Stack(run["blocks"], run["hidden"]), run["hidden"]).requires_grad_(False)
        self.device.begin()
        way = WAYS[run["system"]](model, run["budget"], self.device)
        setup = time.perf_counter() - begun
        try:
            return [{**self._row(way, run, tokens, end), "setup_s": setup} for tokens in run["tokens"]]
        finally:
            way.end()

    def _row(self, way: Way, run: dict, tokens: int, end: float) -> dict:
        x = torch.randn(1, tokens, run["hidden"], generator=torch.Generator().manual_seed(tokens))
        x = x.bfloat16().to(self.device.torch)
        with torch.inference_mode():
            warm = timed(lambda: way.step(x), run["steps"] // 2 or 1, self.device.cuda)
            left = (end - time.perf_counter()) / len(run["tokens"])
            times = int(min(run["steps"] - len(warm), max(1, left * 1e3 / max(warm[-1], 1e-3))))
            row = {"tokens": tokens, **spread(timed(lambda: way.step(x), times, self.device.cuda)), **way.extra()}
            out = way.step(x).cpu()
        peak = self.device.peak()
        if peak is not None:
            row["peak"] = peak + row.pop("ring", 0)
        key = (run["blocks"], run["hidden"], tokens)
        if run["system"] == "resident":
            self.wanted[key] = out
        elif key in self.wanted:
            row["equal"] = bool(torch.equal(out, self.wanted[key]))
        return row
