"""Field cases GG: language models of transformers that generate, and are trained, beside the plain ones (240)."""

from __future__ import annotations

import threading

import card
import hosts
import pytest
import support as s
import torch
from pairs import same_weights

for needed in ("transformers", "accelerate", "peft"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")

import peft  # noqa: E402
import transformers  # noqa: E402

import stagehand  # noqa: E402

DECODERS = [hosts.llama, hosts.qwen3, hosts.gemma3, hosts.gpt_oss]
MODELS = [*DECODERS, hosts.t5_model, hosts.whisper]


@pytest.fixture(autouse=True)
def one_thread():
    with s.threads(1):
        yield
    torch.compiler.reset()


def pair(build, ending, spare=0):
    model = build()
    ref = s.aligned_copy(model)
    ending.append(hosts.managed(model, spare=spare))
    return model, ref


# ---------------------------------------------------------------------- generation


def ids_of(rows=1, length=7):
    return torch.randint(5, 290, (rows, length), generator=torch.Generator().manual_seed(3))


def inputs_of(model, rows=1) -> dict:
    """Of several rows the first ones are shorter, and are filled from the left."""
    if model.config.model_type == "whisper":
        features = torch.randn(rows, 16, 60, generator=torch.Generator().manual_seed(3))
        return {"input_features": card.there(features)}
    ids = ids_of(rows)
    mask = torch.ones_like(ids)
    for row in range(rows - 1):
        ids[row, : row + 1], mask[row, : row + 1] = 0, 0
    return {"input_ids": card.there(ids), "attention_mask": card.there(mask)}


def generated(model, rows=1, new=7, **options):
    torch.manual_seed(0)
    out = model.generate(**inputs_of(model, rows), max_new_tokens=new, **options)
    return out if isinstance(out, torch.Tensor) else torch.stack(list(out.scores))


WAYS = {
    "greedy": {}, "sampling": {"do_sample": True, "top_p": 0.9, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2}, "beams that are sampled": {"num_beams": 2, "do_sample": True},
    "a batch": {"rows": 3}, "a batch by beams": {"rows": 2, "num_beams": 2},
    "static cache": {"cache_implementation": "static"}, "without a cache": {"use_cache": False},
    "scores": {"output_scores": True, "return_dict_in_generate": True}, "one token": {"new": 1},
}


@pytest.mark.parametrize("build", MODELS)
def test_240_a_language_model_generates_the_same_in_each_way(build, ending):
    model, ref = pair(build, ending)
    for way, options in WAYS.items() if s.FULL else s.thinned(WAYS.items(), 5):
        assert s.same(generated(model, **options), generated(ref, **options)), way
    assert ending[0].stats["planned"] and ending[0].stats["h2d_bytes"] > 0


@pytest.mark.parametrize("build", s.thinned(DECODERS, 1))
def test_240_a_draft_assists_and_changes_nothing(build, ending):
    """Both models take turns, step by step."""
    model, ref = pair(build, ending)
    draft, plain = pair(build, ending)
    for options in ({}, {"do_sample": True}):
        got = generated(model, new=9, assistant_model=draft, **options)
        assert s.same(got, generated(ref, new=9, assistant_model=plain, **options))
    assert s.same(generated(model), generated(ref))


def test_240_tokens_that_are_streamed_to_another_thread(ending):
    """generate() runs in a thread of its own, as servers call it, several at once."""
    from test_trl import tokenizer

    model, ref = pair(hosts.llama, ending)
    want = generated(ref, new=9)
    for _ in range(2):
        streamers, found = [], [None] * 3
        for number in range(3):
            streamers.append(transformers.TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=300))

            def run(number=number):
                found[number] = model.generate(**inputs_of(model), max_new_tokens=9, streamer=streamers[number])

            thread = threading.Thread(target=run)
            thread.start()
            text = "".join(streamers[number])
            thread.join()
            assert s.same(found[number], want) and text.split()


def test_240_generation_in_several_threads_at_once(ending):
    model, ref = pair(hosts.llama, ending)
    want, found = generated(ref, new=9), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: generated(model, new=9)})) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(s.same(each, want) for each in found.values())


class Stop(Exception):
    pass


class Fails(transformers.LogitsProcessor):
    """In the third token."""

    def __init__(self):
        self.calls = 0

    def __call__(self, ids, scores):
        self.calls += 1
        if self.calls == 3:
            raise Stop
        return scores


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"num_beams": 2}])
def test_240_a_generation_that_fails_in_the_middle_and_another_one(options, ending):
    model, ref = pair(hosts.qwen3, ending)
    for _ in range(3):
        with pytest.raises(Stop):
            generated(model, logits_processor=[Fails()], **options)
        assert s.same(generated(model, **options), generated(ref, **options))


def test_240_a_cache_that_goes_on_from_turn_to_turn(ending):
    """A conversation: each call gets the cache of the one before; prompts change their length."""
    found = []
    for one in pair(hosts.gemma3, ending):
        cache, ids = transformers.DynamicCache(config=one.config), card.there(ids_of())
        for turn in range(3):
            ids = one.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=4)
            more = ids_of(length=2 + turn)
            ids = torch.cat([ids, more.to(ids.device)], 1)
        found.append(ids)
    assert s.same(*found)


def test_240_modes_autocast_and_dtypes_change_between_generations(ending):
    model, ref = pair(hosts.llama, ending, spare=100_000)

    def used(one):
        found = []
        for mode in (True, False):
            one.train(mode)
            found.append(generated(one))
            with torch.autocast(card.TORCH.type, dtype=torch.bfloat16):
                found.append(generated(one))
        one.bfloat16()
        found.append(generated(one))
        one.float()
        return [*found, generated(one)]

    assert s.same(used(model), used(ref))


# ---------------------------------------------------------------------- loops of training


def loss_of(model):
    ids = card.there(ids_of(2, 9))
    return model(input_ids=ids, labels=ids).loss


def trainable(model) -> list:
    return [param for param in model.parameters() if param.requires_grad]


def steps(model, optimizer, count=2) -> list:
    found = []
    for _ in range(count):
        loss = loss_of(model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def lora(**options):
    return peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False, **options)


def adapted(one):
    torch.manual_seed(1)
    return peft.get_peft_model(one, lora())


@pytest.mark.parametrize("build", s.thinned(DECODERS, 2))
def test_240_recomputation_modes_and_generation_change_during_training(build, ending):
    """A trainer samples between its steps, and turns gradient checkpointing on and off."""
    model, ref = pair(lambda: adapted(build()), ending, spare=200_000)

    def used(one):
        found, optimizer = [], torch.optim.AdamW(trainable(one), lr=1e-2)
        for reentrant in (None, False, None, True):
            if reentrant is None:
                one.gradient_checkpointing_disable()
            else:
                one.enable_input_require_grads()
                one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            one.train()
            torch.manual_seed(0)
            found += steps(one, optimizer)
            one.eval()
            with torch.no_grad():
                found += [loss_of(one), generated(one, new=3)]
        return found

    assert s.same(used(model), used(ref))
    same_weights(model, ref)


def test_240_an_adapter_more_during_training_one_is_merged_and_one_saved(ending, tmp_path):
    model, ref = pair(lambda: adapted(hosts.llama()), ending, spare=300_000)

    def used(one, folder):
        found, optimizer = [], torch.optim.AdamW(trainable(one), lr=1e-2)
        found += steps(one, optimizer)
        torch.manual_seed(2)
        one.add_adapter("more", lora())
        one.set_adapter("more")
        optimizer.add_param_group({"params": [p for n, p in one.named_parameters() if ".more." in n]})
        found += steps(one, optimizer)
        one.set_adapter("default")
        found += steps(one, optimizer)
        with torch.no_grad():
            one.merge_adapter(["more"])
            found.append(loss_of(one))
            one.unmerge_adapter()
            found.append(loss_of(one))
        one.save_pretrained(folder)
        one.delete_adapter("more")
        return found + steps(one, torch.optim.AdamW(trainable(one), lr=1e-2))

    assert s.same(used(model, tmp_path / "a"), used(ref, tmp_path / "b"))
    same_weights(model, ref)
    for name in ("default", "more"):
        folders = [tmp_path / which / ("" if name == "default" else name) for which in "ab"]
        again = [peft.PeftModel.from_pretrained(hosts.llama(), folder) for folder in folders]
        same_weights(*again)
    merged = [one.merge_and_unload() for one in (model, ref)]
    merged[0].save_pretrained(tmp_path / "merged")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", local_files_only=True)
    same_weights(plain, merged[1])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, stagehand.OffloadedAdamW])
def test_240_training_goes_on_with_another_budget(kind, ending, tmp_path):
    """A state that is saved, and taken into a model that streams more, or less, or nothing."""
    def begun(share):
        model = hosts.llama()
        if share is None:
            model = s.aligned_copy(model)
        else:
            budget = int(s.nbytes(model) * share) + 40_000
            ending.append(s.runtime(s.wrap(model, budget)))
        return model, kind(trainable(model), lr=1e-2)

    def saved():
        return {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": optimizer.state_dict()}

    model, optimizer = begun(0.9)
    want = steps(model, optimizer, 2)
    torch.save(saved(), tmp_path / "state.pt")
    want = steps(model, optimizer, 3)
    losses = []
    for share in (0.9, 0.7, 1.2, None):
        other, its = begun(share)
        state = torch.load(tmp_path / "state.pt", weights_only=False)
        other.load_state_dict(state["model"])
        its.load_state_dict(state["optimizer"])
        losses.append(steps(other, its, 3))
        assert s.same(losses[-1], want), share
        same_weights(other, model)


def test_240_all_weights_thaw_and_freeze_during_training(ending):
    """A warm-up of the head, then all, then a part; gradients are kept over a call that does not step."""
    model, ref = pair(hosts.qwen3, ending, spare=200_000)

    def used(one):
        found = []
        for pattern in ("lm_head", "", "layers.1"):
            for name, param in one.named_parameters():
                param.requires_grad_(pattern in name)
                param.grad = None
            optimizer = torch.optim.SGD(trainable(one), lr=1e-2, momentum=0.9)
            found += steps(one, optimizer)
            loss_of(one).backward()
            with torch.no_grad():
                found.append(loss_of(one))
            loss_of(one).backward()
            found += [param.grad.clone() for param in trainable(one)]
            optimizer.step()
        return found

    assert s.same(used(model), used(ref))
    same_weights(model, ref)
