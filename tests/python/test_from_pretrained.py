"""transformers' `from_pretrained` with `StagehandConfig`: a model that is under management, and else a plain one."""

from __future__ import annotations

import json

import card
import hosts
import pytest
import support as s
import torch

import stagehand

pytest.importorskip("transformers", reason="transformers is not installed")

import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM  # noqa: E402

from stagehand.integrations.transformers import StagehandConfig  # noqa: E402


@pytest.fixture(autouse=True)
def one_thread():
    with s.threads(1):
        yield


@pytest.fixture
def checkpoint(tmp_path):
    """(folder, the resident model that it was saved from)."""
    model = hosts.llama(tied=True)
    model.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint", model


def loaded(folder, model, auto=AutoModelForCausalLM, config=None, **options):
    budget = s.nbytes(model) * 7 // 8 + 40_000
    given = StagehandConfig(**{"vram_budget": budget, "device": s.device(budget), **(config or {})})
    return auto.from_pretrained(folder, quantization_config=given, local_files_only=True, **options)


def tokenizer():
    """A letter is a token."""
    from transformers import PreTrainedTokenizerFast
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    names = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(97 + i % 26) + str(i): 3 + i for i in range(297)}}
    inner = Tokenizer(models.WordLevel(names, unk_token="<pad>"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="</s>", bos_token="<s>")


PROMPT = "a0 b1 c2 d3 e4"
WAYS = {
    "greedy": {}, "sampling": {"do_sample": True, "top_k": 20}, "beams": {"num_beams": 3},
    "static cache": {"cache_implementation": "static"}, "from the prompt": {"prompt_lookup_num_tokens": 3},
}


def generated(model, **options):
    torch.manual_seed(0)
    ids = torch.randint(5, 300, (1, 7), generator=torch.Generator().manual_seed(3), device="cpu").to(model.device)
    return model.generate(ids, max_new_tokens=6, attention_mask=torch.ones_like(ids), **options)


def test_a_model_comes_managed_and_generates_as_the_resident_one(checkpoint):
    folder, plain = checkpoint
    model, ref = loaded(folder, plain), s.aligned_copy(plain)
    for way, options in WAYS.items():
        assert s.same(generated(model, **options), generated(ref, **options)), way
    runtime = stagehand.runtime(model)
    assert runtime.plan["bytes_per_step"] > 20_000 and runtime.device == card.TORCH == model.device
    assert model.get_memory_footprint() == plain.get_memory_footprint()
    small = loaded(folder, plain)
    assert s.same(generated(model, assistant_model=small), generated(ref, assistant_model=ref))


def test_an_encoder_with_a_decoder(tmp_path):
    plain = hosts.t5_model()
    plain.save_pretrained(tmp_path)
    model, ref = loaded(tmp_path, plain, AutoModelForSeq2SeqLM), s.aligned_copy(plain)
    for way, options in WAYS.items():
        assert s.same(generated(model, **options), generated(ref, **options)), way
    stagehand.shutdown(model)
    stagehand.layer(model, vram_budget=s.nbytes(plain), device="sim")  # nothing of the first time is in the way


def test_nothing_says_that_it_is_quantized(checkpoint, tmp_path):
    folder, plain = checkpoint
    model, plain = loaded(folder, plain), AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    for name in ("is_quantized", "quantization_method", "hf_quantizer", "hf_device_map"):
        assert hasattr(model, name) == hasattr(plain, name) and getattr(model, name, None) == getattr(plain, name, None)
    assert {*vars(model.config)} == {*vars(plain.config)}
    model.save_pretrained(tmp_path / "again")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "again" / name).read_text()) == json.loads((folder / name).read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again", local_files_only=True)
    for (name, mine), (_, theirs) in zip(again.named_parameters(), plain.named_parameters(), strict=True):
        assert s.same(mine, theirs), name


def test_experts_are_saved_in_the_form_of_their_checkpoint(tmp_path):
    plain = hosts.mixtral()
    plain.save_pretrained(tmp_path / "first")
    model = loaded(tmp_path / "first", plain)
    model.save_pretrained(tmp_path / "second")
    headers = [stagehand.open_checkpoint(tmp_path / name / "model.safetensors") for name in ("first", "second")]
    assert sorted(headers[0].keys()) == sorted(headers[1].keys())


def test_a_pipeline_of_the_model(checkpoint):
    folder, plain = checkpoint
    texts = []
    for model in (loaded(folder, plain), s.aligned_copy(plain)):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer())
        assert pipe.device == card.TORCH
        texts.append(pipe([PROMPT] * 2, max_new_tokens=5, do_sample=False, batch_size=2))
    assert texts[0] == texts[1]


def test_embeddings_are_resized(checkpoint):
    folder, plain = checkpoint
    model, ref = loaded(folder, plain), s.aligned_copy(plain)
    for one in (model, ref):
        torch.manual_seed(5)
        one.resize_token_embeddings(310, mean_resizing=False)
    if card.ON_CARD:  # which draws other random numbers
        ref.load_state_dict(model.state_dict())
    assert s.same(generated(model), generated(ref))
    assert model.get_memory_footprint() == ref.get_memory_footprint()


@pytest.mark.parametrize("form", ["auto", card.TORCH, {"": str(card.TORCH)}, None, "the default device"])
def test_a_device_map_names_the_device(checkpoint, form):
    folder, plain = checkpoint
    budget = s.nbytes(plain)
    given = StagehandConfig(vram_budget=budget)
    with card.TORCH if form == "the default device" else torch.device("cpu"):
        model = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=given, local_files_only=True,
            **({} if form in (None, "the default device") else {"device_map": form}))
    if form not in ("auto", None) or card.ON_CARD:
        assert stagehand.runtime(model).device == card.TORCH
    assert all(param.device.type == "cpu" for param in list(model.parameters())[:1])


def test_several_devices_are_refused(checkpoint):
    folder, plain = checkpoint
    with pytest.raises(ValueError, match="device_map names 2 devices"):
        loaded(folder, plain, device_map={"model": 0, "lm_head": "cpu"})


def test_a_budget_that_is_too_small_says_so(checkpoint):
    folder, plain = checkpoint
    with pytest.raises(stagehand.StagehandOOMError, match="smallest budget"):
        loaded(folder, plain, config={"vram_budget": 1000})


def test_a_quantized_checkpoint_is_refused(checkpoint):
    folder, plain = checkpoint
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="StagehandConfig"):
        loaded(folder, plain)


def test_a_model_that_streams_from_its_files(checkpoint):
    folder, plain = checkpoint
    model = loaded(folder, plain, config={"source": folder, "inference_mode": True})
    assert stagehand.runtime(model).stats["files"]
    assert s.same(generated(model), generated(s.aligned_copy(plain)))


@pytest.mark.parametrize("callback", [False, True])
def test_a_trainer_of_such_a_model(checkpoint, tmp_path, callback):
    from test_trainers import Pair, Sentences, arguments, same_weights
    from stagehand.integrations.transformers import StagehandCallback

    folder, _ = checkpoint
    pair = Pair(lambda: hosts.llama(tied=True), tmp_path)
    model = loaded(folder, pair.plain)
    extra = {"callbacks": [StagehandCallback()]} if callback else {}
    trainer = transformers.Trainer(model, arguments(tmp_path / "own"), train_dataset=Sentences(), **extra)
    for one in (trainer, pair.trainers[1]):
        torch.manual_seed(0)
        one.train()
    same_weights(model, pair.plain)


def test_the_dtype_of_from_pretrained(checkpoint):
    folder, plain = checkpoint
    model = loaded(folder, plain, dtype=torch.bfloat16)
    assert s.same(generated(model), generated(s.aligned_copy(plain.to(torch.bfloat16))))
