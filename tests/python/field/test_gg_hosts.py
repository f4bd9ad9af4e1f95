"""Field cases GG: pipelines of diffusers, models of transformers, accelerate, PEFT; shards (234, 236, 240)."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import types

import card
import hosts
import pytest
import stagehand
from stagehand.session import answers
import support as s
import torch
from pairs import managed, same_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

CARD = card.TORCH if card.ON_CARD else torch.device("cuda", 0)  # what a managed model answers with here
HOST = torch.device("cpu")


def need(*packages):
    for package in packages:
        pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors, and other tests beside: more threads only wait."""
    with s.threads(1):
        yield


def on_a_card(session) -> None:
    """The simulated device's tensors are the host's, so that nobody could tell the answers apart: it gets a card's
    name. For questions alone, not for passes."""
    if not card.ON_CARD:
        session.target.torch = CARD


# ---------------------------------------------------------------------- 240: the device


def plain_getter(kind):
    owner = next(base for base in kind.__mro__ if "device" in vars(base))
    return vars(owner)["device"]


def test_240_every_library_hears_the_device_on_which_a_pipeline_runs(ending):
    need("diffusers", "transformers")
    from diffusers.models import modeling_utils
    from diffusers.utils import torch_utils

    pipe = hosts.made("flux")
    kinds = {type(module) for model in hosts.models(pipe).values() for module in model.modules()
             if hasattr(type(module), "device")}
    getters, function = {kind: plain_getter(kind) for kind in kinds}, modeling_utils.get_parameter_device
    for model in hosts.models(pipe).values():
        ending.append(hosts.managed(model))
        on_a_card(ending[-1].session)
    parts = [module for model in hosts.models(pipe).values() for module in model.modules() if type(module) in kinds]
    assert len(parts) > 4
    assert {part.device for part in parts} == {CARD} == {pipe.device, pipe._execution_device}
    assert modeling_utils.get_parameter_device(pipe.transformer) == CARD
    assert modeling_utils.get_parameter_device(pipe.transformer.transformer_blocks[1]) == CARD
    if hasattr(torch_utils, "get_module_execution_device"):
        assert torch_utils.get_module_execution_device(pipe.text_encoder_2) == CARD
    assert next(pipe.text_encoder.parameters()).device == HOST
    for twin in (copy.deepcopy(pipe.transformer), pickle.loads(pickle.dumps(pipe.text_encoder))):
        assert twin.device == HOST and isinstance(twin, torch.nn.Module)
    while ending:
        ending.pop().shutdown()
    assert {part.device for part in parts} == {HOST} == {pipe.device, pipe._execution_device}
    assert {kind: plain_getter(kind) for kind in kinds} == getters
    assert modeling_utils.get_parameter_device is function


def test_240_a_call_of_the_model_hears_the_same_as_its_caller(ending):
    need("transformers")
    model, asked = hosts.llama(), []
    ending.append(hosts.managed(model))
    model.model.layers[1].register_forward_pre_hook(lambda *_: asked.extend([model.device, model.model.device]))
    with torch.no_grad():
        model(torch.arange(5, 9)[None])
    assert asked == [card.TORCH] * 2


def test_240_block_mode_answers_before_its_first_step(monkeypatch, ending):
    need("transformers")
    from stagehand.modes import block

    if not card.ON_CARD:
        monkeypatch.setattr(block.devices, "resolve", lambda *_: types.SimpleNamespace(torch=CARD))
    model = hosts.llama()
    getter = plain_getter(type(model))
    runtime = hosts.managed(model, "block")
    assert runtime.session is None and model.device == CARD and model.model.device == CARD
    monkeypatch.undo()
    runtime.prepare()
    on_a_card(runtime.session)
    assert model.device == CARD
    runtime.shutdown()
    assert model.device == HOST and plain_getter(type(model)) is getter


def test_240_a_part_that_is_called_alone_opens_block_mode():
    """As `vae.decode()` does, which calls the decoder and never the model."""
    model = s.made(s.Stack)
    ref = s.aligned_copy(model)
    budget = s.tight_budget(model)
    runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), device=s.device(budget))
    twins = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.deepcopy(model.blocks[1])]
    assert not any("forward" in vars(part) or "__getstate__" in vars(part) for twin in twins for part in twin.modules())
    assert runtime.session is None
    x = torch.randn(3, 48)
    for part, plain in ((model.blocks[1].up, ref.blocks[1].up), (model.blocks[2], ref.blocks[2])):
        with torch.no_grad():
            assert s.same(part(x), plain(x))
    assert runtime.stats["h2d_bytes"] > 0
    runtime.shutdown()
    assert not any("forward" in vars(part) or "__getstate__" in vars(part) for part in model.modules())


def test_240_a_compiled_part_that_is_called_alone_opens_block_mode():
    model = s.made(s.Stack)
    ref = s.aligned_copy(model)
    budget = s.tight_budget(model)
    runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget), device=s.device(budget))
    compiled, x = torch.compile(model.blocks[1], backend="eager"), card.there(torch.randn(3, 48))
    with torch.no_grad():
        for _ in range(2):
            assert s.same(compiled(x), ref.blocks[1](x))
    assert runtime.session is not None
    runtime.shutdown()
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_240_a_model_with_a_part_of_torchscript_is_given_back():
    for mode in ("layer", "block"):
        model = s.made(s.Stack)
        model.script = torch.jit.script(nn.Linear(48, 48))
        before = [(id(p), p.clone()) for p in model.parameters()]
        runtime = hosts.managed(model, mode)
        with torch.no_grad():
            model(torch.randn(3, 48))
        runtime.shutdown()
        assert all(id(p) == ident and s.same(p, value) for p, (ident, value) in zip(model.parameters(), before))
        assert model.script(torch.randn(3, 48)).shape == (3, 48)


class Asked(s.Stack):
    """A class of a user's own, whose property reads a weight that streams, and takes another value."""

    @property
    def device(self):
        """Where inputs belong."""
        return self.told if hasattr(self, "told") else self.blocks[2].up.weight.device

    @device.setter
    def device(self, value):
        self.told = value


class Higher(Asked):
    @property
    def device(self):
        return super().device


class Named(s.Stack):
    @property
    def device(self):
        return "a name"


@pytest.mark.parametrize("kind", [Asked, Higher])
def test_240_a_property_of_a_class_of_ones_own(kind):
    own = plain_getter(kind)
    model, other = s.made(kind), s.made(kind)
    managed(model, s.tight_budget(model))
    on_a_card(s.runtime(model).session)
    assert model.device == CARD and other.device == HOST and kind.device.__doc__ == own.__doc__
    outer = nn.Sequential(other, model)
    assert [part.device for part in outer] == [HOST, CARD]
    if kind is Asked:
        model.device = torch.device("meta")
        assert model.device == torch.device("meta")
        del model.told
    s.runtime(model).shutdown()
    assert model.device == HOST and plain_getter(kind) is own


def test_240_a_property_that_answers_something_else_is_left_alone():
    model = s.made(Named)
    managed(model, s.tight_budget(model))
    on_a_card(s.runtime(model).session)
    assert model.device == "a name"


def test_240_models_around_a_managed_one_hear_it_and_others_do_not():
    need("transformers", "peft")
    import peft

    model, other = hosts.llama(), hosts.llama(seed=1)
    managed(model, s.nbytes(model) * 7 // 8)
    on_a_card(s.runtime(model).session)
    around = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert around.device == around.base_model.device == model.device == CARD
    assert other.device == other.model.device == HOST
    s.runtime(model).shutdown()
    assert around.device == HOST


def test_240_the_last_model_that_is_let_go_gives_the_class_its_own_back():
    class OfThisTest(s.Stack):  # of which no other test has left a model
        @property
        def device(self):
            return self.blocks[2].up.weight.device

    for answer in list(answers._watching):  # of models that other tests have left
        answer.end()
    own = plain_getter(OfThisTest)
    models = [s.made(OfThisTest) for _ in range(2)]
    for model in models:
        managed(model, s.tight_budget(model))
        on_a_card(s.runtime(model).session)
    s.runtime(models[0]).shutdown()
    assert [model.device for model in models] == [HOST, CARD]
    s.runtime(models[1]).shutdown()
    assert plain_getter(OfThisTest) is own


def test_240_a_model_that_is_dropped_leaves_no_answer_behind():
    model, other = s.made(Asked), s.made(Asked)
    s.wrap(model, s.tight_budget(model))
    on_a_card(s.runtime(model).session)
    del model
    gc.collect()
    assert other.device == HOST


@card.simulated_only  # the reference is no plain model on a card
def test_240_compiled_code_of_a_plain_model_asks_without_a_break():
    class Moved(Asked):
        def forward(self, x):
            return super().forward(x.to(self.device))

    model, plain = s.made(Moved), card.as_managed(s.made(Moved))
    managed(model, s.tight_budget(model))
    compiled = torch.compile(plain, backend="eager", fullgraph=True)
    x = model.example()[0]
    with torch.no_grad():
        assert s.same(compiled(x), plain(x))
    torch.compiler.reset()


def test_240_to_its_own_device_does_nothing_and_to_another_is_refused(ending):
    need("transformers")
    model = hosts.llama()
    ref = s.aligned_copy(model)
    ending.append(hosts.managed(model))
    ids = torch.arange(5, 12)[None]
    before = [(id(p), p.data_ptr()) for p in model.parameters()]
    assert model.to(card.TORCH) is model
    if card.ON_CARD:
        assert model.cuda() is model and model.to(device=CARD, dtype=torch.float32) is model
    for move in (lambda: model.to("meta"), lambda: model.model.to("meta"), lambda: model.to_empty(device="meta")):
        with pytest.raises(stagehand.StagehandError, match="shutdown"):
            move()
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == before
    with torch.no_grad():
        assert s.same(model(ids).logits, ref(ids).logits)


# ---------------------------------------------------------------------- pipelines


@contextlib.contextmanager
def host_masters_unread(models):
    """No operator reads a master, as it would on a card where something was asked for its device in the wrong way."""
    with contextlib.ExitStack() as guards:
        for model in models:
            guards.enter_context(s.HostMasterGuard(model))
        yield


@pytest.mark.parametrize("kind,mode", [*((kind, "layer") for kind in hosts.PIPELINES), ("flux", "block"),
                                       ("wan", "block")])
def test_240_a_pipeline_gives_the_plain_ones_picture(kind, mode, ending):
    need("diffusers", "transformers")
    pipe, plain, runtimes = hosts.pair(kind, mode)
    ending.extend(runtimes.values())
    want = hosts.called(plain, kind)
    for guarded in (False, mode == "layer"):
        with host_masters_unread(hosts.models(pipe).values() if guarded else ()):
            assert s.same(hosts.called(pipe, kind), want)
    for runtime in runtimes.values():
        assert runtime.stats["h2d_bytes"] > runtime.stats["budget"] // 2
        runtime.shutdown()
    with card.TORCH:
        pipe.to(card.TORCH)
    assert s.same(hosts.called(pipe, kind), want)


def stepped(pipe, kind):
    """With a callback that reads the latents and gives others."""
    sums = []

    def callback(pipe, step, time, values):
        sums.append(values["latents"].sum())
        return {"latents": values["latents"] * 0.9}

    out = hosts.called(pipe, kind, callback_on_step_end=callback, callback_on_step_end_tensor_inputs=["latents"])
    return torch.cat([out.flatten(), torch.stack(sums)])


def tiled(pipe, kind):
    vae = pipe.vae
    vae.enable_tiling()
    vae.enable_slicing()
    if hasattr(vae, "tile_latent_min_size"):
        vae.tile_latent_min_size, vae.tile_sample_min_size = 8, 16
    try:
        return hosts.called(pipe, kind, num_images_per_prompt=2)
    finally:
        vae.disable_tiling()
        vae.disable_slicing()


def sliced(pipe, kind):
    pipe.enable_attention_slicing()
    try:
        return hosts.called(pipe, kind)
    finally:
        pipe.disable_attention_slicing()


def in_half(pipe, kind):
    pipe.to(torch.bfloat16)
    out = hosts.called(pipe, kind)
    pipe.to(torch.float32)
    return out


@pytest.mark.parametrize("kind", ["sd"])
def test_240_a_pipelines_switches_callbacks_and_dtypes(kind, ending):
    need("diffusers", "transformers")
    pipe, plain, runtimes = hosts.pair(kind, spare=100_000)
    ending.extend(runtimes.values())
    for way in (stepped, tiled, sliced, in_half, hosts.called):
        assert s.same(way(pipe, kind), way(plain, kind)), way


@pytest.mark.parametrize("kind", ["flux"])
def test_240_adapters_of_a_pipeline_come_blend_fuse_and_go(kind, ending, tmp_path):
    need("diffusers", "transformers", "peft")
    pipe, plain, runtimes = hosts.pair(kind, spare=300_000)
    ending.extend(runtimes.values())
    files, name, pictures = [hosts.lora(kind, seed) for seed in (1, 2)], hosts.denoiser_of(plain), []

    def both(do):
        for one in (pipe, plain):
            do(one)
        pictures.append(hosts.called(pipe, kind))
        assert s.same(pictures[-1], hosts.called(plain, kind)), len(pictures)

    both(lambda one: None)
    both(lambda one: one.load_lora_weights(dict(files[0]), adapter_name="a"))
    both(lambda one: one.load_lora_weights(dict(files[1]), adapter_name="b"))
    both(lambda one: one.set_adapters(["a", "b"], [0.3, 0.8]))
    assert len({picture.sum().item() for picture in pictures}) == 4
    both(lambda one: one.fuse_lora(components=[name]))
    both(lambda one: one.unfuse_lora(components=[name]))
    both(lambda one: one.delete_adapters("b"))
    both(lambda one: (one.fuse_lora(components=[name]), one.unload_lora_weights()))
    for runtime in runtimes.values():
        runtime.shutdown()
    same_weights(getattr(pipe, name), getattr(plain, name))


def test_240_a_managed_pipeline_is_saved_as_a_plain_one(ending, tmp_path):
    need("diffusers", "transformers")
    pipe, plain, runtimes = hosts.pair("sd")
    ending.extend(runtimes.values())
    pipe.save_pretrained(tmp_path)
    again = type(pipe).from_pretrained(tmp_path, local_files_only=True)
    again.set_progress_bar_config(disable=True)
    for name, model in hosts.models(again).items():
        same_weights(model, getattr(plain, name))
        setattr(again, name, s.aligned_copy(model))
    assert s.same(hosts.called(again, "sd"), hosts.called(plain, "sd"))


# ---------------------------------------------------------------------- a pipeline under one budget


class Scale(nn.Module):
    """Nothing in it streams."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)


def largest(pipe) -> int:
    return max(map(s.nbytes, hosts.models(pipe).values()))


@pytest.mark.parametrize("kind", ["flux", "sdxl"])
def test_240_all_models_of_a_pipeline_under_one_budget(kind):
    need("diffusers", "transformers")
    from stagehand.integrations.diffusers import offload

    pipe, plain = hosts.made(kind), hosts.made(kind)
    for name, model in hosts.models(plain).items():
        setattr(plain, name, s.aligned_copy(model))
    want, budget = hosts.called(plain, kind), largest(pipe) * 9 // 10
    with offload(pipe, budget, device=card.NAME) as offloaded:
        assert set(offloaded.runtimes) == set(hosts.models(pipe)) and not offloaded.moved
        for _ in range(3):
            assert s.same(hosts.called(pipe, kind), want)
        account = offloaded.runtimes["vae"].session.target.core.residency()
        assert account["peak"] <= budget < sum(map(s.nbytes, hosts.models(pipe).values()))
        assert len({id(runtime.session.target.core) for runtime in offloaded.runtimes.values()}) == 1
    offloaded.shutdown()
    assert not any("forward" in vars(module) for model in hosts.models(pipe).values() for module in model.modules())
    for name, model in hosts.models(pipe).items():
        assert model.device == HOST
        same_weights(model, getattr(plain, name))


def test_240_a_pipeline_that_cannot_be_offloaded_is_as_before():
    need("diffusers", "transformers", "accelerate")
    from stagehand.integrations.diffusers import offload

    def untouched():
        return not any("_stagehand_layer_runtime" in vars(model) for model in hosts.models(pipe).values())

    pipe = hosts.made("flux")
    with pytest.raises(stagehand.StagehandOOMError, match="vae of the pipeline.*smallest budget"):
        offload(pipe, 1000, device="sim")
    assert untouched()
    with pytest.raises(TypeError, match="pipeline of diffusers"):
        offload(pipe.vae, 1000, device="sim")
    pipe.enable_model_cpu_offload(device="cpu")
    with pytest.raises(stagehand.StagehandError, match="of the pipeline is offloaded already"):
        offload(pipe, largest(pipe), device="sim")
    pipe.remove_all_hooks()
    stagehand.layer(pipe.transformer, vram_budget=10**7, device="sim")
    with pytest.raises(stagehand.StagehandError, match="transformer of the pipeline.*under stagehand already"):
        offload(pipe, largest(pipe), device="sim")
    s.runtime(pipe.transformer).shutdown()
    assert untouched()
    offload(pipe, largest(pipe), device="sim").shutdown()


def test_240_a_component_without_layers_and_one_that_stands_twice():
    from stagehand.integrations.diffusers import offload

    model, scale = s.made(s.Stack), Scale()
    pipe = types.SimpleNamespace(components={"a": model, "scale": scale, "b": model, "scheduler": object()})
    with offload(pipe, s.nbytes(model) + card.others_mb() * 2**20, device=card.NAME) as offloaded:
        assert list(offloaded.runtimes) == ["a"] and offloaded.moved == {"scale": scale}
        assert scale.norm.weight.device == card.TORCH
    assert scale.norm.weight.device == HOST and not offloaded.moved


# ---------------------------------------------------------------------- transformers, accelerate, PEFT


WAYS = {
    "greedy": {}, "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"num_beams": 3, "num_return_sequences": 2}, "static cache": {"cache_implementation": "static"},
    "without a cache": {"use_cache": False}, "from the prompt": {"prompt_lookup_num_tokens": 3},
    "scores": {"output_scores": True, "return_dict_in_generate": True},
}


def generated(model, ids, **options):
    torch.manual_seed(0)
    out = model.generate(card.there(ids), max_new_tokens=7, attention_mask=card.there(torch.ones_like(ids)), **options)
    return out if isinstance(out, torch.Tensor) else torch.stack(list(out.scores))


@pytest.mark.parametrize("mode", ["layer", "block"])
@pytest.mark.parametrize("build", [hosts.llama, hosts.t5_model, hosts.mixtral])
def test_240_transformers_generates_the_same_in_each_way(build, mode, ending):
    need("transformers")
    model = build()
    ref = s.aligned_copy(model)
    ending.append(hosts.managed(model, mode))
    ids = torch.randint(5, 300, (1, 7), generator=torch.Generator().manual_seed(3))
    for way, options in WAYS.items() if (build, mode) == (hosts.llama, "layer") else s.thinned(WAYS.items(), 3):
        with host_masters_unread([model] if mode == "layer" else ()):
            got = generated(model, ids, **options)
        assert s.same(got, generated(ref, ids, **options)), way
    assert ending[0].stats["planned"]


def test_240_assisted_generation_with_two_managed_models(ending):
    need("transformers")
    model, draft = hosts.llama(), hosts.llama(layers=1, width=32)
    refs = [s.aligned_copy(one) for one in (model, draft)]
    ending.extend(hosts.managed(one) for one in (model, draft))
    ids = torch.randint(5, 300, (1, 7), generator=torch.Generator().manual_seed(3))
    assert s.same(generated(model, ids, assistant_model=draft), generated(refs[0], ids, assistant_model=refs[1]))


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        ids = torch.randint(5, 300, (9,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "labels": ids.clone()}


def trained(model, folder, **options):
    """Losses of three steps by transformers' Trainer, and of an evaluation."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(0)
    trainer = Trainer(model, TrainingArguments(
        output_dir=str(folder), max_steps=3, optim="sgd", per_device_train_batch_size=2, report_to=[], logging_steps=1,
        save_strategy="no", use_cpu=not card.ON_CARD, learning_rate=0.1, disable_tqdm=True, **options),
        train_dataset=Sentences(), eval_dataset=Sentences())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return torch.tensor([*losses, trainer.evaluate()["eval_loss"]])


RECIPES = {
    "as it is": {}, "bf16": {"bf16": True},
    "recomputed, in parts": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2,
                             "gradient_checkpointing_kwargs": {"use_reentrant": False}},
}


@pytest.mark.parametrize("adapted, recipe", s.thinned([
    (False, "recomputed, in parts"), (False, "as it is"), (True, "bf16"), (False, "bf16"), (True, "as it is"),
    (True, "recomputed, in parts")], 3))
def test_240_trainer_trains_the_same_whole_or_by_peft(recipe, adapted, ending, tmp_path):
    need("transformers", "accelerate", "peft")
    import peft

    model = hosts.llama()
    if adapted:
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
    ref = s.aligned_copy(model)
    ending.append(hosts.managed(model))
    got = trained(model, tmp_path, **RECIPES[recipe])
    assert s.same(got, trained(ref, tmp_path, **RECIPES[recipe]))
    passes = 3 * RECIPES[recipe].get("gradient_accumulation_steps", 1)
    assert ending[0].stats["steps"] >= passes + 1 and ending[0].stats["planned"]
    same_weights(model, ref)
    if adapted:
        for one, folder in ((model, tmp_path / "a"), (ref, tmp_path / "b")):
            one.save_pretrained(folder)
        twins = [peft.PeftModel.from_pretrained(hosts.llama(), tmp_path / name) for name in "ab"]
        same_weights(*twins)
        for act in ("merge_adapter", "unmerge_adapter"):
            for one in (model, ref):
                getattr(one, act)()
            same_weights(model, ref)


def test_240_adapters_that_peft_puts_into_a_managed_model_train_and_merge(ending, tmp_path):
    need("transformers", "accelerate", "peft")
    import peft

    model = hosts.llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    plain = copy.deepcopy(model)
    ending.append(hosts.managed(model, spare=60_000))
    adapted = []
    for one in (model, plain):
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(one, config))
    mine, ref = adapted[0], s.aligned_copy(adapted[1])
    assert s.same(trained(mine, tmp_path), trained(ref, tmp_path))
    same_weights(mine, ref)
    mine, ref = mine.merge_and_unload(), ref.merge_and_unload()
    with torch.no_grad():
        ids = torch.arange(5, 14)[None]
        assert s.same(mine(ids).logits, ref(ids).logits)


class ReadsDevice(TorchDispatchMode):
    """Names of operators, but for copies, that read memory of the device outside of places."""

    def __init__(self, session):
        super().__init__()
        self.there = {p.untyped_storage().data_ptr() for p in session.model.parameters()
                      if session.writes.entry_of(p) is None}
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        reads = any(t.untyped_storage().data_ptr() in self.there for t in s.tensors_in(args))
        if reads and not any(word in func._schema.name for word in ("copy", "clone", "detach", "alias")):
            self.found.append(func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_bias": True}])
def test_240_adapters_merge_where_the_masters_are(options, ending):
    """A card's tensors and the host's cannot be added."""
    need("transformers", "peft")
    import peft

    model = s.made(s.Stack, frozen=False)
    plain = copy.deepcopy(model)
    ending.append(hosts.managed(model, spare=40_000))
    config = peft.LoraConfig(r=4, target_modules=["up", "down"], init_lora_weights=False, **options)
    x, adapted = card.there(torch.randn(3, 48)), []
    for one in (model, plain):
        torch.manual_seed(1)
        adapted.append(peft.get_peft_model(one, config))
    mine, ref = adapted[0], s.aligned_copy(adapted[1])
    own = peft.tuners.lora.Linear.merge
    with torch.no_grad():
        assert s.same(mine(x), ref(x))  # takes the adapters to the device
        for act in ("merge_adapter", "unmerge_adapter", "merge_adapter"):
            with ReadsDevice(ending[0].session) as reads:
                getattr(mine, act)()
            getattr(ref, act)()
            assert not reads.found
            assert s.same(mine(x), ref(x))
        for one in (mine, ref):
            with one.disable_adapter():  # takes the merged values out, in the forward
                adapted.append(one(x))
        assert s.same(*adapted[-2:]) and s.same(mine(x), ref(x))
        for one in (mine, ref):
            one.merge_adapter()
    same_weights(mine, ref)
    assert peft.tuners.lora.Linear.merge is not own
    ending[0].shutdown()
    assert peft.tuners.lora.Linear.merge is own
    same_weights(mine.unload(), ref.unload())


def test_240_a_forward_that_a_program_binds_anew_is_a_pass_of_the_model():
    """accelerate's mixed precision takes `forward.__func__`, and binds a function around that to the model."""
    model = s.made(s.Stack, frozen=False)
    ref = s.aligned_copy(model)
    managed(model, s.tight_budget(model))
    runtime, x, seen = s.runtime(model), model.example()[0], []

    def around(function):
        def forward(self, *args):
            seen.append(self)
            return function(self, *args)

        return forward

    first = model.forward
    assert first.__func__ is first.__func__ and first.__func__(ref, card.there(x)).shape == x.shape
    model.forward = types.MethodType(around(model.forward.__func__), model)
    for _ in range(3):
        model(x).sum().backward()
        ref(x).sum().backward()
    for (name, mine), (_, theirs) in zip(model.named_parameters(), ref.named_parameters()):
        assert s.same(mine.grad, theirs.grad), name
    assert runtime.stats["planned"] and runtime.stats["steps"] >= 3 and seen == [model] * 3
    twin = copy.deepcopy(model)
    assert s.same(twin.to(card.TORCH)(card.there(x)), ref(x)) and seen[-1] is twin
    runtime.shutdown()
    assert s.same(model.to(card.TORCH)(card.there(x)), ref(x)) and seen[-1] is model


@pytest.mark.parametrize("when", ["before it opens", "open"])
def test_240_block_mode_under_a_forward_that_a_program_puts_over_the_models(when):
    """accelerate's mixed precision, and hooks that keep the forward that they found."""
    model = s.made(s.Stack, frozen=False)
    ref = s.aligned_copy(model)
    runtime, x, calls = hosts.managed(model, "block"), model.example()[0], []
    if when == "open":
        runtime.prepare()
    for part in (model, model.blocks[1]):
        def over(*args, found=part.forward):
            calls.append(found)
            return found(*args)

        part.forward = over
    for _ in range(3):
        out, want = model(x), ref(x)
        assert s.same(out, want)
        out.sum().backward()
        want.sum().backward()
    for (name, mine), (_, theirs) in zip(model.named_parameters(), ref.named_parameters()):
        assert s.same(mine.grad, theirs.grad), name
    assert runtime.stats["planned"] and len(calls) in (6, 7)
    runtime.shutdown()
    assert s.same(model.to(card.TORCH)(card.there(x)), ref(x)) and len(calls) in (8, 9)


# ---------------------------------------------------------------------- 234: weights that are resized


def grown(model):
    model.resize_token_embeddings(310)


def resized(model, ref, resize):
    """Both are; a card draws other random numbers for the new rows."""
    for one in (model, ref):
        torch.manual_seed(5)
        resize(one)
    if card.ON_CARD:
        ref.load_state_dict(model.state_dict())


def shrunk(model):
    model.resize_token_embeddings(200)


def grown_twice(model):
    model.resize_token_embeddings(310)
    model.resize_token_embeddings(320, pad_to_multiple_of=64, mean_resizing=False)


def grown_between_passes(model):
    model.resize_token_embeddings(310)
    logits(model)
    model.resize_token_embeddings(330)


def grown_and_tied(model):
    model.config.tie_word_embeddings = True
    model.resize_token_embeddings(310)
    model.tie_weights()


def logits(model):
    ids = torch.randint(5, 200, (2, 6), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(ids).logits


RESIZES = [grown, shrunk, grown_twice, grown_between_passes, grown_and_tied]
RESIZED = [(resize, *way) for resize in RESIZES for way in (
    (False, "layer", False), (True, "layer", False), (True, "layer", True), (False, "block", False))]


@pytest.mark.parametrize("resize,tied,mode,frozen", s.thinned(RESIZED, 7))
def test_234_embeddings_are_resized_after_wrapping(resize, tied, mode, frozen, ending):
    need("transformers")
    model = hosts.llama(tied).requires_grad_(not frozen)
    ref = s.aligned_copy(model)
    ending.append(hosts.managed(model, mode, spare=100_000))
    assert s.same(logits(model), logits(ref))
    resized(model, ref, resize)
    assert s.same(logits(model), logits(ref)) and s.same(logits(model), logits(ref))
    ids = torch.arange(5, 17).view(2, 6)
    if not frozen:
        optimizers = [torch.optim.SGD(one.parameters(), 1e-2, momentum=0.9) for one in (model, ref)]
        for _ in range(3):
            for one, optimizer in zip((model, ref), optimizers):
                one(ids, labels=card.there(ids)).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    same_weights(model, ref)
    names = [unit["name"] for unit in ending[0].stats["units"]]
    assert mode == "block" or "model.embed_tokens" in names
    ending[0].shutdown()
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == (
        ref.get_input_embeddings().weight is ref.get_output_embeddings().weight)
    same_weights(model, ref)


def test_234_the_rest_of_a_resized_model_goes_on_streaming_from_its_file(ending, tmp_path):
    need("transformers")
    model = hosts.llama().requires_grad_(False)
    model.save_pretrained(tmp_path)
    ref = s.aligned_copy(model)
    budget = s.nbytes(model) * 7 // 8
    stagehand.layer(model, vram_budget=budget, device=s.device(budget), source=tmp_path)
    ending.append(s.runtime(model))
    before = [unit.name for unit in ending[0].session.units if unit.in_file]
    resized(model, ref, grown)
    assert s.same(logits(model), logits(ref))
    after = [unit.name for unit in ending[0].session.units if unit.in_file]
    assert set(before) - set(after) == {"model.embed_tokens", "lm_head"}


def test_234_a_budget_that_is_too_small_for_the_larger_weight_says_so_and_leaves_a_plain_model():
    need("transformers")
    model = hosts.llama()
    managed(model, s.nbytes(model) * 7 // 8)
    torch.manual_seed(5)
    model.resize_token_embeddings(6000)
    ref = s.aligned_copy(model)
    with pytest.raises(stagehand.StagehandOOMError, match=r"given to model\.embed_tokens\.weight.*smallest budget"):
        logits(model)
    assert "_stagehand_layer_runtime" not in model.__dict__
    assert s.same(logits(card.as_managed(model)), logits(ref))


def test_234_a_weight_that_is_resized_inside_a_step_is_refused_until_that_ends(ending):
    need("transformers")
    model = hosts.llama()
    ref = s.aligned_copy(model)
    ending.append(hosts.managed(model, spare=60_000))
    ending[0].begin_step()
    logits(model)
    resized(model, ref, grown)
    with pytest.raises(stagehand.StagehandError, match="embed_tokens.weight was given data of another shape"):
        logits(model)
    ending[0].begin_step()
    assert s.same(logits(model), logits(ref))
    ending[0].end_step()


# ---------------------------------------------------------------------- 236: shards


class Plain(nn.Module):
    def __init__(self, d=48):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(d), nn.Linear(d, d)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.fixture
def mesh(tmp_path):
    """A mesh of one process."""
    distributed = pytest.importorskip("torch.distributed", reason="torch.distributed is not there")
    if not distributed.is_available() or distributed.is_initialized():
        pytest.skip("no process group can be made here")
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.FileStore(str(tmp_path / "store"), 1), rank=0,
                                   world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        distributed.destroy_process_group()


def fully_sharded(mesh):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no torch.distributed.fsdp.fully_shard")
    model = s.made(Plain, frozen=False)
    for block in model.blocks:
        fsdp.fully_shard(block, mesh=mesh)
    return fsdp.fully_shard(model, mesh=mesh)


def one_dtensor(mesh):
    tensor = pytest.importorskip("torch.distributed.tensor")
    if not hasattr(tensor, "distribute_tensor"):
        pytest.skip("this PyTorch has DTensor elsewhere")
    model = s.made(Plain, frozen=False)
    model.blocks[2][1].weight = nn.Parameter(
        tensor.distribute_tensor(model.blocks[2][1].weight.data, mesh, [tensor.Shard(0)]))
    return model


def flat(mesh):
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(s.made(Plain, 300, frozen=False), device_id=torch.device("cpu"))


SHARDED = [(fully_sharded, "blocks.0.0.weight is a DTensor"), (one_dtensor, "blocks.2.1.weight is a DTensor"),
           (flat, "flat_param is a FlatParameter")]


@pytest.mark.parametrize("shard,what", SHARDED)
def test_236_shards_are_refused_by_name(mesh, shard, what):
    model = shard(mesh)
    for wrap in (lambda: stagehand.layer(model, vram_budget=50_000, device="sim"),
                 lambda: stagehand.StagehandRuntime(model, block_pattern="block", device="sim"),
                 lambda: stagehand.session(model, {"memory": {"strategy": "stagehand"}}, device="sim")):
        with pytest.raises(stagehand.StagehandError, match=what + ".*leave stagehand out"):
            wrap()
    assert not any(name.startswith("_stagehand") for name in vars(model))


def test_236_a_managed_model_that_somebody_shards_says_so_and_keeps_its_weights(mesh):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("this PyTorch has no torch.distributed.fsdp.fully_shard")
    model = s.made(Plain, frozen=False)
    ref = s.aligned_copy(model)
    managed(model, s.nbytes(model) * 7 // 8)
    before = [id(p) for p in model.parameters()]
    with pytest.raises(stagehand.StagehandError, match="nothing was changed.*a shard of blocks.0.0.weight of Plain"):
        fsdp.fully_shard(model, mesh=mesh)
    assert [id(p) for p in model.parameters()] == before
    same_weights(model, ref)
