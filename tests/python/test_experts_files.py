"""Experts that files hold one by one and the model as one tensor (files/merged.py): outputs are those of the model that
transformers loads, bit for bit."""

import copy
import pathlib
import warnings

import pytest
import safetensors.torch
import torch

import stagehand
import support as s
from stagehand import _core
from test_experts import EXPERTS, FAMILIES, assert_equal_runs, experts_of, generate

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


def loaded(saved, family, **options):
    folder, kind, config = saved(family)
    budget = options.pop("vram_budget", None) or 2 * s.nbytes(kind(config)) // 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = stagehand.load(lambda: kind(config).eval(), options.pop("path", folder), vram_budget=budget,
                               device=s.device(budget), **options)
    model.generation_config = transformers.GenerationConfig.from_model_config(config)
    return model


@pytest.mark.parametrize("family", SINGLY)
def test_a_folder_of_the_hub_streams(saved, family):
    folder, kind, _ = saved(family)
    assert any(f".experts.{EXPERTS - 1}." in key for key in tensors_of(folder))
    plain = s.aligned_copy(kind.from_pretrained(folder).eval())
    model = loaded(saved, family)
    assert_equal_runs(model, plain)
    assert s.runtime(model).stats["file_bytes"] > 0
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values()):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("options", [
    dict(ram_budget="1GB"), dict(ram_budget="200KB"), dict(map=False), dict(blocks=r"model\.layers\.\d+$"),
    dict(inference_mode=False)], ids=str)
def test_shares_in_ram_blocks_and_training(saved, options):
    folder, kind, _ = saved("qwen")
    plain = s.aligned_copy(kind.from_pretrained(folder).eval())
    model = loaded(saved, "qwen", **options)
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(model(ids).logits, plain(ids).logits)
    if not options.get("inference_mode", True):
        model(ids, labels=ids).loss.backward()
        plain(ids, labels=ids).loss.backward()
        for ours, theirs in zip(experts_of(model), experts_of(plain)):
            assert torch.equal(ours.gate_up_proj.grad, theirs.gate_up_proj.grad)
            assert torch.equal(ours.down_proj.grad, theirs.down_proj.grad)


def test_at_rest_the_weights_are_those_of_the_files(saved):
    folder, kind, _ = saved("qwen")
    plain = s.aligned_copy(kind.from_pretrained(folder).eval())
    model = loaded(saved, "qwen")
    experts, theirs = experts_of(model)[0], experts_of(plain)[0]
    assert torch.equal(copy.deepcopy(experts.down_proj), theirs.down_proj)
    with pytest.raises(stagehand.StagehandError, match="joined from the tensors of its experts"):
        experts.down_proj.data.zero_()
    stagehand.shutdown(model)
    assert torch.equal(experts.gate_up_proj[3], theirs.gate_up_proj[3])
    assert torch.equal(generate(model).sequences, generate(plain).sequences)


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
    model = stagehand.load(lambda: kind(config).eval().half(), tmp_path, vram_budget="4MB", device=s.device(4 << 20))
    model.generation_config = plain.generation_config
    assert_equal_runs(model, plain)


def test_losslessly_packed_experts_come_to_ram(saved, tmp_path):
    folder, kind, config = saved("qwen")
    plain = s.aligned_copy(kind.from_pretrained(folder).eval())
    _core.pack(folder, str(tmp_path / "packed.safetensors"), "lossless")
    model = stagehand.load(lambda: kind(config).eval(), tmp_path / "packed.safetensors", vram_budget="4MB",
                           device=s.device(4 << 20))
    ids = torch.arange(12).reshape(2, 6)
    assert torch.equal(model(ids).logits, plain(ids).logits)


def test_generation_moves_rows_no_twice(saved):
    """Reads of files are counted as for other units."""
    model = loaded(saved, "olmoe", ram_budget="1GB")
    generate(model)
    first = s.runtime(model).stats["file_bytes"]
    generate(model)
    assert s.runtime(model).stats["file_bytes"] == first
