#!/usr/bin/env python3
"""Four models of a picture's pipeline under one cap that holds half of their weights.

    1  a text encoder reads the prompt; meanwhile the denoiser is reserved, and its weights come
    2  the denoiser makes a small latent picture
    3  an upscaler, as a guest of the denoiser, makes it larger, and leaves
    4  the denoiser refines the large one; a VAE, as a guest, decodes it

Models are those of transformers and diffusers, small and with random weights. The results are compared with those of
the same models without Stagehand, bit for bit.

    examples/four_pass.py [--device cuda] [--cap 24MB]

Exit status: 0 when the pictures are equal and the device never held more than the cap, 1 when not.
"""

import argparse
import copy
import sys

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel

import stagehand

STEPS, SIDE, WIDTH = 4, 8, 128
SIM_LINK = 2_000_000_000  # bytes per second


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cuda, cuda:1 or sim (default: cuda where there is one, else sim)")
    parser.add_argument("--cap", help="of the device for all models together (default: half of their weights)")
    return parser.parse_args()


def unet(channels: int) -> torch.nn.Module:
    return UNet2DConditionModel(
        in_channels=channels, out_channels=4, block_out_channels=(WIDTH, 2 * WIDTH), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=2 * WIDTH, attention_head_dim=8, norm_num_groups=8)


def make_models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    text = CLIPTextModel(CLIPTextConfig(vocab_size=1000, hidden_size=2 * WIDTH, intermediate_size=8 * WIDTH,
                                        num_hidden_layers=12, num_attention_heads=4, bos_token_id=1, eos_token_id=2))
    vae = AutoencoderKL(block_out_channels=(WIDTH, WIDTH), down_block_types=("DownEncoderBlock2D",) * 2,
                        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=8)
    models = {"text": text, "denoiser": unet(4), "upscaler": unet(4), "vae": vae}
    return {name: model.eval().requires_grad_(False) for name, model in models.items()}


def size_of(model: torch.nn.Module) -> int:
    return sum(param.nbytes for param in model.parameters())


def denoise(model, latent: torch.Tensor, prompt: torch.Tensor, steps: int) -> torch.Tensor:
    for step in reversed(range(steps)):
        latent = latent - 0.1 * model(latent, torch.tensor(step * 100), prompt, return_dict=False)[0]
    return latent


def enlarge(latent: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.interpolate(latent, scale_factor=2, mode="nearest")


def start(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 999, (1, 12), generator=generator)
    return ids.to(device), torch.randn(1, 4, SIDE, SIDE, generator=generator).to(device)


def plain_picture(models: dict, device: str) -> torch.Tensor:
    ids, latent = start(device)
    prompt = models["text"](ids).last_hidden_state
    latent = denoise(models["denoiser"], latent, prompt, STEPS)
    latent = denoise(models["upscaler"], enlarge(latent), prompt, 1)
    latent = denoise(models["denoiser"], latent, prompt, STEPS)
    return models["vae"].decode(latent).sample


def streamed_picture(models: dict, device: str, say) -> torch.Tensor:
    text, denoiser, upscaler, vae = map(stagehand.runtime, models.values())
    ids, latent = start(device)
    with text.keep_resident():
        denoiser.reserve_for_resident()  # its weights come while the text encoder works
        prompt = models["text"](ids).last_hidden_state
        say("text")
    latent = denoise(models["denoiser"], latent, prompt, STEPS)
    say("denoise")
    with denoiser.as_guest(upscaler):
        latent = denoise(models["upscaler"], enlarge(latent), prompt, 1)
        say("upscale")
    latent = denoise(models["denoiser"], latent, prompt, STEPS)
    say("refine")
    with denoiser.as_guest(vae):
        picture = models["vae"].decode(latent).sample
        say("decode")
    denoiser.release_reservation()
    return picture


def main() -> int:
    arguments = parse_arguments()
    name = arguments.device or ("cuda" if torch.cuda.is_available() else "sim")
    models = make_models()
    total = sum(map(size_of, models.values()))
    cap = stagehand.parse_size(arguments.cap) if arguments.cap else total // 2
    device = (stagehand.Device("sim", memory_bytes=cap, link_bytes_per_s=SIM_LINK) if name == "sim"
              else stagehand.Device(name, budget=cap))
    where = "cpu" if name == "sim" else name
    plain = {key: copy.deepcopy(model).to(where) for key, model in models.items()}
    for key, model in models.items():
        share = 0.6 if key == "denoiser" else 0.35  # of the cap: what is reserved, and what works beside it
        stagehand.layer(model, vram_budget=int(share * cap), device=device, inference_mode=True)
    most = 0

    def say(what: str) -> None:
        nonlocal most
        held = {key: stagehand.runtime(model).stats["device_bytes"] + stagehand.runtime(model).stats["reserved_bytes"]
                for key, model in models.items()}
        most = max(most, device.residency()["occupied"])
        print(f"{what:8} " + "  ".join(f"{key} {value / 1e6:6.2f} MB" for key, value in held.items()))

    print(f"weights {total / 1e6:.1f} MB, cap {cap / 1e6:.1f} MB on {name}")
    with torch.no_grad():
        picture, wanted = streamed_picture(models, where, say), plain_picture(plain, where)
    equal, within = torch.equal(picture.cpu(), wanted.cpu()), most <= cap
    print(f"{'ok   ' if equal else 'WRONG'}  the picture equals that of the plain models, bit for bit")
    print(f"{'ok   ' if within else 'WRONG'}  the device held {most / 1e6:.1f} MB at most")
    for model in models.values():
        stagehand.shutdown(model)
    return 0 if equal and within else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except stagehand.StagehandOOMError as error:
        sys.exit(f"four_pass: {error}")
