"""Field cases GG: every pipeline with every feature that people use, offloaded below a cap, beside the plain pipeline.

USES: name -> function(pipe, kind) that makes a tensor with a pipeline. A test runs one on the offloaded pipeline and on
the plain one, twice, and an ordinary call behind it. `make test` tries each use with one kind of pipeline,
`make test-hosts` with all of those that have it.
"""

from __future__ import annotations

import contextlib

import card
import hosts
import pytest
import support as s
import torch
from test_gg_pipelines import aligned, ip_adapter, offloaded_pair

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import stagehand  # noqa: E402
from stagehand.integrations.diffusers import offload  # noqa: E402

KINDS = ("flux", "sd3", "sdxl", "sd", "controlled", "wan", "wan22", "qwen", "ltx")
TRANSFORMERS = ("flux", "sd3", "wan", "wan22", "qwen", "ltx")
IMAGES = ("flux", "sd3", "sdxl", "sd", "qwen")


@pytest.fixture(autouse=True)
def one_thread():
    """Compiled code of one test is not that of the next."""
    with s.threads(1):
        yield
    torch.compiler.reset()


def denoisers(pipe) -> list:
    return [getattr(pipe, name) for name in ("unet", "transformer", "transformer_2") if getattr(pipe, name, None)]


def of_all(*tensors) -> torch.Tensor:
    return torch.cat([tensor.flatten().float() for tensor in tensors])


class Stop(Exception):
    pass


# ---------------------------------------------------------------------- uses


def in_other_sizes(pipe, kind):
    """Resolution and batch change from call to call."""
    size = {"height": 2 * hosts.CALLS[kind]["height"]}
    many = {"num_videos_per_prompt": 2} if kind in ("wan", "wan22", "ltx") else {"num_images_per_prompt": 2}
    calls = [{}, size, many, {**size, **many}, {}]
    return of_all(*(hosts.called(pipe, kind, **options) for options in calls))


def tiled(pipe, kind):
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()
    for name, value in (("tile_latent_min_size", 8), ("tile_sample_min_size", 16), ("tile_sample_min_height", 16),
                        ("tile_sample_min_width", 16), ("tile_sample_stride_height", 12),
                        ("tile_sample_stride_width", 12)):
        if hasattr(pipe.vae, name):
            setattr(pipe.vae, name, value)
    got = hosts.called(pipe, kind)
    pipe.vae.disable_tiling()
    pipe.vae.disable_slicing()
    return of_all(got, hosts.called(pipe, kind))


def interrupted(pipe, kind):
    """A callback changes the latents, and stops the call in the middle."""
    seen = []

    def callback(pipe, step, time, values):
        seen.append(values["latents"].sum())
        pipe._interrupt = step == 1
        return {"latents": values["latents"] * 0.9}

    return of_all(hosts.called(pipe, kind, steps=4, callback_on_step_end=callback), torch.stack(seen))


def failing_in_a_callback(pipe, kind):
    def callback(*_):
        raise Stop

    with pytest.raises(Stop):
        hosts.called(pipe, kind, callback_on_step_end=callback)
    return hosts.called(pipe, kind)


def failing_inside_a_model(pipe, kind):
    """At each of several modules, in a forward."""
    net = denoisers(pipe)[0]
    parts = [part for part in net.modules() if isinstance(part, torch.nn.Linear)]
    for part in parts[:: max(1, len(parts) // 3)]:
        handle = part.register_forward_hook(_stopped)
        with contextlib.suppress(Stop):
            hosts.called(pipe, kind)
        handle.remove()
    return hosts.called(pipe, kind)


def _stopped(*_):
    raise Stop


def compiled_blocks(pipe, kind):
    for net in denoisers(pipe):
        net.compile_repeated_blocks(backend="eager", fullgraph=False)
    return hosts.called(pipe, kind, steps=3)


def cast_in_layers(pipe, kind):
    """float8, as people store it."""
    for net in denoisers(pipe):
        net.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    return hosts.called(pipe, kind)


def in_bfloat16(pipe, kind):
    pipe.to(torch.bfloat16)
    got = hosts.called(pipe, kind)
    pipe.to(torch.float32)
    return of_all(got, hosts.called(pipe, kind))


def under_autocast(pipe, kind):
    with torch.autocast(card.TORCH.type, dtype=torch.bfloat16):
        got = hosts.called(pipe, kind)
    return of_all(got, hosts.called(pipe, kind))


def by_hand(pipe, kind):
    """Models and methods of the pipeline are called alone, between calls of it."""
    found = []
    with torch.no_grad():
        if hasattr(pipe, "text_encoder"):
            ids = torch.arange(3, 12)[None]
            found.append(pipe.text_encoder(card.there(ids), output_hidden_states=True).hidden_states[-1])
        found.append(hosts.called(pipe, kind))
        video = kind in ("wan", "wan22", "ltx", "qwen")
        shape = (1, 3, 1 if kind == "qwen" else 9, 32, 32) if video else (1, 3, 32, 32)
        picture = card.there(torch.rand(shape, generator=torch.Generator().manual_seed(4)))
        latents = pipe.vae.encode(picture).latent_dist.mode()
        found.append(latents)
        found.append(pipe.vae.decode(latents, return_dict=False)[0])
        found.append(hosts.called(pipe, kind))
        found.append(hosts.called(pipe, kind, given=True))
    return of_all(*found)


def of_given_embeddings(pipe, kind):
    """The prompt is encoded once; the text encoders are not called again."""
    return of_all(hosts.called(pipe, kind, given=True), hosts.called(pipe, kind))


def latents_alone(pipe, kind):
    """Without the decoder, which another program calls."""
    return hosts.called(pipe, kind, output_type="latent")


def fused_projections(pipe, kind):
    """New modules, whose weights are made of those that stream."""
    pipe.fuse_qkv_projections()
    got = hosts.called(pipe, kind)
    pipe.unfuse_qkv_projections()
    return of_all(got, hosts.called(pipe, kind))


def other_processors(pipe, kind):
    from diffusers.models.attention_processor import AttnProcessor

    pipe.unet.set_attn_processor(AttnProcessor())
    got = hosts.called(pipe, kind)
    pipe.unet.set_default_attn_processor()
    return of_all(got, hosts.called(pipe, kind))


def sliced_attention(pipe, kind):
    pipe.enable_attention_slicing(1)
    got = hosts.called(pipe, kind)
    pipe.disable_attention_slicing()
    return of_all(got, hosts.called(pipe, kind))


def other_backend(pipe, kind):
    for net in denoisers(pipe):
        net.set_attention_backend("_native_math")
    got = hosts.called(pipe, kind)
    for net in denoisers(pipe):
        net.reset_attention_backend()
    return of_all(got, hosts.called(pipe, kind))


def free_unet(pipe, kind):
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.2, b2=1.4)
    got = hosts.called(pipe, kind)
    pipe.disable_freeu()
    return of_all(got, hosts.called(pipe, kind))


def with_first_block_cache(pipe, kind):
    """Blocks are left out in some steps."""
    from diffusers import FirstBlockCacheConfig

    return _cached(pipe, kind, FirstBlockCacheConfig(threshold=0.5))


def with_attention_broadcast(pipe, kind):
    from diffusers import PyramidAttentionBroadcastConfig

    config = PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, spatial_attention_timestep_skip_range=(-1, 1001),
        current_timestep_callback=lambda: 500)
    return _cached(pipe, kind, config)


def _cached(pipe, kind, config):
    for net in denoisers(pipe):
        net.enable_cache(config)
    got = hosts.called(pipe, kind, steps=5)
    for net in denoisers(pipe):
        net.disable_cache()
    return of_all(got, hosts.called(pipe, kind, steps=3))


_NOISE = ("DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler", "UniPCMultistepScheduler")
SCHEDULERS = {"sd": _NOISE, "sdxl": _NOISE, "sd3": ("FlowMatchHeunDiscreteScheduler",),
              "wan": ("UniPCMultistepScheduler",)}


def other_schedulers(pipe, kind):
    import diffusers

    before, found = pipe.scheduler, []
    for name in SCHEDULERS[kind]:
        pipe.scheduler = getattr(diffusers, name).from_config(before.config)
        torch.manual_seed(0)
        found.append(hosts.called(pipe, kind, steps=3))
    pipe.scheduler = before
    return of_all(*found)


def adapted(pipe, kind):
    """LoRA: loaded, switched, blended, scaled in a call, fused, taken out."""
    name, found = hosts.denoiser_of(pipe), []

    def see(**options):
        found.append(hosts.called(pipe, kind, **options))

    for number, adapter in enumerate("ab"):
        pipe.load_lora_weights(hosts.lora(kind, number + 1), adapter_name=adapter)
        see()
    pipe.set_adapters("a")
    see()
    pipe.set_adapters(["a", "b"], [0.3, 0.8])
    see()
    pipe.disable_lora()
    see()
    pipe.enable_lora()
    see()
    pipe.fuse_lora(components=[name], lora_scale=0.7)
    see()
    pipe.unfuse_lora(components=[name])
    see()
    pipe.delete_adapters("a")
    see()
    pipe.unload_lora_weights()
    see()
    pipe.load_lora_weights(hosts.lora(kind, 1))
    pipe.fuse_lora(components=[name])
    pipe.unload_lora_weights()
    see()
    return of_all(*found)


def inverted(pipe, kind):
    """Textual inversion: a token more, whose vector is put into the table."""
    vector = torch.randn(1, 32, generator=torch.Generator().manual_seed(9))
    pipe.load_textual_inversion({"<thing>": vector}, token="<thing>")
    got = hosts.called(pipe, kind, prompt="a <thing> on the moon")
    pipe.unload_textual_inversion()
    return of_all(got, hosts.called(pipe, kind))


def half_with_upcast(pipe, kind):
    """SDXL takes its VAE to float32 inside a call, and back."""
    pipe.vae.register_to_config(force_upcast=True)
    pipe.to(torch.float16)
    got = hosts.called(pipe, kind)
    pipe.to(torch.float32)
    return of_all(got, hosts.called(pipe, kind))


def without_the_text_encoder(pipe, kind):
    """It is dropped once the prompt is encoded."""
    embeddings = hosts.encoded(pipe, kind)
    names = [name for name in hosts.models(pipe) if name.startswith("text_encoder")]
    kept = {name: getattr(pipe, name) for name in names}
    for name in names:
        setattr(pipe, name, None)
    got = hosts.called(pipe, kind, **embeddings)
    for name, model in kept.items():
        setattr(pipe, name, model)
    return of_all(got, hosts.called(pipe, kind))


def derived(pipe, kind):
    """Pipelines for pictures and for masks, over the same models. That of SD3 for masks wants another model."""
    import diffusers

    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(4))
    mask = (torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(5)) > 0.5).float()
    found = [hosts.called(pipe, kind)]
    for auto in (diffusers.AutoPipelineForImage2Image, diffusers.AutoPipelineForInpainting)[: 1 + (kind != "sd3")]:
        other = auto.from_pipe(pipe)
        other.set_progress_bar_config(disable=True)
        more = {"image": picture, "strength": 0.8, "height": 32, "width": 32}
        if auto is diffusers.AutoPipelineForInpainting:
            more["mask_image"] = mask
        found.append(hosts.called(other, kind, steps=3, **more))
        found.append(hosts.called(pipe, kind))
    return of_all(*found)


def moved(pipe, kind):
    """As programs call it that know nothing of stagehand."""
    pipe.to(card.TORCH)
    got = hosts.called(pipe, kind)
    pipe.unet.to(card.TORCH, memory_format=torch.channels_last)
    return of_all(got, hosts.called(pipe, kind))


def switched_to_training(pipe, kind):
    net = denoisers(pipe)[0]
    net.train()
    with torch.no_grad():
        torch.manual_seed(0)
        got = hosts.called(pipe, kind)
    net.eval()
    net.enable_gradient_checkpointing()
    more = hosts.called(pipe, kind)
    net.disable_gradient_checkpointing()
    return of_all(got, more, hosts.called(pipe, kind))


USES = {
    in_other_sizes: KINDS, tiled: KINDS, interrupted: KINDS, failing_in_a_callback: KINDS,
    failing_inside_a_model: KINDS, compiled_blocks: ("flux", "sdxl", "sd", "wan", "wan22", "qwen", "ltx"),
    cast_in_layers: KINDS, in_bfloat16: KINDS, under_autocast: KINDS, by_hand: KINDS,
    of_given_embeddings: KINDS, latents_alone: KINDS, fused_projections: ("sd", "sdxl"),
    other_processors: ("sd", "sdxl"), sliced_attention: ("sd", "sdxl"), other_backend: TRANSFORMERS,
    free_unet: ("sd", "sdxl"), with_first_block_cache: ("flux", "wan", "qwen", "ltx"),
    with_attention_broadcast: ("flux", "wan", "ltx"), other_schedulers: tuple(SCHEDULERS),
    adapted: ("flux", "sd3", "sdxl", "sd", "wan", "qwen", "ltx"), inverted: ("sd",), half_with_upcast: ("sdxl",),
    without_the_text_encoder: KINDS, derived: IMAGES, moved: ("sd",), switched_to_training: KINDS,
}
ONCE = (cast_in_layers,)  # diffusers refuses a second time
CASES = [(use, kind) for number, (use, kinds) in enumerate(USES.items())
         for kind in (kinds if s.FULL else [kinds[number % len(kinds)]])]


@pytest.mark.parametrize("use,kind", CASES, ids=[f"{use.__name__}-{kind}" for use, kind in CASES])
def test_240_a_use_of_an_offloaded_pipeline_is_that_of_the_plain_one(use, kind):
    if use is adapted:
        pytest.importorskip("peft", reason="peft is not installed")
    with offloaded_pair(kind, spare=600_000) as (pipe, plain):
        for turn in range(1 if use in ONCE else 2):
            want, got = use(plain, kind), use(pipe, kind)
            assert got.isfinite().all() and s.same(got, want), turn
        assert s.same(hosts.called(pipe, kind), hosts.called(plain, kind))


# ---------------------------------------------------------------------- several pipelines, files, parts that come


CONTROLLED = {"sd": "StableDiffusionControlNetPipeline", "sdxl": "StableDiffusionXLControlNetPipeline",
              "flux": "FluxControlNetPipeline", "sd3": "StableDiffusion3ControlNetPipeline"}


def controlnet_for(kind):
    """With values that are those of no other part, and in which no layer is left at zero."""
    import diffusers

    torch.manual_seed(7)
    plain = hosts.made(kind)
    if kind in ("sd", "sdxl"):
        net = diffusers.ControlNetModel.from_unet(plain.unet, conditioning_embedding_out_channels=(16, 32))
    elif kind == "flux":
        net = diffusers.FluxControlNetModel.from_transformer(
            plain.transformer, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2)
    else:
        net = diffusers.SD3ControlNetModel.from_transformer(plain.transformer, num_layers=2,
                                                             num_extra_conditioning_channels=0)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(torch.randn_like(param) * 0.02)
    return net.eval()


def controlled_of(pipe, kind, net):
    """A pipeline with a ControlNet, over the models of `pipe`."""
    import diffusers

    other = getattr(diffusers, CONTROLLED[kind]).from_pipe(pipe, controlnet=net)
    other.set_progress_bar_config(disable=True)
    return other


def under_control(pipe, kind):
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    sizes = {"height": 32, "width": 32}
    torch.manual_seed(0)  # some encode the picture without their generator
    return hosts.called(pipe, kind, image=picture, control_image=picture, controlnet_conditioning_scale=0.8, **sizes)


@pytest.mark.parametrize("kind", CONTROLLED if s.FULL else ("sd",))
def test_240_a_controlnet_joins_a_pipeline_that_is_offloaded(kind):
    """`from_pipe` shares all models but one, which comes below the cap of the others."""
    with offloaded_pair(kind, spare=600_000) as (pipe, plain):
        nets = [controlnet_for(kind), s.aligned_copy(controlnet_for(kind))]
        controlled, plainly = (controlled_of(one, kind, net) for one, net in zip((pipe, plain), nets))
        with pytest.raises(stagehand.StagehandError, match="vae, text_encoder.*leave vram_budget and device out"):
            offload(controlled, "1GB")
        with offload(controlled) as joined:
            assert set(joined.runtimes) == {*hosts.models(pipe), "controlnet"}
            for _ in range(2):
                assert s.same(under_control(controlled, kind), under_control(plainly, kind))
                assert s.same(hosts.called(pipe, kind), hosts.called(plain, kind))
            runtimes = joined.runtimes.values()
            assert len({id(runtime.session.target.core) for runtime in runtimes}) == 1
        assert joined.runtimes["controlnet"].mode == "shutdown"
        assert s.same(hosts.called(pipe, kind), hosts.called(plain, kind))


def test_240_two_pipelines_with_one_text_encoder_below_one_cap():
    """The first one ends; the models that both have stay until the second one ends."""
    one, other, plain = hosts.made("wan"), hosts.made("wan", seed=1), aligned(hosts.made("wan"))
    plainly = aligned(hosts.made("wan", seed=1))
    for name in ("text_encoder", "vae"):
        setattr(other, name, getattr(one, name))
        setattr(plainly, name, getattr(plain, name))
    want = [hosts.called(plain, "wan"), hosts.called(plainly, "wan")]
    cap = sum(s.nbytes(model) for model in hosts.models(one).values()) + s.nbytes(other.transformer) // 4
    first = offload(one, cap, device=card.NAME)
    second = offload(other)
    assert second.runtimes["vae"] is first.runtimes["vae"]
    for _ in range(2):
        assert s.same(hosts.called(one, "wan"), want[0]) and s.same(hosts.called(other, "wan"), want[1])
    assert first.runtimes["vae"].session.target.core.residency()["peak"] <= cap
    for _ in range(2):
        first.shutdown()
    assert first.runtimes["transformer"].mode == "shutdown" != first.runtimes["vae"].mode
    assert s.same(hosts.called(other, "wan"), want[1])
    second.shutdown()
    assert {runtime.mode for runtime in (*first.runtimes.values(), *second.runtimes.values())} == {"shutdown"}


def test_240_pipelines_with_caps_of_their_own_have_no_third_between_them():
    pipes = [hosts.made("wan", seed=seed) for seed in range(3)]
    pipes[2].vae, pipes[2].transformer = pipes[0].vae, pipes[1].transformer
    cap = sum(s.nbytes(model) for model in hosts.models(pipes[0]).values())
    with offload(pipes[0], cap, device=card.NAME), offload(pipes[1], cap, device=card.NAME):
        with pytest.raises(stagehand.StagehandError, match="vae, transformer|transformer, vae"):
            offload(pipes[2])
        assert pipes[2].text_encoder.__dict__.get("_stagehand_layer_runtime") is None


@pytest.mark.parametrize("kind", KINDS if s.FULL else ("wan22",))
def test_240_an_offloaded_pipeline_is_saved_as_a_plain_one(kind, tmp_path):
    with offloaded_pair(kind) as (pipe, plain):
        assert s.same(hosts.called(pipe, kind), hosts.called(plain, kind))
        pipe.save_pretrained(tmp_path)
        assert s.same(hosts.called(pipe, kind), hosts.called(plain, kind))
    again = type(pipe).from_pretrained(tmp_path, local_files_only=True)
    again.set_progress_bar_config(disable=True)
    assert s.same(hosts.called(aligned(again), kind), hosts.called(plain, kind))


@pytest.mark.parametrize("kind", ("sdxl", "sd") if s.FULL else ("sdxl",))
def test_240_an_image_adapter_comes_while_the_pipeline_is_offloaded_and_goes(kind):
    """Its encoder is a new model of the pipeline, which is offloaded behind the others."""
    import numpy
    from PIL import Image

    picture = Image.fromarray((numpy.arange(32 * 32 * 3).reshape(32, 32, 3) % 251).astype("uint8"))
    with offloaded_pair(kind, spare=900_000) as (pipe, plain):
        assert s.same(hosts.called(pipe, kind), hosts.called(plain, kind))
        for one in (pipe, plain):
            ip_adapter(one)
        with offload(pipe) as joined:
            for scale in (0.7, 0.2):
                for one in (pipe, plain):
                    one.set_ip_adapter_scale(scale)
                assert s.same(*(hosts.called(one, kind, ip_adapter_image=picture) for one in (pipe, plain)))
            assert joined.runtimes["image_encoder"].stats["steps"] > 0
            for one in (pipe, plain):
                one.unload_ip_adapter()
            assert s.same(hosts.called(pipe, kind), hosts.called(plain, kind))
        assert s.same(hosts.called(pipe, kind), hosts.called(plain, kind))
