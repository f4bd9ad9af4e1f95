"""A managed model under accelerate's Accelerator: `prepare`, mixed precision, accumulation, clipping, states that are
saved and loaded. Equal to the same loop of the resident model."""

from __future__ import annotations

import card
import pytest
import support as s
import torch

import stagehand

for needed in ("transformers", "accelerate", "peft"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

import accelerate  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from test_trainers import adapted, near, one_thread, same_weights, whole  # noqa: E402, F401: the fixture


class Loop:
    """A training loop as accelerate's documentation has it, of one model. managed: under stagehand."""

    def __init__(self, build, managed, precision="no", parts=1, optimizer=torch.optim.AdamW, clip=0.5):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(cpu=not card.ON_CARD, mixed_precision=precision,
                                                  gradient_accumulation_steps=parts)
        self.clip, self.model = clip, build()
        if managed:
            budget = s.nbytes(self.model) * 3 // 4 + 40_000
            stagehand.layer(self.model, vram_budget=budget, device=s.device(budget))
        else:
            self.model = s.aligned_copy(self.model)
        self.plain = self.model
        optimizer = optimizer([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** step)
        data = torch.randint(5, 300, (14, 9), generator=torch.Generator().manual_seed(2))
        loader = torch.utils.data.DataLoader(data, batch_size=2)
        self.model, self.optimizer, self.loader, self.schedule = self.accelerator.prepare(
            self.model, optimizer, loader, schedule)

    def epoch(self) -> list:
        """Losses and norms. Seven batches: the last accumulation has fewer parts."""
        found = []
        for ids in self.loader:
            assert ids.device == card.TORCH
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=ids, labels=ids).loss
                self.accelerator.backward(loss)
                found.append(loss.item())
                if self.accelerator.sync_gradients:
                    found.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)))
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()
        return found


RECIPES = {
    "as it is": {}, "bf16, in parts": {"precision": "bf16", "parts": 3},
    "offloaded, in parts": {"optimizer": stagehand.OffloadedAdamW, "parts": 2},
    **({"fp16": {"precision": "fp16"}} if card.ON_CARD else {}),
}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("build", [whole, adapted])
def test_a_loop_of_accelerate_is_the_one_of_the_resident_model(build, recipe):
    found, loops = [], []
    for managed in (True, False):
        loops.append(Loop(build, managed, **RECIPES[recipe]))
        found.append(loops[-1].epoch() + loops[-1].epoch())
    assert found[0] == near(found[1])
    same_weights(loops[0].plain, loops[1].plain)
    runtime = stagehand.runtime(loops[0].model)
    assert runtime.plan["bytes_per_step"] > 20_000 and runtime.device == card.TORCH


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, stagehand.OffloadedAdamW])
@pytest.mark.parametrize("build", [whole, adapted])
def test_a_state_that_is_saved_goes_on_where_it_was(build, optimizer, tmp_path):
    loop = Loop(build, True, "bf16", 2, optimizer)
    loop.epoch()
    loop.accelerator.save_state(tmp_path / "state")
    want = loop.epoch()
    state = loop.optimizer.state_dict()["state"]
    loop.accelerator.load_state(tmp_path / "state")  # back, in the same process
    assert loop.epoch() == near(want)
    for managed in (True, False):  # and of another model, managed or resident
        again = Loop(build, managed, "bf16", 2, optimizer)
        if not managed:  # safetensors loads into no tensor that has a part of its storage, as these have
            for param in again.plain.parameters():
                param.data = param.data.clone()
        again.accelerator.load_state(tmp_path / "state")
        assert again.epoch() == near(want)
        same_weights(again.plain, loop.plain)
        states = again.optimizer.state_dict()["state"].items()
        for number, values in states if not card.ON_CARD else ():
            assert s.same(list(values.values()), list(state[number].values()))


def test_unwrapped_it_is_the_managed_model_and_its_file_is_a_plain_one(tmp_path):
    loop = Loop(whole, True, "bf16")
    loop.epoch()
    inner = loop.accelerator.unwrap_model(loop.model)
    assert inner is loop.plain and stagehand.runtime(inner) is stagehand.runtime(loop.model)
    loop.accelerator.save_model(loop.model, tmp_path)
    saved = stagehand.open_checkpoint(tmp_path / "model.safetensors")
    for name, param in inner.named_parameters():
        assert s.same(saved[name], param.detach().cpu()), name


def test_a_model_that_was_prepared_before_it_was_wrapped():
    """On a card prepare() has moved it there; on the host it may be wrapped."""
    AcceleratorState._reset_state(True)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model, plain = accelerator.prepare(whole()), accelerator.prepare(s.aligned_copy(whole()))
    budget = s.nbytes(model) * 3 // 4 + 40_000
    stagehand.layer(model, vram_budget=budget, device=s.device(budget))
    ids = torch.arange(5, 23).view(2, 9)
    for _ in range(2):
        losses = [one(input_ids=card.there(ids), labels=card.there(ids)).loss for one in (model, plain)]
        assert s.same(*losses)
