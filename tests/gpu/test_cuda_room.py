"""What the buffers of steps take of a GPU's memory, beside what was reckoned before loading."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.model.config import K2Config
from hedgerow.model.cuda_memory import step_bytes
from hedgerow.model.cuda_step_room import Room

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("rows", [512, 2048])
def test_steps_take_what_was_asked_for(rows: int) -> None:
    c = replace(K2Config.from_folder(Path("models/sapling")), vocab_size=163840)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    room = Room(c, c.vocab_size, 3, rows, torch.device("cuda"), torch.bfloat16)
    taken = torch.cuda.memory_allocated() - before
    assert room.rows == rows
    assert 0.95 * taken <= step_bytes(c, 3, rows) <= taken
