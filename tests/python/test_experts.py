"""Experts that come by rows: results are those of the resident model bit for bit, and what crosses the link is what the
router asked for (docs/experts.md)."""

import copy

import pytest
import torch

import card
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
    return [module for module in model.modules() if hasattr(module, "is_transposed")]


def row_bytes(model):
    return sum(p[0].nbytes for p in experts_of(model)[0].parameters())


def budget_for(model, slots):
    """With which all other weights are resident, and `slots` rows."""
    experts = sum(s.nbytes(module) for module in experts_of(model))
    return s.nbytes(model) - experts + slots * row_bytes(model) + (1 << 16)


def experts(model):
    return s.runtime(model).plan["experts"]


def generate(model, tokens=8, prompt=2, batch=1, **options):
    ids = torch.arange(batch * prompt, device=model.device).reshape(batch, prompt) % 290 + 3
    with torch.no_grad():
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False,
                              return_dict_in_generate=True, output_logits=True, **options)


def equal(a, b):
    """Bit for bit, wherever the two lie."""
    return torch.equal(a.cpu(), b.cpu())


def assert_equal_runs(model, plain, **options):
    ours, theirs = generate(model, **options), generate(plain, **options)
    assert equal(ours.sequences, theirs.sequences)
    assert all(equal(a, b) for a, b in zip(ours.logits, theirs.logits))


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
    assert_equal_runs(model.to(card.TORCH), plain, tokens=3)


def test_rows_that_are_there_do_not_come_again():
    model = model_of()
    plain = s.aligned_copy(model)
    s.wrap(model, budget_for(model, 4 * EXPERTS))
    assert_equal_runs(model, plain)
    first = experts(model)
    assert_equal_runs(model, plain)
    again = experts(model)
    assert again["brought"] == first["brought"] and again["hits"] > first["hits"]
    assert s.runtime(model).plan["bytes_per_step"] == 0, "all other weights stay"


@pytest.mark.parametrize("slots", [EXPERTS, 3 * EXPERTS])
@pytest.mark.parametrize("options", [
    {"prompt": 40}, {"batch": 5, "prompt": 3}, {"num_beams": 3},
    {"cache_implementation": "static", "disable_compile": True}, {"num_beams": 2, "batch": 2, "prompt": 9}], ids=str)
def test_prompts_batches_beams_and_static_caches(options, slots):
    model = model_of()
    plain = s.aligned_copy(model)
    s.wrap(model, budget_for(model, slots))
    assert_equal_runs(model, plain, tokens=5, **options)
    assert experts(model)["by_rows"]


def test_the_link_is_slow_and_no_row_is_read_early():
    model = model_of()
    plain = s.aligned_copy(model)
    s.wrap(model, budget_for(model, EXPERTS), link=50e6)
    assert_equal_runs(model, plain, tokens=3, prompt=20)


def test_the_smallest_budget_is_that_of_a_token_and_an_error_names_one_for_a_prompt():
    model = model_of()
    plain = s.aligned_copy(model)
    with pytest.raises(s.stagehand.StagehandOOMError) as refused:
        s.wrap(model, 1000)
    smallest = int(str(refused.value).rsplit(None, 2)[-2])
    assert smallest < s.nbytes(experts_of(model)[0])
    s.stagehand.layer(model, vram_budget=smallest, device=s.device(1 << 23))
    one = torch.tensor([[5]])
    with torch.no_grad():
        assert equal(model(one).logits, plain(one).logits)
        with pytest.raises(s.stagehand.StagehandOOMError, match="more experts at once than the budget of") as few:
            model(torch.arange(40)[None])
        numbers = [int(word) for word in str(few.value).split() if word.isdigit()]
        assert equal(model(one).logits, plain(one).logits)
        long = torch.arange(40)[None]
        for enough in numbers[-2:]:
            s.runtime(model).set_vram_budget(enough)
            assert equal(model(long).logits, plain(long).logits)


@pytest.mark.parametrize("family", ["qwen", "gpt_oss", "deepseek"])
def test_every_budget_from_the_smallest_on_works(family):
    plain, one = model_of(FAMILIES[family]), torch.tensor([[5]])
    resident = s.aligned_copy(plain)
    with pytest.raises(s.stagehand.StagehandOOMError) as refused:
        s.wrap(s.aligned_copy(plain), 1000)
    smallest = int(str(refused.value).rsplit(None, 2)[-2])
    everything = s.nbytes(plain) + (1 << 16)
    before = 0
    for eighth in range(9):
        model, budget = s.aligned_copy(plain), smallest + (everything - smallest) * eighth // 8
        s.wrap(model, budget)
        with torch.no_grad():
            assert equal(model(one).logits, resident(one).logits)
        stats, found = s.runtime(model).stats, experts(model)
        assert stats["reserved_bytes"] + stats["device_bytes"] <= budget
        assert found["by_rows"] and found["slots"] >= before
        before = found["slots"]
        s.runtime(model).shutdown()
    assert before == found["rows"]
    with pytest.raises(s.stagehand.StagehandOOMError):
        s.wrap(s.aligned_copy(plain), smallest - 1)


def test_weights_that_two_modules_own_are_no_rows():
    plain = model_of()
    first, second = experts_of(plain)[:2]
    second.down_proj = first.down_proj
    model = copy.deepcopy(plain)
    s.wrap(model, s.nbytes(model) - s.nbytes(experts_of(model)[0]))
    assert_equal_runs(model, s.aligned_copy(plain), tokens=3)
    assert len(experts(model)["layers"]) == len(experts_of(model)) - 2


def test_a_budget_that_changes_changes_the_pool():
    model = model_of()
    plain = s.aligned_copy(model)
    large, small = budget_for(model, 4 * EXPERTS), budget_for(model, EXPERTS)
    s.wrap(model, large)
    for budget in (large, small, large, small):
        s.runtime(model).set_vram_budget(budget)
        assert_equal_runs(model, plain, tokens=3)
        found = experts(model)
        assert found["slots"] == (4 * EXPERTS if budget == large else found["slots"])
        assert s.runtime(model).stats["reserved_bytes"] + s.runtime(model).stats["device_bytes"] <= budget
    with pytest.raises(s.stagehand.StagehandOOMError):
        s.runtime(model).set_vram_budget(1000)
    assert_equal_runs(model, plain, tokens=3)


@pytest.mark.parametrize("inference_mode", [False, True])
def test_written_experts_come_anew(inference_mode):
    model = model_of()
    plain = s.aligned_copy(model)
    s.wrap(model, budget_for(model, 3 * EXPERTS), inference_mode=inference_mode)
    assert_equal_runs(model, plain, tokens=3)
    for write in (lambda w: w.mul_(0.5), lambda w: w.data.add_(0.25), lambda w: w[3].zero_()):
        with s.runtime(model).writing() if inference_mode else torch.no_grad(), torch.no_grad():
            for ours, theirs in zip(experts_of(model), experts_of(plain)):
                write(ours.down_proj), write(theirs.down_proj)
        assert_equal_runs(model, plain, tokens=3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in state.items():
        assert equal(value, plain.state_dict()[name])
        value.copy_(value.flip(0))
    if not inference_mode:
        model.load_state_dict(state), plain.load_state_dict(state)
        assert_equal_runs(model, plain, tokens=3)
    data = torch.randn_like(experts_of(plain)[1].gate_up_proj)
    with s.runtime(model).writing():
        experts_of(model)[1].gate_up_proj.data = data.clone()
    experts_of(plain)[1].gate_up_proj.data.copy_(data)
    assert_equal_runs(model, plain, tokens=3)


def losses(model, steps=3):
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1)
    ids, found = torch.arange(24).reshape(2, 12) % 290, []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_over_frozen_experts_train_by_layers_and_generate_by_rows(checkpointing):
    peft = pytest.importorskip("peft")

    def adapted():
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = peft.get_peft_model(model_of(), config)
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        return model

    model, plain = adapted(), s.aligned_copy(adapted())
    s.wrap(model, s.nbytes(model) - 2 * s.nbytes(experts_of(model)[0]))
    for _ in range(2):
        assert equal(losses(model), losses(plain))
        assert not experts(model)["by_rows"]
        model.eval(), plain.eval()
        assert_equal_runs(model, plain, tokens=3)
        assert experts(model)["by_rows"]
        if checkpointing:
            model.train(), plain.train()


def test_the_pool_gives_way_to_what_comes_after_wrapping():
    model = model_of()
    plain = s.aligned_copy(model)
    s.wrap(model, budget_for(model, 3 * EXPERTS))
    assert_equal_runs(model, plain, tokens=3)
    before = experts(model)["slots"]
    for one in (model, plain):
        one.extra = torch.nn.Linear(4 * row_bytes(model) // 4, EXPERTS // 2)
    for _ in range(2):
        assert_equal_runs(model, plain, tokens=3)
        assert experts(model)["by_rows"] and 0 < experts(model)["slots"] < before
    stats = s.runtime(model).stats
    assert stats["reserved_bytes"] + stats["device_bytes"] <= budget_for(plain, 3 * EXPERTS)


@pytest.mark.parametrize("trainables", ["auto", "device", "host"])
def test_experts_that_take_gradients_train(trainables):
    model = model_of(frozen=False)
    plain = s.aligned_copy(model)
    s.wrap(model, s.nbytes(model) - 2 * s.nbytes(experts_of(model)[0]), trainables=trainables)
    assert equal(losses(model), losses(plain))
    assert_equal_runs(model, plain, tokens=3)
    assert experts(model)["by_rows"]
    assert equal(losses(model), losses(plain))


def test_a_generation_between_forward_and_backward():
    model = model_of(frozen=False)
    plain = s.aligned_copy(model)
    s.wrap(model, s.nbytes(model) - s.nbytes(experts_of(model)[0]))
    ids = torch.arange(12)[None]
    grads = []
    for one in (model, plain):
        loss = one(input_ids=ids, labels=ids).loss
        with torch.no_grad():
            one(ids[:, :1])
        loss.backward()
        grads.append([p.grad.clone() for p in one.parameters()])
    assert all(equal(a, b) for a, b in zip(*grads))


def test_a_weight_that_is_read_from_outside_has_calls_go_by_layers():
    model = model_of()
    plain = s.aligned_copy(model)
    for one in (model, plain):
        block = one.model.layers[1].mlp
        inner = type(block).forward
        block.forward = lambda x, m=block, f=inner: f(m, x) * (1 + m.experts.down_proj[0].mean())
    s.wrap(model, s.nbytes(model) - s.nbytes(experts_of(model)[0]))
    assert_equal_runs(model, plain, tokens=3)
    assert not experts(model)["by_rows"]


def test_functions_that_nobody_knows_go_by_layers():
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

    ALL_EXPERTS_FUNCTIONS.register("of_my_own", lambda self, *args: grouped_mm_experts_forward(self, *args) * 2)
    model = model_of(function="of_my_own")
    plain = s.aligned_copy(model)
    s.wrap(model, s.nbytes(model) - s.nbytes(experts_of(model)[0]))
    assert_equal_runs(model, plain, tokens=3)
    assert not experts(model)["by_rows"]


def test_llama_4_runs_by_layers():
    """Its own function multiplies with all experts, whatever the router says."""
    config = transformers.Llama4TextConfig(
        **SIZES, head_dim=16, intermediate_size=160, intermediate_size_mlp=64, num_local_experts=16,
        num_experts_per_tok=1, interleave_moe_layer_step=1)
    model = s.made(transformers.Llama4ForCausalLM, config).eval()
    plain = s.aligned_copy(model)
    s.wrap(model, s.nbytes(model) // 2, inference_mode=True)
    for options in (dict(), dict(batch=3), dict(prompt=20)):
        assert_equal_runs(model, plain, **options)
    assert s.runtime(model).plan.get("experts") is None and s.runtime(model).stats["h2d_bytes"] > s.nbytes(plain)


def test_the_model_and_its_config_stay_as_they_are():
    model = model_of()
    before = model.config.to_dict()
    s.wrap(model, budget_for(model, EXPERTS))
    generate(model, tokens=2)
    assert model.config.to_dict() == before
    module = experts_of(model)[0]
    assert module.num_experts == EXPERTS and module.gate_up_proj.shape[0] == EXPERTS
    assert type(module) is type(experts_of(model_of())[0])
    s.runtime(model).shutdown()
    assert "forward" not in module.__dict__


def test_another_dtype_and_a_copy():
    model = model_of()
    s.wrap(model, budget_for(model, EXPERTS))
    generate(model, tokens=2)
    twin = copy.deepcopy(model)
    assert_equal_runs(model, s.aligned_copy(twin), tokens=2)
    model.to(torch.bfloat16), twin.to(torch.bfloat16)
    assert_equal_runs(model, s.aligned_copy(twin), tokens=4)
    assert experts(model)["by_rows"]


def test_two_models_take_turns_on_a_card():
    models = [model_of(), model_of(mixtral)]
    plains = [s.aligned_copy(model) for model in models]
    budget = budget_for(models[0], 2 * EXPERTS)
    device = s.device(budget + budget // 4)
    device.set_budget(budget + budget // 4)
    for model in models:
        s.stagehand.layer(model, vram_budget=budget, device=device)
    for _ in range(3):
        for model, plain in zip(models, plains):
            assert_equal_runs(model, plain, tokens=2)
            assert device.residency()["occupied"] <= budget + budget // 4
    assert all(s.runtime(model).stats["experts"]["hits"] for model in models)


def test_a_budget_that_is_found():
    model = model_of()
    plain = s.aligned_copy(model)
    device = s.device(budget_for(model, EXPERTS) * 2)
    s.stagehand.layer(model, device=device)
    for _ in range(4):
        assert_equal_runs(model, plain, tokens=2)


def test_steps_count_the_bytes_of_rows():
    model = model_of()
    s.wrap(model, budget_for(model, EXPERTS))
    with torch.no_grad():
        for i in range(3):
            before = experts(model)["bytes"]
            model(torch.tensor([[5 + i]]))
            s.runtime(model).end_step()
            assert s.runtime(model).stats["last_step"]["h2d_bytes"] >= experts(model)["bytes"] - before > 0
