"""stagehand._core on the simulated device: results, ownership, errors, threads."""

import ctypes
import errno
import faulthandler
import gc
import inspect
import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest
from core_support import Tensor, World, address_of, noise, peek, wait_until, write_safetensors

from stagehand import _core, errors

try:
    import torch
except ImportError:
    torch = None

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
HERE = pathlib.Path(__file__).resolve().parent
KIB = 1024
UNIT = 64 * KIB
DL_CPU = (1, 0)
UINT8 = (1, 8, 1)


@pytest.fixture(autouse=True)
def watchdog():
    """A deadlock must end the run with a trace of every thread."""
    faulthandler.dump_traceback_later(60, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def device():
    return _core.Device(memory_bytes=64 << 20)


def free_bytes(device):
    return device.info()["memory_free"]


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Ticker:
    """Counts on a thread of its own: it stands still while another thread holds the GIL."""

    def __enter__(self):
        self.count, self._stop = 0, False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def _run(self):
        while not self._stop:
            self.count += 1
            time.sleep(0.001)

    def __exit__(self, *exc):
        self._stop = True
        self._thread.join()

    def during(self, function):
        """Runs `function`; returns (ticks meanwhile, seconds)."""
        before, start = self.count, time.monotonic()
        function()
        return self.count - before, time.monotonic() - start


# ---- module ----


def test_tables_and_constants():
    assert _core.DTYPES["BF16"] == 16 and _core.DTYPES["C64"] == 64 and "?" not in _core.DTYPES
    assert _core.UNIT_STATES[0] == "unloaded" and "gpu_ready" in _core.UNIT_STATES
    assert all(len(row) == 3 for row in _core.METRICS)
    capabilities = [value for name, value in vars(_core).items() if name.startswith("CAP_")]
    assert len(capabilities) == len(set(capabilities)) == 12
    assert all(value & (value - 1) == 0 for value in capabilities)
    assert _core.__version__.count(".") == 2


def test_backends_and_device_count():
    assert "sim" in _core.backends()
    assert _core.device_count("sim") == (1, "")
    count, reason = _core.device_count("no such back end")
    assert count == 0 and "no such back end" in reason
    assert _core.device_count("sim")[1] == "", "a reason of an earlier failure is shown"


def test_parse_and_format_size():
    assert _core.parse_size("8GB") == 8 * 10**9
    assert _core.parse_size("1.5GiB") == 3 << 29
    assert _core.parse_size("4096") == 4096
    assert _core.format_size(3 << 30) == "3.00 GiB"
    for text in ("8 frogs", "", "-1", "0.3"):
        with pytest.raises(ValueError) as caught:
            _core.parse_size(text)
        assert repr(text)[1:-1] in str(caught.value) and "512MiB" in str(caught.value)
        assert isinstance(caught.value, errors.StagehandError)
    with pytest.raises(TypeError):
        _core.parse_size(4096)


def test_every_method_has_a_docstring_and_a_signature():
    for kind in (_core.Device, _core.Arena, _core.Runtime, _core.Checkpoint, _core.Pool):
        assert inspect.signature(kind)
        for name, member in vars(kind).items():
            if not name.startswith("_"):
                assert member.__doc__, f"{kind.__name__}.{name}"
                if callable(member):
                    assert inspect.signature(member)


# ---- errors ----


@pytest.mark.parametrize(
    ("status", "kinds"),
    [
        ("BUDGET_TOO_SMALL", [errors.StagehandOOMError]),
        ("OUT_OF_HOST_MEMORY", [errors.StagehandOOMError]),
        ("OUT_OF_PINNED_MEMORY", [errors.StagehandOOMError]),
        ("OUT_OF_DEVICE_MEMORY", [errors.StagehandOOMError]),
        ("OUT_OF_ADDRESS_SPACE", [errors.StagehandOOMError]),
        ("DTYPE_MISMATCH", [errors.DtypeMismatchError]),
        ("INVALID_STATE", [errors.InvalidStateTransitionError]),
        ("IO", [errors.TransferError]),
        ("DEVICE_ERROR", [errors.TransferError]),
        ("CHANGED_DATA", [errors.TransferError]),
        ("CORRUPT_DATA", [errors.CheckpointError, ValueError]),
        ("SHAPE_MISMATCH", [errors.CheckpointError, ValueError]),
        ("NOT_FOUND", [FileNotFoundError]),
        ("INVALID_ARGUMENT", [ValueError]),
        ("SHUT_DOWN", []),
        ("INTERNAL", []),
    ],
)
def test_class_of_each_status(status, kinds):
    error = errors.for_status(status, "a sentence", "a thing", 5)
    assert isinstance(error, errors.StagehandError) and all(isinstance(error, kind) for kind in kinds)
    assert (str(error), error.status, error.object, error.native_code) == ("a sentence", status, "a thing", 5)


def test_errors_survive_pickling():
    import pickle

    error = pickle.loads(pickle.dumps(errors.for_status("IO", "a sentence", "a thing", 5)))
    assert type(error) is errors.TransferError
    assert (str(error), error.status, error.object, error.native_code) == ("a sentence", "IO", "a thing", 5)


@pytest.mark.parametrize("value", [-1, 1 << 64])
def test_integers_out_of_range_are_value_errors(device, value):
    with pytest.raises(ValueError, match=f"{value} is out of range"):
        device.empty(value)


def test_integers_must_be_integers(device):
    with pytest.raises(TypeError):
        device.empty(1.5)


# ---- Device ----


def test_device_info(device):
    info = device.info()
    assert (info["backend"], info["index"]) == ("sim", 0)
    assert info["memory_total"] == info["memory_free"] == 64 << 20
    assert info["capabilities"] == device.capabilities
    assert device.capabilities & _core.CAP_PINNED_HOST
    assert not device.capabilities & _core.CAP_VIRTUAL_TIME
    assert _core.Device(virtual_time=True).capabilities & _core.CAP_VIRTUAL_TIME


def test_device_that_is_not_there():
    with pytest.raises(errors.StagehandError) as caught:
        _core.Device("no such back end")
    assert caught.value.status == "BACKEND_UNAVAILABLE" and "no such back end" in str(caught.value)


def test_measured_rate_is_that_of_the_link():
    rate = 2e8
    device = _core.Device(virtual_time=True, link_bytes_per_s=int(rate), copy_latency_ns=0)
    assert device.measure_h2d(1 << 20) == pytest.approx(rate, rel=0.02)
    with pytest.raises(ValueError):
        device.measure_h2d(0)


def test_virtual_clock_moves_with_compute():
    device = _core.Device(virtual_time=True)
    start = device.now_ns()
    device.compute(10**12)
    assert device.now_ns() - start >= 10**12


def test_memory_of_a_device_belongs_to_the_tensor(device):
    before = free_bytes(device)
    tensor = Tensor(device.empty(10_000))
    assert (tensor.shape, tensor.strides, tensor.dtype) == ((10_000,), (1,), UINT8)
    assert tensor.device == DL_CPU and tensor.address % 512 == 0
    assert free_bytes(device) <= before - 10_000
    tensor.fill(5)
    assert tensor.bytes() == b"\5" * 10_000
    tensor.delete()
    assert free_bytes(device) == before


def test_memory_of_a_device_outlives_the_device_object(device):
    tensor = Tensor(device.empty(4096))
    device.close()
    del device
    gc.collect()
    tensor.fill(7)
    assert tensor.bytes() == b"\7" * 4096
    tensor.delete()


def test_an_unconsumed_capsule_gives_its_memory_back(device):
    before = free_bytes(device)
    capsule = device.empty(1 << 20)
    assert free_bytes(device) < before
    del capsule
    assert free_bytes(device) == before


def test_out_of_device_memory(device):
    with pytest.raises(errors.StagehandOOMError) as caught:
        device.empty(65 << 20)
    assert caught.value.status == "OUT_OF_DEVICE_MEMORY"


def test_device_close_is_idempotent_and_final(device):
    device.close()
    device.close()
    for call in (device.info, device.now_ns, lambda: device.empty(1), lambda: device.measure_h2d(1)):
        with pytest.raises(errors.StagehandError, match="shut down") as caught:
            call()
        assert caught.value.status == "SHUT_DOWN"
    with pytest.raises(errors.StagehandError, match="shut down"):
        _core.Arena(device, 4096)
    with pytest.raises(errors.StagehandError, match="shut down"):
        _core.Runtime(device, 4096)


@pytest.mark.alone
def test_closing_a_device_while_it_computes_waits_for_nobody():
    device = _core.Device()
    worker = threading.Thread(target=device.compute, args=(2_000_000_000,))
    worker.start()
    time.sleep(0.05)
    device.close()
    assert worker.is_alive()  # it computes on
    worker.join()


# ---- Arena ----


def test_arena_write_and_tensor(device):
    arena = _core.Arena(device, 8192)
    data = noise(1000)
    first, second = arena.reserve(1000), arena.reserve(3000)
    assert first % 512 == second % 512 == 0
    arena.write(first, address_of(data), len(data))
    arena.finish()
    assert arena.bytes == 1024 + 3072 and arena.pinned_bytes >= 1000 + 3000 and arena.pin_error == ""
    tensor = Tensor(arena.tensor(first, 1000))
    assert (tensor.address, tensor.shape, tensor.dtype, tensor.device) == (first, (1000,), UINT8, DL_CPU)
    assert tensor.bytes() == data
    tensor.delete()


def test_mapped_tensor_sees_the_same_bytes(device):
    arena = _core.Arena(device, 8192)
    address = arena.reserve(5000)
    arena.finish()
    alias = arena.device_alias(address)
    assert alias
    host, mapped = Tensor(arena.tensor(address, 5000)), Tensor(arena.mapped_tensor(address, 5000))
    assert mapped.address == alias and mapped.device == DL_CPU
    host.fill(9)
    assert mapped.bytes() == b"\x09" * 5000
    host.delete()
    mapped.delete()


def test_arena_that_may_not_be_pinned_stays_pageable():
    device = _core.Device(pin_limit_bytes=1)
    arena = _core.Arena(device, 8192)
    address = arena.reserve(8192)
    arena.finish()
    assert arena.pinned_bytes == 0 and arena.pin_error
    assert arena.device_alias(address) == 0
    with pytest.raises(ValueError, match="pin_error"):
        arena.mapped_tensor(address, 10)


def test_arena_memory_outlives_arena_and_device(device):
    arena = _core.Arena(device, 8192)
    address = arena.reserve(4096)
    data = noise(4096)
    arena.write(address, address_of(data), 4096)
    arena.finish()
    tensor = Tensor(arena.tensor(address, 4096))
    device.close()
    del arena, device
    gc.collect()
    assert tensor.bytes() == data
    tensor.delete()


def test_arena_refuses_what_it_does_not_own(device):
    arena = _core.Arena(device, 8192)
    with pytest.raises(ValueError, match="outside"):
        arena.tensor(4096, 1)
    address = arena.reserve(1000)
    for at, length in ((address, 1001), (address - 1, 1), (address + 1001, 0), (0, 0)):
        with pytest.raises(ValueError, match="outside"):
            arena.tensor(at, length)
    with pytest.raises(ValueError, match="outside"):
        arena.write(address - 512, address, 1)
    with pytest.raises(errors.StagehandOOMError) as caught:
        arena.reserve(1 << 40)
    assert caught.value.status == "OUT_OF_HOST_MEMORY"
    with pytest.raises(TypeError):
        _core.Arena("sim", 8192)


# ---- Checkpoint ----


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "model.safetensors"
    tensors = {"a": ("F32", (2, 3), noise(24, 1)), "b": ("BF16", (700,), noise(1400, 2))}
    return path, tensors, write_safetensors(path, tensors)


def test_checkpoint_lists_and_reads(model):
    path, tensors, offsets = model
    checkpoint = _core.Checkpoint(path)
    assert checkpoint.files() == [str(path)] and checkpoint.hole_bytes(0) == 0
    assert checkpoint.tensors() == [
        ("a", "F32", (2, 3), 0, offsets["a"], 24),
        ("b", "BF16", (700,), 0, offsets["b"], 1400),
    ]
    buffer = ctypes.create_string_buffer(1400)
    checkpoint.read(0, offsets["b"], 1400, ctypes.addressof(buffer))
    assert buffer.raw == tensors["b"][2]
    checkpoint.close()
    checkpoint.close()
    with pytest.raises(errors.StagehandError, match="shut down"):
        checkpoint.tensors()


def test_checkpoint_that_is_missing(tmp_path):
    path = str(tmp_path / "missing.safetensors")
    with pytest.raises(FileNotFoundError) as caught:
        _core.Checkpoint(path)
    assert isinstance(caught.value, errors.StagehandError)
    assert caught.value.native_code == errno.ENOENT and path in str(caught.value)


def test_checkpoint_that_is_corrupt(tmp_path):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(errors.CheckpointError) as caught:
        _core.Checkpoint(path)
    assert isinstance(caught.value, ValueError) and str(path) in str(caught.value)


def test_checkpoint_file_that_changes(model):
    path, _, offsets = model
    checkpoint = _core.Checkpoint(path)
    os.truncate(path, offsets["b"])
    buffer = ctypes.create_string_buffer(1400)
    with pytest.raises(errors.TransferError):
        checkpoint.read(0, offsets["b"], 1400, ctypes.addressof(buffer))
    with pytest.raises(ValueError):
        checkpoint.hole_bytes(7)


# ---- Pool ----


def test_pool_acquire_and_release(device):
    pool = _core.Pool(4 * UNIT, UNIT, device=device)
    assert (pool.slab_count, pool.slab_bytes, pool.pinned, pool.warning) == (4, UNIT, True, "")
    slabs = pool.acquire(UNIT + 1)
    assert len(slabs) == 2 and all(address % 512 == 0 for _, address in slabs)
    for slab, address in slabs:
        ctypes.memset(address, 1, UNIT)
    assert pool.stats() == {
        "total": 4, "free": 2, "in_use": 2, "peak_in_use": 2, "wait_count": 0, "total_wait_ns": 0,
    }  # fmt: skip
    ids = [slab for slab, _ in slabs]
    pool.release(ids)
    with pytest.raises(errors.StagehandError) as caught:
        pool.release(ids)
    assert caught.value.status == "STALE"
    with pytest.raises(errors.StagehandOOMError):
        pool.acquire(5 * UNIT)
    with pytest.raises(errors.StagehandOOMError):
        pool.acquire((1 << 64) - 1)
    assert not _core.Pool(UNIT, UNIT).pinned


@pytest.mark.alone
def test_pool_waits_without_the_gil_and_warns():
    pool = _core.Pool(UNIT, UNIT)
    (held,) = pool.acquire(1)
    with Ticker() as ticker, pytest.warns(RuntimeWarning, match="waiting for 1 pinned slabs") as warned:
        releaser = threading.Thread(target=lambda: (wait_until(lambda: len(warned)), pool.release([held[0]])))
        releaser.start()
        ticks, _ = ticker.during(lambda: pool.acquire(1))
    releaser.join()
    assert ticks > 2
    assert pool.stats()["wait_count"] == 1 and pool.stats()["total_wait_ns"] > 100_000_000


def test_pool_shutdown_ends_waiting():
    pool = _core.Pool(UNIT, UNIT)
    pool.acquire(1)
    threading.Timer(0.05, pool.shutdown).start()
    with pytest.raises(errors.StagehandError, match="shut down") as caught:
        pool.acquire(1)
    assert caught.value.status == "SHUT_DOWN"
    pool.shutdown()


def test_pool_sizes_that_do_not_fit():
    with pytest.raises(ValueError):
        _core.Pool(UNIT + 512, UNIT)
    with pytest.raises(ValueError):
        _core.Pool(UNIT, 0)
    with pytest.raises(TypeError):
        _core.Pool(UNIT, UNIT, device="sim")


# ---- Runtime ----


def run_step(world):
    runtime = world.runtime
    runtime.step_begin()
    for unit, image in enumerate(world.images):
        tensor = Tensor(runtime.acquire(unit))
        assert tensor.bytes() == image, f"unit {unit}"
        tensor.delete()
    runtime.step_end()


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("policy", ["planned", "static"])
def test_every_step_sees_the_bytes_of_every_unit(policy, staged):
    sizes = [UNIT, 10_000, UNIT, 3 * UNIT, 512, 2 * UNIT]
    world = World(sizes, budget=5 * UNIT, policy=policy, staged=staged)
    for _ in range(6):
        run_step(world)
    assert world.runtime.unit_count == 6
    stats = world.runtime.stats()
    assert stats["steps"] == 6 and stats["h2d_bytes"] > 0 and stats["budget"] == 5 * UNIT
    assert 0 < stats["device_peak"] <= 5 * UNIT
    world.runtime.synchronize()
    assert world.runtime.metrics(0)["step"] == 5 and world.runtime.metrics(5)["step"] == 0
    assert world.runtime.metrics(6) is None
    assert [name for name, _, _ in _core.METRICS] == list(world.runtime.metrics())
    world.runtime.close()


def test_metrics_that_count_are_ints():
    world = World([UNIT] * 2, budget=4 * UNIT)
    run_step(world)
    world.runtime.synchronize()
    metrics = world.runtime.metrics()
    for name, unit, _ in _core.METRICS:
        whole = unit not in ("ms", "MiB", "ratio", "GB/s")
        assert type(metrics[name]) is (int if whole else float), name


def test_shape_of_a_lease():
    world = World([10_001], budget=4 * UNIT)
    tensor = Tensor(world.runtime.acquire(0))
    assert (tensor.shape, tensor.strides, tensor.dtype) == ((10_001,), (1,), UINT8)
    assert tensor.device == DL_CPU and tensor.address % 512 == 0
    tensor.delete()
    with pytest.raises(TypeError):
        world.runtime.acquire()
    with pytest.raises(ValueError):
        world.runtime.acquire(-1)
    with pytest.raises(ValueError):
        world.runtime.acquire(1)


def test_numbers_of_a_runtime():
    world = World([UNIT] * 4, budget=8 * UNIT)
    run_step(world)
    runtime = world.runtime
    unit = runtime.unit_stats(2)
    assert (unit["name"], unit["group"], unit["bytes"]) == ("unit2", "all", UNIT)
    assert unit["state"] in _core.UNIT_STATES and unit["copies"] >= 1
    prediction = runtime.prediction()
    assert prediction["total_bytes"] == 4 * UNIT and prediction["bound_by"] in ("compute", "link", "ring")
    equal, digest = runtime.verify(1)
    assert equal is True and isinstance(digest, int)
    runtime.step_begin()
    runtime.acquire(0)
    runtime.count_guards(1, 2, 3)
    runtime.count_mapped(4096)
    runtime.count_d2h(1000)
    runtime.step_end()
    runtime.synchronize()
    metrics = runtime.metrics()
    assert (metrics["dtype_promotions"], metrics["nan_count"], metrics["inf_count"]) == (1, 2, 3)
    assert metrics["d2h_bytes"] == 1000
    assert (runtime.stats()["mapped_bytes"], runtime.stats()["d2h_bytes"]) == (4096, 1000)
    assert UNIT <= runtime.smallest_budget() <= 8 * UNIT
    with pytest.raises(ValueError):
        runtime.unit_stats(99)


def test_downloads():
    device = _core.Device("sim", link_bytes_per_s=10**8)
    download = _core.Download(device, region_bytes=1 << 20, chunk_bytes=4096)
    source = bytearray(noise(100_000))
    address = ctypes.addressof((ctypes.c_char * len(source)).from_buffer(source))
    capsule, ticket = download.start(source, address, len(source))
    held = sys.getrefcount(source)
    ticket.wait()
    assert ticket.done and sys.getrefcount(source) == held - 1
    tensor = Tensor(capsule)
    assert tensor.bytes() == source
    assert (tensor.shape, tensor.dtype, tensor.device, tensor.address % 512) == ((100_000,), UINT8, DL_CPU, 0)
    stats = download.stats()
    assert (stats["d2h_bytes"], stats["copies"], stats["blocks_in_use"], stats["tickets"]) == (100_000, 1, 1, 0)
    with pytest.raises(errors.InvalidArgumentError):
        download.start(source, address, 0)
    with pytest.raises(errors.InvalidArgumentError):
        download.start(source, 0, 8)
    with pytest.raises(TypeError):
        type(ticket)()
    flying = download.start(source, address, len(source))
    download.close()
    download.close()
    device.close()
    assert flying[1].done
    flying[1].wait()
    for call in (download.stats, lambda: download.reserve(1), lambda: download.start(source, address, 8)):
        with pytest.raises(errors.StagehandError, match="shut down") as caught:
            call()
        assert caught.value.status == "SHUT_DOWN"
    assert tensor.bytes() == source  # it outlives the download
    tensor.delete()


def test_budget_changes_between_steps():
    world = World([UNIT] * 6, budget=6 * UNIT)
    run_step(world)
    world.runtime.set_budget(3 * UNIT)
    run_step(world)
    run_step(world)
    assert world.runtime.stats()["device_bytes"] <= 3 * UNIT
    with pytest.raises(errors.StagehandOOMError) as caught:
        world.runtime.set_budget(512)
    assert caught.value.status == "BUDGET_TOO_SMALL"
    run_step(world)


def test_budget_too_small_names_unit_and_budget():
    with pytest.raises(errors.StagehandOOMError) as caught:
        World([UNIT, 4 * UNIT], budget=2 * UNIT)
    assert caught.value.status == "BUDGET_TOO_SMALL" and "unit1" in str(caught.value)


def test_a_changed_image_is_copied_again():
    world = World([UNIT] * 2, budget=4 * UNIT)
    run_step(world)
    changed = noise(UNIT, 77)
    world.runtime.synchronize()
    host = Tensor(world.arena.tensor(world.addresses[0], UNIT))
    ctypes.memmove(host.address, changed, UNIT)
    host.delete()
    world.runtime.mark_written(0)
    world.images[0] = changed
    run_step(world)


def test_writable_units_are_fresh_in_every_step():
    world = World([UNIT] * 3, budget=6 * UNIT, flags=_core.UNIT_WRITABLE)
    for seed in range(3):
        run_step(world)
        changed = noise(UNIT, 100 + seed)
        ctypes.memmove(world.addresses[1], changed, UNIT)
        world.runtime.mark_written(1)
        world.images[1] = changed
    run_step(world)


def test_units_after_seal_are_refused():
    world = World([UNIT], budget=2 * UNIT)
    with pytest.raises(errors.InvalidStateTransitionError):
        world.runtime.add_unit("late", 512, host=world.addresses[0], arena=world.arena)
    with pytest.raises(errors.StagehandError):
        world.runtime.seal()


def test_arguments_of_the_runtime(device):
    with pytest.raises(ValueError, match="planned"):
        _core.Runtime(device, UNIT, policy="best")
    with pytest.raises(TypeError):
        _core.Runtime(device, UNIT, alloc=print)
    with pytest.raises(TypeError):
        _core.Runtime("sim", UNIT)
    runtime = _core.Runtime(device, UNIT)
    with pytest.raises(ValueError, match="nothing"):
        runtime.add_unit("nothing", UNIT)
    with pytest.raises(TypeError):
        runtime.add_unit("x", UNIT, host=4096, arena="arena")
    with pytest.raises(TypeError):
        runtime.add_unit("x", UNIT, checkpoint="file", ranges=[(0, 0, 1, 0)])
    with pytest.raises(TypeError):
        runtime.add_unit("x", UNIT, ranges=[(0, 0, 1)])


# ---- leases and their owners ----


def two_units_in_the_room_of_one():
    world = World([UNIT, UNIT], budget=UNIT)
    return world, world.runtime


def assert_leased(runtime):
    """Unit 0 is leased, so that unit 1 finds no room."""
    with pytest.raises(errors.StagehandOOMError) as caught:
        runtime.acquire(1)
    assert caught.value.status == "BUDGET_TOO_SMALL"


def test_a_lease_ends_with_its_deleter():
    world, runtime = two_units_in_the_room_of_one()
    tensor = Tensor(runtime.acquire(0))
    assert_leased(runtime)
    assert tensor.bytes() == world.images[0], "a leased place was overwritten"
    tensor.delete()
    assert peek(runtime.acquire(1)) == world.images[1]


def test_a_lease_ends_with_an_unconsumed_capsule():
    world, runtime = two_units_in_the_room_of_one()
    capsule = runtime.acquire(0)
    assert_leased(runtime)
    del capsule
    assert peek(runtime.acquire(1)) == world.images[1]


def test_leases_of_one_unit_are_counted():
    world, runtime = two_units_in_the_room_of_one()
    first, second = Tensor(runtime.acquire(0)), Tensor(runtime.acquire(0))
    assert first.address == second.address
    first.delete()
    assert_leased(runtime)
    second.delete()
    assert peek(runtime.acquire(1)) == world.images[1]


def test_a_lease_may_end_on_another_thread():
    world, runtime = two_units_in_the_room_of_one()
    for _ in range(50):
        tensor = Tensor(runtime.acquire(0))
        worker = threading.Thread(target=tensor.delete)
        worker.start()
        worker.join()
        assert peek(runtime.acquire(1)) == world.images[1]


def test_many_threads_end_leases_at_once():
    world = World([UNIT] * 8, budget=8 * UNIT)
    runtime = world.runtime
    for _ in range(20):
        tensors = [Tensor(runtime.acquire(unit)) for unit in range(8)]
        workers = [threading.Thread(target=tensor.delete) for tensor in tensors]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        runtime.poll()
    for unit in range(8):
        assert peek(runtime.acquire(unit)) == world.images[unit]


def test_a_lease_outlives_the_runtime_and_everything_else():
    device = _core.Device(memory_bytes=64 << 20)
    before = free_bytes(device)
    world = World([UNIT] * 3, budget=3 * UNIT, device=device)
    image = world.images[1]
    tensor = Tensor(world.runtime.acquire(1))
    world.runtime.close()
    world.runtime.close()
    del world
    gc.collect()
    assert tensor.bytes() == image
    assert free_bytes(device) < before
    tensor.delete()
    assert free_bytes(device) == before


def test_an_unconsumed_capsule_outlives_the_runtime(device):
    before = free_bytes(device)
    world = World([UNIT] * 3, budget=3 * UNIT, device=device)
    capsule, image = world.runtime.acquire(1), world.images[1]
    del world
    gc.collect()
    assert peek(capsule) == image
    del capsule
    assert free_bytes(device) == before


def test_a_runtime_without_leases_gives_all_memory_back(device):
    before = free_bytes(device)
    world = World([UNIT] * 3, budget=3 * UNIT, device=device)
    run_step(world)
    world.runtime.close()
    assert free_bytes(device) == before


def test_calls_after_close_are_refused():
    world = World([UNIT], budget=2 * UNIT)
    runtime = world.runtime
    runtime.close()
    runtime.close()
    calls = [
        runtime.seal, runtime.step_begin, runtime.step_end, runtime.poll, runtime.synchronize, runtime.stats,
        runtime.prediction, runtime.metrics, runtime.smallest_budget, lambda: runtime.acquire(0),
        lambda: runtime.mark_written(0), lambda: runtime.set_budget(UNIT), lambda: runtime.verify(0),
        lambda: runtime.unit_stats(0), lambda: runtime.count_guards(0, 0, 0), lambda: runtime.count_mapped(0),
        lambda: runtime.count_d2h(0),
        lambda: runtime.add_unit("x", 512, host=world.addresses[0], arena=world.arena),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(errors.StagehandError, match="shut down") as caught:
            call()
        assert caught.value.status == "SHUT_DOWN"


def test_the_runtime_keeps_arena_and_device():
    world = World([UNIT] * 3, budget=UNIT)
    world.device.close()
    world.device = world.arena = None
    gc.collect()
    run_step(world)
    run_step(world)


def open_files():
    return {os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")}


def test_units_from_a_checkpoint_that_is_closed_early(model, device):
    path, tensors, offsets = model
    checkpoint = _core.Checkpoint(path)
    runtime = _core.Runtime(device, 4 * UNIT, link_bytes_per_s=1e9)
    ranges = [(0, offsets["b"], 1400, 0), [0, offsets["a"], 24, 1536]]
    assert runtime.add_unit("both", 2048, checkpoint=checkpoint, ranges=ranges) == 0
    checkpoint.close()
    runtime.seal()
    data = peek(runtime.acquire(0))
    assert data[:1400] == tensors["b"][2] and data[1536:1560] == tensors["a"][2]
    assert runtime.verify(0)[0] is True
    assert str(path.resolve()) in open_files()
    runtime.close()
    assert str(path.resolve()) not in open_files()


def test_a_truncated_file_is_an_error_of_the_use(model, device):
    path, _, offsets = model
    checkpoint = _core.Checkpoint(path)
    runtime = _core.Runtime(device, 4 * UNIT, link_bytes_per_s=1e9)
    runtime.add_unit("b", 1536, checkpoint=checkpoint, ranges=[(0, offsets["b"], 1400, 0)])
    os.truncate(path, offsets["b"] + 10)
    with pytest.raises(errors.TransferError) as caught:
        runtime.seal()
        runtime.acquire(0)
    assert path.name in str(caught.value) + caught.value.object


def test_a_telemetry_file_is_written(tmp_path):
    path = tmp_path / "steps.jsonl"
    world = World([UNIT], budget=2 * UNIT, telemetry_path=path)
    run_step(world)
    run_step(world)
    world.runtime.close()
    import json

    steps = [json.loads(line) for line in path.read_text().splitlines()]
    assert [step["step"] for step in steps if "step" in step] == [0, 1]


# ---- Python allocators ----


class Places:
    """An allocator in Python over the device's own memory."""

    def __init__(self, device):
        self.device, self.live, self.allocs, self.frees = device, {}, 0, 0

    def alloc(self, nbytes):
        tensor = Tensor(self.device.empty(nbytes))
        self.live[tensor.address] = (nbytes, tensor)
        self.allocs += 1
        return tensor.address

    def free(self, address, nbytes):
        size, tensor = self.live.pop(address)
        assert size == nbytes
        tensor.delete()
        self.frees += 1


def test_places_come_from_a_python_allocator(device):
    places = Places(device)
    world = World([UNIT] * 4, budget=3 * UNIT, device=device, alloc=places.alloc, free=places.free)
    for _ in range(3):
        run_step(world)
    assert places.allocs and places.live
    assert sum(size for size, _ in places.live.values()) == world.runtime.stats()["device_bytes"]
    world.runtime.close()
    assert not places.live and places.frees == places.allocs


def test_a_python_allocator_outlives_the_runtime_for_its_leases(device):
    places = Places(device)
    world = World([UNIT] * 3, budget=3 * UNIT, device=device, alloc=places.alloc, free=places.free)
    tensor, image = Tensor(world.runtime.acquire(2)), world.images[2]
    world.runtime.close()
    del world
    gc.collect()
    assert places.live and tensor.bytes() == image
    worker = threading.Thread(target=tensor.delete)
    worker.start()
    worker.join()
    assert not places.live


def small_units(device, alloc):
    """A world that could work with a small part of its budget, over an allocator that takes nothing back."""
    return World([4096] * 64, budget=64 * 4096, device=device, alloc=alloc, free=lambda address, nbytes: None)


def test_an_exception_of_the_allocator_is_the_error(device):
    def alloc(nbytes):
        raise RuntimeError("the card is full of cats")

    with pytest.raises(errors.StagehandOOMError) as caught:
        small_units(device, alloc)
    assert caught.value.status == "OUT_OF_DEVICE_MEMORY"
    assert "the card is full of cats" in str(caught.value)


@pytest.mark.parametrize("result", [0, 1000, None, "text", -512])
def test_a_wrong_result_of_the_allocator_is_an_error(device, result):
    with pytest.raises(errors.StagehandOOMError) as caught:
        small_units(device, lambda nbytes: result)
    assert caught.value.status == "OUT_OF_DEVICE_MEMORY" and "alloc" in str(caught.value)


def test_an_interrupt_in_the_allocator_is_raised_again(device):
    def alloc(nbytes):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        with pytest.raises(errors.StagehandOOMError):
            small_units(device, alloc)
        for _ in range(1000):  # the signal's handler runs between two instructions
            pass


def test_an_interrupt_in_free_is_raised_again(device):
    places = Places(device)

    def free(address, nbytes):
        places.free(address, nbytes)
        raise KeyboardInterrupt

    world = World([UNIT] * 3, budget=3 * UNIT, device=device, alloc=places.alloc, free=free)
    with pytest.raises(KeyboardInterrupt):
        world.runtime.close()
        for _ in range(1000):
            pass


def test_an_exception_of_free_is_reported_and_not_lost(device, monkeypatch):
    places, reported = Places(device), []

    def free(address, nbytes):
        places.free(address, nbytes)
        raise RuntimeError("the memory is cursed")

    monkeypatch.setattr(sys, "unraisablehook", lambda report: reported.append(str(report.exc_value)))
    world = World([UNIT] * 3, budget=3 * UNIT, device=device, alloc=places.alloc, free=free)
    world.runtime.close()
    assert reported and set(reported) == {"the memory is cursed"}


def test_an_allocator_that_waits_for_the_gil_does_not_deadlock(device):
    places, done = Places(device), threading.Event()

    def slow_alloc(nbytes):
        time.sleep(0.02)
        return places.alloc(nbytes)

    world = World([UNIT] * 4, budget=3 * UNIT, device=device, alloc=slow_alloc, free=places.free, seal=False)

    def ask():
        while not done.is_set():
            world.runtime.smallest_budget()
            world.runtime.count_mapped(0)

    asker = threading.Thread(target=ask)
    asker.start()
    world.runtime.seal()
    done.set()
    asker.join()
    run_step(world)


def test_a_cycle_through_the_allocator_is_collected(device):
    class Owner(Places):
        runtime = None

    owner = Owner(device)
    before = free_bytes(device)
    world = World([UNIT] * 2, budget=2 * UNIT, device=device, alloc=owner.alloc, free=owner.free)
    owner.runtime = world.runtime
    gone = weakref.ref(owner)
    del owner, world
    gc.collect()
    assert gone() is None
    assert free_bytes(device) == before


# ---- the GIL, threads, leaks, the end ----


def slow_link(**options):
    return _core.Device(memory_bytes=64 << 20, link_bytes_per_s=1_000_000, **options)


@pytest.mark.alone
def test_acquire_waits_without_the_gil():
    size = 400_000  # 400 ms of link
    world = World([size], budget=1 << 20, device=slow_link())
    with Ticker() as ticker:
        ticks, seconds = ticker.during(lambda: world.runtime.acquire(0))
    assert seconds > 0.2 and ticks > 2


@pytest.mark.alone
def test_close_waits_without_the_gil():
    world = World([400_000], budget=1 << 20, device=slow_link())
    world.runtime.step_begin()
    with Ticker() as ticker:
        ticks, seconds = ticker.during(world.runtime.close)
    assert seconds < 0.1 or ticks > 2


@pytest.mark.alone
def test_measure_waits_without_the_gil():
    device = slow_link()
    with Ticker() as ticker:
        ticks, seconds = ticker.during(lambda: device.measure_h2d(100_000, repeats=3))
    assert seconds > 0.2 and ticks > 2


def test_close_during_a_call_lets_the_call_finish():
    world = World([400_000], budget=1 << 20, device=slow_link())
    results = []
    worker = threading.Thread(target=lambda: results.append(peek(world.runtime.acquire(0))))
    worker.start()
    time.sleep(0.1)
    world.runtime.close()
    with pytest.raises(errors.StagehandError, match="shut down"):
        world.runtime.poll()
    worker.join()
    assert results == [world.images[0]]


def test_threads_acquire_at_once():
    world = World([UNIT] * 6, budget=6 * UNIT)
    right = []

    def work(seed):
        for i in range(200):
            unit = (seed + i) % 6
            right.append(peek(world.runtime.acquire(unit)) == world.images[unit])

    world.runtime.step_begin()
    workers = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert right == [True] * 800
    world.runtime.step_end()


def test_ten_thousand_leases_leak_nothing():
    world = World([4096] * 4, budget=3 * 4096)
    runtime = world.runtime

    def run(count):
        for i in range(count):
            Tensor(runtime.acquire(i % 4)).delete()

    run(2_000)
    gc.collect()
    before = resident_bytes()
    run(10_000)
    gc.collect()
    assert resident_bytes() - before < 2 << 20


def test_ten_thousand_objects_leak_nothing(device):
    def run(count):
        for _ in range(count):
            arena = _core.Arena(device, 4096)
            arena.tensor(arena.reserve(4096), 4096)
            device.empty(512)
            with pytest.raises(ValueError):
                arena.tensor(0, 1)

    run(1_000)
    gc.collect()
    before, memory = resident_bytes(), free_bytes(device)
    run(10_000)
    gc.collect()
    assert resident_bytes() - before < 4 << 20 and free_bytes(device) == memory


def test_the_interpreter_may_end_with_everything_open():
    script = textwrap.dedent(
        """
        import sys, threading
        sys.path.insert(0, sys.argv[1])
        from core_support import Tensor, World
        from test_core import Places, UNIT
        from stagehand import _core
        device = _core.Device(memory_bytes=64 << 20)
        places = Places(device)
        world = World([UNIT] * 4, budget=3 * UNIT, device=device, alloc=places.alloc, free=places.free)
        tensor, capsule = Tensor(world.runtime.acquire(0)), world.runtime.acquire(1)
        cycle = [world, tensor, capsule]
        cycle.append(cycle)
        pool = _core.Pool(UNIT, UNIT)
        pool.acquire(1)
        threading.Thread(target=pool.acquire, args=(1,), daemon=True).start()
        print("done")
        """
    )
    command = [sys.executable, "-c", script, str(HERE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# ---- torch ----


@needs_torch
def test_torch_reads_a_lease_and_its_views_hold_it():
    world, runtime = two_units_in_the_room_of_one()
    tensor = torch.from_dlpack(runtime.acquire(0))
    assert tensor.dtype == torch.uint8 and tensor.shape == (UNIT,) and tensor.device.type == "cpu"
    assert tensor.numpy().tobytes() == world.images[0]
    view = tensor[512:1024].view(torch.bfloat16)
    del tensor
    assert_leased(runtime)
    assert view.view(torch.uint8).numpy().tobytes() == world.images[0][512:1024]
    del view
    assert peek(runtime.acquire(1)) == world.images[1]


@needs_torch
def test_torch_tensor_outlives_the_runtime(device):
    before = free_bytes(device)
    world = World([UNIT], budget=UNIT, device=device)
    tensor, image = torch.utils.dlpack.from_dlpack(world.runtime.acquire(0)), world.images[0]
    world.runtime.close()
    del world
    gc.collect()
    assert tensor.numpy().tobytes() == image
    del tensor
    assert free_bytes(device) == before


@needs_torch
def test_torch_tensor_over_an_arena_is_a_storage_of_its_own(device):
    arena = _core.Arena(device, 1 << 20)
    address = arena.reserve(4096)
    tensor = torch.from_dlpack(arena.tensor(address, 4096)).view(torch.float32)
    assert tensor.untyped_storage().nbytes() == 4096 and tensor.data_ptr() == address
    tensor.fill_(1.5)
    del arena
    gc.collect()
    assert float(tensor.sum()) == 1.5 * 1024


@needs_torch
def test_torch_ends_a_lease_on_an_autograd_thread():
    world, runtime = two_units_in_the_room_of_one()
    holder = [torch.from_dlpack(runtime.acquire(0))]
    worker = threading.Thread(target=holder.clear)
    worker.start()
    worker.join()
    assert peek(runtime.acquire(1)) == world.images[1]
