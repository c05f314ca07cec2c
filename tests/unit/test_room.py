"""Too little memory is said before the first weight is read, with what is needed and what is there."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import NamedTuple, cast

import pytest
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model import room, select
from hedgerow.model.cache import LatentCache
from hedgerow.model.compiled import CompiledK2
from hedgerow.model.config import K2Config
from hedgerow.model.devices import Device
from hedgerow.model.draft_config import DraftConfig
from hedgerow.model.interface import Target
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import Checkpoint, CheckpointError
from hedgerow.model.memory import token, weights
from hedgerow.model.room import cache_pages, check_room, cpu_bytes, free_memory, page_bytes
from hedgerow.model.select import load_drafter, load_target
from hedgerow.weights.published import MINI
from hedgerow.weights.rehearse import write
from kernels.linear import MIN_4
from tests.tiny import write_tiny

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


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_drafter_that_does_not_fit_is_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    """It was read until the memory was full: on a GPU a traceback, on a CPU the kernel's end of the process."""
    if device == "cuda":
        pytest.importorskip("triton")
    tiny, read = write_tiny(tmp_path), list[Path]()
    c = DraftConfig.from_folder(tiny.drafter)
    stored = sum(math.prod(entry.shape) for entry in Checkpoint(tiny.drafter).stored.entries.values())
    needed = 4 * (stored + 2 * c.vocab_size * c.hidden_size)
    if device == "cuda":
        needed = needed // 2 + 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * c.hidden_size
        monkeypatch.setattr(select, "cuda_device", lambda: torch.device("cuda", 0))
    free = [needed - 1]
    monkeypatch.setattr(room, "free_memory", lambda: free[0])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda place: (free[0], 1 << 40))
    for model in ("hedgerow.model.cuda_dflash.CudaDFlash", "hedgerow.model.select.DFlashModel"):
        if device == "cuda" or "cuda" not in model:
            monkeypatch.setattr(f"{model}.load", lambda folder, *_: read.append(folder))
    where = "memory on cuda:0" if device == "cuda" else "memory"
    with pytest.raises(
        CheckpointError, match=f"GB of free {where}, for the drafter's weights and its target's"
    ) as error:
        load_drafter(tiny.drafter, tiny.target, "auto" if device == "cuda" else "torch", device=device)
    assert (error.value.file, error.value.actual, read) == (tiny.drafter, f"{(needed - 1) / 1e9:.1f} GB", [])
    free[0] = needed
    load_drafter(tiny.drafter, tiny.target, "auto" if device == "cuda" else "torch", device=device)
    assert read == [tiny.drafter]


def test_a_cache_takes_no_more_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """K2.6's 262,144 positions made a cache of 98 GB in float32, and the kernel ended the verifier."""
    write(tmp_path, "k2.6", SMALL)
    model = K2Model.load(tmp_path, (), law=MIN_4)
    page = model.new_cache(1).data.nbytes
    monkeypatch.setattr(room, "free_memory", lambda: 400 * page)
    assert cache_pages(model, None, 100) is None
    assert cache_pages(model, None, 101) == 100
    assert "the cache has 100 pages of 64 tokens, not 101" in caplog.text
    assert cache_pages(model, None, 100, copies=2) == 50
    assert cache_pages(model, 400, 1) == 400
    with pytest.raises(InvalidRequest, match="cache_pages: 401 is not allowed: at most 400"):
        cache_pages(model, 401, 1)
    monkeypatch.setattr(room, "free_memory", lambda: page)
    with pytest.raises(InvalidRequest, match="for one page"):
        cache_pages(model, None, 1)
    monkeypatch.setattr(room, "free_memory", lambda: None)
    assert (cache_pages(model, 7, 1), cache_pages(model, None, 1)) == (7, None)


class OnCuda(NamedTuple):
    """As much of a CudaK2 as the cache's size asks for."""

    config: K2Config
    architecture: str = "cuda-sm90"
    least_free: int | None = None


def test_a_device_is_asked_for_its_own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 % of it stay free for activations and graphs; the weights alone are compared before they are read."""
    write(tmp_path, "k2.6", SMALL)
    c = K2Config.from_folder(tmp_path)
    page = 64 * token(c)
    needed = weights(c, 1) + page
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (needed - 1, 10 * needed))
    place = torch.device("cuda", 0)
    with pytest.raises(CheckpointError, match=r"GB of free memory on cuda:0, for .* of weights, .* of cache \(1 pages"):
        check_room(tmp_path, c, place)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (needed, 10 * needed))
    check_room(tmp_path, c, place)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (90 * page, 100 * page))
    model = cast(Target, OnCuda(c))
    assert cache_pages(model, None, 1000) == 82
    assert cache_pages(model, 90, 1000) == 90
    fuller = cast(Target, OnCuda(c, least_free=50 * page))  # another rank's device, which somebody else uses too
    assert cache_pages(fuller, None, 1000) == 42
    with pytest.raises(InvalidRequest, match="at most 50"):
        cache_pages(fuller, 51, 1000)
    with pytest.raises(InvalidRequest, match="at most 90"):
        cache_pages(model, 91, 1000)


@pytest.mark.parametrize("architecture", ["cpu-torch", "cpu-compiled", "cuda-sm90"])
def test_a_page_has_the_bytes_that_the_engine_gives_it(tmp_path: Path, architecture: str) -> None:
    write(tmp_path, "k2.6", dataclasses.replace(SMALL, top_k=2))
    c = K2Config.from_folder(tmp_path)
    if architecture == "cuda-sm90":
        assert page_bytes(c, architecture) == 64 * token(c)
        return
    model: Target = K2Model.load(tmp_path, ()) if architecture == "cpu-torch" else CompiledK2.load(tmp_path, ())
    one = model.new_cache(1)
    parts = [one.data] if isinstance(one, LatentCache) else [one.keys, one.latents]  # type: ignore[attr-defined]
    assert model.architecture == architecture
    assert page_bytes(c, architecture) == sum(part.nbytes for part in parts)


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
