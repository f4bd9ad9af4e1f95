"""Field cases S: files and the disk tier."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import resource
import signal
import struct
import subprocess
import sys
import threading

import children
import file_support as f
import pytest
import support as s
import torch
from torch import nn
from worlds import infer, run

import stagehand
from stagehand import CheckpointError, StagehandError, TransferError


def raw(path, header, data=b""):
    """A file with this header: text, or an object."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin, end, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def from_file(path, budget=None, n=5, d=32, link=None, **options):
    """(a Stack that streams from `path`, its reference), made from the same seed as `saved`."""
    with torch.device("cpu"):
        ref = s.made(s.Stack, n, d)
    budget = budget or s.tight_budget(ref)
    model = stagehand.load(lambda: s.Stack(n, d), path, vram_budget=budget, device=s.device(budget, link), **options)
    with torch.device("cpu"):
        return model, s.aligned_copy(ref)


def saved(path, n=5, d=32, seed=0):
    f.save(path, f.state(s.made(s.Stack, n, d, seed=seed)))
    return path


def right(model, ref, passes=2):
    for _ in range(passes):
        with torch.device("cpu"):
            x = ref.example()[0]
        assert s.same(infer(model, x), infer(ref, x))


def test_125_a_name_that_comes_twice_is_refused(tmp_path):
    header = (b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
              b'"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}')
    with pytest.raises(CheckpointError, match="twice.*a|duplicate"):
        stagehand.open_checkpoint(raw(tmp_path / "twice.safetensors", header, bytes(12)))


def test_125_the_index_decides_which_shards_copy_counts(tmp_path):
    tensors = f.state(s.made(s.Stack, 5, 32))
    index = f.save_sharded(tmp_path, tensors, 2)
    second = tmp_path / "model-00002-of-00002.safetensors"
    first_names = list(tensors)[0::2]
    f.save(second, {**{n: tensors[n] for n in list(tensors)[1::2]}, first_names[3]: torch.full((7, 7), 3.0)})
    model, ref = from_file(index, strict=False)
    right(model, ref)
    run(model).shutdown()


# 127: tests/store/test_safetensors.c refuses_hostile_headers, refuses_deep_nesting, refuses_lying_lengths.


@pytest.mark.parametrize("header", [
    {"inp.weight": entry(2**64 - 16, 2**64, [4])}, {"inp.weight": entry(0, 8, [2**32, 2**32])},
    {"inp.weight": entry(-8, 0, [2])}, {"inp.weight": entry("0", "8", [2])},
    {"inp.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 24.0]}},
    {"inp.weight": entry(0, 8, [2], "X9")}, {"inp.weight": entry(0, 4000, [2], "X9")}, b"[" * 100000 + b"]" * 100000,
    {"inp.weight": entry(0, 8, [2**62, 0, 2**62])}, {"inp.weight": entry(0, 0, [2**40, 0])},
])
def test_127_hostile_headers_are_refused_with_the_files_name_and_the_model_stays(header, tmp_path):
    path = raw(tmp_path / "evil.safetensors", header, bytes(8))
    model = s.made(s.Stack, 5, 32)
    ref, before = s.aligned_copy(model), [p.data_ptr() for p in model.parameters()]
    with pytest.raises(StagehandError, match=r"evil\.safetensors"):
        stagehand.layer(model, vram_budget=1 << 20, device="sim", source=path)
    assert [p.data_ptr() for p in model.parameters()] == before and f.open_files(tmp_path) == []
    right(s.aligned_copy(model), ref, 1)


def test_129_a_shard_that_is_cut_is_named_with_tensor_and_bytes(tmp_path):
    path = saved(tmp_path / "m.safetensors")
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    page = len(content) // 4096 * 4096
    cuts = [len(content) - by for by in (1, 4, 7, 8, 9, 40)] + [len(content) - 5000, page, header]
    for size in cuts:
        path.write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"m\.safetensors.*'[\w.]+'.*\d+ bytes wanted.*\d+ found|truncated"):
            from_file(path)
        with open(path, "r+b") as file:
            file.truncate(len(content))  # the rest is a hole: a download that was set up and never came
        if len(content) - size >= 5000:
            with pytest.raises(CheckpointError, match=r"m\.safetensors"):
                from_file(path)
    path.write_bytes(content)
    model, ref = from_file(path)
    f.from_outside(path, size=page)  # wrapped, not streamed yet
    with pytest.raises(TransferError, match=r"m\.safetensors"):
        for _ in range(3):
            infer(model, ref.example()[0])
    run(model).shutdown()


def test_131_unaligned_tensors_take_no_private_copies(tmp_path):
    """A header of 3 mod 8 bytes: host memory beside the device is the same as with the aligned twin."""
    tensors = {f"{i}.weight": torch.full((1024, 512), 1 + i / 16) for i in range(8)}
    f.save(tmp_path / "even.safetensors", tensors)
    content = (tmp_path / "even.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    text = content[8:8 + size] + b" " * ((3 - 8 - size) % 8)
    (tmp_path / "odd.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size:])
    del content
    taken = {}
    for name in ("even", "odd", "even", "odd"):
        gc.collect()
        before = f.anonymous_bytes()
        model = stagehand.load(lambda: nn.Sequential(*(nn.Linear(512, 1024, bias=False) for _ in range(8))),
                               tmp_path / f"{name}.safetensors", vram_budget=6 << 20, device=f.sim(6 << 20))
        with torch.no_grad():
            for _ in range(2):
                for i, layer in enumerate(model):
                    assert layer(torch.ones(1, 512))[0, 0] == 512 * (1 + i / 16)
        taken[name] = f.anonymous_bytes() - before  # of the second time: what starts once has started
        run(model).shutdown()
        del model
    assert taken["odd"] - taken["even"] < 4 << 20, taken


def test_132_a_file_that_vanishes_under_a_model_is_an_error_and_others_go_on(tmp_path):
    """Truncated to nothing through another handle; another model streams from another file meanwhile."""
    a, ref_a = from_file(saved(tmp_path / "a.safetensors"))
    b, ref_b = from_file(saved(tmp_path / "b.safetensors"))
    right(a, ref_a), right(b, ref_b)
    f.from_outside(tmp_path / "a.safetensors", size=0)
    for _ in range(3):
        with pytest.raises(TransferError, match=r"a\.safetensors"):
            for _ in range(12):  # where many threads read, some steps are in slabs already
                infer(a, ref_a.example()[0])
        right(b, ref_b, 1)
    run(a).shutdown()
    right(b, ref_b)
    run(b).shutdown()
    assert f.open_files(tmp_path) == []


def test_134_a_file_that_is_replaced_or_removed_gives_old_values_and_one_that_is_written_an_error(tmp_path):
    path = saved(tmp_path / "m.safetensors")
    content = path.read_bytes()
    other = saved(tmp_path / "other.safetensors", seed=1)
    for change in ("replace", "delete", "rewrite", "truncate", "grow"):
        path.write_bytes(content)
        model, ref = from_file(path)
        right(model, ref, 1)
        if change == "replace":
            (tmp_path / "new").write_bytes(other.read_bytes())
            os.replace(tmp_path / "new", path)
        elif change == "delete":
            path.unlink()
        elif change == "rewrite":
            f.from_outside(path, other.read_bytes())
        elif change == "truncate":
            f.from_outside(path, size=len(content) // 2)
        else:
            f.from_outside(path, b"more", at=len(content))
        if change in ("replace", "delete"):
            right(model, ref)
            run(model).shutdown()
            assert s.same(list(model.state_dict().values()), list(ref.state_dict().values()))
        else:
            with pytest.raises(TransferError, match=r"m\.safetensors: changed"):
                for _ in range(3):
                    infer(model, ref.example()[0])
            run(model).shutdown()
        assert f.open_files(tmp_path) == []
        model = None  # while it lives, nobody may write its file


KILLED = """
import os, signal
from torch import nn
folder = {folder!r}
p = nn.Parameter(torch.ones(1000))
optimizer = stagehand.OffloadedAdamW([p], state_path=folder)
for _ in range(3):
    p.grad = torch.full_like(p, 0.5)
    optimizer.step()
print("stepped", flush=True)
signal.pause()
"""


def test_136_state_files_do_not_collide_and_leave_nothing_also_after_kill_9(tmp_path):
    """Two processes and this one in one folder, the same names in each; one is killed."""
    first, second = (children.start(KILLED.format(folder=str(tmp_path))) for _ in range(2))
    first.said("stepped"), second.said("stepped")
    for i in range(8):
        nets = [nn.Linear(8, 8) for _ in range(2)]
        refs = [s.aligned_copy(net) for net in nets]
        optimizers = [stagehand.OffloadedAdamW(net.parameters(), lr=0.1, state_path=str(tmp_path)) for net in nets]
        others = [stagehand.OffloadedAdamW(ref.parameters(), lr=0.1) for ref in refs]
        for _ in range(2):
            for k, (net, ref) in enumerate(zip(nets, refs)):
                for module, optimizer in ((net, optimizers[k]), (ref, others[k])):
                    for p in module.parameters():
                        p.grad = torch.full_like(p, k + 1.0) * p.detach()
                    optimizer.step()
                assert s.same(list(net.parameters()), list(ref.parameters()))
        if i == 5:
            first.kill(signal.SIGKILL).wait()
        assert os.listdir(tmp_path) == []
        del optimizers, nets
    gc.collect()
    assert second.kill(signal.SIGTERM).wait().status == -signal.SIGTERM
    assert os.listdir(tmp_path) == []


def test_138_stray_shards_are_not_opened(tmp_path):
    index = f.save_sharded(tmp_path, f.state(s.made(s.Stack, 5, 32)), 2)
    stray = saved(tmp_path / "model-00001-of-00003.safetensors", seed=7)
    saved(tmp_path / "model-00001-of-00002.safetensors.tmp", seed=7)
    saved(tmp_path / "adapter_model.safetensors", seed=7)
    (tmp_path / "model-00002-of-00003.safetensors").write_bytes(b"damaged")
    for path in (index, tmp_path):
        model, ref = from_file(path)
        right(model, ref)
        assert len(set(f.open_files(tmp_path))) == 2 and str(stray) not in f.open_files(tmp_path)
        run(model).shutdown()


# 140: test_readers.py::test_host_memory_is_slabs_and_the_share_in_ram, ::test_where_io_uring_is_refused_threads_read.


# ---------------------------------------------------------------------- own cases


def test_own_what_is_no_file_is_refused_at_once(tmp_path):
    """A pipe without a writer, a device that never ends, a folder, a loop of links, a socket: as file, shard, index."""
    import socket

    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "loop.safetensors").symlink_to(tmp_path / "loop.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    (tmp_path / "folder.safetensors").mkdir()
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(tmp_path / "socket.safetensors"))
        for name in ("pipe", "loop", "zero", "folder", "socket"):
            with pytest.raises((StagehandError, FileNotFoundError), match=name):
                stagehand.open_checkpoint(tmp_path / f"{name}.safetensors")
            (tmp_path / "i").mkdir(exist_ok=True)
            index = tmp_path / "i" / "model.safetensors.index.json"
            (tmp_path / "i" / f"{name}.safetensors").unlink(missing_ok=True)
            index.write_text(json.dumps({"weight_map": {"inp.weight": f"{name}.safetensors"}}))
            (tmp_path / "i" / f"{name}.safetensors").symlink_to(tmp_path / f"{name}.safetensors")
            with pytest.raises((StagehandError, FileNotFoundError), match=name):
                stagehand.open_checkpoint(index)
    os.mkfifo(tmp_path / "i" / "pipe.index.json")
    with pytest.raises((StagehandError, FileNotFoundError), match="pipe"):
        stagehand.open_checkpoint(tmp_path / "i" / "pipe.index.json")


@pytest.mark.parametrize("name", [b"\xff\xfe.safetensors", b"%n%s%n%s.safetensors", b"a\nb\x1b[31m.safetensors",
                                  "\u202egnp.safetensors".encode(), b"x" * 240 + b".safetensors"])
def test_own_odd_names_of_files_work_and_come_back_in_errors(name, tmp_path):
    """Bytes that are no text, formats, line ends, escapes, a name of the longest kind."""
    path = os.path.join(os.fsencode(tmp_path), name)
    f.save(path, f.state(s.made(s.Stack, 5, 32)))
    model, ref = from_file(path)
    right(model, ref)
    telemetry = path + b".t" if len(name) < 200 else path[:-4]
    f.from_outside(path, size=5000)
    with pytest.raises(StagehandError) as caught:
        for _ in range(3):
            infer(model, ref.example()[0])
    str(caught.value), repr(caught.value)
    run(model).shutdown()
    with pytest.raises(StagehandError) as caught:
        stagehand.open_checkpoint(path)
    assert os.fsdecode(tmp_path) in str(caught.value)
    with pytest.raises(FileNotFoundError) as caught:
        stagehand.open_checkpoint(path + b"no")
    str(caught.value)
    net = s.made(s.Stack, 2, 40)
    s.wrap(net, s.tight_budget(net), telemetry=telemetry)
    infer(net, net.example()[0])
    run(net).shutdown()
    assert os.path.getsize(telemetry) > 100
    with pytest.raises(ValueError):
        stagehand.open_checkpoint(os.fsdecode(path) + "\0x")


def test_own_escapes_in_a_files_names_do_not_reach_the_terminal(tmp_path):
    """A stranger's tensor names and metadata may hold what moves the cursor or renames the window."""
    evil = "w\x1b]0;owned\x07\x1b[2J\r\u009b31m\u202e"
    path = raw(tmp_path / "evil.safetensors", {"__metadata__": {evil: evil}, evil: entry(0, 8, [2])}, bytes(8))
    tool = subprocess.run([sys.executable, "-m", "stagehand", "inspect", str(path)], capture_output=True, timeout=300,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    said = (tool.stdout + tool.stderr).decode("utf-8", "surrogateescape")
    assert "w" in said and not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]", said), repr(said)


def test_own_more_shards_than_descriptors_is_an_error_by_name(tmp_path):
    tensors = {f"{i}.weight": torch.full((1, 1), float(i)) for i in range(90)}
    index = f.save_sharded(tmp_path, tensors, 90)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = set(map(int, os.listdir("/proc/self/fd")))
    open_now, limit = len(taken), next(n for n in range(4096) if n - len([t for t in taken if t < n]) == 60)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        for _ in range(3):
            with pytest.raises(StagehandError, match=r"model-\d+-of-00090.*[Tt]oo many open files"):
                stagehand.open_checkpoint(index)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert len(os.listdir("/proc/self/fd")) == open_now
    with stagehand.open_checkpoint(index) as checkpoint:
        assert checkpoint["89.weight"].item() == 89


def test_own_a_file_that_is_replaced_between_opening_and_binding_is_not_mixed(tmp_path, monkeypatch):
    """An update that lands while a model is being loaded: views at rest and what streams come from one file."""
    path, other = saved(tmp_path / "m.safetensors"), saved(tmp_path / "new", seed=1)
    bind = stagehand.files.filesource.FileSource.bind

    def replaced(self, bindings):
        os.replace(other, path)
        return bind(self, bindings)

    monkeypatch.setattr(stagehand.files.filesource.FileSource, "bind", replaced)
    model, ref = from_file(path)
    x = ref.example()[0]
    assert s.same(infer(model, x), infer(ref, x))
    assert s.same(list(model.state_dict().values()), list(ref.state_dict().values()))
    run(model).shutdown()
    assert s.same(infer(s.aligned_copy(model), x), infer(ref, x))


def test_own_a_private_view_does_not_write_to_the_file(tmp_path):
    """Weights at rest are views of the file: a write to one, before wrapping and after shutdown, stays in memory."""
    path = saved(tmp_path / "m.safetensors")
    content = path.read_bytes()
    os.chmod(path, 0o444)
    model, ref = from_file(path)
    right(model, ref)
    run(model).shutdown()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    assert path.read_bytes() == content
    again, _ = from_file(path)
    right(again, ref)
    run(again).shutdown()


def test_own_two_models_stream_from_one_file_while_it_is_deleted(tmp_path):
    path = saved(tmp_path / "m.safetensors", 6, 48)
    models = [from_file(path, n=6, d=48, link=1e8) for _ in range(2)]
    failures = []

    def work(model, ref):
        try:
            right(model, ref, 6)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in models]
    for thread in threads:
        thread.start()
    path.unlink()
    for thread in threads:
        thread.join(60)
    assert not failures
    for model, _ in models:
        run(model).shutdown()
    assert f.open_files(tmp_path) == []


def peak():
    """Most resident bytes of this process since `reset_peak`."""
    with open("/proc/self/status") as file:
        return int(re.search(r"VmHWM:\s*(\d+) kB", file.read())[1]) << 10


def reset_peak():
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        pytest.skip("this kernel does not reset the peak of resident memory")
    return peak()


def test_own_memory_for_a_header_is_in_proportion_to_the_file(tmp_path):
    """Length fields, counts of dimensions and names that promise much: what is taken stays below a multiple of the
    file."""
    many = {f"t{i}": entry(0, 0, [0] * 16) for i in range(2000)}
    cases = [raw(tmp_path / "a.safetensors", many), tmp_path / "b.safetensors",
             raw(tmp_path / "c.safetensors", b'{"' + b"\\u0041" * 200000 + b'":1}'),
             raw(tmp_path / "d.safetensors", b'{"x":' + b"[1," * 60 + b'"' + b"y" * 500000)]
    cases[1].write_bytes(struct.pack("<Q", 99_999_999) + b"{}")
    for path in cases:
        before = reset_peak()
        with contextlib.suppress(StagehandError):
            stagehand.open_checkpoint(path).close()
        assert peak() - before < 60 * path.stat().st_size + (2 << 20), path.name


def test_own_an_optimizers_state_is_not_written_through_links(tmp_path):
    target = tmp_path / "target"
    target.write_bytes(b"keep")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    p = nn.Parameter(torch.ones(4))
    for name in ("link", "dangling", "pipe", "target"):
        with pytest.raises(StagehandError, match=name):
            stagehand.OffloadedAdamW([p], state_path=str(tmp_path / name)).step()
    assert target.read_bytes() == b"keep" and not (tmp_path / "nowhere").exists()


def test_own_an_index_that_names_itself_or_another_index_is_refused(tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    for shard in ("model.safetensors.index.json", "other.index.json", ".", "..", "", "a/../../x", "/etc/passwd",
                  "a\u0000b"):
        index.write_text(json.dumps({"weight_map": {"inp.weight": shard}}))
        (tmp_path / "other.index.json").write_text(index.read_text())
        with pytest.raises((StagehandError, FileNotFoundError, ValueError)) as caught:
            stagehand.open_checkpoint(index)
        assert "index" in str(caught.value), (shard, str(caught.value))
    assert f.open_files(tmp_path) == []


def test_own_files_are_read_into_host_memory_whatever_the_default_device_is(tmp_path):
    path = saved(tmp_path / "m.safetensors")
    with torch.device("meta"):
        with stagehand.open_checkpoint(path) as checkpoint:
            values = dict(checkpoint)
        model, ref = from_file(path)
        right(model, ref)
        run(model).shutdown()
        p = nn.Parameter(torch.ones(8, device="cpu"))
        optimizer = stagehand.OffloadedAdamW([p], state_path=str(tmp_path))
        p.grad = torch.ones(8, device="cpu")
        optimizer.step()
        assert optimizer.state[p]["step"].device.type == "cpu" and (p != 1).all()
    assert all(value.device.type == "cpu" for value in values.values())
    assert s.same([values[name] for name in ref.state_dict()], list(ref.state_dict().values()))
