"""TRL's trainers, which build on transformers': SFTTrainer and DPOTrainer of managed models, equal to those of resident
ones."""

from __future__ import annotations

import card
import hosts
import pytest
import support as s
import torch

import stagehand

for needed in ("trl", "datasets", "peft"):
    pytest.importorskip(needed, reason=f"{needed} is not installed: make test-hosts installs it")

import datasets  # noqa: E402
import peft  # noqa: E402
import trl  # noqa: E402
from test_trainers import near, one_thread, same_weights  # noqa: E402, F401: the fixture

from stagehand.integrations.transformers import StagehandCallback, StagehandConfig, offloaded_adamw  # noqa: E402


def tokenizer():
    """A word is a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    inner = Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 300)}},
                                       unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


def words(seed, count=8) -> str:
    numbers = torch.randint(3, 300, (count,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{number}" for number in numbers.tolist())


TEXTS = {"text": [words(i) for i in range(8)]}
PAIRS = {"prompt": [words(i) for i in range(8)], "chosen": [words(i + 20) for i in range(8)],
         "rejected": [words(i + 40) for i in range(8)]}
KINDS = {"sft": (trl.SFTTrainer, trl.SFTConfig, TEXTS), "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS)}


def lora():
    return peft.LoraConfig(r=32, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def trainer(kind, model, folder, callbacks=(), offloaded=False, adapted=False, **given):
    make, arguments, data = KINDS[kind]
    args = arguments(output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, report_to=[], logging_steps=1,
                     save_strategy="no", use_cpu=not card.ON_CARD, bf16=False, learning_rate=1e-2, disable_tqdm=True)
    if offloaded:
        given["optimizer_cls_and_kwargs"] = offloaded_adamw(args)
    return make(model=model, args=args, train_dataset=datasets.Dataset.from_dict(data), processing_class=tokenizer(),
                callbacks=list(callbacks), peft_config=lora() if adapted else None, **given)


def losses(trainer) -> list:
    return [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm") if name in entry]


def budget_of(model) -> int:
    return s.nbytes(model) * 3 // 4 + 40_000


def managed(model):
    budget = budget_of(model)
    return stagehand.layer(model, vram_budget=budget, device=s.device(budget))


@pytest.mark.parametrize("kind,options", [("sft", {}), ("sft", {"offloaded": True}), ("sft", {"adapted": True}),
                                          ("dpo", {}), ("dpo", {"adapted": True})])
def test_a_trainer_of_trl_is_the_one_of_the_resident_model(kind, options, tmp_path):
    """DPO compares with a second model, or with the same one without its adapters."""
    model, plain = hosts.llama(), s.aligned_copy(hosts.llama())
    budget = budget_of(model) + (120_000 if options.get("adapted") else 0)
    more = [{}, {}]
    if kind == "dpo" and not options:
        more = [{"ref_model": managed(hosts.llama(seed=1))}, {"ref_model": s.aligned_copy(hosts.llama(seed=1))}]
    more[0]["callbacks"] = [StagehandCallback(model, vram_budget=budget, device=s.device(budget))]
    runs = []
    for one, others in zip((model, plain), more):
        runs.append(trainer(kind, one, tmp_path, **options, **others))
        torch.manual_seed(0)
        runs[-1].train()
    assert losses(runs[0]) == near(losses(runs[1])) and losses(runs[0])
    same_weights(runs[0].model, runs[1].model)
    runtime = stagehand.runtime(runs[0].model)
    assert runtime.plan["bytes_per_step"] > 20_000
    if options.get("adapted"):
        assert "device" in {each["home"] for each in runtime.trainables.values()}


def test_a_model_that_sft_loads_itself(tmp_path):
    hosts.llama().save_pretrained(tmp_path / "model")
    budget = budget_of(hosts.llama())
    config = StagehandConfig(vram_budget=budget, device=s.device(budget))
    args = trl.SFTConfig(output_dir=str(tmp_path), max_steps=2, report_to=[], save_strategy="no", bf16=False,
                         use_cpu=not card.ON_CARD, disable_tqdm=True)
    run = trl.SFTTrainer(str(tmp_path / "model"), args, train_dataset=datasets.Dataset.from_dict(TEXTS),
                         processing_class=tokenizer(), quantization_config=config, peft_config=lora())
    run.train()
    assert stagehand.runtime(run.model).plan["bytes_per_step"] > 20_000
