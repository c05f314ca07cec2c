"""A folder that is damaged, wrong or hostile is refused with file and tensor, and nothing of it is run.

Every case is loaded and inspected: both must name the same file and tensor. Each folder also holds code and a pickle
that leave a trace when they are run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pickle
import random
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hedgerow.errors import InvalidRequest
from hedgerow.model.fields import MOST, ConfigError
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import INDEX, Checkpoint, CheckpointError
from hedgerow.weights.__main__ import main
from hedgerow.weights.convert import convert
from hedgerow.weights.published import MINI
from hedgerow.weights.rehearse import write
from hedgerow.weights.report import inspect
from kernels.linear import MIN_4
from services.gateway.templates import template_of
from services.gateway.tokenizer import Tokenizer, TokenizerError
from services.verifier.vocabulary import read_vocabulary
from tests.kimi import BUNDLED

SMALL = dataclasses.replace(MINI, layers=2, vocab=512, experts=2, top_k=1)
SHARD = "model-00002-of-000005.safetensors"  # layer 1
BASE = "language_model.model.layers.1."
UP = f"{BASE}mlp.experts.1.up_proj."
NORM = f"{BASE}input_layernorm.weight"
EXTRA = "language_model.model.layers.2.input_layernorm.weight"
Change = Callable[[Path], object]


class Trap:
    """Runs when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.trace),)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once: most of a case's time went into it."""
    made = tmp_path_factory.mktemp("good")
    write(made, "k2.6", SMALL)
    return made


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "kimi")
    trace = f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n"
    for name in ("modeling_deepseek.py", "configuration_kimi_k25.py", "sitecustomize.py"):
        (tmp_path / "kimi" / name).write_text(trace)
    (tmp_path / "kimi" / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    return tmp_path / "kimi"


def load(folder: Path) -> K2Model:
    return K2Model.load(folder, (), law=MIN_4)


def index(change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(folder: Path) -> None:
        text = json.loads((folder / INDEX).read_text())
        change(text["weight_map"])
        (folder / INDEX).write_text(json.dumps(text))

    return apply


def points(to: str) -> Change:
    return index(lambda names: names.update({NORM: to}))


def tensors(change: Callable[[dict[str, torch.Tensor]], object], shard: str = SHARD) -> Change:
    def apply(folder: Path) -> None:
        found = load_file(folder / shard)
        change(found)
        save_file(found, folder / shard, metadata={"format": "pt"})

    return apply


def header(change: Callable[[str], str]) -> Change:
    """The shard's header as text; its length is kept right, the data as it is."""

    def apply(folder: Path) -> None:
        whole = (folder / SHARD).read_bytes()
        length = int.from_bytes(whole[:8], "little")
        text = change(whole[8 : 8 + length].decode()).encode()
        (folder / SHARD).write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])

    return apply


def entry(name: str, change: Callable[[dict[str, Any]], object]) -> Change:
    def apply(text: str) -> str:
        told = json.loads(text)
        change(told[name])
        return json.dumps(told)

    return header(apply)


def shard(change: Callable[[Path], object]) -> Change:
    return lambda folder: change(folder / SHARD)


def replaced(make: Callable[[Path], object]) -> Change:
    """Another thing under the shard's name."""

    def apply(folder: Path) -> None:
        (folder / SHARD).unlink()
        make(folder / SHARD)

    return apply


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Trap(path.parent.parent / "ran")))


def sparse(path: Path) -> None:
    """A header of 10 GB in a file that is that long."""
    with path.open("wb") as file:
        file.write((10 * 10**9).to_bytes(8, "little") + b"{")
        file.truncate(10 * 10**9 + 8)


def outside(path: Path) -> None:
    other = path.parent.parent / "other.safetensors"
    save_file({NORM: torch.zeros(SMALL.hidden)}, other)
    path.symlink_to(other)


def again(names: dict[str, torch.Tensor]) -> None:
    names[NORM] = torch.ones(SMALL.hidden).bfloat16()


def cut(count: int) -> Change:
    return shard(lambda path: path.write_bytes(path.read_bytes()[:-count]))


def halved(found: dict[str, torch.Tensor]) -> None:
    found[UP + "weight_scale"] = found[UP + "weight_scale"][:, ::2].contiguous()


def twice(text: str) -> str:
    one = json.dumps(NORM) + ':{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}'
    return text.rstrip()[:-1] + "," + one + "}"


def in_utf_16(path: Path) -> None:
    """As long as before, and the same text for a reader that guesses encodings."""
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    text = whole[8 : 8 + length].decode().encode("utf-16-le")
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])


def one_more(folder: Path) -> None:
    """Of the third layer, of which config.json knows nothing."""
    tensors(lambda t: t.update({EXTRA: torch.ones(4)}))(folder)
    index(lambda names: names.update({EXTRA: SHARD}))(folder)


# what is done to the folder -> the file and the tensor that are named, and a word of the message
CASES: dict[str, tuple[Change, str, str, str]] = {
    "truncated by a byte": (cut(1), SHARD, "", "bytes"),
    "truncated by half": (cut(100_000), SHARD, "", "bytes"),
    "truncated in the header": (shard(lambda p: p.write_bytes(p.read_bytes()[:99])), SHARD, "", "header of at most"),
    "empty": (shard(lambda p: p.write_bytes(b"")), SHARD, "", "header"),
    "too long": (shard(lambda p: p.write_bytes(p.read_bytes() + b"x")), SHARD, "", "bytes"),
    "missing": (shard(Path.unlink), SHARD, "", "missing"),
    "not in the index": (index(lambda n: n.pop(UP + "weight_packed")), "kimi", UP + "weight_packed", "missing"),
    "not in the file": (tensors(lambda t: t.pop(UP + "weight_packed")), SHARD, UP + "weight_packed", "missing"),
    "another dtype": (
        tensors(lambda t: t.update({UP + "weight_packed": t[UP + "weight_packed"].long()})),
        SHARD, UP + "weight_packed", r"'I64' is not allowed: one of \['I32'\]",
    ),
    "another group size": (tensors(halved), SHARD, UP + "weight_scale", "a scale for each group of 32"),
    "another shape": (
        tensors(lambda t: t.update({NORM: t[NORM][:-1].contiguous()})), SHARD, NORM, r"shape \[128\]",
    ),
    "in two files": (tensors(again, "model-00001-of-000005.safetensors"), "model-00001-of-000005.safetensors", NORM,
                     "only in model-00002"),
    "twice in a header": (header(twice), SHARD, NORM, "once in this file"),
    "a pickle in the index": (points("pytorch_model.bin"), INDEX, NORM, "others are not opened"),
    "a pickle under another name": (
        replaced(lambda p: p.write_bytes(pickle.dumps(Trap(p.parent.parent / "ran")))), SHARD, "", "a pickle",
    ),
    "an archive of a pickle": (replaced(zipped), SHARD, "", "a pickle or an archive"),
    "above the folder": (points("../other.safetensors"), INDEX, NORM, "a file of this folder"),
    "anywhere": (points("/etc/passwd"), INDEX, NORM, "a file of this folder"),
    "below the folder": (points("sub/other.safetensors"), INDEX, NORM, "a file of this folder"),
    "the folder above itself": (points(".."), INDEX, NORM, "a file of this folder"),
    "no name": (points(""), INDEX, NORM, "a file of this folder"),
    "a name that no file has": (points("\ud800.safetensors"), INDEX, NORM, "a file of this folder"),
    "a name with a zero byte": (points("a\0.safetensors"), INDEX, NORM, "a file of this folder"),
    "a name that is too long": (points("a" * 5000 + ".safetensors"), "a" * 5000 + ".safetensors", "", "can be read"),
    "a link out of the folder": (replaced(outside), SHARD, f"{BASE}input_layernorm.weight", "a link to"),
    "a link in a circle": (replaced(lambda p: p.symlink_to(p.name)), SHARD, "", "can be read"),
    "a link to nothing": (replaced(lambda p: p.symlink_to("absent")), SHARD, "", "missing"),
    "a pipe": (replaced(os.mkfifo), SHARD, "", "no regular file"),
    "a folder": (replaced(Path.mkdir), SHARD, "", "a folder"),
    "a header of 10 GB": (
        shard(lambda p: p.write_bytes((10**10).to_bytes(8, "little") + p.read_bytes()[8:])), SHARD, "", "10000000000",
    ),
    "a header of 10 GB in as long a file": (replaced(sparse), SHARD, "", "header of at most 100000000 bytes"),
    "a header of 2^64 - 1 bytes": (
        shard(lambda p: p.write_bytes(b"\xff" * 8 + p.read_bytes()[8:])), SHARD, "", "header of at most",
    ),
    "a field twice in a header": (
        header(lambda text: text.replace(f'"{NORM}":{{', f'"{NORM}":{{"dtype":"F16",')), SHARD, NORM, "one of them",
    ),
    "a header in UTF-16": (shard(in_utf_16), SHARD, "", "a safetensors header"),
    "a layer too many": (one_more, SHARD, EXTRA, "no layer above 1, by num_hidden_layers"),
    "a header that is no object": (header(lambda text: "[" + text + "]"), SHARD, "", "header"),
    "a header without end": (header(lambda text: "[" * 200_000), SHARD, "", "header"),
    "a dtype of its own": (entry(NORM, lambda e: e.update(dtype="F99")), SHARD, NORM, "a dtype, one of"),
    "a shape of its own": (entry(NORM, lambda e: e.update(shape=[1 << 62, 1 << 62])), SHARD, NORM, "bytes for BF16"),
    "a negative shape": (entry(NORM, lambda e: e.update(shape=[-128])), SHARD, NORM, "a shape of integers"),
    "a shape of truth": (entry(NORM, lambda e: e.update(shape=[True])), SHARD, NORM, "a shape of integers"),
    "a shape of text": (entry(NORM, lambda e: e.update(shape="128")), SHARD, NORM, "a shape of integers"),
    "offsets backwards": (entry(NORM, lambda e: e["data_offsets"].reverse()), SHARD, NORM, "ascending"),
    "offsets past the end": (
        entry(NORM, lambda e: e.update(data_offsets=[10**9, 10**9 + 256])), SHARD, "", "data_offsets from",
    ),
    "offsets of another tensor": (
        entry(NORM, lambda e: e.update(data_offsets=[256, 512])), SHARD, "", "data_offsets from",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_is_refused_by_name_and_nothing_runs(folder: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, file, tensor, message = CASES[case]
    change(folder)
    monkeypatch.chdir(folder)  # code beside us could be imported from here
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    assert error.value.file.name == file
    if tensor:
        assert error.value.tensor == tensor
    named = {(Path(fault.file).name, fault.what) for fault in inspect(folder).faults}
    assert (file, error.value.tensor) in named
    assert not (folder.parent / "ran").exists()


def test_a_lie_about_an_experts_shape_is_found_when_it_is_read(folder: Path) -> None:
    tensors(lambda t: t.update({UP + "weight_shape": torch.tensor([128, 256], dtype=torch.int32)}))(folder)
    with pytest.raises(CheckpointError, match=r"\[128, 256\] is not allowed: \[256, 128\]") as error:
        load(folder)
    assert (error.value.file.name, error.value.tensor) == (SHARD, UP + "weight_shape")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda text: "{", "file"),
        (lambda text: "[" * 100_000, "file"),
        (lambda text: '{"weight_map": {"a": "b", "a": "c"}}', "a"),
    ],
    ids=["broken", "deep", "a name twice"],
)
@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_broken_json_is_named(folder: Path, name: str, change: Callable[[str], str], field: str) -> None:
    (folder / name).write_text(change((folder / name).read_text()))
    with pytest.raises(ConfigError) as error:
        load(folder)
    assert (error.value.file.name, error.value.name) == (name, field)
    assert inspect(folder).faults[0].file == str(folder / name)


@pytest.mark.parametrize("name", [INDEX, "config.json"])
def test_endless_json_is_not_read(folder: Path, name: str) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(10 * 10**9)
    with pytest.raises(ConfigError, match=f"at most {MOST} bytes"):
        load(folder)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(ConfigError, match="no regular file"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, [], {"a": 1}, {"a": None}])
def test_an_index_without_a_map_is_refused(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(InvalidRequest, match="weight_map") as error:
        load(folder)
    assert str(folder / INDEX) in str(error.value)


def test_the_layout_of_a_download_cache_is_followed(folder: Path, tmp_path: Path) -> None:
    """snapshots/REVISION/x -> ../../blobs/HASH, as `hf download` leaves it; nothing else above the snapshot."""
    snapshot, blobs = tmp_path / "cache" / "snapshots" / "7eb5002f", tmp_path / "cache" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / f"{number:064x}")
    (tmp_path / "kimi").rmdir()
    (tmp_path / "link").symlink_to(snapshot)
    assert len(load(tmp_path / "link").layers) == 2
    (snapshot / SHARD).unlink()
    save_file({NORM: torch.zeros(SMALL.hidden)}, tmp_path / "cache" / "other.safetensors")
    (snapshot / SHARD).symlink_to(tmp_path / "cache" / "other.safetensors")
    with pytest.raises(CheckpointError, match="or of its download cache"):
        load(snapshot)


def test_inspect_lists_everything_that_is_wrong(folder: Path) -> None:
    cut(1)(folder)
    points("../x.safetensors")(folder)
    index(lambda names: names.pop("language_model.lm_head.weight"))(folder)
    (folder / "tiktoken.model").unlink()
    found = {(Path(fault.file).name, fault.what) for fault in inspect(folder).faults}
    assert {(SHARD, ""), (INDEX, NORM), ("kimi", "language_model.lm_head.weight"), ("tiktoken.model", "")} <= found


def test_no_byte_of_a_header_makes_another_error(folder: Path) -> None:
    """300 random bytes, one at a time: a CheckpointError, or a header that says the same things."""
    whole, g = (folder / SHARD).read_bytes(), random.Random(1)
    length = int.from_bytes(whole[:8], "little")
    refused = 0
    for _ in range(300):
        content = bytearray(whole)
        content[g.randrange(8 + length)] = g.randrange(256)
        (folder / SHARD).write_bytes(content)
        with contextlib.suppress(CheckpointError):
            refused += 1
            Checkpoint(folder)
            refused -= 1
    assert refused > 200


def test_names_of_a_folders_own_choice_steer_no_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points("\x1b[31m\n\u202e.safetensors")(folder)
    assert main(["inspect", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert r"\x1b[31m\n\u202e.safetensors: found" in shown
    assert all(line.isprintable() for line in shown.splitlines())
    with pytest.raises(CheckpointError) as error:
        load(folder)
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    ("name", "content", "needed"),
    [
        ("tiktoken.model", b"\xff\xfe no lines\n", "lines of base64 and rank"),
        ("tiktoken.model", b"AA== 0\n", "256 ranks, 256 below vocab_size"),
        ("tiktoken.model", b"AA== 0\n" * 256, "ranks from 0 on, each piece once"),
        ("tiktoken.model", None, "the tokenizer's file"),
        ("tokenizer_config.json", b"{", "must be readable JSON"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": []}', "must be an object"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"3": {}}}', "a token of the last 256 of 512"),
        ("tokenizer_config.json", b'{"added_tokens_decoder": {"300": {"content": "a"}}}', "must be bool"),
        (
            "tokenizer_config.json",
            b'{"added_tokens_decoder": {"300": {"content": "a", "special": true}, '
            b'"301": {"content": "a", "special": true}}}',
            "a name of its own",
        ),
    ],
)
def test_a_tokenizer_that_no_gateway_takes_is_found_and_not_converted(
    folder: Path, name: str, content: bytes | None, needed: str
) -> None:
    """594 GB were converted, and then nobody could serve them."""
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    found = [(Path(fault.file).name, fault.needed) for fault in inspect(folder).faults]
    assert (name, needed) in found
    with pytest.raises(InvalidRequest) as error:
        convert(folder, folder.parent / "out", 1, lambda text: None)
    assert str(folder / name) in str(error.value)
    assert not (folder.parent / "out").exists()


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer_config.json", "chat_template.jinja"])
def test_a_small_file_that_never_ends_stops_nobody(folder: Path, name: str) -> None:
    """A pipe: whoever opened it waited for ever."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    begun = time.monotonic()
    if name == "chat_template.jinja":
        with pytest.raises(TokenizerError, match="no regular file"):
            template_of(folder, Tokenizer.from_folder(BUNDLED), "folder")
    else:
        with pytest.raises(TokenizerError, match="no regular file"):
            Tokenizer.from_folder(folder)
        with pytest.raises(InvalidRequest, match="no regular file"):
            read_vocabulary(folder, 512)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", [NORM, UP + "weight_scale", BASE + "mlp.gate.e_score_correction_bias"])
def test_numbers_that_are_none_are_found_when_all_is_read(
    folder: Path, name: str, value: float, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors(lambda t: t[name].view(-1)[-1].fill_(-value))(folder)
    assert main(["inspect", str(folder)]) == 0
    taken_out = name.endswith("bias") and value == float("inf")  # of use: an expert that is never chosen
    assert main(["inspect", str(folder), "--verify"]) == (0 if taken_out else 1)
    assert (f"{name}: found 'NaN or an infinity', needed: finite numbers" in capsys.readouterr().out) != taken_out
