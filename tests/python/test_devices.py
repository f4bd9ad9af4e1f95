"""Which device of the core a name means, with a PyTorch for CUDA and with one for ROCm."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from stagehand import _core, device as devices  # noqa: E402
from stagehand.files import pool  # noqa: E402
from stagehand.errors import StagehandError  # noqa: E402


class Card:
    """Stands for a device of the core that has a card."""

    opened: list[str] = []

    def __init__(self, name: str) -> None:
        Card.opened.append(name)
        self.backend, _, number = name.partition(":")
        self.index = int(number or 0)

    def info(self) -> dict:
        return {"name": "a card", "backend": self.backend, "index": self.index, "capabilities": 0}


@pytest.fixture
def cards(monkeypatch):
    """Cards by name, number 3 current; torch for CUDA until the test says otherwise."""
    Card.opened = []
    monkeypatch.setattr(_core, "Device", Card)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.version, "hip", None)
    yield Card
    gc.collect()


def test_torch_for_cuda_means_the_cuda_back_end(cards):
    assert devices.resolve("cuda:1", None).torch == torch.device("cuda", 1)
    assert devices.resolve(None, None).torch == torch.device("cuda", 3)
    pool._device()
    assert cards.opened == ["cuda:1", "cuda:3", "cuda:3"]


def test_torch_for_rocm_means_the_hip_back_end(cards, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    target = devices.resolve(torch.device("cuda", 1), None)
    assert target.core.backend == "hip" and target.torch == torch.device("cuda", 1) and not target.simulated
    assert devices.resolve(None, None).torch == torch.device("cuda", 3)
    pool._device()
    assert cards.opened == ["hip:1", "hip:3", "hip:3"]


def test_a_card_has_one_target_whatever_it_is_called(cards, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    target = devices.resolve("cuda:1", None)
    assert devices.resolve("hip:1", None) is target
    current = devices.resolve("hip", None)
    assert current.torch == torch.device("cuda", 3) and devices.resolve("cuda", None) is current


@pytest.mark.parametrize("hip, name", [(None, "hip:0"), ("6.4.1", None)])
def test_a_card_that_torch_was_not_built_for_is_refused(cards, monkeypatch, hip, name):
    monkeypatch.setattr(torch.version, "hip", hip)
    with pytest.raises(StagehandError, match="was built for"):
        devices.resolve(name or Card("cuda:0"), None)


def test_simulated_devices_have_no_vendor(cards, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4.1")
    assert devices.core_name("sim") == "sim" and devices.core_name("cpu") == "cpu"
