"""Too little memory is said before the first weight is read, with what is needed and what is there."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hedgerow.model import room, select
from hedgerow.model.config import K2Config
from hedgerow.model.loader import Checkpoint, CheckpointError
from hedgerow.model.room import check_room, cpu_bytes, free_memory
from hedgerow.model.select import load_target
from hedgerow.weights.published import MINI
from hedgerow.weights.rehearse import write

SMALL = dataclasses.replace(MINI, layers=2, vocab=512, experts=2, top_k=1)


def test_a_cpu_needs_four_bytes_a_weight(tmp_path: Path) -> None:
    write(tmp_path, "k2.6", SMALL)
    s = SMALL
    attention = s.hidden * (s.q_rank + s.kv_rank + s.rope) + s.q_rank + s.kv_rank
    attention += s.heads * (s.q_rank * (s.nope + s.rope) + s.kv_rank * (s.nope + s.value) + s.value * s.hidden)
    sparse = s.hidden * s.experts + s.experts + 3 * s.hidden * s.width * (s.experts + 1)
    weights = 2 * s.vocab * s.hidden + s.hidden + 2 * (attention + 2 * s.hidden) + 3 * s.hidden * s.dense_width + sparse
    assert cpu_bytes(K2Config.from_folder(tmp_path)) == 4 * weights


def test_a_model_that_does_not_fit_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "k2.6", SMALL)
    needed = cpu_bytes(K2Config.from_folder(tmp_path))
    monkeypatch.setattr(room, "free_memory", lambda: needed - 1)
    monkeypatch.setattr(Checkpoint, "raw", lambda *_: pytest.fail("a weight was read"))
    monkeypatch.setattr(select, "K2Model", None)
    with pytest.raises(CheckpointError, match="GB of free memory, for the weights alone") as error:
        load_target(tmp_path, (), "torch")
    assert (error.value.file, error.value.tensor) == (tmp_path, "")
    assert error.value.actual == f"{(needed - 1) / 1e9:.1f} GB"
    monkeypatch.setattr(room, "free_memory", lambda: needed)
    check_room(tmp_path, K2Config.from_folder(tmp_path))
    with pytest.raises(CheckpointError):
        check_room(tmp_path, K2Config.from_folder(tmp_path), compiled=True)


@pytest.mark.parametrize(
    ("available", "limit", "anon", "free"),
    [
        ("8000000 kB", "4000000000", 1_000_000_000, 3_000_000_000),
        ("2000000 kB", "4000000000", 1_000_000_000, 2_048_000_000),
        ("8000000 kB", "max", 1_000_000_000, 8_192_000_000),
        (None, "4000000000", 1_000_000_000, 3_000_000_000),
        (None, "max", 0, None),
    ],
)
def test_what_is_free_is_the_machines_or_the_containers(
    tmp_path: Path, available: str | None, limit: str, anon: int, free: int | None
) -> None:
    lines = "MemTotal:  9 kB\n" + (f"MemAvailable:   {available}\n" if available else "")
    (tmp_path / "meminfo").write_text(lines)
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.stat").write_text(f"anon {anon}\nfile 12345\n")
    assert free_memory(tmp_path / "meminfo", tmp_path) == free


def test_a_machine_that_says_nothing_is_believed_to_have_room(tmp_path: Path) -> None:
    assert free_memory(tmp_path / "a", tmp_path / "b") is None
