"""Folders and devices that a GPU cannot serve are refused before a weight is read or a rank is started. The device here
is pretended."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.engine.rank_process import Spec, serve
from hedgerow.engine.ranks import check_folder
from hedgerow.errors import InvalidRequest
from hedgerow.model.config import K2Config
from hedgerow.model.cuda_memory import LEAST_ROWS, Asked, check_device, growth, step_bytes
from hedgerow.model.fields import ConfigError
from hedgerow.model.headers import CheckpointError
from hedgerow.model.loader import Checkpoint
from hedgerow.model.memory import USABLE, on_card, token
from hedgerow.model.room import cache_pages
from hedgerow.model.select import load_target
from hedgerow.weights.convert import convert
from hedgerow.weights.published import MINI
from hedgerow.weights.rehearse import write
from services.verifier.agreement import Wanted
from services.verifier.config import VerifierServiceConfig
from services.verifier.ranks import load_ranks, rows_of
from services.verifier.service import load as load_group

SMALL = dataclasses.replace(MINI, layers=2, vocab=512, experts=4, top_k=2)
SHARD = "model-00002-of-000005.safetensors"
Fault = Callable[[Path], object]


def text(change: Callable[[dict[str, Any]], object]) -> Fault:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["text_config"])
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def packing(**values: object) -> Fault:
    return text(lambda c: c["quantization_config"]["config_groups"]["group_0"]["weights"].update(values))


def cut(folder: Path) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-100])


# what is wrong; in which file; what is said
FAULTS: dict[str, tuple[Fault, str, str]] = {
    "missing shard": (lambda folder: (folder / SHARD).unlink(), SHARD, "missing"),
    "truncated shard": (cut, SHARD, "bytes"),
    "group of 64": (packing(group_size=64), "config.json", r"group_size: 64 .*32 is supported"),
    "8 bits": (packing(num_bits=8), "config.json", r"num_bits: 8 .*4 is supported"),
    "packing": (
        text(lambda c: c["quantization_config"].update(format="marlin-24")), "config.json",
        r"format: 'marlin-24' .*'pack-quantized'",
    ),
    "another shape": (
        text(lambda c: c.update(moe_intermediate_size=128)), SHARD,
        r"shared_experts.*: \[256, 128\] .*shape \[128, 128\]",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "kimi"
    write(folder, "k2.6", SMALL)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of two devices with much memory; nothing may be read or started."""

    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("loading began")

    for place in ("hedgerow.model.select", "services.verifier.ranks"):
        monkeypatch.setattr(f"{place}.cuda_device", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (1 << 40, 1 << 40))
    for begun in ("hedgerow.model.cuda.CudaK2.load", "hedgerow.engine.rank_channels.subprocess.Popen"):
        monkeypatch.setattr(begun, never)
    monkeypatch.setattr(Checkpoint, "raw", never)
    monkeypatch.setattr("services.verifier.ranks.bind", lambda *_: None)
    monkeypatch.setattr("services.verifier.ranks.pci_address", lambda index: "")
    shutil.copytree(made, tmp_path / "kimi")
    return tmp_path / "kimi"


def given(folder: Path) -> dict[str, Any]:
    return {"listen": "127.0.0.1:0", "model_path": folder, "model_name": "m", "device": "cuda"}


def load(folder: Path, ranks: int, pages: int | None = None) -> None:
    config = VerifierServiceConfig(**given(folder), tensor_parallel=ranks, cache_pages=pages)
    if ranks == 1:
        load_target(folder, (0, 1), device="cuda", rows=rows_of(config), pages=pages)
    else:
        load_ranks(config, (0, 1))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_is_refused(folder: Path, fault: str, ranks: int) -> None:
    spoil, file, said = FAULTS[fault]
    spoil(folder)
    with pytest.raises((ConfigError, CheckpointError), match=said) as refused:
        load(folder, ranks)
    assert refused.value.file == folder / file


@pytest.mark.parametrize(("ranks", "pages"), [(1, 1), (1, 500), (2, 500)])
def test_too_little_memory_is(folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, pages: int) -> None:
    cache = pages * 64 * token(K2Config.from_folder(folder))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (cache, 1 << 40))
    with pytest.raises(
        CheckpointError, match=rf"GB of free memory .* of weights, .* \({pages} pages .* for steps"
    ) as no:
        load(folder, ranks, pages)
    assert (no.value.file, no.value.actual) == (folder, f"{cache / 1e9:.1f} GB")


@pytest.mark.parametrize("total", [1 << 40, 1 << 20])
@pytest.mark.parametrize("ranks", [1, 2])
def test_memory_of_which_no_page_could_be_taken_is_too_little(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, total: int
) -> None:
    """Without a number of pages a part of the card stays free, and what the largest step's buffers will need: it was
    asked for when the weights had been read, or not at all."""
    c, most = K2Config.from_folder(folder), rows_of(VerifierServiceConfig(**given(folder)))
    rows, grows = step_bytes(c, 2, LEAST_ROWS, ranks), growth(c, 2, most, ranks)
    half = math.ceil((1 - USABLE) * total / 2)
    assert (grows > half) is (total < 1 << 40)
    needed = on_card(c, ranks) + 64 * token(c) + rows + half + max(half, grows)
    free = [needed - 1]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (free[0], total))
    with pytest.raises(CheckpointError, match="GB of free memory on cuda:0") as no:
        load(folder, ranks)
    assert no.value.actual == f"{free[0] / 1e9:.1f} GB"
    free[0] = needed
    check_device(folder, c, torch.device("cuda", 0), Asked(most), 2, ranks)
    left: Any = SimpleNamespace(config=c, architecture="cuda-bfloat16")
    free[0] = needed - on_card(c, ranks) - rows  # as it is when they have been
    assert cache_pages(left, None, 1000, grows=grows) == 1


def test_too_little_memory_of_another_ranks_device_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's was looked at alone: another that was in use ran out of memory amid loading."""
    free = {0: 1 << 40, 1: 1000}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[torch.device(device).index], 1 << 40))
    monkeypatch.setattr(torch.cuda, "set_device", lambda place: None)
    monkeypatch.setattr("kernels.collectives.connect", lambda *given, **named: pytest.fail("the ranks met"))
    spec: dict[str, Any] = {
        "folder": str(folder), "ranks": 2, "address": "127.0.0.1", "patience": 1.0, "threads": 1, "backend": "nccl",
        "parent": os.getpid(), "cores": [], "engine": "cuda", "feature_layers": [0], "tell_hash": False,
        "room": (64, 500),
    }  # fmt: skip
    monkeypatch.setattr("hedgerow.engine.rank_process.bind", lambda *_: None)
    monkeypatch.setattr("hedgerow.engine.rank_process._node", lambda spec: None)
    with pytest.raises(CheckpointError, match=r"GB of free memory on cuda:1, .* \(500 pages .* for steps"):
        serve(Spec(**spec, rank=1, place=(1, 2)), lambda line: None)
    with pytest.raises(pytest.fail.Exception, match="the ranks met"):
        serve(Spec(**spec, rank=0, place=(0, 2)), lambda line: None)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_file_of_any_rank_is(folder: Path, tmp_path: Path, device: str) -> None:
    """Of a converted folder: another rank's was looked at by that rank, when the first had begun to read."""
    convert(folder, tmp_path / "two", 2, lambda line: None)
    file = tmp_path / "two" / "rank-01-of-02.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="bytes") as refused:
        load_ranks(VerifierServiceConfig(**given(tmp_path / "two") | {"device": device}, tensor_parallel=2), (0, 1))
    assert refused.value.file == file
    with pytest.raises(CheckpointError, match="bytes"):
        check_folder(tmp_path / "two", range(1, 2), 2)
    check_folder(tmp_path / "two", range(1), 2)


def test_small_files_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were read when the weights had been."""
    monkeypatch.setattr("services.verifier.service.load_target", lambda *given, **named: pytest.fail("loading began"))
    for name, text in (
        ("generation_config.json", '{"top_p": 2}'),
        ("tokenizer_config.json", "{"),
        ("tiktoken.model", "a b"),
    ):
        (folder / name).write_text(text)
        with pytest.raises(InvalidRequest, match=name):
            load_group(VerifierServiceConfig(**given(folder) | {"device": "cpu"}), Wanted("hidden", ()))


def test_what_ranks_cannot_share_is(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"moe_intermediate_size: 256 .*a multiple of 96, .*with 3 ranks"):
        load(folder, 3)
    text(lambda c: c.update(num_attention_heads=7, num_key_value_heads=7))(folder)
    with pytest.raises(CheckpointError, match="shape") as refused:
        load(folder, 2)
    assert "self_attn" in refused.value.tensor


def test_what_can_be_served_is_loaded(folder: Path) -> None:
    with pytest.raises(AssertionError, match="loading began"):
        load(folder, 1, 4)
