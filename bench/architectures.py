"""Real architectures from configurations, nothing downloaded: a diffusion transformer in the manner of Flux (two
streams, then one), a decoder in the manner of Llama that generates with a KV cache (transformers), and a UNet with
convolutions.

Each is called with one tensor, so that inference.py can run it as its own models: `inputs` makes it. `passes`: how
often a call goes over the weights.
"""

from __future__ import annotations

import inspect

import torch
import torch.nn as nn
import torch.nn.functional as F

GENERATED = 8  # tokens after the prompt
TEXT = 256  # tokens of text beside the image's


def _attend(q, k, v, heads: int):
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class _Modulated(nn.Module):
    """Scale, shift and gate from the conditioning vector, as adaptive layer norms have them."""

    def __init__(self, hidden: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.lin = nn.Linear(hidden, count * hidden)

    def forward(self, vec):
        return self.lin(F.silu(vec)).unsqueeze(1).chunk(self.count, -1)


def _shifted(x, shift, scale):
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:]), 1 + scale)


class _Stream(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.mod = _Modulated(hidden, 6)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.proj = nn.Linear(hidden, hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)


class DoubleBlock(nn.Module):
    """Image and text each with weights of their own, and one attention over both."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.img, self.txt = _Stream(hidden), _Stream(hidden)

    def forward(self, img, txt, vec):
        mods = [stream.mod(vec) for stream in (self.txt, self.img)]
        parts = [stream.qkv(_shifted(x, mod[0], mod[1])).chunk(3, -1)
                 for stream, x, mod in ((self.txt, txt, mods[0]), (self.img, img, mods[1]))]
        both = _attend(*(torch.cat([t, i], 1) for t, i in zip(*parts)), self.heads)
        out = []
        for stream, x, mod, a in ((self.txt, txt, mods[0], both[:, : txt.shape[1]]),
                                  (self.img, img, mods[1], both[:, txt.shape[1]:])):
            x = x + mod[2] * stream.proj(a)
            out.append(x + mod[5] * stream.down(F.gelu(stream.up(_shifted(x, mod[3], mod[4])), approximate="tanh")))
        return out[1], out[0]


class SingleBlock(nn.Module):
    """Attention and MLP beside each other, in two large products."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.hidden = heads, hidden
        self.mod = _Modulated(hidden, 3)
        self.first = nn.Linear(hidden, 7 * hidden)
        self.second = nn.Linear(5 * hidden, hidden)

    def forward(self, x, vec):
        shift, scale, gate = self.mod(vec)
        qkv, mlp = self.first(_shifted(x, shift, scale)).split([3 * self.hidden, 4 * self.hidden], -1)
        a = _attend(*qkv.chunk(3, -1), self.heads)
        return x + gate * self.second(torch.cat([a, F.gelu(mlp, approximate="tanh")], -1))


class DiT(nn.Module):
    """blocks: of two streams; twice as many of one. Called with the image's tokens, [1, tokens, hidden]."""

    passes = 1

    def __init__(self, blocks: int, hidden: int) -> None:
        super().__init__()
        heads = max(1, hidden // 128)
        self.double_blocks = nn.ModuleList(DoubleBlock(hidden, heads) for _ in range(blocks))
        self.single_blocks = nn.ModuleList(SingleBlock(hidden, heads) for _ in range(2 * blocks))
        self.time = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, hidden))
        self.final = nn.Linear(hidden, hidden)

    def forward(self, img):
        txt = img[:, :TEXT].flip(1) * 0.5
        vec = self.time(img.mean(1))
        for block in self.double_blocks:
            img, txt = block(img, txt, vec)
        x = torch.cat([txt, img], 1)
        for block in self.single_blocks:
            x = block(x, vec)
        return self.final(x[:, txt.shape[1]:])

    @staticmethod
    def inputs(tokens: int, hidden: int):
        return torch.randn(1, tokens, hidden)


class Llama(nn.Module):
    """Called with a prompt, [1, tokens]: one pass over it that fills a KV cache, and one for each token that is
    generated. Returns the logits of each."""

    passes = 1 + GENERATED
    vocabulary = 32000

    def __init__(self, blocks: int, hidden: int) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        heads = max(2, hidden // 128)
        self.model = LlamaForCausalLM(LlamaConfig(
            vocab_size=min(self.vocabulary, 64 * hidden), hidden_size=hidden, intermediate_size=hidden * 11 // 4,
            num_hidden_layers=blocks, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4),
            max_position_embeddings=32768, pad_token_id=None, bos_token_id=None, eos_token_id=None))
        names = inspect.signature(self.model.forward).parameters
        self.cache = "cache" if "cache" in names else "past_key_values"  # renamed in transformers 5

    def forward(self, ids):
        found, cache = [], None
        for _ in range(self.passes):
            out = self.model(input_ids=ids, **{self.cache: cache}, use_cache=True, logits_to_keep=1)
            cache, ids = out[self.cache], out.logits[:, -1:].argmax(-1)
            found.append(out.logits)
        return torch.cat(found, 1)

    @classmethod
    def inputs(cls, tokens: int, hidden: int):
        return torch.randint(0, min(cls.vocabulary, 64 * hidden), (1, tokens))


class _Res(nn.Module):
    def __init__(self, inputs: int, outputs: int, wide: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(min(32, inputs), inputs), nn.GroupNorm(min(32, outputs), outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.emb = nn.Linear(wide, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x, vec):
        h = self.conv1(F.silu(self.norm1(x))) + self.emb(F.silu(vec))[:, :, None, None]
        return self.skip(x) + self.conv2(F.silu(self.norm2(h)))


class _Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = max(1, width // 64)
        self.norm = nn.GroupNorm(min(32, width), width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm(x).flatten(2).transpose(1, 2)
        h = h + self.proj(_attend(*self.qkv(h).chunk(3, -1), self.heads))
        h = h + self.down(F.gelu(self.up(F.layer_norm(h, h.shape[-1:]))))
        return x + h.transpose(1, 2).unflatten(2, x.shape[2:])


class UNet(nn.Module):
    """blocks: residual blocks at each of three levels of width hidden, 2 hidden, 4 hidden. Called with [1, 4, side,
    side]."""

    passes = 1

    def __init__(self, blocks: int, hidden: int) -> None:
        super().__init__()
        widths, wide = [hidden, 2 * hidden, 4 * hidden], 4 * hidden
        self.inp = nn.Conv2d(4, hidden, 3, padding=1)
        self.time = nn.Sequential(nn.Linear(16, wide), nn.SiLU(), nn.Linear(wide, wide))
        self.down, self.up, self.shrink, self.grow = (nn.ModuleList() for _ in range(4))
        before, skips = hidden, []
        for level, width in enumerate(widths):
            stage = nn.ModuleList()
            for _ in range(blocks):
                stage.append(nn.ModuleList([_Res(before, width, wide), _Attention(width) if level else nn.Identity()]))
                before = width
                skips.append(width)
            self.down.append(stage)
            self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1) if level < 2 else nn.Identity())
        self.mid = nn.ModuleList([_Res(before, before, wide), _Attention(before), _Res(before, before, wide)])
        for level, width in reversed(list(enumerate(widths))):
            stage = nn.ModuleList()
            for _ in range(blocks):
                stage.append(nn.ModuleList([_Res(before + skips.pop(), width, wide),
                                            _Attention(width) if level else nn.Identity()]))
                before = width
            self.up.append(stage)
            self.grow.append(nn.Conv2d(width, width, 3, padding=1) if level else nn.Identity())
        self.out = nn.Conv2d(hidden, 4, 3, padding=1)

    def forward(self, x):
        vec = self.time(x.flatten(1)[:, :16])
        x, kept = self.inp(x), []
        for stage, shrink in zip(self.down, self.shrink):
            for res, attention in stage:
                x = attention(res(x, vec))
                kept.append(x)
            x = shrink(x)
        x = self.mid[2](self.mid[1](self.mid[0](x, vec)), vec)
        for i, (stage, grow) in enumerate(zip(self.up, self.grow)):
            for res, attention in stage:
                x = attention(res(torch.cat([x, kept.pop()], 1), vec))
            if i < 2:
                x = grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))
        return self.out(x)

    @staticmethod
    def inputs(side: int, hidden: int):
        return torch.randn(1, 4, side, side)


ARCHITECTURES = {"dit": DiT, "llama": Llama, "unet": UNet}


def build(name: str, blocks: int, hidden: int, on: torch.device | str = "cpu") -> nn.Module:
    """On the CPU in bf16, frozen, with weights from the generator as it stands: small ones, so that values stay in
    range. `on`: where they are drawn; a CPU takes minutes for what a card does in a second."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(on):
            model = ARCHITECTURES[name](blocks, hidden).cpu()
    finally:
        torch.set_default_dtype(before)
    return model.eval().requires_grad_(False)
