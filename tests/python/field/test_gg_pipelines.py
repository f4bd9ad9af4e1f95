"""Field cases GG: what people do with a pipeline of diffusers that is offloaded below a cap (240)."""

from __future__ import annotations

import contextlib
import os

import card
import hosts
import pytest
import support as s
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from stagehand.integrations.diffusers import offload  # noqa: E402

KINDS = s.thinned(["controlled", "flux", "sdxl", "sd3", "qwen", "ltx", "wan", "sd"], 2)


@pytest.fixture(autouse=True)
def one_thread():
    with s.threads(1):
        yield


def aligned(pipe):
    for name, model in hosts.models(pipe).items():
        setattr(pipe, name, s.aligned_copy(model))
    return pipe


def cap_of(pipe) -> int:
    """Less than the models take, and more than the largest needs."""
    sizes = [s.nbytes(model) for model in hosts.models(pipe).values()]
    return max(int(0.8 * sum(sizes)), max(sizes))


@contextlib.contextmanager
def offloaded_pair(kind, change=lambda pipe: None, before=lambda pipe: None, spare=0):
    """(offloaded pipeline, plain one). change: is made to both, to the first one while it is offloaded; before: to
    both, before."""
    pipe, plain = hosts.made(kind), aligned(hosts.made(kind))
    for one in (pipe, plain):
        before(one)
    cap = cap_of(pipe) + spare
    with offload(pipe, cap, device=card.NAME) as offloaded:
        for one in (pipe, plain):
            change(one)
        yield pipe, plain
        assert sum(runtime.stats["h2d_bytes"] for runtime in offloaded.runtimes.values()) > 0
        assert offloaded.runtimes["vae"].session.target.core.residency()["peak"] <= cap


@pytest.mark.parametrize("kind", KINDS)
def test_240_a_pipeline_below_a_cap_gives_the_plain_ones_picture(kind):
    with offloaded_pair(kind) as (pipe, plain):
        want = hosts.called(plain, kind, steps=3)
        for _ in range(2):
            assert s.same(hosts.called(pipe, kind, steps=3), want)
        assert s.same(hosts.called(pipe, kind, steps=4), hosts.called(plain, kind, steps=4))


def tiled(pipe):
    pipe.vae.enable_tiling()
    pipe.vae.enable_slicing()


def other_scheduler(name, **options):
    def change(pipe):
        import diffusers

        pipe.scheduler = getattr(diffusers, name).from_config(pipe.scheduler.config, **options)

    return change


def compiled(pipe):
    pipe.transformer.compile_repeated_blocks(backend="eager", fullgraph=False)


CHANGES = {
    "tiling and slicing": ("flux", tiled), "DPM-Solver": ("sd", other_scheduler("DPMSolverMultistepScheduler")),
    "compiled blocks": ("flux", compiled)}
if s.FULL:  # schedulers once more
    CHANGES |= {
        "Euler ancestral": ("sd", other_scheduler("EulerAncestralDiscreteScheduler")),
        "another shift": ("flux", other_scheduler("FlowMatchEulerDiscreteScheduler", shift=2.0))}


@pytest.mark.parametrize("name", CHANGES)
def test_240_a_pipeline_is_changed_while_it_is_offloaded(name):
    kind, change = CHANGES[name]
    try:
        with offloaded_pair(kind, change) as (pipe, plain):
            for _ in range(2):
                torch.manual_seed(0)
                got = hosts.called(pipe, kind, steps=3)
                torch.manual_seed(0)
                assert s.same(got, hosts.called(plain, kind, steps=3))
    finally:
        torch.compiler.reset()


def cast(pipe):
    pipe.transformer.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)


@pytest.mark.parametrize("when", ["before", "change"])
def test_240_layerwise_casting_before_and_after_offloading(when):
    with offloaded_pair("flux", **{when: cast}) as (pipe, plain):
        for _ in range(2):
            assert s.same(hosts.called(pipe, "flux"), hosts.called(plain, "flux"))


def test_240_callbacks_of_steps_and_a_stop_in_the_middle():
    def stepped(pipe):
        seen = []

        def callback(pipe, step, time, values):
            seen.append(values["latents"].sum())
            pipe._interrupt = step == 1
            return {"latents": values["latents"] * 0.9}

        out = hosts.called(pipe, "flux", steps=4, callback_on_step_end=callback)
        return torch.cat([out.flatten(), torch.stack(seen)])

    with offloaded_pair("flux") as (pipe, plain):
        for _ in range(2):
            assert s.same(stepped(pipe), stepped(plain))
        assert s.same(hosts.called(pipe, "flux"), hosts.called(plain, "flux"))


def test_240_adapters_of_an_offloaded_pipeline_come_switch_fuse_and_go():
    pytest.importorskip("peft", reason="peft is not installed")
    files, pictures = [hosts.lora("flux", seed) for seed in (1, 2)], []
    with offloaded_pair("flux", spare=300_000) as (pipe, plain):

        def both(do):
            for one in (pipe, plain):
                do(one)
            pictures.append(hosts.called(pipe, "flux"))
            assert s.same(pictures[-1], hosts.called(plain, "flux")), len(pictures)

        both(lambda one: None)
        both(lambda one: one.load_lora_weights(dict(files[0]), adapter_name="a"))
        both(lambda one: one.load_lora_weights(dict(files[1]), adapter_name="b"))
        both(lambda one: one.set_adapters("a"))
        both(lambda one: one.set_adapters(["a", "b"], [0.3, 0.8]))
        both(lambda one: one.disable_lora())
        both(lambda one: one.enable_lora())
        both(lambda one: one.fuse_lora(components=["transformer"]))
        both(lambda one: one.unfuse_lora(components=["transformer"]))
        both(lambda one: one.delete_adapters("a"))
        both(lambda one: one.unload_lora_weights())
        assert s.same(pictures[0], pictures[5])
        assert torch.allclose(pictures[0], pictures[-1], atol=1e-3)  # fusing and back rounds
        assert len({picture.sum().item() for picture in pictures[:5]}) == 4 and s.same(pictures[1], pictures[3])


def ip_adapter(pipe):
    """An image encoder, and attention processors that look at what it says of a picture."""
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModelWithProjection

    torch.manual_seed(3)
    across = pipe.unet.config.cross_attention_dim
    pipe.register_modules(
        image_encoder=CLIPVisionModelWithProjection(CLIPVisionConfig(
            hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4, projection_dim=32,
            image_size=32, patch_size=8)).eval().to(pipe.unet.device),
        feature_extractor=CLIPImageProcessor(crop_size=32, size=32))
    state, number = {}, 1
    for name in pipe.unet.attn_processors:
        if "attn2" in name:
            width = IPAdapterAttnProcessor2_0(hidden_size=_width(pipe.unet, name), cross_attention_dim=across)
            for key in ("to_k_ip", "to_v_ip"):
                state[f"{number}.{key}.weight"] = getattr(width, key)[0].weight.detach()
            number += 2
    projection = {"proj.weight": torch.randn(4 * across, 32) * 0.1, "proj.bias": torch.zeros(4 * across),
                  "norm.weight": torch.ones(across), "norm.bias": torch.zeros(across)}
    pipe.unet._load_ip_adapter_weights([{"image_proj": projection, "ip_adapter": state}])
    pipe.set_ip_adapter_scale(0.7)


def _width(unet, name: str) -> int:
    widths = unet.config.block_out_channels
    if name.startswith("mid_block"):
        return widths[-1]
    number = int(name.split(".")[1])
    return (list(reversed(widths)) if name.startswith("up") else widths)[number]


def test_240_an_ip_adapter_looks_at_a_picture():
    import numpy
    from PIL import Image

    picture = Image.fromarray((numpy.arange(32 * 32 * 3).reshape(32, 32, 3) % 251).astype("uint8"))
    with offloaded_pair("sd", before=ip_adapter) as (pipe, plain):
        got = [hosts.called(pipe, "sd", ip_adapter_image=picture) for _ in range(2)]
        want = hosts.called(plain, "sd", ip_adapter_image=picture)
        assert s.same(got[0], want) and s.same(got[1], want)
        plain.set_ip_adapter_scale(0.0)
        assert not s.same(hosts.called(plain, "sd", ip_adapter_image=picture), want)


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc/self/maps")
def test_240_a_pipeline_of_mapped_files_lets_go_of_them_when_it_is_offloaded(tmp_path):
    """from_pretrained maps safetensors files: their pages would be a second copy in RAM."""
    import gc

    def mapped() -> int:
        with open("/proc/self/maps") as lines:
            return sum(str(tmp_path) in line for line in lines)

    plain = aligned(hosts.made("flux"))
    hosts.made("flux").save_pretrained(tmp_path)
    pipe = type(plain).from_pretrained(tmp_path, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    assert mapped() > 0
    with offload(pipe, cap_of(pipe), device=card.NAME):
        gc.collect()
        assert mapped() == 0
        assert s.same(hosts.called(pipe, "flux"), hosts.called(plain, "flux"))
