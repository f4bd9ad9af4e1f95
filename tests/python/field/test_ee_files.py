"""Field cases EE: files that are written while they are mapped, files that are no files, odd checkpoints."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pickle
import re
import socket
import stat
import struct

import children
import file_support as f
import numpy as np
import pytest
import safetensors
import safetensors.torch
import support as s
import torch
from torch import nn
from worlds import run

import stagehand
from stagehand import CheckpointError, InvalidStateTransitionError, StagehandError, TransferError, _core
from stagehand.modes import memoryconfig
from stagehand.errors import InvalidArgumentError
from stagehand.jsonlines import JsonLines

WIDE = 128


def net(n=4):
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(n)))


def saved(path, seed=0):
    torch.manual_seed(seed)
    f.save(path, net().state_dict())
    return path


def resident(path):
    model = net()
    model.load_state_dict(safetensors.torch.load_file(path))
    return model


def plain(path):
    return s.aligned_copy(resident(path))


def wrapped(path, how="load", budget=300_000, **options):
    """A model that streams from `path`."""
    device = s.device(budget)
    if how == "load":
        return stagehand.load(net, path, vram_budget=budget, device=device, **options)
    model = resident(path).requires_grad_(False)
    if how == "layer":
        return stagehand.layer(model, vram_budget=budget, device=device, source=path, **options)
    if how == "block":
        runtime = stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget),
                                             block_pattern=r"^\d+$", device=device)
        runtime.convert_registry_to_file_backed(path, **options)
        runtime.prepare()
        return model
    settings = {"mode": "layer", "vram_budget": budget, "source": str(path), **options}
    model.session = stagehand.session(model, {"memory": {"strategy": "stagehand", "stagehand": settings}},
                                      device=device)
    return model


def passes(model, path):
    x = torch.ones(2, WIDE)
    with torch.no_grad():
        return s.same(model(x), plain(path)(x))


def by_tofile(state, path):
    next(iter(state.values())).numpy().tofile(path)


def by_opening(state, path):
    with open(path, "wb") as file:
        pickle.dump({name: tensor.clone() for name, tensor in state.items()}, file)


def by_numpy(state, path):
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))


def by_descriptor(state, path):
    os.close(os.open(path, os.O_RDWR))


WRITERS = {
    "torch.save": lambda state, path: torch.save(state, path),
    "torch.save to Path": torch.save,
    "legacy": lambda state, path: torch.save(state, path, _use_new_zipfile_serialization=False),
    "tofile": by_tofile, "open": by_opening, "numpy": by_numpy, "os.open": by_descriptor,
    "truncate": lambda state, path: os.truncate(path, 100),
    "append": lambda state, path: open(path, "ab"),
    "write_bytes": lambda state, path: path.write_bytes(b"other"),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_237_a_mapped_file_is_not_written(tmp_path, writer):
    """The error comes before the first byte; the file, the model and its values are as before."""
    path = saved(tmp_path / "m.safetensors")
    content = path.read_bytes()
    model = wrapped(path)
    with pytest.raises(InvalidStateTransitionError, match=r"m\.safetensors is about to be written.*map=False"):
        WRITERS[writer](model.state_dict(), path)
    assert path.read_bytes() == content and passes(model, path)
    run(model).shutdown()
    with pytest.raises(InvalidStateTransitionError, match=r"m\.safetensors is about to be written"):
        WRITERS[writer](model.state_dict(), path)
    assert path.read_bytes() == content
    del model
    WRITERS[writer]({"a": torch.ones(3)}, path)


@pytest.mark.parametrize("replaces", [False, True])
def test_237_a_mapped_file_is_not_written_by_safetensors(tmp_path, monkeypatch, replaces):
    """Either kind of safetensors: one that writes in place is refused, one that renames another file goes on."""
    def written(tensors, filename, metadata=None):
        with open(tmp_path / "new", "wb") as file:
            file.write(b"{}")
        if replaces:
            os.replace(tmp_path / "new", filename)
        else:
            f.from_outside(filename, b"{}", size=0)

    monkeypatch.setattr(safetensors.torch, "serialize_file", written)
    path = saved(tmp_path / "m.safetensors")
    content, ref = path.read_bytes(), plain(path)
    model = wrapped(path)
    if replaces:
        safetensors.torch.save_file(model.state_dict(), path)
        assert path.read_bytes() == b"{}"
    else:
        with pytest.raises(InvalidStateTransitionError, match=r"m\.safetensors is about to be written.*map=False"):
            safetensors.torch.save_file(model.state_dict(), path)
        assert path.read_bytes() == content
    x = torch.ones(2, WIDE)
    with torch.no_grad():
        assert s.same(model(x), ref(x))
    run(model).shutdown()
    assert s.same(list(model.state_dict().values()), list(ref.state_dict().values()))


def test_237_the_safetensors_that_is_installed_saves_over_its_file_or_refuses(tmp_path):
    path = saved(tmp_path / "m.safetensors")
    ref = plain(path)
    model = wrapped(path)
    state = model.state_dict()
    with contextlib.suppress(InvalidStateTransitionError):
        safetensors.torch.save_file(state, path)
    assert passes(model, path) and s.same(list(state.values()), list(ref.state_dict().values()))
    run(model).shutdown()


@pytest.mark.parametrize("name", ["hard link", "symbolic link", "relative", "bytes"])
def test_237_another_name_of_the_file_is_the_file(tmp_path, name, monkeypatch):
    path = saved(tmp_path / "m.safetensors")
    content = path.read_bytes()
    other = tmp_path / "other.safetensors"
    if name == "hard link":
        os.link(path, other)
    elif name == "symbolic link":
        other.symlink_to(path)
    elif name == "relative":
        monkeypatch.chdir(tmp_path)
        other = "m.safetensors"
    else:
        other = os.fsencode(path)
    model = wrapped(path)
    with pytest.raises(InvalidStateTransitionError, match="is about to be written"):
        open(other, "wb")
    if name != "bytes":  # which torch.save does not take
        with pytest.raises(InvalidStateTransitionError, match="is about to be written"):
            torch.save(model.state_dict(), other)
    assert path.read_bytes() == content and passes(model, path)
    run(model).shutdown()


@pytest.mark.parametrize("how", ["load", "layer", "block", "session"])
def test_237_a_file_that_takes_its_place_is_safe(tmp_path, how):
    """os.replace(), and unlink() before a new file: the old file lives as long as its model."""
    path = saved(tmp_path / "m.safetensors")
    ref = plain(path)
    model = wrapped(path, how)
    safetensors.torch.save_file(model.state_dict(), tmp_path / "new")
    os.replace(tmp_path / "new", path)
    assert passes(model, path) and s.same(list(model.state_dict().values()), list(ref.state_dict().values()))
    path.unlink()
    torch.save({"a": torch.ones(3)}, path)
    x = torch.ones(2, WIDE)
    with torch.no_grad():
        assert s.same(model(x), ref(x))


@pytest.mark.parametrize("how", ["load", "layer", "block", "session"])
def test_237_without_a_mapping_the_file_may_be_written(tmp_path, how):
    """map=False: nothing is mapped, values at rest are read; to save over the file works, and what reads the model
    afterwards says that it changed."""
    path = saved(tmp_path / "m.safetensors")
    ref = plain(path)
    model = wrapped(path, how, map=False)
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()
    assert passes(model, path)
    state = model.state_dict()
    assert s.same(list(state.values()), list(ref.state_dict().values()))
    assert all(type(tensor) is torch.Tensor for tensor in state.values())
    (model.session if how == "session" else run(model)).shutdown()
    assert passes(model, path)
    f.save(path, state)
    assert passes(plain(path), path)
    with pytest.raises(TransferError, match=r"m\.safetensors: changed"), torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, WIDE))


def test_237_a_weight_of_a_file_that_is_not_mapped_says_that_it_cannot_be_written(tmp_path):
    path = saved(tmp_path / "m.safetensors")
    model = wrapped(path, map=False)
    with torch.no_grad(), pytest.raises(StagehandError, match=r"0\.weight was loaded with map=False.*cannot be"):
        model[0].weight.add_(1)
    assert passes(model, path)
    run(model).shutdown()
    with pytest.raises(TypeError, match="map must be True or False"):
        wrapped(path, map="no")


def test_237_trainable_weights_of_a_file_that_is_not_mapped_are_in_ram(tmp_path):
    path = saved(tmp_path / "m.safetensors")
    model = wrapped(path, budget=600_000, map=False, inference_mode=False)
    ref = plain(path)
    for net_ in (model, ref):
        optimizer = torch.optim.SGD(net_.parameters(), lr=0.1)
        for _ in range(3):
            net_(torch.ones(2, WIDE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    run(model).shutdown()
    assert s.same(list(model.state_dict().values()), list(ref.state_dict().values()))
    safetensors.torch.save_file(model.state_dict(), path)


LOST = """
import sys, threading
sys.path.insert(0, {field!r})
import test_ee_files as ee
path = {path!r}
model = ee.wrapped(path)
weight = model[2].weight
f = file_support
f.from_outside(path, size=4096)
def read():
    try:
        total = 0
        for _ in range(1000):
            total += weight.sum().item()
    except stagehand.TransferError as error:
        print("in", threading.current_thread().name, error, error.object)
    else:
        print("no error", total)
if {thread!r}:
    reader = threading.Thread(target=read, name="reader")
    reader.start()
    reader.join()
else:
    read()
assert torch.isnan(weight.sum())
try:
    for _ in range(100):
        weight.sum()
except stagehand.TransferError:
    pass
print("lives", flush=True)
"""


@pytest.mark.parametrize("thread", [False, True])
def test_237_a_file_that_another_process_cuts_off_is_an_error_and_no_end(tmp_path, thread):
    """A read of a page that is not there any more: an error that names the file, in the thread that read it."""
    path = saved(tmp_path / "m.safetensors")
    done = children.run(LOST.format(field=os.path.dirname(__file__), path=str(path), thread=thread))
    assert done.status == 0 and "lives" in done.stdout, (done.stdout, done.stderr)
    where = "reader" if thread else "MainThread"
    assert f"in {where} {path} was cut off" in done.stdout and "map=False" in done.stdout


def test_237_another_bus_error_ends_the_process_as_before(tmp_path):
    path, other = saved(tmp_path / "m.safetensors"), tmp_path / "other"
    other.write_bytes(bytes(8192))
    done = children.run(f"""
        import sys, mmap, os
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        import test_ee_files as ee
        model = ee.wrapped({str(path)!r})
        file = open({str(other)!r}, "r+b")
        seen = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        print(seen[5000])
    """)
    assert done.status == -7, done.stderr


ODD = ("fifo", "socket", "zeros", "null", "folder")


def odd_file(folder, kind):
    """What is no plain file."""
    path = folder / kind
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    else:
        return {"zeros": "/dev/zero", "null": "/dev/null"}[kind]
    return path


def opens_session(path):
    stagehand.session(net(), path)


def opens_runtime(telemetry):
    stagehand.layer(net(), vram_budget=300_000, device=s.device(300_000), telemetry=telemetry)


READERS = {
    "session": opens_session, "open_checkpoint": stagehand.open_checkpoint, "load": wrapped,
    "layer": lambda path: stagehand.layer(net(), source=path, inference_mode=True),
    "load_backend": lambda path: stagehand.load_backend(str(path)),
    "trace": lambda path: _core.Device(f"trace(file={path})+sim"),
    "telemetry": lambda path: opens_runtime(telemetry=path),
    "state": lambda path: stagehand.OffloadedAdamW([nn.Parameter(torch.ones(3))], state_path=path),
    "pack": lambda path: _core.pack(str(path), "/nowhere/out.json", "layer-index"),
    "unpack": lambda path: _core.unpack(str(path), "/nowhere/out.safetensors"),
    "verify": lambda path: _core.verify(str(path)),
}


@pytest.mark.parametrize("reader, kind", [(reader, kind) for reader in READERS for kind in ODD
                                          if (reader, kind) != ("state", "folder")])  # which state_path may be
def test_214_what_is_no_plain_file_is_refused_at_once(tmp_path, reader, kind):
    """No wait for the other end of a pipe, no read of a device; the error names the path."""
    path = odd_file(tmp_path, kind)
    with pytest.raises((StagehandError, OSError), match=re.escape(str(path))):
        READERS[reader](path)


def test_214_a_configuration_that_is_too_large_or_no_text_is_refused(tmp_path):
    path = tmp_path / "config.json"
    for content, match in ((b" " * (2 << 20), "more than"), (b"\xff\xfe\x00", "is not JSON"), (b"", "is not JSON"),
                           (b"[" * 100_000, "too deeply"), (b'{"memory": ' * 90_000, "too deeply")):
        path.write_bytes(content)
        with pytest.raises(InvalidArgumentError, match=f"config.json.*{match}"):
            stagehand.session(net(), path)


def raw(header, data=b""):
    """A safetensors file with this header: text, or an object."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def text_of(shape=b"[1]", begin=b"0", end=b"4", more=b"", name=b"a"):
    return (b'{"' + name + b'":{"dtype":"F32","shape":' + shape + b',"data_offsets":[' + begin + b"," + end + b"]"
            + more + b"}}")


FOUR, ONE = bytes(4), {"a": entry(0, 4, [1])}
BOTH = text_of()[:-1] + b"," + text_of()[1:]
ODD_FILES = {
    "good": raw(ONE, FOUR), "bytes behind": raw(ONE, FOUR + b"x"), "a line end behind": raw(ONE, FOUR + b"\n"),
    "a gap first": raw({"a": entry(4, 8, [1])}, bytes(8)),
    "a gap between": raw({"a": entry(0, 4, [1]), "b": entry(8, 12, [1])}, bytes(12)),
    "the same bytes": raw({"a": entry(0, 4, [1]), "b": entry(0, 4, [1])}, FOUR),
    "an overlap": raw({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, bytes(12)),
    "empty first": raw({"a": entry(0, 0, [0]), "b": entry(0, 4, [1])}, FOUR),
    "empty last": raw({"b": entry(0, 4, [1]), "a": entry(4, 4, [0])}, FOUR),
    "empty inside": raw({"b": entry(0, 8, [2]), "a": entry(4, 4, [0])}, bytes(8)),
    "not in order": raw({"b": entry(4, 8, [1]), "a": entry(0, 4, [1])}, bytes(8)),
    "no tensor": raw({}), "no tensor, bytes": raw({}, b"x"),
    "metadata": raw({"__metadata__": {"a": "b"}, **ONE}, FOUR), "metadata alone": raw({"__metadata__": {"a": "b"}}),
    "metadata, bytes": raw({"__metadata__": {"a": "b"}}, b"zz"),
    "metadata of numbers": raw({"__metadata__": {"a": 1}, **ONE}, FOUR),
    "metadata null": raw({"__metadata__": None, **ONE}, FOUR),
    "metadata a list": raw({"__metadata__": [], **ONE}, FOUR),
    "metadata of objects": raw({"__metadata__": {"a": {"b": "c"}}, **ONE}, FOUR),
    "metadata twice": raw(b'{"__metadata__":{},"__metadata__":{}}'),
    "a key of metadata twice": raw(b'{"__metadata__":{"x":"1","x":"2"}}'),
    "a list": raw([]), "a number": raw(b"1"), "null": raw(b"null"), "a name twice": raw(BOTH, FOUR),
    "a field twice": raw(text_of(more=b',"dtype":"F32"'), FOUR), "a field more": raw(text_of(more=b',"x":1'), FOUR),
    "no shape": raw({"a": {"dtype": "F32", "data_offsets": [0, 4]}}, FOUR),
    "no dtype": raw({"a": {"shape": [1], "data_offsets": [0, 4]}}, FOUR),
    "no offsets": raw({"a": {"dtype": "F32", "shape": [1]}}, FOUR),
    "shape of reals": raw(text_of(b"[1.0]"), FOUR), "shape of less than 0": raw(text_of(b"[-1]"), FOUR),
    "shape null": raw(text_of(b"null"), FOUR), "scalar": raw(text_of(b"[]"), FOUR), "1e0": raw(text_of(b"[1e0]"), FOUR),
    "shape of text": raw(text_of(b'["1"]'), FOUR), "offsets of reals": raw(text_of(begin=b"0.0"), FOUR),
    "three offsets": raw(text_of(end=b"4,4"), FOUR), "offsets turned": raw(text_of(begin=b"4", end=b"0"), FOUR),
    "another size": raw(text_of(b"[2]"), FOUR), "cut off": raw(text_of(b"[2]", end=b"8"), FOUR),
    "spaces before": raw(b"  " + text_of(), FOUR), "spaces behind": raw(text_of() + b"   ", FOUR),
    "NULs behind": raw(text_of() + b"\0\0", FOUR), "text behind": raw(text_of() + b"xx", FOUR),
    "a line end before": raw(b"\n" + text_of(), FOUR), "a mark of byte order": raw(b"\xef\xbb\xbf" + text_of(), FOUR),
    "no name": raw(text_of(name=b""), FOUR), "a name of letters": raw(text_of(name="\u00e4\u20ac".encode()), FOUR),
    "a NUL in a name": raw(text_of(name=b"a\\u0000b"), FOUR), "half a pair": raw(text_of(name=b"\\ud800"), FOUR),
    "no text": raw(text_of(name=b"\xff"), FOUR), "dtype a number": raw({"a": entry(0, 4, [1], 1)}, FOUR),
    "F4": raw({"a": entry(0, 4, [8], "F4")}, FOUR), "F4, a part of a byte": raw({"a": entry(0, 4, [7], "F4")}, FOUR),
    "F4, another size": raw({"a": entry(0, 4, [4], "F4")}, FOUR),
    "F6": raw({"a": entry(0, 3, [4], "F6_E2M3")}, bytes(3)),
    "the other F6": raw({"a": entry(0, 3, [4], "F6_E3M2")}, bytes(3)),
    "FNUZ": raw({"a": entry(0, 4, [4], "F8_E4M3FNUZ"), "b": entry(4, 8, [4], "F8_E5M2FNUZ")}, bytes(8)),
    "FNUZ, another size": raw({"a": entry(0, 4, [5], "F8_E4M3FNUZ")}, FOUR),
    "E8M0": raw({"a": entry(0, 4, [4], "F8_E8M0")}, FOUR), "C64": raw({"a": entry(0, 8, [1], "C64")}, bytes(8)),
    "no such dtype": raw({"a": entry(0, 4, [4], "Q4_K")}, FOUR),
    "dtype in small letters": raw({"a": entry(0, 4, [1], "f32")}, FOUR),
    "no such dtype beside one": raw({"a": entry(0, 4, [4], "Q4_K"), "b": entry(4, 8, [1])}, bytes(8)),
    "a huge product": raw({"a": entry(0, 0, [2**62, 2**62, 0])}), "2^64": raw(text_of(b"[18446744073709551616]"), FOUR),
    "an overflow": raw({"a": entry(0, 4, [2**62, 8])}, FOUR), "20 dimensions": raw({"a": entry(0, 4, [1] * 20)}, FOUR),
    "offsets of 2^63": raw(text_of(begin=b"9223372036854775808", end=b"9223372036854775812"), FOUR),
    "nothing": b"", "7 bytes": b"1234567", "no header": bytes(8), "half a header": struct.pack("<Q", 2) + b"{",
    "a length of 2^40": struct.pack("<Q", 1 << 40) + b"{}", "a long header": struct.pack("<Q", 100_000_001) + b"{}",
    "a comment": raw(b"{/*x*/}"), "NaN": raw(text_of(more=b',"x":NaN'), FOUR), "a tensor null": raw(b'{"a":null}'),
    "a tensor a list": raw(b'{"a":["F32",[1],[0,4]]}', FOUR), "deep": raw(b'{"a":' + b"[" * 3000 + b"]" * 3000 + b"}"),
}
# Stricter than the format's own reader, and why.
STRICTER = {
    "a name twice": "one of the two would be taken without a word",
    "a key of metadata twice": "as for names",
    "a NUL in a name": "names are C strings",
    "20 dimensions": "STH_MAX_RANK",
    "a tensor a list": "the format says an object",
}
# Less strict: the tensor alone is refused, when it is asked for.
LATER = {"no such dtype", "no such dtype beside one", "dtype in small letters"}


@pytest.mark.parametrize("case", ODD_FILES)
def test_218_a_file_is_taken_as_the_formats_own_reader_takes_it(tmp_path, case):
    path = tmp_path / "odd.safetensors"
    path.write_bytes(ODD_FILES[case])
    try:
        with safetensors.safe_open(path, "pt") as file:
            theirs = sorted(file.keys())
    except safetensors.SafetensorError:
        theirs = None
    try:
        ours = sorted(stagehand.open_checkpoint(path))
    except (CheckpointError, StagehandError) as error:
        ours = None
        assert "odd.safetensors" in str(error)
    if case in STRICTER:
        assert ours is None
    elif case in LATER:
        assert theirs is None and "a" in ours
    elif theirs is not None or ours is not None:
        assert ours == theirs, "F4 and F6 are not in a safetensors before 0.6"


@pytest.mark.parametrize("dtype, shape, nbytes", [("F4", [2, 4], 4), ("F6_E2M3", [4], 3), ("Q4_K", [256], 144),
                                                  ("f32", [1], 4), ("", [3], 7)])
def test_218_one_tensor_of_a_dtype_that_nobody_knows(tmp_path, dtype, shape, nbytes):
    """The others stream; that one is an error, when it is asked for, which names it and its dtype."""
    weight = torch.arange(WIDE * WIDE, dtype=torch.float32).reshape(WIDE, WIDE)
    header = {"odd.weight": entry(0, nbytes, shape, dtype),
              "fc.weight": entry(nbytes, nbytes + 4 * WIDE * WIDE, [WIDE, WIDE])}
    path = tmp_path / "m.safetensors"
    path.write_bytes(raw(header, bytes(nbytes) + weight.numpy().tobytes()))
    with stagehand.open_checkpoint(path) as checkpoint:
        assert list(checkpoint) == ["odd.weight", "fc.weight"] and checkpoint.records["odd.weight"].dtype_name == dtype
        assert torch.equal(checkpoint["fc.weight"], weight)
        with pytest.raises(CheckpointError, match=f"odd.weight is of the dtype {dtype}, which Stagehand does not know"):
            checkpoint["odd.weight"]

    class Fc(nn.Module):
        def __init__(self, *odd):
            super().__init__()
            self.fc = nn.Linear(WIDE, WIDE, bias=False)
            for name in odd:
                setattr(self, name, nn.Linear(shape[0], shape[-1], bias=False))

    with pytest.warns(RuntimeWarning, match="does not use: odd.weight"):
        model = stagehand.load(Fc, path, vram_budget=1 << 20, device=s.device(1 << 20), strict=False)
    with torch.no_grad():
        assert s.same(model.fc(torch.ones(1, WIDE)), nn.functional.linear(torch.ones(1, WIDE), weight))
    run(model).shutdown()
    with pytest.raises(CheckpointError, match=r"odd\.weight"):
        stagehand.load(lambda: Fc("odd"), path, vram_budget=1 << 20, device=s.device(1 << 20))


def test_218_packing_keeps_a_tensor_that_nobody_knows(tmp_path):
    header = {"odd": entry(0, 5, [3], "Q9_K"), "fc.weight": entry(5, 5 + 4 * 64, [8, 8])}
    path, data = tmp_path / "m.safetensors", bytes(range(5)) + torch.arange(64.).numpy().tobytes()
    path.write_bytes(raw(header, data))
    for result in ("index.json", "v2.safetensors"):
        _core.pack(str(path), str(tmp_path / result), "layer-index" if result == "index.json" else "v2")
        assert all(line["checksum"] != 0 and line["equal"] for line in _core.verify(str(tmp_path / result), str(path))
                   if line["name"] == "odd"), result
    _core.unpack(str(tmp_path / "v2.safetensors"), str(tmp_path / "again.safetensors"))
    with stagehand.open_checkpoint(tmp_path / "again.safetensors") as checkpoint:
        odd = checkpoint.records["odd"]
        content = (tmp_path / "again.safetensors").read_bytes()
        assert (odd.dtype_name, odd.shape) == ("Q9_K", (3,)) and content[odd.offset:odd.offset + 5] == bytes(range(5))


@pytest.mark.parametrize("text", ["[]", '{"layers": []}', '{"entries": []}', '{"weight_map": {}}', "{}", "null", "3"])
def test_218_an_index_without_tensors_is_an_error(tmp_path, text):
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(StagehandError, match=r"index\.json"):
        stagehand.open_checkpoint(tmp_path / "index.json")


@pytest.mark.parametrize("name", ["float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_218_the_other_kinds_of_eight_bits_are_read_and_stream_as_bytes(tmp_path, name):
    dtype = getattr(torch, name)
    values = torch.arange(WIDE, dtype=torch.float32).to(dtype)
    safetensors.torch.save_file({"a": values}, tmp_path / "m.safetensors")
    with stagehand.open_checkpoint(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint["a"].dtype is dtype and torch.equal(checkpoint["a"].float(), values.float())


@pytest.mark.parametrize("how", ["layer", "block"])
def test_230_a_disk_that_is_full_at_the_end_is_said_by_a_warning(tmp_path, how):
    """Lines that were gathered and fail at shutdown, which goes on: the file, the cause and how many there were."""
    path, budget = tmp_path / "t.jsonl", 300_000
    model = s.aligned_copy(plain(saved(tmp_path / "m.safetensors")))
    if how == "layer":
        stagehand.layer(model, vram_budget=budget, device=s.device(budget), telemetry=str(path))
    else:
        stagehand.StagehandRuntime(model, stagehand.StagehandConfig(vram_budget=budget, telemetry_file=str(path)),
                                   block_pattern=r"^\d+$", device=s.device(budget)).prepare()
    runtime = run(model)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, WIDE))
    _core._fault_arm("write", 1, True)
    try:
        with pytest.warns(RuntimeWarning, match=r"steps are missing at the end.*t\.jsonl.*No space left"):
            runtime.shutdown()
    finally:
        _core._fault_disarm()
    assert runtime.stats["telemetry_lost"] == runtime.stats["steps"] - path.read_text().count("\n") > 0
    assert passes(model, tmp_path / "m.safetensors")


def test_230_activations_and_conductor_say_it_once_too(tmp_path):
    """Their lines are written one by one: the step that fails raises, those behind it go on."""
    made, said = JsonLines(tmp_path / "a.jsonl"), []
    _core._fault_arm("write", 2, True)
    try:
        for step in range(5):
            try:
                made.append([{"step": step}])
            except OSError as error:
                said.append(str(error))
    finally:
        _core._fault_disarm()
    assert len(said) == 1 and "a.jsonl" in said[0] and made.lost == 4
    assert (tmp_path / "a.jsonl").read_text() == '{"step": 0}\n'


WRONG = ("false", "x", 1, -1, 0, 1.5, math.nan, math.inf, [], ["a"], {}, {"a": 1}, True, False, None, "", 10**30)
# What of these each key takes; all else is an error that names it.
RIGHT = {
    "name": ("false", "x", None, ""), "source": (None,), "map": (True, False), "vram_budget": (None,),
    "ram_budget": (1, None), "dtype": (None,), "inference_mode": (True, False), "transfer": (None,),
    "telemetry_file": ("false", "x", None), "reserve_for_resident": (None,),
    "vram_high_watermark_mb": (), "vram_low_watermark_mb": (1, 0), "pinned_pool_classes_mb": (),
    "slabs_per_class": (1, None), "max_inflight_d2h": (1, 0), "max_inflight_h2d": (1, 0),
    "debug_checksums": (True, False), "telemetry_enabled": (True, False), "recompute_threshold_bytes": (1, 0),
    "recompute_cheap": (True, False), "vram_soft_cap_mb": (1,), "vram_hard_cap_mb": (), "h2d_slots": (1,),
    "d2h_slots": (1,), "debug_event_trace": (True, False), "telemetry_interval_steps": (1,), "pinned_cap_mb": (1, None),
    "lr": (1, 0, 1.5, 10**30), "betas": (), "eps": (1, 0, 1.5, 10**30), "weight_decay": (1, 0, 1.5, 10**30),
    "maximize": (True, False),
    "master_dtype": (None,), "state_dtype": (None,), "stochastic_rounding": (True, False), "seed": (1, 0),
    "state_path": ("false", "x", None), "threads": (1, None), "max_grad_norm": (1, 1.5, None, 10**30),
    "enabled": (True, False), "trainables": (),
}
SECTION_KEYS = [(None, key) for key in memoryconfig.MODES["layer"] if key != "mode"]
SECTION_KEYS += [(section, key) for section, keys in memoryconfig.SECTIONS.items() for key in keys]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("section, key", SECTION_KEYS)
def test_231_every_key_of_a_configuration_takes_what_is_right_and_names_the_rest(tmp_path, monkeypatch, section, key):
    monkeypatch.chdir(tmp_path)
    for value in WRONG:
        settings = {"mode": "layer", "vram_budget": 300_000}
        if section is None:
            settings[key] = value
        else:
            settings[section] = {"enabled": True, key: value}
        config = {"memory": {"strategy": "stagehand", "stagehand": settings}}
        right = any(value is known or (type(value) is type(known) and value == known) for known in RIGHT[key])
        if right:
            stagehand.session(net(2), config, device=s.device(300_000)).shutdown()
        else:
            with pytest.raises((TypeError, ValueError, StagehandError), match=rf"{key}|budget of 1 B"):
                stagehand.session(net(2), config, device=s.device(300_000))


def test_231_the_file_gives_the_same_errors_as_the_mapping(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"memory": {"strategy": "stagehand", "stagehand": {"mode": "layer", "inference_mode": "false"}}}')
    with pytest.raises(TypeError, match="memory.stagehand.inference_mode must be True or False.*not 'false'"):
        stagehand.session(net(), path)


@pytest.mark.parametrize("call", [
    lambda value: stagehand.layer(net(), inference_mode=value, device="sim"),
    lambda value: stagehand.StagehandRuntime(net(), block_pattern=r"^\d+$", inference_mode=value),
    lambda value: stagehand.load(net, "nowhere", inference_mode=value),
    lambda value: stagehand.load(net, "nowhere", strict=value),
    lambda value: stagehand.layer(net(), source="nowhere", inference_mode=value),
    lambda value: stagehand.OffloadedAdamW([nn.Parameter(torch.ones(3))], maximize=value),
    lambda value: stagehand.OffloadedAdamW([nn.Parameter(torch.ones(3))], stochastic_rounding=value),
])
def test_231_a_switch_that_is_a_text_is_refused_by_functions_too(call):
    for value in ("false", "", 0, 1, None, []):
        with pytest.raises(TypeError, match="must be True or False"):
            call(value)


def modes(path):
    """Of a file, or of a folder and all in it."""
    inside = sorted(path.iterdir()) if path.is_dir() else []
    return {stat.S_IMODE(one.stat().st_mode) for one in (path, *inside) if not one.is_dir()}


@pytest.mark.combinations("mode and umask make the result's mode together")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666, 0o400, 0o604])
def test_232_results_are_read_by_nobody_who_may_not_read_the_source(tmp_path, mode, mask):
    """Data, manifests, indexes, folders, what is unpacked: the source's mode, less what the umask takes."""
    path = saved(tmp_path / "m.safetensors")
    path.chmod(mode)
    wanted = (mode | 0o600) & ~mask
    before = os.umask(mask)
    try:
        for name, form in (("a.safetensors", "v2"), ("b.json", "layer-index")):
            _core.pack(str(path), str(tmp_path / name), form)
        _core.unpack(str(tmp_path / "a.safetensors"), str(tmp_path / "d.safetensors"))
    finally:
        os.umask(before)
    made = [one for one in tmp_path.iterdir() if one != path]
    assert len(made) >= 5 and all(modes(one) == {wanted} for one in made), [(one.name, modes(one)) for one in made]


@pytest.mark.parametrize("mode, of_folder", [(0o600, 0o700), (0o640, 0o750)])
def test_232_a_folder_is_for_those_who_may_read_its_files(tmp_path, mode, of_folder):
    """As root its owner and group are the source's, too."""
    path = tmp_path / "m.safetensors"
    f.save(path, {"a.weight": torch.ones(1024, 1024)})
    path.chmod(mode)
    if os.geteuid() == 0:
        os.chown(path, 1234, 4321)
    _core.pack(str(path), str(tmp_path / "c"), "v3-int4")
    assert modes(tmp_path / "c") == {mode} and stat.S_IMODE((tmp_path / "c").stat().st_mode) == of_folder
    for made in (tmp_path / "c", *(tmp_path / "c").iterdir()):
        assert (made.stat().st_uid, made.stat().st_gid) == (path.stat().st_uid, path.stat().st_gid), made


def test_232_of_several_files_what_all_of_them_allow(tmp_path):
    folder = tmp_path / "shards"
    folder.mkdir()
    f.save_sharded(folder, net().state_dict(), 3)
    shards = sorted(folder.glob("*.safetensors"))
    for shard, mode in zip(shards, (0o644, 0o640, 0o604)):
        shard.chmod(mode)
    _core.pack(str(folder), str(tmp_path / "out.json"), "layer-index")
    assert modes(tmp_path / "out.json") == modes(tmp_path / "out.bin") == {0o600}
