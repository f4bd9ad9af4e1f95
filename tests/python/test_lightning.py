"""Lightning's Trainer with `StagehandStrategy`: equal to the Trainer of the resident module."""

from __future__ import annotations

import card
import hosts
import pytest
import support as s
import torch

import stagehand

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
for needed in ("transformers", "accelerate", "peft"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

from test_trainers import adapted, near, one_thread, same_weights  # noqa: E402, F401: the fixture

from stagehand.integrations.lightning import StagehandStrategy  # noqa: E402


class Words(pl.LightningModule):
    """A language model in a module, as Lightning's documentation has it."""

    def __init__(self, build=hosts.llama, optimizer=torch.optim.AdamW):
        super().__init__()
        self.net, self.optimizer = build(), optimizer
        self.losses, self.seen = [], []

    def step_loss(self, ids):
        assert ids.device == self.device == card.TORCH
        return self.net(input_ids=ids, labels=ids).loss

    def training_step(self, ids, number):
        loss = self.step_loss(ids)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, ids, number):
        self.losses.append(self.step_loss(ids))

    def predict_step(self, ids, number):
        return self.net(input_ids=ids).logits

    def on_train_end(self):
        runtimes = [vars(part).get("_stagehand_layer_runtime") for part in self.modules()]
        self.seen.extend(runtime.plan["bytes_per_step"] for runtime in runtimes if runtime is not None)

    def configure_optimizers(self):
        optimizer = self.optimizer([p for p in self.parameters() if p.requires_grad], lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}


class MadeLate(Words):
    def configure_model(self):
        if self.net is None:
            self.net = hosts.llama()

    def __init__(self, **options):
        super().__init__(lambda: None, **options)


def loader():
    data = torch.randint(5, 300, (10, 9), generator=torch.Generator().manual_seed(2))
    return torch.utils.data.DataLoader(data, batch_size=2)


def strategy(net, **options):
    budget = s.nbytes(net) * 3 // 4 + 40_000
    return StagehandStrategy(vram_budget=budget, device=s.device(budget), **options)


def trainer(folder, **options):
    given = {"accelerator": "gpu" if card.ON_CARD else "cpu", "devices": 1, "logger": False, "max_epochs": 2,
             "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": folder,
             "enable_checkpointing": False, "gradient_clip_val": 0.5, **options}
    return pl.Trainer(**given)


class Plain(pl.strategies.SingleDeviceStrategy):
    """The resident module: its weights lie where streamed ones would."""

    def model_to_device(self):
        for name, child in list(self.model.named_children()):
            setattr(self.model, name, s.aligned_copy(child))
        super().model_to_device()


def values(module) -> list:
    return [loss.item() for loss in module.losses]


RECIPES = {
    "as it is": {}, "bf16, in parts": {"precision": "bf16-mixed", "accumulate_grad_batches": 2},
    **({"fp16": {"precision": "16-mixed"}} if card.ON_CARD else {}),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("build", [hosts.llama, adapted])
def test_a_fit_is_that_of_the_resident_module(build, recipe, tmp_path):
    modules = [Words(build), Words(build)]
    for module, chosen in zip(modules, (strategy(modules[0].net), Plain(card.TORCH))):
        trainer(tmp_path, strategy=chosen, **RECIPES[recipe]).fit(module, loader(), loader())
    mine, theirs = modules
    assert len(mine.losses) == 2 * 10 + 2 and values(mine) == near(values(theirs))
    same_weights(mine, theirs)
    assert mine.seen[0] > 20_000 and not theirs.seen
    with pytest.raises(stagehand.StagehandError, match="not under stagehand"):
        stagehand.runtime(mine)
    assert {param.device.type for param in mine.parameters()} == {"cpu"}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, stagehand.OffloadedAdamW])
@pytest.mark.parametrize("build", [hosts.llama, adapted])
def test_a_fit_that_goes_on_from_a_checkpoint(build, optimizer, tmp_path):
    """Of the whole run, of one that was interrupted, and of the resident module from the same checkpoint."""
    whole, first = Words(build, optimizer), Words(build, optimizer)
    trainer(tmp_path, strategy=strategy(whole.net)).fit(whole, loader())
    half = trainer(tmp_path, strategy=strategy(first.net), max_epochs=1)
    half.fit(first, loader())
    half.save_checkpoint(tmp_path / "half.ckpt")
    for resident in (False, True):
        again = Words(build, optimizer)
        chosen = Plain(card.TORCH) if resident else strategy(again.net)
        other = trainer(tmp_path, strategy=chosen)
        other.fit(again, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=False)
        assert values(again) == near(values(whole)[5:])
        same_weights(again, whole)


def test_a_fit_begins_again_with_the_optimizer_that_it_had(tmp_path):
    kept = {}

    class Keeps(Words):
        def configure_optimizers(self):
            return kept.setdefault(id(self), torch.optim.AdamW(self.parameters(), lr=1e-2))

    modules = [Keeps(), Keeps()]
    for module, resident in zip(modules, (False, True)):
        for _ in range(2):
            chosen = pl.strategies.SingleDeviceStrategy(card.TORCH) if resident else strategy(module.net)
            trainer(tmp_path, strategy=chosen, max_epochs=1).fit(module, loader())
    assert len(modules[0].losses) == 10 and torch.allclose(modules[0].losses[-1], modules[1].losses[-1])


def test_predictions_and_a_module_that_makes_its_weights_late(tmp_path):
    want = trainer(tmp_path, strategy=Plain(card.TORCH)).predict(Words(), loader())
    module = MadeLate()
    assert s.same(trainer(tmp_path, strategy=strategy(hosts.llama())).predict(module, loader()), want)
    assert s.same(trainer(tmp_path, strategy=strategy(module.net)).predict(module, loader()), want)


def test_it_is_known_by_its_name(tmp_path):
    module = Words()
    mine = trainer(tmp_path, strategy="stagehand", max_epochs=1)
    assert isinstance(mine.strategy, StagehandStrategy) and mine.strategy.root_device == card.TORCH
    mine.fit(module, loader())
    assert module.seen


def test_a_part_that_is_managed_already_stays_so_until_the_end(tmp_path):
    module = Words()
    budget = s.nbytes(module.net) * 3 // 4 + 40_000
    stagehand.layer(module.net, vram_budget=budget, device=s.device(budget))
    before = stagehand.runtime(module)
    trainer(tmp_path, strategy=StagehandStrategy(), max_epochs=1).fit(module, loader())
    assert before.mode == "shutdown" and module.seen[0] > 20_000
    plain = Words()
    trainer(tmp_path, strategy=Plain(card.TORCH), max_epochs=1).fit(plain, loader())
    same_weights(module, plain)


def test_too_small_a_budget_and_several_devices(tmp_path):
    module = Words()
    with pytest.raises(stagehand.StagehandOOMError, match="smallest budget"):
        trainer(tmp_path, strategy=StagehandStrategy(vram_budget=1000, device="sim")).fit(module, loader())
    same_weights(module, Words())
    with pytest.raises(stagehand.StagehandError, match="devices=1"):
        StagehandStrategy().parallel_devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
