"""Experts that come by rows: results are those of the resident model bit for bit, and what crosses the link is what the
router asked for (docs/experts.md)."""

import pytest
import torch

import support as s

transformers = pytest.importorskip("transformers")

SIZES = dict(vocab_size=300, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
             pad_token_id=0, bos_token_id=1, eos_token_id=None, max_position_embeddings=256)
EXPERTS, EACH = 32, 4


def qwen():
    return transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, intermediate_size=64, moe_intermediate_size=64, num_experts=EXPERTS,
        num_experts_per_tok=EACH)


def mixtral():
    return transformers.MixtralForCausalLM, transformers.MixtralConfig(
        **SIZES, intermediate_size=64, num_local_experts=EXPERTS, num_experts_per_tok=EACH)


def gpt_oss():
    return transformers.GptOssForCausalLM, transformers.GptOssConfig(
        **SIZES, head_dim=16, intermediate_size=64, num_local_experts=EXPERTS, num_experts_per_tok=EACH)


def deepseek():
    return transformers.DeepseekV3ForCausalLM, transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4}, intermediate_size=64, moe_intermediate_size=64, n_routed_experts=EXPERTS,
        num_experts_per_tok=EACH, n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=16, first_k_dense_replace=1)


def olmoe():
    return transformers.OlmoeForCausalLM, transformers.OlmoeConfig(
        **SIZES, intermediate_size=64, num_experts=EXPERTS, num_experts_per_tok=EACH)


FAMILIES = {build.__name__: build for build in (qwen, mixtral, gpt_oss, deepseek, olmoe)}
FUNCTIONS = ("grouped_mm", "batched_mm", "eager")


def model_of(build=qwen, function="grouped_mm", frozen=True):
    kind, config = build()
    model = s.made(kind, config, frozen=frozen).eval()
    model.set_experts_implementation(function)
    return model


def experts_of(model):
    return [module for module in model.modules() if hasattr(module, "_is_expert_parallel")]


def row_bytes(model):
    return sum(p[0].nbytes for p in experts_of(model)[0].parameters())


def budget_for(model, slots):
    """With which all other weights are resident, and `slots` rows."""
    experts = sum(s.nbytes(module) for module in experts_of(model))
    return s.nbytes(model) - experts + slots * row_bytes(model) + (1 << 16)


def experts(model):
    return s.runtime(model).plan["experts"]


def generate(model, tokens=8, prompt=2, batch=1, **options):
    ids = torch.arange(batch * prompt).reshape(batch, prompt) % 290 + 3
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                              return_dict_in_generate=True, output_logits=True, **options)


def assert_equal_runs(model, plain, **options):
    ours, theirs = generate(model, **options), generate(plain, **options)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert all(torch.equal(a, b) for a, b in zip(ours.logits, theirs.logits))


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generation_equals_the_resident_model_and_moves_what_was_missing(family, function):
    model = model_of(FAMILIES[family], function)
    plain = s.aligned_copy(model)
    s.wrap(model, budget_for(model, 40))
    assert_equal_runs(model, plain, tokens=12)
    found = experts(model)
    assert found["by_rows"] and 0 < found["hits"] < found["asked"] and found["slots"] >= 40
    assert found["asked"] == found["hits"] + found["brought"]
    assert found["bytes"] == (found["brought"] + found["ahead"]) * row_bytes(model)
    assert sum(layer["held"] for layer in found["layers"]) <= found["slots"]
    s.runtime(model).shutdown()
    assert_equal_runs(model, plain, tokens=3)


def test_the_order_of_calls_decides_what_stays_and_a_second_run_hits_more():
    model = model_of()
    plain = s.aligned_copy(model)
    s.wrap(model, budget_for(model, 4 * EXPERTS))
    assert_equal_runs(model, plain)
    first = experts(model)
    assert_equal_runs(model, plain)
    again = experts(model)
    assert again["brought"] == first["brought"], "all rows that were asked for are in slots"


