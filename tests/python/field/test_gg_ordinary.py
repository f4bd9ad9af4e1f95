"""Field cases GG: what an ordinary computer has: RAM for half of the weights, few pinned bytes (20)."""

from __future__ import annotations

import json

import card
import children
import hosts
import pytest
import support as s
import torch

pytest.importorskip("diffusers", reason="diffusers is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

MIB = 1 << 20

# A computer with 32 GB of RAM and a card of 8 GB runs the two transformers of Wan 2.2 (28.6 GB each in bfloat16) and
# its text encoder (11.4 GB): the same ratios, a MiB for 0.4 GB. Of each model 6 GB are kept in RAM, so that 14 GB are
# left to all else.
RAM, VRAM, KEPT, EXPERT, ENCODER = (int(gigabytes * MIB / 0.4) for gigabytes in (32, 8, 6, 28.6, 11.4))

SCRIPT = """
import gc, json, os, re, sys, threading
sys.path[:0] = [{tests!r}]
import hosts, support
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel
torch.set_num_threads(1)
folder, kept, vram = {folder!r}, {kept}, {vram}

def anonymous():
    with open("/proc/self/status") as file:
        return int(re.search(r"RssAnon:\\s*(\\d+) kB", file.read())[1]) << 10

def loaded(name, build):
    return stagehand.load(build, os.path.join(folder, name), vram_budget=vram, ram_budget=kept, device=device)

def expert(name):
    config = WanTransformer3DModel.load_config(folder, subfolder=name)
    return loaded(name, lambda: WanTransformer3DModel.from_config(config).eval())

hosts.called(hosts.made("wan22"), "wan22")  # imports much, once
gc.collect()
base, peak, ending = anonymous(), [0], threading.Event()

def watch():
    while not ending.wait(0.0005):
        peak[0] = max(peak[0], anonymous() - base)

thread = threading.Thread(target=watch, daemon=True)
thread.start()
device = stagehand._core.Device("sim", memory_bytes=vram)
config = UMT5Config.from_pretrained(folder, subfolder="text_encoder", local_files_only=True)
encoder = loaded("text_encoder", lambda: UMT5EncoderModel(config).eval())
experts = {{name: expert(name) for name in ("transformer", "transformer_2")}}
pipe = WanPipeline.from_pretrained(folder, local_files_only=True, text_encoder=encoder, **experts)
pipe.set_progress_bar_config(disable=True)
stagehand.layer(pipe.vae, vram_budget=vram, device=device)
want = torch.load(os.path.join(folder, "want.pt"))
same = [support.same(hosts.called(pipe, "wan22", steps=4), want) for _ in range(2)]
ending.set()
thread.join()
parts = [encoder, pipe.transformer, pipe.transformer_2]
stats = [stagehand.runtime(part).stats for part in parts]
print(json.dumps([same, peak[0], [(one["ram_bytes"], one["file_bytes"], one["h2d_bytes"]) for one in stats],
                  device.residency()["peak"]]), flush=True)
os._exit(0)
"""


def large_wan22():
    """A pipeline of those sizes; its transformers are the only large part."""
    from diffusers import WanTransformer3DModel
    from transformers import UMT5Config, UMT5EncoderModel

    def transformer():
        return WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=8, attention_head_dim=48, in_channels=16, out_channels=16,
            text_dim=256, freq_dim=256, ffn_dim=1536, num_layers=7, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", rope_max_seq_len=32)

    pipe = hosts.made("wan22")
    torch.manual_seed(0)
    pipe.register_modules(
        transformer=transformer().eval(), transformer_2=transformer().eval(),
        text_encoder=UMT5EncoderModel(UMT5Config(vocab_size=32, d_model=256, d_kv=64, d_ff=1024, num_layers=7,
                                                 num_heads=4)).eval())
    return pipe


@card.simulated_only
@pytest.mark.alone
def test_20_two_transformers_of_wan_run_in_turn_with_ram_for_half_of_them(tmp_path):
    """Nothing has to be swapped: memory that no file backs is less than the RAM. The simulated device's own memory and
    its mirror lie in this process and are not that computer's."""
    pipe = large_wan22()
    sizes = {name: s.nbytes(model) for name, model in hosts.models(pipe).items()}
    assert min(sizes["transformer"], sizes["transformer_2"]) > 0.9 * EXPERT and sizes["text_encoder"] > 0.9 * ENCODER
    pipe.save_pretrained(tmp_path, max_shard_size="8MB")
    for name, model in hosts.models(pipe).items():
        setattr(pipe, name, s.aligned_copy(model.requires_grad_(False)))
    torch.save(hosts.called(pipe, "wan22", steps=4), tmp_path / "want.pt")
    done = children.run(SCRIPT.format(tests=str(s.__file__).rpartition("/")[0], folder=str(tmp_path), kept=KEPT,
                                      vram=VRAM))
    assert done.status == 0, done.stderr
    same, peak, parts, on_device = json.loads(done.stdout.splitlines()[-1])
    assert all(same) and on_device <= VRAM
    assert peak < RAM + 2 * VRAM < sum(sizes.values())
    for kept, in_files, copied in parts:
        assert KEPT // 2 < kept <= KEPT < in_files < copied
