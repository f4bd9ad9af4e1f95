"""transformers' Trainer, `from_pretrained` and the trainers that are built on them (TRL's), over streamed weights.

    from stagehand.integrations.transformers import StagehandCallback, offloaded_adamw

    callback = StagehandCallback(model, vram_budget="12GB")  # model: in RAM
    trainer = Trainer(model, args, train_dataset=data, callbacks=[callback],
                      optimizer_cls_and_kwargs=offloaded_adamw(args))
    trainer.train()

The callback keeps the Trainer from moving the model to the device, and wraps it with `stagehand.layer` at the end of
the Trainer's own construction: adapters that the Trainer puts in are there by then, and are counted. Checkpoints,
resuming, evaluation, clipping and accumulation are the Trainer's.

    model = AutoModelForCausalLM.from_pretrained(name, quantization_config=StagehandConfig(vram_budget="12GB"))

gives a model that is managed already. transformers has one public door for those who load a model in their own
way, its registry of quantizers, and so a configuration comes through it that quantizes nothing. Tried with transformers
5.24 and accelerate 1.15.
"""

from __future__ import annotations

import contextlib

from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from .. import device as devices
from .. import managed
from .._torch import torch
from ..errors import StagehandError
from ..modes.layer import layer
from ..optim import OffloadedAdamW

METHOD = "stagehand"  # in transformers' registry of quantizers


def offloaded_adamw(args: TrainingArguments, **options: object) -> tuple[type, dict]:
    """For `Trainer(optimizer_cls_and_kwargs=)`: OffloadedAdamW with the learning rate, betas and epsilon of `args`.

    The Trainer makes the groups, with weight decay and without. options: of OffloadedAdamW, such as state_path.
    """
    return OffloadedAdamW, {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2),
                            "eps": args.adam_epsilon, **options}


class StagehandCallback(TrainerCallback):
    """Manages the model of a Trainer, from before its first pass.

    model: the model on the host that the Trainer is given, so that the Trainer does not move it to the device first.
        None: the Trainer moves it, and it is taken back to the host, which needs a device that holds it for a moment.
        A model that is managed stays as it is.
    overlap: True updates weights while the last backward of an accumulation goes on
        (`OffloadedAdamW.last_backward`). It needs `optimizer_cls_and_kwargs=offloaded_adamw(args)`, `max_grad_norm=0`
        and no fp16, whose scaler and whose clipping need all gradients first.
    options: of `stagehand.layer`: vram_budget, trainables, transfer and others. device: left out, the Trainer's.

    The model stays managed behind `train()`; `stagehand.shutdown(model)` ends that. Errors come from Trainer's
    construction (StagehandOOMError for a budget that is too small) and from `train()`, before the first pass.
    """

    def __init__(self, model: torch.nn.Module | None = None, *, overlap: bool = False, **options: object) -> None:
        self._options, self._overlap = options, overlap
        self._open = contextlib.ExitStack()  # last_backward() of the step that is under way
        self._inside = False  # that
        self._optimizer: OffloadedAdamW | None = None
        self._hook = None
        self._mapped = None  # the model, while it has our device map
        if model is not None:
            managed.check_module(model)
            if getattr(model, "hf_device_map", None) is None:
                model.hf_device_map = {"": torch.device("cpu")}  # the Trainer does not move a model that has one
                self._mapped = model

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                    **kwargs: object) -> None:
        """The Trainer has its model."""
        if self._mapped is not None:
            del self._mapped.hf_device_map
            self._mapped = None
        if args.n_gpu > 1:
            raise StagehandError(f"the Trainer would copy the model to {args.n_gpu} GPUs for nn.DataParallel, and "
                                 f"stagehand streams weights to one: name it in CUDA_VISIBLE_DEVICES")
        self._manage(kwargs["model"], args)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                       **kwargs: object) -> None:
        """The model may be another one: `model_init` makes one for each run."""
        model = kwargs["model"]
        self._manage(model, args)
        self._leave()
        if self._overlap:
            self._begin_overlap(model, args, kwargs["optimizer"])

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                              **kwargs: object) -> None:
        """The last backward of the accumulation is over."""
        if self._overlap:
            self._end_backward()
            self._optimizer.confirm_gradients()  # the Trainer's norm has multiplied them by one

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl,
                     **kwargs: object) -> None:
        """The model stays managed."""
        self._leave()

    # ------------------------------------------------------------------ internal

    def _manage(self, model, args) -> None:
        if not any(managed.runtime_of(part) is not None for part in model.modules()):
            model.to("cpu")
            layer(model, **{"device": str(args.device), **self._options})
        runtime = managed.runtime(model)
        if not devices.same(runtime.device, args.device):
            raise StagehandError(f"{runtime.name} runs on {runtime.device} and the Trainer on {args.device}: leave "
                                 f"device= out, or give the Trainer's")

    def _begin_overlap(self, model, args, optimizer) -> None:
        from accelerate.state import GradientState

        optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's stands around it
        if not isinstance(optimizer, OffloadedAdamW) or args.max_grad_norm > 0 or args.fp16:
            raise ValueError(
                f"overlap=True updates weights before all gradients are known: it needs optimizer_cls_and_kwargs="
                f"offloaded_adamw(args), max_grad_norm=0 and fp16=False. The optimizer is "
                f"{type(optimizer).__name__}, max_grad_norm {args.max_grad_norm} and fp16 {args.fp16}")
        accumulation = GradientState()

        def begins(module, inputs) -> None:
            if accumulation.sync_gradients and torch.is_grad_enabled() and module.training and not self._inside:
                self._open.enter_context(optimizer.last_backward())
                self._inside = True

        self._optimizer, self._hook = optimizer, model.register_forward_pre_hook(begins)

    def _end_backward(self) -> None:
        self._inside = False
        self._open.close()

    def _leave(self) -> None:
        """Nothing is left of a run, or of one that an error has ended."""
        self._end_backward()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


@register_quantization_config(METHOD)
class StagehandConfig(QuantizationConfigMixin):
    """For `from_pretrained(quantization_config=)`: the model is loaded into RAM and wrapped with `stagehand.layer`.

    options: of `stagehand.layer`: vram_budget, transfer, trainables and others. device: left out, the one that
        `device_map` names, else as for `stagehand.layer`.

    The model keeps nothing of this configuration: it says that it is not quantized, `save_pretrained` writes a plain
    model, and there is no `hf_device_map`, since nothing of it is dispatched by accelerate. from_pretrained raises what
    `stagehand.layer` raises (StagehandOOMError for a budget that is too small), and ValueError where the checkpoint
    itself is quantized, or `device_map` names several devices.
    """

    def __init__(self, **options: object) -> None:
        self.quant_method = METHOD
        self.options = options

    def to_dict(self) -> dict:
        """For messages; nothing is loaded from it."""
        return {"quant_method": METHOD, "options": {name: str(value) for name, value in self.options.items()}}

    def __deepcopy__(self, memo):  # transformers copies configurations, and a stagehand.Device has no copy
        return self


@register_quantizer(METHOD)
class _Loader(HfQuantizer):
    """What from_pretrained asks on the way. Weights are loaded as of a plain model, on the host."""

    is_trainable = True

    def is_serializable(self) -> bool:
        return True

    def update_device_map(self, device_map):
        options = self.quantization_config.options
        named = set(device_map.values()) if isinstance(device_map, dict) else set()
        if len(named) > 1:
            raise ValueError(f"device_map names {len(named)} devices, and stagehand brings weights from the host to "
                             f"one: leave device_map out, or give StagehandConfig(device=)")
        self._options = {"device": torch.device(*named), **options} if named else options
        return {"": "cpu"}

    def _process_model_after_weight_loading(self, model, **kwargs):
        for name in ("hf_quantizer", "quantization_method", "is_quantized"):
            vars(model).pop(name, None)
        vars(model.config).pop("quantization_config", None)
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                vars(part.config).pop("_is_quantized", None)
        return layer(model, **self._options)
