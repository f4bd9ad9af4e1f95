"""Models and pipelines that people run, at true size, built from configurations by the released libraries; nothing is
downloaded. Weights are random: one buffer repeated, for bytes are what is measured. `small`: a few layers of each, for
the simulated device.

CASES: name -> Case. The libraries are imported when a case is built.
"""

from __future__ import annotations

import contextlib
import dataclasses
import string
from collections.abc import Callable

import torch
from torch import nn

BF16 = torch.bfloat16
INITIALISED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm, nn.GroupNorm)
PROMPT = "a red cat on the moon"


@dataclasses.dataclass
class Case:
    """build(small) -> a module or a pipeline in RAM, in bf16 (small: float32). steps(model, device, small) -> name of a
    phase -> a function that makes one step of it and returns a tensor to compare. budgets: GB of the card. trains: a
    step is one of an optimizer."""

    build: Callable
    steps: Callable
    budgets: tuple
    trains: bool = False
    pipeline: bool = False


# ---------------------------------------------------------------------- weights


@contextlib.contextmanager
def _without_values(small: bool):
    """Modules are made on the host in bf16, and their weights are not initialised."""
    from transformers.initialization import no_init_weights

    before, own = torch.get_default_dtype(), {kind: kind.reset_parameters for kind in INITIALISED}
    torch.set_default_dtype(torch.float32 if small else BF16)
    for kind in INITIALISED:
        kind.reset_parameters = lambda module: None
    try:
        with no_init_weights():
            yield
    finally:
        for kind, method in own.items():
            kind.reset_parameters = method
        torch.set_default_dtype(before)


def _fill(model: nn.Module) -> nn.Module:
    seed = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)) * 0.02
    seeds, at = {}, 0
    with torch.no_grad():
        for name, param in model.named_parameters():
            flat = param.data.view(-1)
            values = seeds.setdefault(flat.dtype, seed.to(flat.dtype))
            if param.dim() == 1:
                flat.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                continue
            done = 0
            while done < flat.numel():
                count = min(flat.numel() - done, values.numel() - at)
                flat[done : done + count] = values[at : at + count]
                done, at = done + count, (at + count) % values.numel()
    return model.eval().requires_grad_(False)


def _made(make: Callable, small: bool) -> nn.Module:
    with _without_values(small):
        model = make()
    return _fill(model)


def _inputs(device, small: bool):
    """A function that makes a random tensor of a shape, the same ones each time."""
    generator = torch.Generator("cpu").manual_seed(1)
    return lambda *shape: torch.randn(*shape, generator=generator).to(device, torch.float32 if small else BF16)


def _forward(model, **inputs) -> dict:
    def step():
        with torch.no_grad():
            return model(**inputs, return_dict=False)[0]

    return {"step": step}


# ---------------------------------------------------------------------- image and video


def _flux_transformer(small: bool):
    from diffusers import FluxTransformer2DModel

    size = {"in_channels": 4, "num_layers": 2, "num_single_layers": 3, "attention_head_dim": 16,
            "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8)} if small else {}
    return _made(lambda: FluxTransformer2DModel(guidance_embeds=True, **size), small)


def _flux_inputs(model, device, small: bool) -> dict:
    image, text = (16, 8) if small else (4096, 512)
    config, random = model.config, _inputs(device, small)
    return {"hidden_states": random(1, image, config.in_channels),
            "encoder_hidden_states": random(1, text, config.joint_attention_dim),
            "pooled_projections": random(1, config.pooled_projection_dim), "timestep": random(1).abs(),
            "guidance": random(1).abs(), "img_ids": torch.zeros(image, 3, device=device),
            "txt_ids": torch.zeros(text, 3, device=device)}


def _flux_steps(model, device, small: bool) -> dict:
    return _forward(model, **_flux_inputs(model, device, small))


def _wan_transformer(small: bool):
    from diffusers import WanTransformer3DModel

    size = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 32, "freq_dim": 32, "ffn_dim": 32,
            "num_layers": 3, "rope_max_seq_len": 32} if small else {}
    return _made(lambda: WanTransformer3DModel(**size), small)


def _wan_steps(model, device, small: bool) -> dict:
    frames, side, text = (3, 4, 8) if small else (9, 60, 512)  # 33 frames of 480 x 480
    random = _inputs(device, small)
    return _forward(model, hidden_states=random(1, 16, frames, side, side), timestep=torch.tensor([500], device=device),
                    encoder_hidden_states=random(1, text, model.config.text_dim))


def _qwen_transformer(small: bool):
    from diffusers import QwenImageTransformer2DModel

    size = {"in_channels": 16, "out_channels": 4, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 3,
            "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)} if small else {}
    return _made(lambda: QwenImageTransformer2DModel(**size), small)


def _qwen_steps(model, device, small: bool) -> dict:
    side, text = (4, 7) if small else (64, 256)
    random = _inputs(device, small)
    return _forward(model, hidden_states=random(1, side * side, model.config.in_channels),
                    encoder_hidden_states=random(1, text, model.config.joint_attention_dim),
                    encoder_hidden_states_mask=torch.ones(1, text, device=device, dtype=torch.bool),
                    timestep=random(1).abs(), img_shapes=[[(1, side, side)]])


def _ltx_transformer(small: bool):
    from diffusers import LTXVideoTransformer3DModel

    size = {"in_channels": 8, "out_channels": 8, "num_attention_heads": 4, "attention_head_dim": 8,
            "cross_attention_dim": 32, "num_layers": 3, "caption_channels": 32} if small else {}
    return _made(lambda: LTXVideoTransformer3DModel(**size), small)


def _ltx_steps(model, device, small: bool) -> dict:
    frames, height, width, text = (2, 4, 4, 8) if small else (13, 16, 24, 128)  # 97 frames of 768 x 512
    random = _inputs(device, small)
    return _forward(model, hidden_states=random(1, frames * height * width, model.config.in_channels),
                    encoder_hidden_states=random(1, text, model.config.caption_channels),
                    timestep=torch.tensor([500], device=device),
                    encoder_attention_mask=torch.ones(1, text, device=device), num_frames=frames, height=height,
                    width=width, rope_interpolation_scale=(1.0, 32.0, 32.0))


def _sdxl_unet(small: bool):
    from diffusers import UNet2DConditionModel

    size = {"block_out_channels": (32, 64), "layers_per_block": 1, "cross_attention_dim": 64,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (2, 4),
            "addition_time_embed_dim": 8, "transformer_layers_per_block": (1, 2),
            "projection_class_embeddings_input_dim": 80} if small else {
        "sample_size": 128, "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048,
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), "attention_head_dim": (5, 10, 20),
        "addition_time_embed_dim": 256, "transformer_layers_per_block": (1, 2, 10),
        "projection_class_embeddings_input_dim": 2816}
    return _made(lambda: UNet2DConditionModel(use_linear_projection=True, addition_embed_type="text_time", **size),
                 small)


def _sdxl_steps(model, device, small: bool) -> dict:
    side, pooled = (16, 32) if small else (128, 1280)
    random = _inputs(device, small)
    return _forward(model, sample=random(2, 4, side, side), timestep=torch.tensor(500, device=device),
                    encoder_hidden_states=random(2, 77, model.config.cross_attention_dim),
                    added_cond_kwargs={"text_embeds": random(2, pooled), "time_ids": random(2, 6)})


def _tokenizers():
    """Of a few words: the real ones are files."""
    from transformers import CLIPTokenizer, T5Tokenizer

    letters = [letter + end for letter in string.ascii_lowercase for end in ("", "</w>")]
    names = ["<|startoftext|>", "<|endoftext|>", *letters]
    clip = CLIPTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[], model_max_length=77)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(f"▁{word}", -1.0) for word in sorted(set(PROMPT.split()))]
    return clip, T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def _flux_pipeline(small: bool):
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    clip_size = {"hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4, "num_hidden_layers": 3,
                 "vocab_size": 80, "projection_dim": 32} if small else {
        "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12,
        "projection_dim": 768}
    t5_size = {"vocab_size": 32, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 3, "num_heads": 4} if small else {
        "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
        "feed_forward_proj": "gated-gelu"}
    levels = (32, 64) if small else (128, 256, 512, 512)
    vae_size = {"latent_channels": 1 if small else 16, "layers_per_block": 1 if small else 2}
    clip = _made(lambda: CLIPTextModel(CLIPTextConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1, **clip_size)),
                 small)
    t5 = _made(lambda: T5EncoderModel(T5Config(tie_word_embeddings=False, **t5_size)), small)
    vae = _made(lambda: AutoencoderKL(
        block_out_channels=levels, down_block_types=("DownEncoderBlock2D",) * len(levels),
        up_block_types=("UpDecoderBlock2D",) * len(levels), use_quant_conv=False, use_post_quant_conv=False,
        shift_factor=0.1159, scaling_factor=0.3611, **vae_size), small)
    first, second = _tokenizers()
    pipe = FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, clip, first, t5, second, _flux_transformer(small))
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _calls(pipe, small: bool, **options) -> dict:
    def call(steps: int):
        generator = torch.Generator("cpu").manual_seed(0)
        return pipe(PROMPT, num_inference_steps=steps, output_type="pt", generator=generator, **options)[0].detach()

    few, many = (2, 3) if small else (4, 20)
    return {f"{few} steps": lambda: call(few), f"{many} steps": lambda: call(many)}


def _flux_calls(pipe, device, small: bool) -> dict:
    size, length = (8, 16) if small else (1024, 512)
    return _calls(pipe, small, height=size, width=size, max_sequence_length=length)


# ---------------------------------------------------------------------- language


def _causal(kind: str, small: bool, **size):
    import transformers

    config = getattr(transformers, f"{kind}Config")(pad_token_id=0, bos_token_id=None, eos_token_id=None, **size)
    return _made(lambda: getattr(transformers, f"{kind}ForCausalLM")(config), small)


def _llama(small: bool, layers=32, hidden=4096, wide=14336):
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "vocab_size": 300} if small else {
        "hidden_size": hidden, "intermediate_size": wide, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128, "num_key_value_heads": 8, "vocab_size": 128256, "rope_theta": 500000.0}
    return _causal("Llama", small, **size)


def _moe(small: bool):
    size = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8,
            "num_experts_per_tok": 2, "vocab_size": 300} if small else {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "vocab_size": 151936}
    return _causal("Qwen3Moe", small, norm_topk_prob=True, **size)


def _ids(device, small: bool, length: int):
    return torch.arange(9 if small else length, device=device).remainder(200)[None]


def _decoding(model, device, small: bool) -> dict:
    ids, state = _ids(device, small, 512), {}

    def prefill():
        with torch.no_grad():
            out = model(input_ids=ids, use_cache=True)
        state.update(cache=out.past_key_values, token=out.logits[:, -1:].argmax(-1))
        return out.logits[:, -1]

    def decode():
        with torch.no_grad():
            out = model(input_ids=state["token"], past_key_values=state["cache"], use_cache=True)
        state.update(cache=out.past_key_values, token=out.logits[:, -1:].argmax(-1))
        return out.logits[:, -1]

    return {"prefill": prefill, "decode": decode}


# ---------------------------------------------------------------------- training


def _lora(model, targets: list[str]):
    import peft

    torch.manual_seed(0)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=16, target_modules=targets))
    return model.train()


def _lora_llama(small: bool):
    model = _llama(small)
    model.config.use_cache = False
    model = _lora(model, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _lora_flux(small: bool):
    model = _flux_transformer(small)
    model.enable_gradient_checkpointing()
    return _lora(model, ["to_q", "to_k", "to_v", "to_out.0"])


def _full_llama(small: bool):
    model = _llama(small, layers=16, hidden=2048, wide=8192).requires_grad_(True).train()  # 1.5 B
    model.config.use_cache = False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def _trained(model, loss: Callable) -> dict:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def step():
        value = loss()
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return {"step": step}


def _language_training(model, device, small: bool) -> dict:
    ids = _ids(device, small, 2048)
    return _trained(model, lambda: model(input_ids=ids, labels=ids).loss)


def _flux_training(model, device, small: bool) -> dict:
    inputs = _flux_inputs(model.get_base_model(), device, small)
    return _trained(model, lambda: model(**inputs, return_dict=False)[0].float().pow(2).mean())


CASES = {
    "flux": Case(_flux_transformer, _flux_steps, (8, 12, 16)),
    "flux-pipeline": Case(_flux_pipeline, _flux_calls, (8, 16), pipeline=True),
    "wan14b": Case(_wan_transformer, _wan_steps, (8, 12, 24)),
    "qwen-image": Case(_qwen_transformer, _qwen_steps, (8, 16, 24)),
    "ltx": Case(_ltx_transformer, _ltx_steps, (1, 2, 3)),
    "sdxl-unet": Case(_sdxl_unet, _sdxl_steps, (1, 2, 4)),
    "llama8b": Case(_llama, _decoding, (4, 8, 12)),
    "moe": Case(_moe, _decoding, (6, 10)),
    "lora-llama8b": Case(_lora_llama, _language_training, (5, 8, 20), trains=True),
    "lora-flux": Case(_lora_flux, _flux_training, (8, 12, 16), trains=True),
    "full-llama1b": Case(_full_llama, _language_training, (2, 4, 8), trains=True),
}
