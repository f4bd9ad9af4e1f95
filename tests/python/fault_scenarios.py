"""Whole scenarios for the fault loops of test_fault_scenarios.py: each opens something, has parts that can be done
again and check their own results, and closes. A part that fails raises; the next part goes on from where that left
it."""

from __future__ import annotations

import copy

import torch
from file_support import save, state
from support import Stack, aligned_copy, made, nbytes, runtime, same, tight_budget

import stagehand
from stagehand import _core
from stagehand.activation import ActivationRuntime, ActivationStagehandConfig
from stagehand.optim import OffloadedAdamW

WIDTH = 32
STEPS = 2
LR = 1e-2


def _rows(seed):
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


class Facts:
    """What all runs share: models to copy, their files, and what is right. Made once, without faults."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.frozen = made(Stack, 3, WIDTH)
        self.guest = made(Stack, 2, WIDTH, seed=1)
        self.trained = made(Stack, 3, WIDTH, seed=2, frozen=False)
        self.file = str(folder / "weights.safetensors")
        save(folder / "weights.safetensors", state(self.frozen))
        self.x = _rows(0)
        with torch.no_grad():
            self.frozen_out = aligned_copy(self.frozen)(self.x)
            self.guest_out = aligned_copy(self.guest)(self.x)
        self._train()

    def _train(self) -> None:
        """weights, states: of the model and of the optimizer before step i. grads: of step i."""
        ref = aligned_copy(self.trained)
        optimizer = OffloadedAdamW(ref.parameters(), lr=LR, threads=1)
        self.weights, self.states, self.grads = [], [], []
        for step in range(STEPS + 1):
            self.weights.append(copy.deepcopy(ref.state_dict()))
            self.states.append(copy.deepcopy(optimizer.state_dict()))
            optimizer.zero_grad()
            ref(_rows(step)).pow(2).mean().backward()
            self.grads.append([p.grad.clone() for p in ref.parameters()])
            optimizer.step()


class Scenario:
    """device_name: with decorators. virtual_time: of the device; else its streams are threads.
    opened: whether `open` has succeeded and `close` has not."""

    device_bytes = 1 << 20

    def __init__(self, facts: Facts, device_name: str, virtual_time: bool = True) -> None:
        self.facts = facts
        self.virtual_time = virtual_time
        self.opened = False
        self.device = None
        self.device_name = device_name

    def open(self) -> None:
        if self.device is None:
            self.device = _core.Device(self.device_name, memory_bytes=self.device_bytes, link_bytes_per_s=10**9,
                                       virtual_time=self.virtual_time)
        self.wrap()
        self.opened = True

    def close(self) -> None:
        """Again is fine."""
        self.unwrap()
        self.opened = False


class Load(Scenario):
    """Weights stream from a file, some of them are kept in host memory; steps leave their records in a file."""

    model = None

    def wrap(self) -> None:
        self.model = stagehand.load(
            lambda: Stack(3, WIDTH).eval().requires_grad_(False), self.facts.file,
            vram_budget=tight_budget(self.facts.frozen),
            device=self.device, inference_mode=True, ram_budget=nbytes(self.facts.frozen) // 3,
            telemetry=str(self.facts.folder / "steps.jsonl"))

    def infer(self) -> None:
        with torch.no_grad():
            assert same(self.model(self.facts.x), self.facts.frozen_out)

    parts = [infer, infer, infer]

    def unwrap(self) -> None:
        if self.model is not None:
            if "_stagehand_layer_runtime" in self.model.__dict__:
                runtime(self.model).shutdown()
            self.model = None

    def plain(self) -> None:
        """There is no model without a runtime."""


class Train(Scenario):
    """Two steps of AdamW on the host, with saved activations spilled. `state_path`: the optimizer's state is in a
    file."""

    model = optimizer = saving = None
    state_path = False

    def wrap(self) -> None:
        self.model = self.model or copy.deepcopy(self.facts.trained)
        self.done, self.unfinished = 0, False
        stagehand.layer(self.model, vram_budget=tight_budget(self.model), device=self.device)
        self.optimizer = OffloadedAdamW(self.model.parameters(), lr=LR, threads=2,
                                        state_path=str(self.facts.folder) if self.state_path else None)
        config = ActivationStagehandConfig(enabled=True, slabs_per_class=None, recompute_cheap=False)
        self.saving = ActivationRuntime(config, self.device, smallest=256, high=8 << 10, low=4 << 10)

    def step(self) -> None:
        if self.unfinished:
            self._finish()
        if self.done == STEPS:
            return
        self.optimizer.zero_grad()
        with self.saving.managed_forward():
            loss = self.model(_rows(self.done)).pow(2).mean()
            loss.backward()
        assert same([p.grad for p in self.model.parameters()], self.facts.grads[self.done])
        self.unfinished = True
        self.optimizer.step()
        self._finished()

    def _finish(self) -> None:
        """A step of the optimizer that failed goes on, or, where its state's file is lost, begins anew."""
        try:
            self.optimizer.step()
        except stagehand.TransferError:
            self._load()
            return
        except RuntimeError as error:
            if "Load weights and optimizer state" not in str(error):
                raise
            self._load()
            return
        self._finished()

    def _load(self) -> None:
        self.model.load_state_dict(self.facts.weights[self.done])
        self.optimizer.load_state_dict(copy.deepcopy(self.facts.states[self.done]))
        self.unfinished = False

    def _finished(self) -> None:
        self.done += 1
        self.unfinished = False
        self.right()

    def right(self) -> None:
        want = self.facts.weights[self.done]
        assert all(same(value, want[name]) for name, value in self.model.state_dict().items())

    parts = [step] * (STEPS + 1)

    def unwrap(self) -> None:
        if self.saving is not None:
            self.saving.shutdown()
        if self.model is not None and "_stagehand_layer_runtime" in self.model.__dict__:
            runtime(self.model).shutdown()
        self.optimizer = self.saving = None

    def plain(self) -> None:
        if self.model is None:
            return
        if not self.__dict__.get("unfinished"):
            self.done = self.__dict__.get("done", 0)
            self.right()
        assert all(p.is_leaf and type(p) is torch.nn.Parameter for p in self.model.parameters())
        self.model(self.facts.x).sum().backward()
        self.model.zero_grad()


class TrainFromFile(Train):
    state_path = True


class Guest(Scenario):
    """Two models on a device that holds one and a bit: the second comes as a guest while the first is reserved."""

    main = guest = None
    device_bytes = 120_000

    def wrap(self) -> None:
        self.main = self.main or copy.deepcopy(self.facts.frozen)
        self.guest = self.guest or copy.deepcopy(self.facts.guest)
        for model in (self.main, self.guest):
            if "_stagehand_layer_runtime" not in model.__dict__:
                stagehand.layer(model, vram_budget=60_000, device=self.device, inference_mode=True)

    def run_main(self) -> None:
        with torch.no_grad():
            assert same(self.main(self.facts.x), self.facts.frozen_out)

    def run_guest(self) -> None:
        with torch.no_grad():
            assert same(self.guest(self.facts.x), self.facts.guest_out)

    def reserve(self) -> None:
        runtime(self.main).reserve_for_resident()

    def visit(self) -> None:
        with runtime(self.main).as_guest(runtime(self.guest)):
            self.run_guest()
            self.run_main()

    def release(self) -> None:
        runtime(self.main).release_reservation()

    parts = [run_main, reserve, visit, run_main, release, run_guest, visit]

    def unwrap(self) -> None:
        for model in (self.guest, self.main):
            if model is not None and "_stagehand_layer_runtime" in model.__dict__:
                runtime(model).shutdown()

    def plain(self) -> None:
        for model, want in ((self.main, self.facts.frozen_out), (self.guest, self.facts.guest_out)):
            if model is not None:
                with torch.no_grad():
                    assert same(aligned_copy(model)(self.facts.x), want)
