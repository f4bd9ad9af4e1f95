"""TRL's trainers, which build on transformers': SFTTrainer, DPOTrainer and GRPOTrainer, which generates, of managed
models, equal to those of resident ones."""

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
KINDS = {"sft": (trl.SFTTrainer, trl.SFTConfig, TEXTS), "dpo": (trl.DPOTrainer, trl.DPOConfig, PAIRS),
         "grpo": (trl.GRPOTrainer, trl.GRPOConfig, {"prompt": PAIRS["prompt"]})}


def lora():
    return peft.LoraConfig(r=32, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")


def trainer(kind, model, folder, callbacks=(), offloaded=False, adapted=False, **given):
    make, arguments, data = KINDS[kind]
    more = {}
    if kind == "grpo":
        # Without adapters it would load the model that it compares with from a file, onto the card.
        more = {"num_generations": 2, "max_completion_length": 6, "beta": 0.1 if adapted else 0.0}
        given = {"reward_funcs": many_even_words, **given}
    args = arguments(output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, report_to=[], logging_steps=1,
                     save_strategy="no", use_cpu=not card.ON_CARD, bf16=False, learning_rate=1e-2, disable_tqdm=True,
                     **more)
    if offloaded:
        given["optimizer_cls_and_kwargs"] = offloaded_adamw(args)
    return make(model=model, args=args, train_dataset=datasets.Dataset.from_dict(data), processing_class=tokenizer(),
                callbacks=list(callbacks), peft_config=lora() if adapted else None, **given)


def losses(trainer) -> list:
    names = ("loss", "grad_norm", "reward", "kl")
    return [entry[name] for entry in trainer.state.log_history for name in names if name in entry]


def many_even_words(completions, **_) -> list:
    """A reward that differs among completions."""
    numbers = [[int(word[1:]) for word in text.split() if word[1:].isdigit()] for text in completions]
    return [sum(number % 2 == 0 for number in each) / 4 for each in numbers]


def budget_of(model) -> int:
    return s.nbytes(model) * 3 // 4 + 40_000


def managed(model):
    budget = budget_of(model)
    return stagehand.layer(model, vram_budget=budget, device=s.device(budget))


@pytest.mark.parametrize("kind,options", [("sft", {}), ("sft", {"offloaded": True}), ("sft", {"adapted": True}),
                                          ("dpo", {}), ("dpo", {"adapted": True}), ("grpo", {}),
                                          ("grpo", {"adapted": True})])
def test_a_trainer_of_trl_is_the_one_of_the_resident_model(kind, options, tmp_path):
    """DPO compares with a second model, or with the same one without its adapters. GRPO generates in each step."""
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


def test_models_that_grpo_loads_itself(tmp_path):
    """The one that is trained and the one that it is compared with."""
    hosts.llama().save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    budget = budget_of(hosts.llama())
    config = StagehandConfig(vram_budget=budget, device=s.device(3 * budget))
    runs = []
    for more in ({"quantization_config": config}, {}):
        args = trl.GRPOConfig(output_dir=str(tmp_path), max_steps=2, report_to=[], save_strategy="no", bf16=False,
                              use_cpu=not card.ON_CARD, disable_tqdm=True, num_generations=2, beta=0.1, logging_steps=1,
                              max_completion_length=6, per_device_train_batch_size=2, learning_rate=1e-2,
                              model_init_kwargs={"dtype": torch.float32, **more})
        runs.append(trl.GRPOTrainer(str(tmp_path / "model"), reward_funcs=many_even_words, args=args,
                                    train_dataset=datasets.Dataset.from_dict({"prompt": PAIRS["prompt"]})))
        torch.manual_seed(0)
        runs[-1].train()
    for model in (runs[0].model, runs[0].ref_model):
        stats = stagehand.runtime(model).stats
        assert stats["h2d_bytes"] > budget // 2
    assert losses(runs[0]) == pytest.approx(losses(runs[1]), rel=1e-3) and len(losses(runs[0])) == 8
