"""Small models and pipelines of diffusers and transformers, from configurations, with random weights. The functions
import their libraries when they are called."""

from __future__ import annotations

import inspect
import re
import string

import support as s
import torch

import stagehand

WORDS = ("a", "cat", "on", "the", "moon", "red")


def clip_tokenizer():
    from transformers import CLIPTokenizer

    letters = [letter + end for letter in string.ascii_lowercase for end in ("", "</w>")]
    names = ["<|startoftext|>", "<|endoftext|>", *letters]
    return CLIPTokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[], model_max_length=77)


def t5_tokenizer():
    from transformers import T5Tokenizer

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    return T5Tokenizer(vocab=pieces + [(f"▁{word}", -1.0) for word in WORDS], extra_ids=0, model_max_length=32)


def clip_text(projection=None):
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(bos_token_id=0, eos_token_id=1, pad_token_id=1, hidden_size=32, intermediate_size=37,
                            num_attention_heads=4, num_hidden_layers=3, vocab_size=80, projection_dim=projection or 32,
                            hidden_act="gelu")
    return CLIPTextModel(config) if projection is None else CLIPTextModelWithProjection(config)


def t5_encoder(kind="T5"):
    import transformers

    config = getattr(transformers, f"{kind}Config")(vocab_size=32, d_model=32, d_kv=8, d_ff=37, num_layers=3,
                                                    num_heads=4, relative_attention_num_buckets=8)
    return getattr(transformers, f"{kind}EncoderModel")(config)


def image_vae(channels=4, **options):
    from diffusers import AutoencoderKL

    return AutoencoderKL(block_out_channels=(32, 64), in_channels=3, out_channels=3, sample_size=32,
                         down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
                         up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"), latent_channels=channels, **options)


def flux():
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True)
    vae = image_vae(1, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5)
    return FluxPipeline(FlowMatchEulerDiscreteScheduler(), vae, clip_text(), clip_tokenizer(), t5_encoder(),
                        t5_tokenizer(), transformer)


def sd3():
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

    transformer = SD3Transformer2DModel(
        sample_size=32, patch_size=1, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=32, pooled_projection_dim=64, out_channels=4,
        qk_norm="rms_norm", dual_attention_layers=(0,))
    vae = image_vae(4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.06, scaling_factor=1.5)
    return StableDiffusion3Pipeline(
        transformer, FlowMatchEulerDiscreteScheduler(), vae, clip_text(32), clip_tokenizer(), clip_text(32),
        clip_tokenizer(), t5_encoder(), t5_tokenizer())


def unet(**options):
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **options)


def sd():
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    return StableDiffusionPipeline(
        image_vae(), clip_text(), clip_tokenizer(), unet(cross_attention_dim=32, norm_num_groups=16),
        DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False),
        None, None, requires_safety_checker=False)


def sdxl():
    from diffusers import EulerDiscreteScheduler, StableDiffusionXLPipeline

    net = unet(attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time",
               addition_time_embed_dim=8, transformer_layers_per_block=(1, 2), cross_attention_dim=64,
               projection_class_embeddings_input_dim=80)
    scheduler = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
                                       timestep_spacing="leading")
    return StableDiffusionXLPipeline(image_vae(), clip_text(), clip_text(32), clip_tokenizer(), clip_tokenizer(), net,
                                     scheduler, add_watermarker=False)


def ltx():
    from diffusers import (AutoencoderKLLTXVideo, FlowMatchEulerDiscreteScheduler, LTXPipeline,
                           LTXVideoTransformer3DModel)

    transformer = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32,
        num_layers=3, caption_channels=32)
    vae = AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
        spatio_temporal_scaling=(True, True, False, False), decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(1, 1, 1, 1),
        timestep_conditioning=False, patch_size=1, patch_size_t=1, encoder_causal=True, decoder_causal=False)
    return LTXPipeline(FlowMatchEulerDiscreteScheduler(), vae, t5_encoder(), t5_tokenizer(), transformer)


def wan_transformer():
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
        text_dim=32, freq_dim=256, ffn_dim=32, num_layers=3, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32)


def wan(**more):
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline

    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                           temperal_downsample=[False, True, True])
    return WanPipeline(t5_tokenizer(), t5_encoder("UMT5"), vae, FlowMatchEulerDiscreteScheduler(shift=7.0),
                       wan_transformer(), **more)


def wan22():
    """Two transformers: one for the steps with much noise, one for the others."""
    return wan(transformer_2=wan_transformer(), boundary_ratio=0.9)


def qwen():
    from diffusers import (AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline,
                           QwenImageTransformer2DModel)
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

    transformer = QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=3,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4))
    vae = AutoencoderKLQwenImage(base_dim=24, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1,
                                 temperal_downsample=[False, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
    rope = {"rope_type": "default", "type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e6}
    text = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2,
            "num_key_value_heads": 2, "rope_scaling": rope, "rope_parameters": rope, "vocab_size": 300}
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    ids = {"vision_start_token_id": 290, "vision_end_token_id": 291, "vision_token_id": 292, "image_token_id": 293,
           "video_token_id": 294}
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))
    from tokenizers.pre_tokenizers import ByteLevel

    names = ["<|endoftext|>", *sorted(ByteLevel.alphabet())]
    tokenizer = Qwen2Tokenizer(vocab={name: i for i, name in enumerate(names)}, merges=[])
    return QwenImagePipeline(FlowMatchEulerDiscreteScheduler(), vae, encoder, tokenizer, transformer)


def controlled():
    """Stable Diffusion with a ControlNet, which runs in each step before the UNet."""
    from diffusers import ControlNetModel, StableDiffusionControlNetPipeline

    plain = sd()
    net = ControlNetModel.from_unet(plain.unet, conditioning_embedding_out_channels=(16, 32))
    with torch.no_grad():
        for param in net.parameters():  # those that lead into the UNet begin as zeros
            param.add_(torch.randn_like(param) * 0.02)
    parts = {name: part for name, part in plain.components.items() if name != "safety_checker"}
    return StableDiffusionControlNetPipeline(**parts, controlnet=net, safety_checker=None,
                                             requires_safety_checker=False)


PIPELINES = {"qwen": qwen, "controlled": controlled, "flux": flux, "sd": sd, "sdxl": sdxl, "sd3": sd3, "ltx": ltx,
             "wan": wan, "wan22": wan22}
CALLS = {
    "qwen": {"height": 32, "width": 32, "true_cfg_scale": 1.0, "max_sequence_length": 64},
    "controlled": {"guidance_scale": 6.0, "height": 32, "width": 32},
    "flux": {"height": 8, "width": 8, "max_sequence_length": 16, "guidance_scale": 5.0},
    "sd": {"guidance_scale": 6.0, "height": 32, "width": 32},
    "sdxl": {"guidance_scale": 5.0, "height": 32, "width": 32},
    "sd3": {"guidance_scale": 5.0, "height": 32, "width": 32, "max_sequence_length": 16},
    "ltx": {"guidance_scale": 3.0, "height": 32, "width": 32, "num_frames": 9, "max_sequence_length": 16},
    "wan": {"guidance_scale": 5.0, "height": 16, "width": 16, "num_frames": 9, "max_sequence_length": 16},
    "wan22": {"guidance_scale": 5.0, "height": 16, "width": 16, "num_frames": 9, "max_sequence_length": 16},
}
PROMPT = "a red cat on the moon"
_CFG = ("prompt_embeds", "negative_prompt_embeds")
ENCODED = {  # what encode_prompt() of a pipeline returns, by the names under which calls take that
    "flux": ("prompt_embeds", "pooled_prompt_embeds", None), "qwen": ("prompt_embeds", "prompt_embeds_mask"),
    "sd": _CFG, "controlled": _CFG, "wan": _CFG, "wan22": _CFG,
    "sdxl": (*_CFG, "pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
    "sd3": (*_CFG, "pooled_prompt_embeds", "negative_pooled_prompt_embeds"),
    "ltx": ("prompt_embeds", "prompt_attention_mask", "negative_prompt_embeds", "negative_prompt_attention_mask"),
}


def made(name: str, seed=0):
    """A pipeline of that kind with weights from a seed, on the host."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        pipe = PIPELINES[name]()
    pipe.set_progress_bar_config(disable=True)
    for model in models(pipe).values():
        model.eval()
    return pipe


def models(pipe) -> dict:
    """Name -> the pipeline's models."""
    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def taken(function, options: dict) -> dict:
    """Those of the options that the function has."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


def encoded(pipe, kind: str) -> dict:
    """The prompt as a call takes it from somebody who has encoded it."""
    options = {"prompt": PROMPT, "prompt_2": None, "prompt_3": None, "device": pipe._execution_device,
               "num_images_per_prompt": 1, "do_classifier_free_guidance": True, **CALLS[kind]}
    with torch.no_grad():
        found = pipe.encode_prompt(**taken(pipe.encode_prompt, options))
    return {name: value for name, value in zip(ENCODED[kind], found) if name is not None}


def called(pipe, kind: str, steps=2, given=False, **options):
    """A tensor with what the pipeline makes of a prompt. given: of its embeddings, which encode_prompt() makes."""
    options = {**CALLS[kind], **(encoded(pipe, kind) if given else {}), **options}
    if "prompt_embeds" not in options:
        options.setdefault("prompt", PROMPT)
    if kind == "controlled":
        options["image"] = torch.rand(1, 3, 32, 32, generator=torch.Generator("cpu").manual_seed(1))
    options = taken(pipe.__call__, {"output_type": "pt", **options})
    out = pipe(num_inference_steps=steps, generator=torch.Generator("cpu").manual_seed(0), **options)
    return out[0] if isinstance(out[0], torch.Tensor) else torch.stack(list(out[0]))


def denoiser_of(pipe) -> str:
    return "unet" if hasattr(pipe, "unet") else "transformer"


def lora(kind: str, seed: int) -> dict:
    """A LoRA of the part that denoises, as a file would hold it."""
    import peft

    name = denoiser_of(made(kind))
    net = getattr(made(kind), name)
    net.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_v", "to_out.0"]))
    torch.manual_seed(seed)
    state = peft.utils.get_peft_model_state_dict(net)
    return {f"{name}.{key}": torch.randn_like(value) * 0.1 for key, value in state.items()}


BLOCKS = (r"^(encoder\.)?block\.\d+\.layer\.\d+$", r"(^|\.)(transformer_blocks|single_transformer_blocks|layers)\.\d+$",
          r"(resnets|attentions)\.\d+$", r"(^|\.)(blocks|h)\.\d+$", r"_block$")


def managed(model, mode="layer", spare=0):
    """Puts a model under a runtime with 7/8 of its bytes, so that a part of it streams, and `spare`. Returns that."""
    budget = s.nbytes(model) * 7 // 8 + spare
    if mode == "layer":
        return s.runtime(s.wrap(model, budget))
    names = [name for name, module in model.named_modules() if next(module.parameters(), None) is not None]
    pattern = next(p for p in BLOCKS if any(re.search(p, name) for name in names))
    config = stagehand.StagehandConfig(vram_budget=budget)
    return stagehand.StagehandRuntime(model, config, block_pattern=pattern, device=s.device(budget))


def pair(kind: str, mode="layer", spare=0):
    """(pipeline whose models are all managed, a plain one, runtimes by name)."""
    pipe, plain = made(kind), made(kind)
    for name, model in models(plain).items():
        setattr(plain, name, s.aligned_copy(model))
    return pipe, plain, {name: managed(model, mode, spare) for name, model in models(pipe).items()}


def llama(tied=False, layers=3, width=64, seed=0):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=300, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, tie_word_embeddings=tied)
    return s.made(LlamaForCausalLM, config, seed=seed, frozen=False)


def t5_model():
    from transformers import T5Config, T5ForConditionalGeneration

    return s.made(T5ForConditionalGeneration, T5Config(
        vocab_size=300, d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, decoder_start_token_id=0,
        pad_token_id=0, eos_token_id=2), frozen=False)


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return s.made(MixtralForCausalLM, MixtralConfig(
        vocab_size=300, hidden_size=64, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, pad_token_id=0, bos_token_id=1, eos_token_id=2), frozen=False)


TOKENS = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, **TOKENS}


def causal(kind: str, config="Config", **more):
    import transformers

    made_of = getattr(transformers, kind + config)(**{**SMALL, **more})
    return s.made(getattr(transformers, f"{kind}ForCausalLM"), made_of, frozen=False)


def qwen3():
    return causal("Qwen3")


def gemma3():
    """Local and global attention, and a table of tokens that is the head."""
    return causal("Gemma3", "TextConfig", sliding_window=8,
                  layer_types=["sliding_attention", "full_attention", "sliding_attention"])


def gpt_oss():
    return causal("GptOss", intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, sliding_window=8,
                  layer_types=["sliding_attention", "full_attention", "sliding_attention"])


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    model = s.made(WhisperForConditionalGeneration, WhisperConfig(
        d_model=64, encoder_layers=3, decoder_layers=3, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=128, decoder_ffn_dim=128, num_mel_bins=16, max_source_positions=30, max_target_positions=64,
        decoder_start_token_id=3, suppress_tokens=[], begin_suppress_tokens=[], **TOKENS), frozen=False)
    model.generation_config.no_timestamps_token_id = 299
    return model
