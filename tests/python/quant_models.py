"""Models in quantised files: the bytes written from the description (quant_files.py), the values by the library's
decoder, which test_quant_read.py holds to the description."""

import copy

import numpy as np
import quant_files as qf
import torch
from file_support import SIZES, tensor_bytes
from support import aligned_copy
from torch import nn

from stagehand import _core

FOUR_BITS = ("svdquant", "svdquant-smooth", "hybrid", "v3-int4", "v3-nvfp4")
PACKED = ("v1", "v2", "v2-zeros") + FOUR_BITS  # what the device expands from the file
DECODED = ("svdquant-fine",)  # groups of 8 inputs
FORMS = PACKED + DECODED


def plain(tensor):
    """A tensor as quant_files has them, of any rank."""
    return SIZES[tensor.dtype], list(tensor.shape), tensor_bytes(tensor)


def layers_of(model, leave=()):
    """{name: module} of what is quantised."""
    return {name: module for name, module in model.named_modules()
            if isinstance(module, (nn.Linear, nn.Conv2d)) and "weight" in module._parameters and name not in leave}


def rest_of(model, layers, without=()):
    """Tensors of the model that are part of no layer, as they are."""
    taken = {f"{name}.{key}" for name in layers for key in ("weight", "bias")} | set(without)
    return {name: plain(tensor) for name, tensor in model.state_dict().items() if name not in taken}


def _int8(model, layers, rng, form):
    out = {}
    for name, module in layers.items():
        w = module.weight.detach().float().reshape(module.weight.shape[0], -1).numpy()
        q, s = qf.quantise_int8(w, 1 if form == "v2-narrow" else 64)
        zero = np.zeros(len(w), np.float32)
        if form == "v2-zeros":
            zero[::2] = rng.uniform(-1, 1, len(zero[::2]))
        tensors = {"qweight": q, "scale": s, "zero_point": zero}
        if module.bias is not None:
            tensors["bias"] = module.bias.detach().float().numpy()
        out[name] = (tensors, w.shape[1])
    return out


def _narrow(model, layers, rng, form, rank):
    """Layers of four bits: {base: tensors}, {key: (out, in, rank)}."""
    found, shapes = {}, {}
    for base, module in layers.items():
        rows, columns = module.weight.shape
        groups = {"svdquant-fine": columns // 8, "hybrid": 1}.get(form, columns // 64)
        q, scales, down, up = qf.random_int4(rng, rows, columns, groups, rank)
        tensors = {".lora_down": qf.tensor("BF16", down), ".lora_up": qf.tensor("BF16", up)}
        if form == "v3-nvfp4":
            codes = rng.integers(0, 16, (rows, columns))
            tiles = rng.integers(8, 0x7F, (rows, columns // 16)).astype(np.uint8)
            tensors[".nvq"] = qf.tensor("U8", codes[:, 0::2] | codes[:, 1::2] << 4)
            tensors[".nvs"] = qf.tensor("U8", qf.tile_scales(tiles))
            tensors[".nvg"] = qf.tensor("F32", [np.float32(1e-5)])
        else:
            codes = qf.pack_nibbles(q)
            tensors[".qweight"] = qf.tensor("U8", codes) if form == "v3-int4" else qf.tensor("I8", codes.view(np.int8))
            if form == "hybrid":
                tensors[".wscale"] = qf.tensor("BF16", scales[0])
            else:
                tensors[".wscales"] = qf.tensor("BF16", scales)
            if form == "svdquant-smooth":
                smooth = np.exp2(rng.uniform(-2, 2, columns)).astype(np.float32)
                tensors[".smooth"] = qf.tensor("BF16", qf.to_bf16(smooth))
            elif form.startswith("svdquant"):
                tensors[".smooth"] = qf.tensor("BF16", np.full(columns, 0x3F80))
        found[base], shapes[base + ".weight"] = tensors, (rows, columns, rank)
    return found, shapes


def _svd_manifest(form, shapes, rest):
    if form == "hybrid":
        return {"method": "svdquant_w4a4_hybrid", "rank": 32, "w4a16_rank": 32, "group": 64, "hadamard": "sylvester",
                "layers": {key: {"kind": "w4a4", "in": i, "out": o, "rank": r} for key, (o, i, r) in shapes.items()},
                "passthrough": list(rest)}
    group = 8 if form == "svdquant-fine" else 64
    return {"method": "svdquant_int4", "quant_bits": 4, "rank": 32, "group": group,
            "quantized": {key: {"out": o, "in": i, "rank": r, "group": group} for key, (o, i, r) in shapes.items()},
            "passthrough": list(rest)}


def write(folder, model, form, leave=(), without=(), seed=3, rank=32):
    """The model's Linear and convolution weights in `form`, but for the modules in `leave`; everything else beside them
    (v1 has no room for it) and the names in `without`. Returns the path."""
    rng, layers = np.random.default_rng(seed), layers_of(model, leave)
    if form == "v1":
        path = folder / "model.fpk"
        qf.write_zip(path, qf.v1_members(qf.v1_object(_int8(model, layers, rng, form))))
        return path
    rest = rest_of(model, layers, without)
    if form.startswith("v2"):
        change = (lambda manifest, _: [e.update(pad_k=1) for e in manifest["layers"]]) if form == "v2-narrow" else None
        return qf.write_v2(folder, _int8(model, layers, rng, form), change, rest)
    found, shapes = _narrow(model, layers, rng, form, rank)
    tensors = {base + part: data for base, parts in found.items() for part, data in parts.items()}
    biases = {f"{name}.bias": plain(module.bias) for name, module in layers.items() if module.bias is not None}
    if form.startswith("v3"):
        return qf.write_v3(folder, [tensors, {**rest, **biases}], shapes,
                           "squareq_w4_v1" if form == "v3-int4" else "squareq_nvfp4_v1")
    for base, module in layers.items():
        if module.bias is not None:
            tensors[base + ".bias"] = plain(module.bias.detach().bfloat16())
    path = folder / "model.safetensors"
    qf.write_safetensors(path, {**tensors, **rest})
    (folder / "model.manifest.json").write_text(qf.json.dumps(_svd_manifest(form, shapes, rest)))
    return path


def resident(model, path, takes_from_host=True):
    """An aligned copy of the model that holds what the file at `path` decodes to, row by row whatever it had."""
    ref, quant = copy.deepcopy(model), _core.QuantFile(path)
    checkpoint = quant.checkpoint()
    tensors = {entry[0]: entry for entry in checkpoint.tensors()}
    modules = dict(ref.named_modules())
    for layer in quant.layers():
        module = modules[layer["name"]]
        module.weight.data = torch.empty(module.weight.shape, dtype=module.weight.dtype)
        quant.decode(layer["name"], SIZES[module.weight.dtype], module.weight.data_ptr())
        if "bias" in layer["parts"]:
            _, dtype, shape, file, offset, nbytes = tensors[layer["parts"]["bias"]]
            stored = torch.empty(shape, dtype=next(t for t, name in SIZES.items() if name == dtype))
            checkpoint.read(file, offset, nbytes, stored.data_ptr())
            with torch.no_grad():
                module.bias.copy_(stored)
    checkpoint.close()
    quant.close()
    return aligned_copy(ref, takes_from_host)


class Shown(nn.Linear):
    """Shows the bytes of its weight instead of using it."""

    def forward(self, x):
        return self.weight.clone()


class Gallery(nn.Module):
    def __init__(self, shapes):
        super().__init__()
        self.layers = nn.ModuleList(Shown(columns, rows, bias=False) for rows, columns in shapes)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


# Several segments, rows that are no multiple of 256, and for the hybrid every size of H that has a tile of its own.
SHAPES = [(900, 256), (1026, 512), (257, 1024), (640, 768)]
HYBRID_SHAPES = [(200, 16), (300, 256), (290, 512), (270, 1024), (260, 2048), (259, 4096), (258, 8192)]


def differing_weights(folder, form, dtype, device, rank=8, passes=3):
    """Streams layers of `form` on `device`: the names of those of which any bit is not the decoder's, runtime.quantised
    and the figures."""
    import stagehand

    shapes = HYBRID_SHAPES if form == "hybrid" else SHAPES
    torch.manual_seed(0)
    model = Gallery(shapes).to(dtype).requires_grad_(False)
    path = write(folder, model, form, rank=rank)
    want = resident(model, path).state_dict()
    budget = sum(t.numel() * t.element_size() for t in want.values()) * 3 // 4 + (2 << 20)  # and stages
    model = stagehand.load(lambda: Gallery(shapes).to(dtype), path, vram_budget=budget, device=device)
    runtime, wrong, bits = model._stagehand_layer_runtime, set(), torch.int32 if dtype is torch.float32 else torch.int16
    with torch.no_grad():
        for _ in range(passes):
            for (name, value), got in zip(want.items(), model(torch.zeros(1))):
                if not torch.equal(value.cpu().view(bits), got.cpu().view(bits)):
                    wrong.add(name)
    told, stats = runtime.quantised, runtime.stats
    runtime.shutdown()
    return wrong, told, stats
