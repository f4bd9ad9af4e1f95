"""Strategies of Lightning's Trainer, for modules that are larger than the card.

    from stagehand.integrations.lightning import StagehandDDPStrategy, StagehandStrategy

    trainer = Trainer(strategy=StagehandStrategy(vram_budget="12GB"), devices=1)
    trainer.fit(module, loader)

`Trainer(strategy="stagehand")` is the same without options, once this module was imported. `StagehandDDPStrategy`,
"stagehand_ddp", is for several devices, each with a process. The LightningModule is wrapped with `stagehand.layer`
where a usual strategy moves it to the device, so that weights made in `configure_model` are there. Behind `fit`,
`validate`, `test` and `predict` it is a plain module on the host, as behind each strategy. Tried with lightning 2.6.
"""

from __future__ import annotations

import contextlib

try:
    import lightning.pytorch as pl
except ImportError:  # the same under its other name
    import pytorch_lightning as pl

from .. import managed
from .._torch import torch
from ..errors import StagehandError
from ..modes.layer import layer
from ..session import ranks

strategies = pl.strategies


class _Managing(strategies.Strategy):
    """What both strategies do in another way than Lightning's."""

    _options: dict  # of `stagehand.layer`

    def model_to_device(self) -> None:
        """The module is wrapped, and what is outside of it moves."""
        module = self.lightning_module
        if not any(managed.runtime_of(part) is not None for part in module.modules()):
            layer(module, **{"device": self.root_device, **self._options})
        there = {managed.runtime_of(part).device for part in module.modules() if managed.runtime_of(part) is not None}
        if there != {self.root_device}:
            raise StagehandError(f"the module runs on {', '.join(map(str, there))} and the Trainer on "
                                 f"{self.root_device}: leave device= out, or give the Trainer's")
        module.to(self.root_device)

    def setup(self, trainer: pl.Trainer) -> None:
        """As each strategy's, but that an optimizer's state stays with its weights."""
        super().setup(trainer)
        for optimizer in self.optimizers:
            if optimizer.state:
                optimizer.load_state_dict(optimizer.state_dict())

    def load_optimizer_state_dict(self, checkpoint: dict) -> None:
        """As above."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"]):
            optimizer.load_state_dict(state)

    def teardown(self) -> None:
        """The module is plain again, and on the host."""
        if self.lightning_module is not None:
            managed.shutdown(self.lightning_module)
        super().teardown()


class StagehandStrategy(_Managing, strategies.SingleDeviceStrategy):
    """Streams the weights of a LightningModule through one device.

    options: of `stagehand.layer`: vram_budget, trainables, transfer and others. device: left out, the one that the
        Trainer's `accelerator` and `devices` name.

    A module of which a part is managed already stays so until the Trainer is done with it. Optimizers keep
    their state beside their weights: on the host, or on the device for adapters that live there. Raises StagehandError
    where the Trainer has several devices, StagehandOOMError where the budget is too small; the module is then as it
    was.
    """

    strategy_name = "stagehand"

    def __init__(self, accelerator: pl.accelerators.Accelerator | None = None, checkpoint_io: object | None = None,
                 precision_plugin: object | None = None, **options: object) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self._options = options

    @property
    def parallel_devices(self) -> list | None:
        """The Trainer sets it to the devices that it was given: one."""
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: list) -> None:
        if len(devices) > 1:
            raise StagehandError(f"the Trainer has {len(devices)} devices, and this strategy streams weights to one: "
                                 f"give it devices=1, or the number of one in a list; StagehandDDPStrategy is for "
                                 f"several")
        self._root_device = devices[0]


class StagehandDDPStrategy(_Managing, strategies.DDPStrategy):
    """The same in several processes, each with one of the Trainer's devices and a budget of its own, under
    DistributedDataParallel (docs/distributed.md).

    options: of `stagehand.layer`, without `device`. ddp: of Lightning's DDPStrategy, such as find_unused_parameters or
        process_group_backend. Weights whose masters are on the host are reduced there: with cards
        process_group_backend="cpu:gloo,cuda:nccl".

    Raises StagehandError on all ranks where the weights of one differ; else as StagehandStrategy.
    """

    strategy_name = "stagehand_ddp"

    def __init__(self, ddp: dict | None = None, **options: object) -> None:
        super().__init__(**(ddp or {}))
        self._options = options
        self._around = contextlib.ExitStack()  # of setup

    def setup(self, trainer: pl.Trainer) -> None:
        with self._around:
            super().setup(trainer)

    def model_to_device(self) -> None:
        super().model_to_device()
        if self.lightning_module.trainer.state.fn != "fit":  # all weights would be broadcast
            self._around.enter_context(ranks.left_out(self.lightning_module))


for strategy in (StagehandStrategy, StagehandDDPStrategy):
    strategies.StrategyRegistry.register(strategy.strategy_name, strategy, override=True,
                                         description=(strategy.__doc__ or "").partition(".")[0])
