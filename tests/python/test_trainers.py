"""transformers' Trainer under `stagehand.integrations.transformers`: equal to the Trainer of the resident model, with
checkpoints, resuming, evaluation, accumulation and clipping. A part is tried by default, all with STH_TEST_FULL=1."""

from __future__ import annotations

import copy
import os
import pathlib

import card
import hosts
import pytest
import support as s
import torch

import stagehand

for needed in ("transformers", "accelerate", "peft"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

import peft  # noqa: E402
from transformers import Trainer, TrainingArguments  # noqa: E402

from stagehand.integrations.transformers import StagehandCallback, offloaded_adamw  # noqa: E402
from stagehand.optim import OffloadedAdamW  # noqa: E402



@pytest.fixture(autouse=True)
def one_thread():
    with s.threads(1):
        yield


class Sentences(torch.utils.data.Dataset):
    def __init__(self, count=12):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        ids = torch.randint(5, 300, (9,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


def whole():
    return hosts.llama()


def adapted():
    """Of the same seed each time."""
    model = hosts.llama()
    torch.manual_seed(1)
    return peft.get_peft_model(model, peft.LoraConfig(r=32, target_modules=["q_proj", "down_proj"],
                                                      init_lora_weights=False))


def arguments(folder, **options):
    given = {"max_steps": 4, "per_device_train_batch_size": 2, "report_to": [], "logging_steps": 1,
             "save_strategy": "no", "use_cpu": not card.ON_CARD, "learning_rate": 1e-2, "disable_tqdm": True,
             "output_dir": str(folder), "weight_decay": 0.1, **options}
    return TrainingArguments(**given)


def budget_of(model) -> int:
    return s.nbytes(model) * 3 // 4 + 40_000


def callback_for(model, **options):
    budget = budget_of(model)
    return StagehandCallback(model, vram_budget=budget, device=s.device(budget), **options)


def same_weights(one, other) -> None:
    """On a card the resident model's optimizer runs there, and rounds otherwise: means of differences that are far
    below a step of 1e-2 pass."""
    mine, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert mine.keys() == theirs.keys()
    for name, param in mine.items():
        if card.ON_CARD:
            assert (param.detach().cpu() - theirs[name].detach().cpu()).abs().mean() < 2e-4, name
        else:
            assert s.same(param, theirs[name]), name


def near(values):
    return pytest.approx(values, rel=1e-2 if card.ON_CARD else 0)


def logged(trainer, *names) -> list:
    """What the Trainer has logged under these names, in order."""
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


class Pair:
    """A Trainer of a managed model and one of a resident one, with the same arguments."""

    def __init__(self, build, folder, offloaded=False, callback=None, kind=Trainer, **options):
        self.model, self.plain = build(), s.aligned_copy(build())
        self.trainers = []
        for name, model in (("managed", self.model), ("plain", self.plain)):
            args = arguments(folder / name, **options)
            extra = {"optimizer_cls_and_kwargs": offloaded_adamw(args)} if offloaded else {}
            if model is self.model:
                extra["callbacks"] = [callback_for(model, **(callback or {}))]
            torch.manual_seed(0)
            self.trainers.append(kind(model=model, args=args, train_dataset=Sentences(), eval_dataset=Sentences(4),
                                      **extra))

    def train(self, **options):
        """Each trainer's run, with the same random numbers."""
        for trainer in self.trainers:
            torch.manual_seed(0)
            trainer.train(**options)
        return self

    def check(self):
        mine, theirs = self.trainers
        for names in (("loss", "grad_norm"), ("eval_loss",)):
            assert logged(mine, *names) == near(logged(theirs, *names))
        assert logged(mine, "loss")
        same_weights(self.model, self.plain)
        runtime = stagehand.runtime(self.model)
        assert runtime.stats["planned"] and runtime.plan["bytes_per_step"] > 20_000
        return runtime


FULL = bool(os.environ.get("STH_TEST_FULL"))
RECIPES = {
    "clipped, fused AdamW": {"max_grad_norm": 0.1},
    "recomputed, in parts": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2,
                             "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16, evaluated": {"bf16": True, "eval_strategy": "steps", "eval_steps": 2},
    "foreach AdamW": {"optim": "adamw_torch"},
    "adafactor": {"optim": "adafactor"},
    "not recomputed, in unequal parts": {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 2,
                                         "eval_strategy": "epoch"},
    **({"fp16": {"fp16": True}} if card.ON_CARD else {}),
}


@pytest.mark.parametrize("recipe", RECIPES if FULL else list(RECIPES)[:3])
@pytest.mark.parametrize("build", [whole, adapted])
def test_a_trainer_with_the_callback_is_the_trainer_of_the_resident_model(build, recipe, tmp_path):
    pair = Pair(build, tmp_path, **RECIPES[recipe]).train()
    runtime = pair.check()
    if build is adapted:
        assert "device" in {each["home"] for each in runtime.trainables.values()}
    pair.trainers[0].evaluate()
    stagehand.shutdown(pair.model)
    same_weights(pair.model, pair.plain)


# Losses of both are those of OffloadedAdamW, whose rounding is not that of torch's.
@pytest.mark.parametrize("build", [whole, adapted])
@pytest.mark.parametrize("parts", [1, 4])
def test_weights_are_updated_in_the_last_backward_of_an_accumulation(build, parts, tmp_path, monkeypatch):
    """The last accumulation of an epoch has fewer parts."""
    options = {"max_grad_norm": 0.0, "gradient_accumulation_steps": parts, "max_steps": -1, "num_train_epochs": 2,
               "eval_strategy": "epoch"}
    updated, final = [], OffloadedAdamW._gradient_is_final

    def noted(self, param):
        updated.append((self, param))
        final(self, param)

    monkeypatch.setattr(OffloadedAdamW, "_gradient_is_final", noted)
    pair = Pair(build, tmp_path, offloaded=True, callback={"overlap": True, "trainables": "host"}, **options)
    pair.train().check()
    steps = pair.trainers[0].state.global_step
    assert steps == 2 * -(-6 // parts)
    # Those that stay on a card are updated there by the step.
    trained = {id(param) for param in pair.model.parameters() if param.requires_grad and param.is_cpu}
    assert {id(param) for _, param in updated} == trained and len(updated) == steps * len(trained)


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("build", [whole, adapted])
def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(build, offloaded, tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_grad_norm": 0.1, "max_steps": 6,
               "gradient_accumulation_steps": 2}
    pair = Pair(build, tmp_path, offloaded, **options).train()
    pair.check()
    again = Pair(build, tmp_path / "again", offloaded, **options)
    checkpoint = tmp_path / "managed/checkpoint-2"
    for trainer in again.trainers:  # the resident model goes on from the checkpoint of the managed one
        torch.manual_seed(0)
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert logged(trainer, "loss", "grad_norm") == near(logged(pair.trainers[0], "loss", "grad_norm"))
    same_weights(again.model, pair.model)
    same_weights(again.plain, pair.model)
    states = [trainer.optimizer.state_dict()["state"] for trainer in (*again.trainers, pair.trainers[0])]
    for other in states[1:] if not card.ON_CARD else ():
        assert s.same([tuple(state.values()) for state in states[0].values()],
                      [tuple(state.values()) for state in other.values()])


@pytest.mark.parametrize("build", [whole, adapted])
def test_the_best_model_is_loaded_at_the_end(build, tmp_path):
    """What counts as best is such that it is the first evaluation."""
    pair = Pair(build, tmp_path, load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps",
                eval_steps=2, save_steps=2, learning_rate=0.3, lr_scheduler_type="constant",
                metric_for_best_model="eval_loss", greater_is_better=build is adapted).train()
    pair.check()
    assert {pathlib.Path(trainer.state.best_model_checkpoint).name for trainer in pair.trainers} == {"checkpoint-2"}
    losses = [trainer.evaluate()["eval_loss"] for trainer in pair.trainers]
    assert losses[0] == near(losses[1])


def test_a_checkpoint_of_a_managed_model_loads_without_stagehand(tmp_path):
    pair = Pair(whole, tmp_path).train()
    pair.trainers[0].save_model(tmp_path / "saved")
    from transformers import AutoModelForCausalLM

    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", local_files_only=True)
    same_weights(again, pair.model)
    assert "stagehand" not in (tmp_path / "saved/config.json").read_text()


def test_a_model_that_each_run_makes_anew(tmp_path):
    made = []

    def build():
        made.append(whole())
        return made[-1]

    plain = Pair(whole, tmp_path)
    budget = budget_of(whole())
    trainer = Trainer(model_init=build, args=arguments(tmp_path / "init"), train_dataset=Sentences(),
                      callbacks=[StagehandCallback(vram_budget=budget, device=s.device(10 * budget))])
    for _ in range(2):
        trainer.train()
        assert stagehand.runtime(made[-1]).plan["bytes_per_step"] > 20_000
    assert len(made) == 3
    plain.trainers[1].train()
    same_weights(made[-1], plain.plain)


def test_a_model_under_management_stays_as_it_is(tmp_path):
    model = whole()
    budget = budget_of(model)
    stagehand.layer(model, vram_budget=budget, device=s.device(budget))
    before = stagehand.runtime(model)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Sentences(), callbacks=[StagehandCallback()])
    trainer.train()
    assert stagehand.runtime(model) is before and before.plan["bytes_per_step"] > 20_000


def test_the_callback_leaves_no_device_map(tmp_path):
    pair = Pair(whole, tmp_path)
    assert not hasattr(pair.model, "hf_device_map")


def test_overlap_says_what_it_needs(tmp_path):
    for offloaded, options in ((False, {"max_grad_norm": 0.0}), (True, {"max_grad_norm": 1.0})):
        pair = Pair(whole, tmp_path, offloaded, callback={"overlap": True}, **options)
        with pytest.raises(ValueError, match="overlap=True.*max_grad_norm=0"):
            pair.trainers[0].train()


def test_a_run_that_fails_inside_an_overlap_can_be_begun_again(tmp_path):
    pair = Pair(whole, tmp_path, offloaded=True, callback={"overlap": True}, max_grad_norm=0.0)
    handle = pair.model.model.layers[1].register_forward_hook(fails)
    with pytest.raises(ZeroDivisionError):
        pair.trainers[0].train()
    handle.remove()
    pair.train().check()


def fails(*_):
    raise ZeroDivisionError


def test_a_budget_that_is_too_small_leaves_a_plain_model(tmp_path):
    model = whole()
    before = copy.deepcopy(model)
    with pytest.raises(stagehand.StagehandOOMError, match="smallest budget"):
        Trainer(model, arguments(tmp_path), train_dataset=Sentences(),
                callbacks=[StagehandCallback(model, vram_budget=1000, device="sim")])
    assert not hasattr(model, "hf_device_map")
    same_weights(model, before)


def test_several_gpus_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    model = whole()
    with pytest.raises(stagehand.StagehandError, match="CUDA_VISIBLE_DEVICES"):
        Trainer(model, arguments(tmp_path), train_dataset=Sentences(), callbacks=[StagehandCallback(model)])


def test_the_given_gradients_are_taken_as_they_are():
    """`confirm_gradients`: without it a write behind last_backward() is refused."""
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = OffloadedAdamW([param], lr=0.1)
    for confirmed in (True, False):
        with optimizer.last_backward():
            param.square().sum().backward()
            with pytest.raises(RuntimeError, match="cannot be called inside"):
                optimizer.confirm_gradients()
        param.grad.mul_(1.0)
        value = param.detach().clone()
        if confirmed:
            optimizer.confirm_gradients()
            optimizer.step()
            assert s.same(param.detach(), value)  # updated once, in the backward
        else:
            with pytest.raises(RuntimeError, match="was changed after its update"):
                optimizer.step()
        optimizer.zero_grad()
