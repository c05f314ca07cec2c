"""Held-out text is found again by path and hash, and bits per byte count what they say."""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path

import pytest
import torch

from bench.quality import main
from models.train.evaluate import Losses, by_length, token_bytes
from models.train.installed import heldout_texts, read_list, write_list

ROOT = Path(__file__).resolve().parents[2]
TEXT = "# a licence\n\nimport os\n\n\ndef f():\n\treturn os\n"
CLEANED = "import os\n\n\ndef f():\n    return os\n"


def listed(folder: Path, text: str) -> Path:
    write_list([{"package": "p", "version": "1.0", "path": "p/a.py", "text": text}], folder / "files.tsv")
    return folder / "files.tsv"


def test_a_listed_file_is_found_in_a_folder_and_in_a_wheel(tmp_path: Path) -> None:
    entries = read_list(listed(tmp_path, CLEANED))
    (tmp_path / "site" / "p").mkdir(parents=True)
    (tmp_path / "site" / "p" / "a.py").write_text(TEXT)
    with zipfile.ZipFile(tmp_path / "p-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("p/a.py", TEXT)
    assert heldout_texts(entries, [tmp_path / "site"]) == [CLEANED]
    assert heldout_texts(entries, [], tmp_path) == [CLEANED]
    assert heldout_texts(entries, [tmp_path / "site"], tmp_path) == [CLEANED], "once, though it is in both"


def test_another_version_of_a_listed_file_is_not_taken(tmp_path: Path) -> None:
    """It may have been trained on."""
    entries = read_list(listed(tmp_path, CLEANED))
    (tmp_path / "site" / "p").mkdir(parents=True)
    (tmp_path / "site" / "p" / "a.py").write_text(TEXT + "x = 1\n")
    assert heldout_texts(entries, [tmp_path / "site"]) == []


def test_every_prompt_comes_from_a_listed_file() -> None:
    files = {(f"{entry.package} {entry.version}", entry.path) for entry in read_list(ROOT / "models/heldout/files.tsv")}
    assert len(files) == 526
    for line in (ROOT / "models/heldout/heads.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert (record["package"], record["path"]) in files, record["id"]


def test_bits_per_byte_counts_bytes_and_not_special_tokens() -> None:
    sizes = token_bytes(ROOT / "models/sapling/tiktoken.model", 4096, "cpu")
    assert sizes[3840:].sum() == 0
    assert sizes[:256].tolist() == [1.0] * 256
    losses = Losses(torch.full((1, 4), math.log(2)), torch.tensor([[65, 66, 3841, 67]]))
    assert losses.bits_per_byte(sizes) == pytest.approx(4 / 3)
    assert losses.at(0, 2).bits_per_byte(sizes) == pytest.approx(1.0)


def test_late_positions_are_told_from_early_ones() -> None:
    nats = torch.ones(2, 4096) * math.log(2)
    nats[:, 2048:] *= 1.05
    figures = by_length(Losses(nats, torch.full((2, 4096), 65)), torch.ones(4096))
    assert (figures["bits_per_byte_512_1024"], figures["bits_per_byte_2048_4096"]) == (1.0, 1.05)


def test_too_little_text_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/heldout").mkdir(parents=True)
    (tmp_path / "models/heldout/files.tsv").write_text("p\t1.0\tp/absent.py\t0123456789abcdef\n")
    threads = str(torch.get_num_threads())
    assert main(["--target", str(ROOT / "models/sapling"), "--threads", threads]) == 1
    said = capsys.readouterr()
    assert said.out == "0 of 1 held-out files are on this machine, 0.00 MB\n"
    assert "0 tokens of held-out text" in said.err
