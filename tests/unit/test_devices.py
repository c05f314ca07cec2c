"""A device that cannot serve is refused by the setting's name, with what is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.devices import cuda_device
from hedgerow.model.select import load_target


@pytest.fixture
def built_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(InvalidRequest, match=r"device.*cuda.*torch built for CUDA"):
        cuda_device()


def test_no_triton(monkeypatch: pytest.MonkeyPatch, built_for_cuda: None) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InvalidRequest, match=r"device.*the package triton"):
        cuda_device()


def test_no_gpu(monkeypatch: pytest.MonkeyPatch, built_for_cuda: None) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match=r"device.*a CUDA device that torch can see"):
        cuda_device()


def test_an_old_gpu(monkeypatch: pytest.MonkeyPatch, built_for_cuda: None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    with pytest.raises(InvalidRequest, match=r"device.*capability 9.0 or more; this has \(8, 0\)"):
        cuda_device()


def test_a_gpu_that_serves(built_for_cuda: None) -> None:
    assert cuda_device() == torch.device("cuda", 0)


def test_a_cpu_s_engine_on_a_gpu(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"engine.*'torch'.*auto where device is cuda"):
        load_target(tmp_path, (), "torch", device="cuda")
