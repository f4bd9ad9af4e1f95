"""Field cases EE: files that are written while they are mapped, files that are no files, odd checkpoints."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import socket

import children
import file_support as f
import numpy as np
import pytest
import safetensors.torch
import support as s
import torch
from torch import nn
from worlds import run

import stagehand
from stagehand import InvalidStateTransitionError, StagehandError, TransferError, _core
from stagehand.errors import InvalidArgumentError

WIDE = 128


def net(n=4):
    return nn.Sequential(*(nn.Linear(WIDE, WIDE) for _ in range(n)))


def saved(path, seed=0):
    torch.manual_seed(seed)
    f.save(path, net().state_dict())
    return path


def plain(path):
    model = net()
    model.load_state_dict(safetensors.torch.load_file(path))
    return s.aligned_copy(model)


def wrapped(path, how="load", budget=300_000, **options):
    """A model that streams from `path`."""
    device = s.device(budget)
    if how == "load":
        return stagehand.load(net, path, vram_budget=budget, device=device, **options)
    model = plain(path).requires_grad_(False)
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
    with torch.no_grad(), pytest.raises(StagehandError, match=r"0\.weight was loaded with map=False.*cannot be written"):
        model[0].weight.add_(1)
    assert passes(model, path)
    run(model).shutdown()
    with pytest.raises(TypeError, match="map= is True or False"):
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
