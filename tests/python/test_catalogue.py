"""The table of named models has the weights that the libraries' own classes have at those configurations."""

import json
import subprocess
import sys

import pytest
import torch

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")


def sdxl():
    return diffusers.UNet2DConditionModel(
        sample_size=128, block_out_channels=(320, 640, 1280), cross_attention_dim=2048, use_linear_projection=True,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(5, 10, 20),
        transformer_layers_per_block=(1, 2, 10), addition_embed_type="text_time", addition_time_embed_dim=256,
        projection_class_embeddings_input_dim=2816)


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256))


def moe():
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(
        hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=48, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8, vocab_size=151936))


# Their defaults are the configurations of the released models.
MODELS = {"flux": lambda: diffusers.FluxTransformer2DModel(guidance_embeds=True),
          "wan14b": lambda: diffusers.WanTransformer3DModel(),
          "qwen-image": lambda: diffusers.QwenImageTransformer2DModel(),
          "ltx": lambda: diffusers.LTXVideoTransformer3DModel(),
          "sdxl": sdxl, "llama8b": llama, "qwen3-moe": moe}


def planned(*words: str):
    done = subprocess.run([sys.executable, "-m", "stagehand", "plan", *words, "--card", "rtx4090", "--json"],
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_model_of_the_table_is_compared():
    assert {plan["model"]["name"] for plan in planned()} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_weights(name):
    with torch.device("meta"):
        model = MODELS[name]()
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    want = 2 * sum(p.numel() for p in model.parameters())
    if embedding is not None:  # its rows are read where they are
        want -= 2 * embedding.weight.numel()
    assert planned(name)["model"]["bytes"] == pytest.approx(want, rel=0.02)
