"""Experts that files hold one by one and the model as one tensor (files/merged.py): outputs are those of the model that
transformers loads, bit for bit."""

import copy
import pathlib
import subprocess
import warnings

import pytest
import safetensors.torch
import torch

import stagehand
import support as s
from stagehand import _core
from test_experts import (EXPERTS, FAMILIES, FUNCTIONS, assert_equal_runs, equal, experts, experts_of, generate,
                          row_bytes)

transformers = pytest.importorskip("transformers")

SINGLY = ("qwen", "mixtral", "deepseek", "olmoe")  # the hub has their experts one by one


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """family -> (the folder that save_pretrained wrote, the class, its config)."""
    made = {}

    def save(family):
        if family not in made:
            kind, config = FAMILIES[family]()
            folder = tmp_path_factory.mktemp(family)
            s.made(kind, config).eval().save_pretrained(folder, max_shard_size="200KB")
            made[family] = str(folder), kind, config
        return made[family]

    return save


def tensors_of(folder):
    files = sorted(pathlib.Path(folder).glob("*.safetensors"))
    return {key: value for file in files for key, value in safetensors.torch.load_file(file).items()}


def resident(folder, kind):
    """What transformers makes of the folder."""
    plain = s.aligned_copy(kind.from_pretrained(folder).eval())
    plain.set_experts_implementation("grouped_mm")
    return plain


def loaded(saved, family, **options):
    folder, kind, config = saved(family)
    config = copy.deepcopy(config)
    budget = options.pop("vram_budget", None) or 2 * s.nbytes(kind(config)) // 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = stagehand.load(lambda: kind(config).eval(), options.pop("path", folder), vram_budget=budget,
                               device=s.device(budget), **options)
    model.generation_config = transformers.GenerationConfig.from_model_config(config)
    model.set_experts_implementation("grouped_mm")
    return model


@pytest.mark.parametrize("family", SINGLY)
def test_a_folder_of_the_hub_streams(saved, family):
    folder, kind, _ = saved(family)
    assert any(f".experts.{EXPERTS - 1}." in key for key in tensors_of(folder))
    plain = resident(folder, kind)
    model = loaded(saved, family)
    assert_equal_runs(model, plain)
    assert s.runtime(model).stats["file_bytes"] > 0
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values()):
        assert equal(ours, theirs), name


@pytest.mark.parametrize("options", [
    dict(ram_budget="1GB"), dict(ram_budget="200KB"), dict(map=False), dict(blocks=r"model\.layers\.\d+$"),
    dict(inference_mode=False)], ids=str)
def test_shares_in_ram_blocks_and_training(saved, options):
    folder, kind, _ = saved("qwen")
    plain = resident(folder, kind)
    model = loaded(saved, "qwen", **options)
    ids = torch.arange(12).reshape(2, 6)
    assert equal(model(ids).logits, plain(ids).logits)
    if not options.get("inference_mode", True):
        model(ids, labels=ids).loss.backward()
        plain(ids, labels=ids).loss.backward()
        for ours, theirs in zip(experts_of(model), experts_of(plain)):
            assert equal(ours.gate_up_proj.grad, theirs.gate_up_proj.grad)
            assert equal(ours.down_proj.grad, theirs.down_proj.grad)


def test_at_rest_the_weights_are_those_of_the_files(saved):
    folder, kind, _ = saved("qwen")
    plain = resident(folder, kind)
    model = loaded(saved, "qwen")
    ours, theirs = experts_of(model)[0], experts_of(plain)[0]
    assert equal(copy.deepcopy(ours.down_proj), theirs.down_proj)
    with pytest.raises(stagehand.StagehandError, match="joined from the tensors of its experts"):
        ours.down_proj.data.zero_()
    stagehand.shutdown(model)
    assert equal(ours.gate_up_proj[3], theirs.gate_up_proj[3])
    assert equal(generate(model).sequences, generate(plain).sequences)


def damaged(folder, tmp_path, change):
    tensors = tensors_of(folder)
    change(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


LAST = f"model.layers.1.mlp.experts.{EXPERTS - 1}.up_proj.weight"


@pytest.mark.parametrize("change, says", [
    (lambda tensors: tensors.pop(LAST), f"32 experts, and the files have no tensor {LAST}"),
    (lambda tensors: tensors.update({LAST: tensors[LAST][:-1].contiguous()}), rf"{LAST} in .* is F32 \(63, 64\)"),
    (lambda tensors: tensors.update({LAST: tensors[LAST].half()}), rf"{LAST} in .* is F16 \(64, 64\)"),
    (lambda tensors: tensors.update({LAST.replace("31", "32"): tensors[LAST].clone()}), "does not use"),
], ids=["missing", "shape", "dtype", "extra"])
def test_experts_that_do_not_add_up_are_named(saved, tmp_path, change, says):
    folder, kind, config = saved("qwen")
    path = damaged(folder, tmp_path, change)
    with pytest.raises(stagehand.CheckpointError, match=says):
        stagehand.load(lambda: kind(config), path, vram_budget="4MB", device=s.device(4 << 20))


def test_odd_sizes_come_to_ram(tmp_path):
    kind, config = FAMILIES["qwen"]()
    config.moe_intermediate_size = 24
    config.hidden_size = 40
    plain = s.made(kind, config).eval().half()
    plain.save_pretrained(tmp_path)
    plain = s.aligned_copy(plain)
    model = stagehand.load(lambda: kind(config).eval().half(), tmp_path, vram_budget="4MB", device=s.device(4 << 20))
    model.generation_config = plain.generation_config
    assert_equal_runs(model, plain)


def test_losslessly_packed_experts_come_to_ram(saved, tmp_path):
    folder, kind, config = saved("qwen")
    plain = resident(folder, kind)
    _core.pack(folder, str(tmp_path / "packed.safetensors"), "lossless")
    model = stagehand.load(lambda: kind(config).eval(), tmp_path / "packed.safetensors", vram_budget="4MB",
                           device=s.device(4 << 20))
    ids = torch.arange(12).reshape(2, 6)
    assert equal(model(ids).logits, plain(ids).logits)


# ---------------------------------------------------------------------- rows of files


def rows_budget(model_of_kind, slots):
    experts = sum(s.nbytes(module) for module in experts_of(model_of_kind))
    return s.nbytes(model_of_kind) - experts + slots * row_bytes(model_of_kind) + (1 << 18)


@pytest.mark.parametrize("family, function", [*zip(SINGLY, (*FUNCTIONS, "eager"))])
def test_only_the_rows_that_the_router_asks_for_are_read(saved, family, function):
    folder, kind, config = saved(family)
    plain = resident(folder, kind)
    model = loaded(saved, family, vram_budget=rows_budget(plain, EXPERTS), ram_budget="1GB")
    for each in (plain, model):
        each.set_experts_implementation(function)
    assert_equal_runs(model, plain)
    seen = experts(model)
    assert seen["by_rows"] and 0 < seen["file_bytes"] < sum(s.nbytes(module) for module in experts_of(plain))
    assert seen["file_bytes"] == (seen["brought"] - seen["ram_hits"]) * seen["row_bytes"]
    assert_equal_runs(model, plain)  # nothing is read twice
    again = experts(model)
    assert again["file_bytes"] == seen["file_bytes"] and again["brought"] > seen["brought"]
    assert s.runtime(model).stats["file_bytes"] >= again["file_bytes"]


def test_a_share_in_ram_serves_other_weights_first(saved):
    model = loaded(saved, "qwen", ram_budget="200KB")
    generate(model)
    stats = s.runtime(model).stats
    assert stats["experts"]["ram_slots"] > 0 and stats["ram_bytes"] >= stats["experts"]["ram_bytes"]


def test_prompts_batches_and_gradients_between(saved):
    folder, kind, _ = saved("qwen")
    plain = resident(folder, kind)
    model = loaded(saved, "qwen", vram_budget=rows_budget(plain, EXPERTS), inference_mode=True)
    for options in (dict(prompt=20), dict(batch=3), dict(num_beams=2)):
        ours, theirs = generate(model, **options), generate(plain, **options)
        assert equal(ours.sequences, theirs.sequences)
        for a, b in zip(ours.logits, theirs.logits):  # weights that stay are views of the file, at any address
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    ids = torch.arange(12).reshape(2, 6)
    hidden = [each.get_input_embeddings()(ids).detach().requires_grad_() for each in (model, plain)]
    for each, values in zip((model, plain), hidden):
        each(inputs_embeds=values, labels=ids).loss.backward()  # by layers, from the same files
    assert equal(hidden[0].grad, hidden[1].grad)
    assert not experts(model)["by_rows"]
    assert_equal_runs(model, plain)
    assert experts(model)["by_rows"]


def test_weights_that_are_written_leave_their_file(tmp_path):
    """A fused tensor in a file is mapped, and may be written."""
    kind, config = FAMILIES["qwen"]()
    plain = s.made(kind, config).eval()
    safetensors.torch.save_file(plain.state_dict(), tmp_path / "fused.safetensors")
    budget = rows_budget(plain, EXPERTS)
    model = stagehand.load(lambda: kind(config).eval(), tmp_path / "fused.safetensors", vram_budget=budget,
                           device=s.device(budget), inference_mode=False)
    for param in model.parameters():
        param.requires_grad_(False)
    plain = s.aligned_copy(plain)
    model.generation_config = plain.generation_config
    assert_equal_runs(model, plain)
    with torch.no_grad():
        for each in (model, plain):
            experts_of(each)[1].down_proj[5] *= 2
    assert_equal_runs(model, plain)


def test_a_file_that_is_cut_off_is_named(saved, tmp_path):
    folder, kind, config = saved("qwen")
    path = damaged(folder, tmp_path, lambda tensors: None)
    plain = s.made(kind, config)
    model = loaded(saved, "qwen", path=path, vram_budget=rows_budget(plain, EXPERTS))
    subprocess.run(["truncate", "--size", str(path.stat().st_size // 3), path], check=True)
    with pytest.raises(stagehand.TransferError, match=r"model\.safetensors"):
        generate(model)
