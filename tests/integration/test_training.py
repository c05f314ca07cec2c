"""The training pipeline from sources to checkpoints, each stage by its documented command, tiny, without a GPU."""

from __future__ import annotations

import importlib
import json
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from bench.quality import served_nats
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.k2 import K2Model
from hedgerow.model.selector import Selector
from models.train.configs import drafter_shape, target_shape
from models.train.corpus import key_of
from models.train.export import read_target
from models.train.installed import heldout_texts, read_list
from models.train.shape import DrafterShape, TargetShape
from models.train.sources import Source

ROOT = Path(__file__).resolve().parents[2]
METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nLicense-Expression: {licence}\n"


def written_function(draw: random.Random, words: list[str]) -> str:
    """A documented function of random words: every file has lines of its own, so none is a near-duplicate."""
    a, b, c, d, e = draw.sample(words, 5)
    does = f"Return the {draw.choice(words)} of a {draw.choice(words)} and its {draw.choice(words)}."
    lines = [
        f"def {a}_{b}({c}, {d}):", f'    """{does}"""', f"    {e} = {c}.{draw.choice(words)}({d})",
        f"    for {a} in {e}.{draw.choice(words)}():", f"        {d}.{draw.choice(words)}({a})",
        f"    if {d} is None:", f"        raise ValueError({draw.choice(words)!r})",
        f"    {b} = {e} + {draw.choice(words)}({c}, {draw.choice(words)}={d})", f"    return {b}", "", "",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def write_wheel(path: Path, name: str, licence: str, files: dict[str, str]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-1.0.dist-info/METADATA", METADATA.format(name=name, licence=licence))
        archive.writestr(
            f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{name}-1.0.dist-info/RECORD", "")
        for file, text in files.items():
            archive.writestr(file, text)


def write_sources(folder: Path) -> None:
    """Two packages and a library. One package's licence is refused. 8 of 108 files fall into the held-out split."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 9))) for _ in range(4000)]
    names = (f"good/part{i}.py" for i in range(100_000))
    slots: dict[bool, list[str]] = {True: [], False: []}
    while len(slots[True]) < 8 or len(slots[False]) < 100:
        name = next(names)
        slots[key_of(Source("good", "1.0", "MIT", name, "")) // 7 % 100 < 4].append(name)
    chosen = slots[True][:8] + slots[False][:100]
    files = {name: "".join(written_function(draw, words) for _ in range(8)) for name in chosen}
    folder.mkdir()
    write_wheel(folder / "good-1.0-py3-none-any.whl", "good", "MIT", files)
    write_wheel(folder / "bad-1.0-py3-none-any.whl", "bad", "GPL-3.0-only", {"bad/a.py": next(iter(files.values()))})
    (folder / "python3.99").mkdir()
    (folder / "python3.99" / "library.py").write_text("".join(written_function(draw, words) for _ in range(8)))
    (folder / "sources.txt").write_text("# what to fetch\ngood==1.0\nbad==1.0\n")


def stage(monkeypatch: pytest.MonkeyPatch, module: str, *arguments: str) -> None:
    """`python -m models.train.<module> arguments`, in this process: torch is loaded once."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    importlib.import_module(f"models.train.{module}").main()


def lines_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.timeout(300)
@pytest.mark.long
def test_sources_become_checkpoints_that_the_engine_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sources(tmp_path / "index")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    stage(monkeypatch, "corpus", "fetch", "--sources", "index/sources.txt")
    stage(monkeypatch, "corpus", "build", "--lib", "index/python3.99")
    taken = {(r["package"], r["licence"]) for r in lines_of(tmp_path / ".work/train/train.jsonl")}
    assert taken >= {("good", "MIT")}
    assert "bad" not in {package for package, _ in taken}
    stage(monkeypatch, "tokenizer", "--sample", "1")
    stage(monkeypatch, "pack")
    stage(monkeypatch, "heldout")
    listed = read_list(tmp_path / "models/heldout/files.tsv")
    assert len(heldout_texts(listed, [], tmp_path / ".work/train/wheels")) == len(listed) >= 6

    small = ("--seconds", "1", "--tiny", "--eager", "--device", "cpu")
    stage(monkeypatch, "train_target", "--out", "target", *small)
    stage(monkeypatch, "train_drafter", "--target", "target", "--out", "first", *small)
    stage(
        monkeypatch, "train_drafter", "--target", "target", "--start", "first", "--seed", "20", "--out", "two", *small
    )
    stage(monkeypatch, "evaluate", "--target", "target")
    drafts = ("--target", "target", "--drafter", "two", "--limit", "2", "--new", "16")
    for name in ("tiktoken.model", "tokenizer_config.json"):
        (tmp_path / "target" / name).write_bytes((tmp_path / "models/sapling" / name).read_bytes())
    stage(monkeypatch, "acceptance", *drafts)
    figures = json.loads((tmp_path / "target" / "train_target.json").read_text())
    assert 0 < figures["served"]["bits_per_byte_4096"] < 8
    assert json.loads((tmp_path / "two" / "train_drafter.json").read_text())["acceptance"]["chat"]["prompts"] > 0

    chosen = ("--packages", "iniconfig", "pluggy", "--lib", "index/python3.99", "--out", "installed")
    stage(monkeypatch, "installed_text", *chosen)
    folders = ("--corpus", "installed", "--target", "target", "--drafter", "two", "--out", "chosen")
    stage(monkeypatch, "train_selector", *folders, "--ranks", "8", "--seconds", "1", "--tiny")
    (tmp_path / "chosen/8/selector").rename(tmp_path / "two/selector")
    figures = json.loads((tmp_path / "chosen" / "train_selector.json").read_text())
    assert figures["rank_8"]["nats"] > 0

    taught = ("--target", "target", "--drafter", "two", "--out", "taught", "--ranks", "4", "8", "--seconds", "1")
    stage(monkeypatch, "teach_selector", *taught, "--tiny", "--device", "cpu")
    judged = json.loads((tmp_path / "taught" / "train_selector.json").read_text())["left_out"]
    assert [each["rank"] for each in judged] == [4, 8]
    assert all(each["chain"] >= 1 and each["marginal_chain"] >= 1 for each in judged)

    drafter = DFlashModel.load(tmp_path / "two", tmp_path / "target")
    assert Selector.find(tmp_path / "taught/4", drafter.config) is not None
    selector = Selector.find(tmp_path / "two", drafter.config)
    assert selector is not None
    assert (selector.predecessor.shape[1], selector.top_k) == (8, 16)
    engine = K2Model.load(tmp_path / "target", drafter.feature_layers)
    window = torch.arange(300).remainder(97).tolist()
    trained = read_target(tmp_path / "target", torch.float32)
    hidden, _, _ = trained.hidden(torch.tensor([window[:-1]]))
    expected = torch.nn.functional.cross_entropy(trained.logits(hidden)[0], torch.tensor(window[1:]), reduction="none")
    assert torch.allclose(served_nats(engine, window), expected, atol=1e-4, rtol=0)


def test_configs_state_the_shapes_that_were_trained() -> None:
    assert target_shape(ROOT / "models/sapling") == TargetShape()
    assert drafter_shape(ROOT / "models/sapling-dflash") == DrafterShape()


@pytest.mark.parametrize(
    "module",
    [
        "corpus",
        "tokenizer",
        "pack",
        "heldout",
        "train_target",
        "train_drafter",
        "evaluate",
        "acceptance",
        "installed_text",
        "train_selector",
        "teach_selector",
    ],
)
def test_a_stage_tells_how_it_is_used(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        stage(monkeypatch, module, "--help")
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_a_pin_that_is_missing_fails_the_fetch(tmp_path: Path) -> None:
    (tmp_path / "sources.txt").write_text("no-such-package==1.0\n")
    command = [sys.executable, "-m", "models.train.corpus", "fetch", "--sources", str(tmp_path / "sources.txt")]
    environment = {"PATH": "/usr/bin:/bin", "PIP_NO_INDEX": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == "no-such-package==1.0: NOT FETCHED\n"
