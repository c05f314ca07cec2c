"""Tensors of a folder straight onto the device, through pinned memory: the bits that host memory gets."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from hedgerow.model import reading
from hedgerow.model.config import K2Config
from hedgerow.model.loader import Checkpoint
from hedgerow.model.reading import DTYPES
from hedgerow.model.tensors import Share, tensors
from hedgerow.weights.convert import convert
from hedgerow.weights.published import MINI
from hedgerow.weights.rehearse import write

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("converted", [False, True])
def test_what_is_read_onto_a_device_is_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converted: bool
) -> None:
    monkeypatch.setattr(reading, "CHUNK", 1 << 16)
    s = dataclasses.replace(MINI, layers=3, vocab=4096)
    write(tmp_path / "a", "k2.6", s)
    if converted:
        convert(tmp_path / "a", tmp_path / "b", 2, lambda text: None)
    folder, c = tmp_path / ("b" if converted else "a"), K2Config.from_folder(tmp_path / "a")
    host, device = Checkpoint(tmp_path / "a", Share(1, 2)), Checkpoint(folder, Share(1, 2))
    for wanted in tensors(c):
        every = tuple(DTYPES.values())
        got = device.raw(wanted.name, wanted.shape, every, "cuda")
        assert torch.equal(got.cpu().view(torch.uint8), host.raw(wanted.name, wanted.shape, every).view(torch.uint8))
    names = [f"model.layers.1.mlp.experts.{e}.{n}_proj.weight_packed" for e in range(s.experts) for n in ("gate", "up")]
    shape = s.width, s.hidden // 8
    assert torch.equal(device.stacked(names, shape, torch.int32, "cuda").cpu(), host.stacked(names, shape, torch.int32))
