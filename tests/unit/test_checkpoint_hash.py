"""The hash of a large folder is kept beside it, and never outlives a change of the folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hedgerow.model import identity
from hedgerow.model.config import K2Config
from hedgerow.model.headers import CheckpointError
from hedgerow.model.identity import KEPT, check_share, checkpoint_hash
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import Checkpoint
from hedgerow.model.tensors import Share
from hedgerow.weights.convert import convert
from hedgerow.weights.published import MINI
from hedgerow.weights.rehearse import write
from kernels.collectives import Ranks

SHARD = "model-00001-of-000004.safetensors"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    write(tmp_path, "k2.6", dataclasses.replace(MINI, layers=1, vocab=512))
    monkeypatch.setattr(identity, "LARGE", 1000)
    yield tmp_path
    tmp_path.chmod(0o755)


def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often bytes are hashed from here on."""
    calls, real = [], identity.hashlib.sha256
    monkeypatch.setattr(identity.hashlib, "sha256", lambda: (calls.append(1), real())[1])
    return calls


def test_a_second_start_reads_no_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checkpoint_hash(folder)
    calls = hashed(monkeypatch)
    assert checkpoint_hash(folder) == first
    assert calls == []
    (folder / KEPT).unlink()
    assert checkpoint_hash(folder) == first
    assert calls == [1]


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_changed_byte_is_seen_though_size_and_time_are_put_back(folder: Path, name: str) -> None:
    first, before = checkpoint_hash(folder), (folder / name).stat()
    content = bytearray((folder / name).read_bytes())
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    os.utime(folder / name, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert checkpoint_hash(folder) != first
    content[-3] ^= 1
    (folder / name).write_bytes(content)
    assert checkpoint_hash(folder) == first


@pytest.mark.parametrize("text", ["", "{", "[]", '{"hash": 3}', '{"files": []}'])
def test_a_broken_note_is_no_note(folder: Path, text: str) -> None:
    first = checkpoint_hash(folder)
    (folder / KEPT).write_text(text)
    assert checkpoint_hash(folder) == first


def test_a_note_from_elsewhere_is_refused(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other") / KEPT
    checkpoint_hash(folder)
    (folder / KEPT).rename(other)
    (folder / KEPT).symlink_to(other)
    with pytest.raises(CheckpointError, match="a file of this folder"):
        checkpoint_hash(folder)


def test_a_folder_that_cannot_be_written_to_is_hashed_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, text: str) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(identity, "write_whole", refuse)
    assert len(checkpoint_hash(folder)) == 64
    assert not (folder / KEPT).exists()


def test_a_small_folder_gets_no_file_of_ours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "LARGE", 10**9)
    checkpoint_hash(folder)
    assert not (folder / KEPT).exists()


def test_a_changed_byte_of_a_converted_file_is_refused_before_it_is_loaded(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It was served under its source's fingerprint."""
    target = tmp_path_factory.mktemp("converted") / "ranks"
    convert(folder, target, 2, lambda text: None)
    config, file = K2Config.from_folder(target), target / "rank-01-of-02.safetensors"
    for rank in (0, 1):
        Checkpoint(target, Share(rank, 2)).compare()
    content, before = bytearray(file.read_bytes()), file.stat()
    content[-3] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    Checkpoint(target, Share(0, 2)).compare()
    with pytest.raises(CheckpointError, match=r"rank-01-of-02\.safetensors.*sha256"):
        K2Model(config, target, (), ranks=Ranks(2))


def test_a_large_converted_file_is_compared_once(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path_factory.mktemp("converted") / "ranks"
    convert(folder, target, 2, lambda text: None)
    share, parts = Share(0, 2), []
    real = identity.hashlib.sha256
    monkeypatch.setattr(identity.hashlib, "sha256", lambda *data: (parts.append(len(data)), real(*data))[1])
    check_share(target, share)
    compared = parts.count(0)
    assert compared > 0
    check_share(target, share)
    assert parts.count(0) == compared
