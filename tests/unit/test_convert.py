"""A converted folder is its source bit by bit, whatever interrupted the conversion; and says so with checksums."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hedgerow.errors import HedgerowError, InvalidRequest
from hedgerow.model import identity, reading
from hedgerow.model.config import K2Config
from hedgerow.model.fields import ConfigError
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import (
    Checkpoint,
    CheckpointError,
    checkpoint_hash,
    embedding_and_head_hash,
    load_embedding_and_head,
)
from hedgerow.model.manifest import MANIFEST, Manifest
from hedgerow.model.reading import DTYPES
from hedgerow.model.tensors import Share, tensors
from hedgerow.weights import convert as conversion
from hedgerow.weights import vocabulary
from hedgerow.weights.__main__ import main
from hedgerow.weights.convert import convert, verify
from hedgerow.weights.journal import JOURNAL, LOCK, Journal, plan_of
from hedgerow.weights.order import ORDER
from hedgerow.weights.published import MINI, MINI_FP8, Member, Sizes
from hedgerow.weights.rehearse import write
from kernels.collectives import Ranks
from kernels.linear import MIN_4
from tests.peers import chain
from tests.polling import eventually

ROOT = Path(__file__).resolve().parents[2]
SMALL = dataclasses.replace(MINI, layers=3, vocab=1024, experts=5, top_k=2)
SMALL_FP8 = dataclasses.replace(MINI_FP8, layers=2, vocab=1024, experts=2)
MEMBERS: list[tuple[Member, Sizes]] = [("k2.6", SMALL), ("k2-thinking", SMALL), ("k2-instruct", SMALL_FP8)]


def quiet(text: str) -> None:
    """Nobody listens."""


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    write(tmp_path / "source", "k2.6", SMALL)
    return tmp_path / "source"


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize(("member", "s"), MEMBERS, ids=["k2.6", "k2-thinking", "k2-instruct"])
def test_every_rank_has_its_part_of_every_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: Member, s: Sizes, ranks: int
) -> None:
    """Against the published folder's own parts, and with the format's own library."""
    monkeypatch.setattr(conversion, "CHUNK", 3000)
    write(tmp_path / "source", member, s)
    manifest = convert(tmp_path / "source", tmp_path / "out", ranks, quiet)
    config = K2Config.from_folder(tmp_path / "out")
    assert config == K2Config.from_folder(tmp_path / "source")
    compared = 0
    for rank in range(ranks):
        share = Share(rank, ranks)
        before, after = Checkpoint(tmp_path / "source", share), Checkpoint(tmp_path / "out", share)
        after.check(config)
        library = load_file(manifest.rank_file(tmp_path / "out", share))
        assert library.keys() == before.stored.entries.keys()
        for wanted in tensors(config):
            if wanted.name not in before:
                continue
            expected = before.raw(wanted.name, wanted.shape, tuple(DTYPES.values())).view(torch.uint8)
            got = after.raw(wanted.name, wanted.shape, tuple(DTYPES.values()))
            assert torch.equal(got.view(torch.uint8), expected), wanted.name
            assert torch.equal(library[before.prefix + wanted.name].view(torch.uint8), expected), wanted.name
            compared += 1
    assert compared == ranks * len(before.stored.entries)


def logits(folder: Path, ranks: Ranks | None = None) -> torch.Tensor:
    model = K2Model.load(folder, (), law=MIN_4, ranks=ranks)
    return model.forward([chain(list(range(3, 40)), 0, 37, [0])], model.new_cache(1)).logits


@pytest.mark.parametrize(("member", "s"), MEMBERS, ids=["k2.6", "k2-thinking", "k2-instruct"])
def test_one_rank_computes_the_sources_bits_under_its_fingerprint(tmp_path: Path, member: Member, s: Sizes) -> None:
    write(tmp_path / "source", member, s)
    convert(tmp_path / "source", tmp_path / "out", 1, quiet)
    assert torch.equal(logits(tmp_path / "out"), logits(tmp_path / "source"))
    assert checkpoint_hash(tmp_path / "out") == checkpoint_hash(tmp_path / "source")
    small = {"config.json", "generation_config.json", "tiktoken.model", "tokenizer_config.json"}
    assert files(tmp_path / "out").keys() == {*small, MANIFEST, "rank-00-of-01.safetensors"}
    assert all((tmp_path / "out" / n).read_bytes() == (tmp_path / "source" / n).read_bytes() for n in small)


def test_two_ranks_of_files_compute_what_two_of_the_source_do(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", 2, quiet)
    assert torch.equal(logits(tmp_path / "out", Ranks(2)), logits(source, Ranks(2)))


def test_a_drafter_gets_the_whole_embedding_of_a_divided_folder(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", 4, quiet)
    a, b = load_embedding_and_head(source), load_embedding_and_head(tmp_path / "out")
    assert torch.equal(a.embedding, b.embedding)
    assert a.hash == b.hash == embedding_and_head_hash(tmp_path / "out")


@pytest.mark.parametrize("stop", [0, 1, 2, 4])
def test_it_goes_on_after_a_break_at_any_part(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """The break leaves half a part behind; the result is that of a run without one, and only the rest was written."""
    convert(source, tmp_path / "whole", 2, quiet)
    kept, written, calls = conversion.Out.kept, [0], [0]

    def broken(self: Any, end: int) -> str:
        if calls[0] == 2 * stop + 1:  # after the first of the part's two ranks
            self._file.flush()
            raise OSError(5, "Input/output error", "disk")
        calls[0] += 1
        return kept(self, end)

    monkeypatch.setattr(conversion.Out, "kept", broken)
    with pytest.raises(OSError, match="Input/output"):
        convert(source, tmp_path / "out", 2, quiet)
    assert not (tmp_path / "out" / MANIFEST).exists()
    assert len(json.loads((tmp_path / "out" / JOURNAL).read_text())["done"]) == stop
    monkeypatch.setattr(conversion.Out, "kept", kept)
    real = conversion.Out.write
    monkeypatch.setattr(
        conversion.Out, "write", lambda self, b: (written.__setitem__(0, written[0] + len(b)), real(self, b))[1]
    )
    said: list[str] = []
    manifest = convert(source, tmp_path / "out", 2, said.append)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert written[0] == sum(part.end - part.start for parts in manifest.files for part in parts[stop:])
    assert any(f"going on after {stop} of 6 parts" in text for text in said) == (stop > 0)


@pytest.mark.timeout(200)
def test_a_killed_process_is_gone_on_with(tmp_path: Path) -> None:
    write(tmp_path / "source", "k2.6", dataclasses.replace(MINI, vocab=1024, experts=8))
    command = [sys.executable, "-m", "hedgerow.weights", "convert", str(tmp_path / "source"), str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def done() -> int:
        try:
            return len(json.loads((tmp_path / "out" / JOURNAL).read_text())["done"])
        except FileNotFoundError:
            return 0

    process = subprocess.Popen([*command, "--ranks", "4"], cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
    eventually(lambda: done() >= 3 or process.poll() is not None, 100)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    reached = done()
    assert 3 <= reached < 64, "it was killed in the middle"
    ended = subprocess.run([*command, "--ranks", "4"], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert f"going on after {reached} of 64 parts" in ended.stderr
    convert(tmp_path / "source", tmp_path / "whole", 4, quiet)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_a_second_run_has_nothing_to_do(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As of a Job before each upgrade."""
    arguments = ["convert", str(source), str(tmp_path / "out"), "--ranks", "2"]
    assert main(arguments) == 0
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    assert main(arguments) == 0
    assert "converted already" in capsys.readouterr().err
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == before


def test_other_ranks_other_files_and_foreign_folders_are_refused(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", 2, quiet)
    with pytest.raises(InvalidRequest, match="for other ranks than 4"):
        convert(source, tmp_path / "out", 4, quiet)
    with pytest.raises(InvalidRequest, match="a published folder, not a converted one"):
        convert(tmp_path / "out", tmp_path / "again", 2, quiet)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("x")
    with pytest.raises(InvalidRequest, match="a new or empty folder"):
        convert(source, tmp_path / "mine", 2, quiet)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes"]
    with pytest.raises(CheckpointError, match="rows that 16 ranks can share"):
        convert(source, tmp_path / "sixteen", 16, quiet)
    assert not (tmp_path / "sixteen").exists()
    os.utime(source / "model-00001-of-000006.safetensors", ns=(1, 1))
    with pytest.raises(InvalidRequest, match="converted from other files"):
        convert(source, tmp_path / "out", 2, quiet)


def test_a_source_that_changes_meanwhile_makes_no_folder(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = conversion.verify_parts

    def touched(*arguments: Any) -> None:
        real(*arguments)
        os.utime(source / "model-00001-of-000006.safetensors", ns=(1, 1))

    monkeypatch.setattr(conversion, "verify_parts", touched)
    with pytest.raises(CheckpointError, match="changed; convert them anew"):
        convert(source, tmp_path / "out", 2, quiet)
    assert not (tmp_path / "out" / MANIFEST).exists()


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def test_a_bit_that_the_disk_lost_is_found_and_written_anew(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "whole", 2, quiet)
    file, real = tmp_path / "out" / "rank-01-of-02.safetensors", conversion.write_parts

    def damaged(work: Any, *rest: Any) -> Any:
        journal = real(work, *rest)
        flip(file, work.bounds[3] + 7)
        return journal

    monkeypatch.setattr(conversion, "write_parts", damaged)
    with pytest.raises(CheckpointError, match="in part 3"):
        convert(source, tmp_path / "out", 2, quiet)
    monkeypatch.setattr(conversion, "write_parts", real)
    said: list[str] = []
    convert(source, tmp_path / "out", 2, said.append)
    assert any("going on after 3 of 6 parts" in text for text in said)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_verification_names_the_file_whose_bytes_changed(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", 2, quiet)
    verify(tmp_path / "out")
    file = tmp_path / "out" / "rank-01-of-02.safetensors"
    flip(file, -1)
    with pytest.raises(CheckpointError, match="sha256") as error:
        verify(tmp_path / "out")
    assert error.value.file == file


def test_a_folder_for_other_ranks_is_not_loaded(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", 2, quiet)
    with pytest.raises(CheckpointError, match=r"'of 2' is not allowed: files of 1 ranks"):
        Checkpoint(tmp_path / "out")


def change(folder: Path, **fields: object) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(manifest | fields))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"order": "fragments-9"}, "order: 'fragments-9' is not allowed: one of rows-1; convert again"),
        ({"version": 2}, "version: 2 is not allowed"),
        ({"files": [[[0, 10, "x"]]]}, "one for each of 2 ranks"),
        ({"files": [[[0, 10, "x"], [11, 12, "y"]], []]}, "parts that follow each other"),
        ({"files": 3}, "lists of"),
        ({"files": [[[0, "ten", "x"]], []]}, "lists of"),
        ({"files": [[[0, float("inf"), "x"]], []]}, "Infinity is no JSON number"),
        ({"source": 3}, "source: 3 is not allowed"),
    ],
)
def test_a_manifest_of_something_else_is_refused(
    source: Path, tmp_path: Path, fields: dict[str, object], match: str
) -> None:
    convert(source, tmp_path / "out", 2, quiet)
    change(tmp_path / "out", **fields)
    with pytest.raises(ConfigError, match=match):
        Checkpoint(tmp_path / "out", Share(0, 2))


def test_what_the_manifest_does_not_describe_is_refused(source: Path, tmp_path: Path) -> None:
    """A truncated file, and a configuration that was changed after the conversion: the hash would not show it."""
    convert(source, tmp_path / "out", 2, quiet)
    file = tmp_path / "out" / "rank-01-of-02.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError) as error:
        Checkpoint(tmp_path / "out", Share(1, 2))
    assert (error.value.file, error.value.actual) == (file, f"{len(whole) - 1} bytes")
    file.write_bytes(whole)
    text = (tmp_path / "out" / "config.json").read_text()
    (tmp_path / "out" / "config.json").write_text(text.replace("2.827", "2.5"))
    with pytest.raises(ConfigError, match="changed"):
        Checkpoint(tmp_path / "out", Share(1, 2))


def test_two_at_once_are_one_too_many(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with conversion.locked(tmp_path / "out"), pytest.raises(HedgerowError, match="another conversion"):
        convert(source, tmp_path / "out", 2, quiet)


def test_a_file_system_without_locks_is_written_to_all_the_same(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(conversion.fcntl, "flock", none)
    convert(source, tmp_path / "out", 2, quiet)
    verify(tmp_path / "out")
    assert not (tmp_path / "out" / LOCK).exists()


def test_too_small_a_disk_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = conversion.shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(conversion.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InvalidRequest, match="a disk with"):
        convert(source, tmp_path / "out", 2, quiet)
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.undo()
    convert(source, tmp_path / "out", 2, quiet)


def test_a_disk_that_fills_up_is_told_with_the_file_and_gone_on_with(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It said "a file: No space left on device"."""
    out, whole = tmp_path / "out", os.fsync

    def full(descriptor: int) -> None:
        if "rank-01" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        whole(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    asked = ["convert", str(source), str(out), "--ranks", "2"]
    assert main(asked) == 1
    assert f"hedgerow convert: {out / 'rank-01-of-02.safetensors'}: No space left" in capsys.readouterr().err
    monkeypatch.undo()
    assert main(asked) == 0
    verify(out)


def test_a_ranks_file_is_read_from_its_first_byte_to_its_last(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an engine would: matrices that it multiplies together, all experts of a layer at once."""
    convert(source, tmp_path / "out", 2, quiet)
    reads: list[tuple[int, int]] = []
    real = reading.Files.fill

    def fill(self: Any, out: torch.Tensor, file: Path, start: int) -> None:
        reads.append((start, start + len(out)))
        real(self, out, file, start)

    monkeypatch.setattr(reading.Files, "fill", fill)
    c, s = K2Config.from_folder(source), SMALL
    after, before = Checkpoint(tmp_path / "out", Share(1, 2)), Checkpoint(source, Share(1, 2))
    base = "model.layers.1.mlp.experts."
    gate_up = [f"{base}{e}.{name}_proj.weight_packed" for e in range(s.experts) for name in ("gate", "up")]
    words = after.stacked(gate_up, (s.width, s.hidden // 8), torch.int32)
    scales = after.stacked([n.replace("packed", "scale") for n in gate_up], (s.width, s.hidden // 32), torch.bfloat16)
    down = [f"{base}{e}.down_proj.weight_packed" for e in range(s.experts)]
    out = after.stacked(down, (s.hidden, s.width // 8), torch.int32)
    assert len(reads) == 3, "one read a matrix of all experts"
    assert all(end == start for (_, end), (start, _) in pairwise(reads))
    assert words.shape == (2 * s.experts, s.width // 2, s.hidden // 8)
    assert torch.equal(words, before.stacked(gate_up, (s.width, s.hidden // 8), torch.int32))
    assert torch.equal(out, before.stacked(down, (s.hidden, s.width // 8), torch.int32))
    packed = before.packed(f"{base}3.up_proj", c.moe_intermediate_size, c.hidden_size)
    assert torch.equal(scales[7].float(), packed.scales)
    entries = sorted(after.stored.entries.values(), key=lambda e: e.start)
    assert entries[-1].end == Manifest.read(tmp_path / "out").files[1][-1].end  # type: ignore[union-attr]


def test_a_copy_that_was_cut_short_is_made_anew(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that filled up within tiktoken.model left half of it, and the next run took it for done."""
    real = vocabulary.shutil.copyfile

    def half(path: Path, to: Path) -> None:
        to.write_bytes(path.read_bytes()[:100])
        if path.name == "tiktoken.model":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(path, to)

    monkeypatch.setattr(vocabulary.shutil, "copyfile", half)
    with pytest.raises(OSError, match="No space") as error:
        convert(source, tmp_path / "out", 1, quiet)
    assert error.value.filename == str(tmp_path / "out" / "tiktoken.model.new")
    monkeypatch.undo()
    convert(source, tmp_path / "out", 1, quiet)
    for name in ("tiktoken.model", "tokenizer_config.json", "generation_config.json", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not list((tmp_path / "out").glob("*.new"))


def test_a_link_out_of_the_folder_is_not_copied(source: Path, tmp_path: Path) -> None:
    """What it leads to is not the folder's: it would leave this machine with the result."""
    (tmp_path / "secret").write_text("x")
    (source / "LICENSE").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="a link to") as error:
        convert(source, tmp_path / "out", 1, quiet)
    assert error.value.file == source / "LICENSE"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("done", [5, {"a": 1}, [5], [["x"]], [["a", "b", "c"]], None])
def test_a_journal_of_something_else_is_refused(source: Path, tmp_path: Path, done: object) -> None:
    (tmp_path / "out").mkdir()
    journal = Journal(plan_of(source, ORDER, 2), "", ())
    journal.write(tmp_path / "out")
    told = json.loads((tmp_path / "out" / JOURNAL).read_text())
    (tmp_path / "out" / JOURNAL).write_text(json.dumps(told | {"done": done}))
    with pytest.raises(ConfigError, match="lists of 2 checksums"):
        convert(source, tmp_path / "out", 2, quiet)


def test_a_lock_on_a_file_that_its_holder_removed_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was opened before that, and locked after: a third conversion would make a file of its own."""
    real = conversion.fcntl.flock

    def late(file: Any, how: int) -> None:
        (tmp_path / LOCK).unlink()
        real(file, how)

    monkeypatch.setattr(conversion.fcntl, "flock", late)
    with pytest.raises(HedgerowError, match="another conversion"), conversion.locked(tmp_path):
        pytest.fail("two would write")


def test_everything_long_says_how_far_it_is(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing, writing, reading back; comparing at a start. Hashing and comparing said nothing, of 594 GB."""
    monkeypatch.setattr(reading, "EVERY", -1.0)
    for module in (identity, reading):
        monkeypatch.setattr(module, "EVERY", -1.0)
        monkeypatch.setattr(module, "EVERY_LOGGED", -1.0, raising=False)
    told: list[reading.Progress] = []
    checkpoint_hash(source, told.append)
    size = sum(path.stat().st_size for path in [source / "config.json", *source.glob("model-0000[1-4]*")])
    assert (told[-1].done, told[-1].total) == (size, size)
    convert(source, tmp_path / "out", 2, quiet)
    said: list[str] = []
    monkeypatch.setattr(identity.log, "info", lambda text, *words: said.append(text % words))
    identity.check_share(tmp_path / "out", Share(1, 2))
    assert said[-1].startswith(f"comparing rank 1 of {tmp_path / 'out'}: ")
    assert said[-1].endswith(" GB/s, 0 s left")


def test_a_kill_right_after_the_manifest_leaves_no_journal(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", 2, quiet)
    whole = files(tmp_path / "out")
    (tmp_path / "out" / JOURNAL).write_text("{}")
    convert(source, tmp_path / "out", 2, quiet)
    assert files(tmp_path / "out") == whole
