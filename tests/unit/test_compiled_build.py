"""Whatever is wrong with compiler, cache or engine, a model is loaded: on PyTorch, with one line that says why."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hedgerow.model import selfcheck
from hedgerow.model.batch import SequenceRows
from hedgerow.model.compiled import CompiledK2
from hedgerow.model.compiled_dflash import CompiledDFlash
from hedgerow.model.config import K2Config
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.fields import ConfigError
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import Checkpoint
from hedgerow.model.select import load_drafter, load_target
from hedgerow.model.selfcheck import SelfCheckFailed, check_target
from kernels.cpu import build as builder
from kernels.cpu.build import BuildError, best_isa, build
from kernels.cpu.library import Library
from kernels.tree_accept import Walked, WalkRows
from tests.compiled_builds import FAULTS, missing_compiler, of_build, plain_build, plant
from tests.tiny import TinyDrafter, TinyPaths, TinyTarget, write_tiny

needs_compiler = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    return write_tiny(tmp_path_factory.mktemp("tiny"), TinyTarget(layers=2))


@pytest.fixture
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")


def script(folder: Path, text: str) -> str:
    """An executable that stands for a compiler."""
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


COUNTING = """echo run >> "$(dirname "$0")/runs"
case "$1" in --version) echo 'counting cc 1.0'; exit 0;; esac
while [ "$1" != -o ]; do shift; done
echo library > "$2" """


def runs(folder: Path) -> int:
    return len((folder / "runs").read_text().split())


@pytest.mark.usefixtures("without_compiler")
def test_without_a_compiler_torch_serves_and_one_line_says_so(
    tiny: TinyPaths, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "hedgerow.model.select"):
        assert isinstance(load_target(tiny.target, tiny.feature_layers), K2Model)
        assert isinstance(load_drafter(tiny.drafter, tiny.target), DFlashModel)
    assert [record.getMessage() for record in caplog.records if record.name == "hedgerow.model.select"] == [
        "the target runs on PyTorch, the compiled engine is not used: there is no C compiler",
        "the drafter runs on PyTorch, the compiled engine is not used: there is no C compiler",
    ]
    with pytest.raises(BuildError, match="there is no C compiler"):
        load_target(tiny.target, tiny.feature_layers, "compiled")
    with pytest.raises(BuildError, match="there is no C compiler"):
        load_drafter(tiny.drafter, tiny.target, "compiled")


def test_torch_is_taken_when_it_is_asked_for(tiny: TinyPaths) -> None:
    assert isinstance(load_target(tiny.target, tiny.feature_layers, "torch"), K2Model)
    assert isinstance(load_drafter(tiny.drafter, tiny.target, "torch"), DFlashModel)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("echo 'x.c:1: error: no such instruction' >&2; exit 1", "failed: x.c:1: error: no such instruction"),
        ("exit 3", "failed: no output"),
        ("kill -9 $$", "failed: no output"),
        ("exit 0", "wrote no library"),
    ],
)
def test_a_compiler_that_fails_is_told_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    compiler = script(tmp_path, f"case \"$1\" in --version) echo 'broken cc 1.0'; exit 0;; esac\n{text}")
    with pytest.raises(BuildError) as refused:
        build(tmp_path / "builds", compiler=compiler)
    assert refused.value.why == f"{compiler} {why}"
    assert [path.name for path in (tmp_path / "builds").iterdir()] == ["lock"]


@pytest.mark.parametrize("text", ["echo 'x.c:1: error: no such instruction' >&2; exit 1", "echo nothing > /dev/null"])
def test_with_a_compiler_that_fails_torch_serves_and_one_line_says_so(
    tiny: TinyPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    """One that says so, and one that writes no library."""
    script(tmp_path, f"case \"$1\" in --version) echo 'broken cc 1.0'; exit 0;; esac\n{text}")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert isinstance(load_target(tiny.target, tiny.feature_layers, builds=tmp_path / "builds"), K2Model)
    assert isinstance(load_drafter(tiny.drafter, tiny.target, builds=tmp_path / "builds"), DFlashModel)
    lines = [record.getMessage() for record in caplog.records if record.name == "hedgerow.model.select"]
    assert len(lines) == 2
    assert all("runs on PyTorch, the compiled engine is not used: " in line for line in lines)
    assert not any("\n" in line for line in lines)


@needs_compiler
def test_a_cache_that_another_cpu_has_filled_is_not_loaded(tiny: TinyPaths, tmp_path: Path) -> None:
    """Its libraries have other names; this CPU's own is built beside them. Loading them could end the process."""
    others = {"avx512", "avx2", "baseline"} - {builder.isa_of_this_cpu()}
    for isa in others:
        build(tmp_path, compiler=script(tmp_path, COUNTING), isa=isa)  # type: ignore[arg-type]
    foreign = set(tmp_path.glob("*.so"))
    assert len(foreign) == len(others)
    model = load_target(tiny.target, tiny.feature_layers, builds=tmp_path)
    assert isinstance(model, CompiledK2)
    assert model._library.path not in foreign


def test_a_compiler_that_cannot_be_run_is_told(tmp_path: Path) -> None:
    (tmp_path / "cc").write_text("\x7fELF")
    (tmp_path / "cc").chmod(0o755)
    with pytest.raises(BuildError, match="did not run: OSError"):
        build(tmp_path / "builds", compiler=str(tmp_path / "cc"))
    with pytest.raises(BuildError, match="there is no compiler 'nonesuch'"):
        build(tmp_path / "builds", compiler="nonesuch")


def test_a_cache_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compiler = script(tmp_path, COUNTING)
    with pytest.raises(BuildError, match="cannot be written"):
        build(tmp_path / "file" / "builds", compiler=compiler)


def test_a_build_is_made_once_and_again_when_anything_that_decides_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, folder = script(tmp_path, COUNTING), tmp_path / "builds"
    first = build(folder, compiler=compiler, isa="avx2")
    assert build(folder, compiler=compiler, isa="avx2") == first
    assert runs(tmp_path) == 3, "two times --version, one build"
    others = [
        build(folder, compiler=compiler, isa="baseline"),
        build(folder, compiler=compiler, isa="avx2", level="-O1"),
        build(folder, compiler=compiler, isa="avx2", defines=["X"]),
        build(folder, compiler=script(tmp_path, COUNTING.replace("1.0", "1.1")), isa="avx2"),
    ]
    copied = tmp_path / "sources"
    copied.mkdir()
    for path in [*builder.HERE.glob("*.c"), *builder.HERE.glob("*.h")]:
        (copied / path.name).write_bytes(path.read_bytes())
    (copied / "vec.h").write_text((copied / "vec.h").read_text() + "\n")
    monkeypatch.setattr(builder, "HERE", copied)
    others.append(build(folder, compiler=script(tmp_path, COUNTING), isa="avx2"))
    assert len({first, *others}) == 6


@needs_compiler
def test_a_prebuilt_engine_is_found_where_there_is_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image: built on another machine, on a file system that takes no writes."""
    made = builder.prebuild(tmp_path)
    assert len({path.name for path in made}) == len(made)
    tmp_path.chmod(0o500)
    monkeypatch.setattr(builder, "COMPILERS", ())
    assert build(tmp_path) in made
    Library(build(tmp_path))
    with pytest.raises(BuildError, match="no C compiler"):
        build(tmp_path, defines=("OTHER",))
    build(tmp_path).write_bytes(b"damaged")
    with pytest.raises(BuildError, match="no C compiler"):
        build(tmp_path)


@pytest.mark.parametrize("damage", ["library", "seal"])
def test_a_damaged_build_is_made_again_not_loaded(tmp_path: Path, damage: str) -> None:
    compiler, folder = script(tmp_path, COUNTING), tmp_path / "builds"
    path = build(folder, compiler=compiler, isa="avx2")
    if damage == "library":
        path.write_bytes(b"\x7fELF, cut short")
    else:
        builder.seal_of(path).unlink()
    assert build(folder, compiler=compiler, isa="avx2") == path
    assert path.read_text() == "library\n"


def test_of_two_processes_one_builds_and_the_other_waits(tmp_path: Path) -> None:
    # a build that ends when all three callers are past the look at the compiler
    all_here = 'until [ "$(wc -l < "$(dirname "$0")/runs")" -ge 4 ]; do sleep 0.01; done; echo library'
    compiler = script(tmp_path, COUNTING.replace("echo library", all_here))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        paths = list(pool.map(lambda _: build(tmp_path / "builds", compiler=compiler, isa="avx2"), range(3)))
    assert len(set(paths)) == 1
    assert runs(tmp_path) == 4, "three times --version, one build"


def test_a_build_that_was_broken_off_leaves_nothing_for_long(tmp_path: Path) -> None:
    """A service that is told to stop while it builds ends at once, and its folder stays."""
    (tmp_path / "builds" / "building-x").mkdir(parents=True)
    (tmp_path / "builds" / "building-x" / "half.so").touch()
    path = build(tmp_path / "builds", compiler=script(tmp_path, COUNTING), isa="avx2")
    assert not list(path.parent.glob("building-*"))


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.so"
    path.write_text("library")
    with pytest.raises(BuildError, match="cannot be loaded"):
        Library(path)


@needs_compiler
def test_a_library_of_other_structures_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernels.cpu import library

    path = build()
    monkeypatch.setattr(library, "STRUCTURES", (*library.STRUCTURES[1:], library.STRUCTURES[0]))
    with pytest.raises(BuildError, match="were expected"):
        Library(path)


def test_the_widest_instruction_set_that_is_whole_is_taken() -> None:
    whole = {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl"}
    assert best_isa(frozenset(whole)) == "avx512"
    assert best_isa(frozenset(whole - {"avx512vl"})) == "avx2"
    assert best_isa(frozenset(whole - {"fma"})) == "baseline"
    assert best_isa(frozenset()) == "baseline"


def test_a_cpu_without_multiply_adds_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every 64-bit Arm has them; an x86 without AVX2 would call the C library for each."""
    monkeypatch.setattr(builder, "cpu_features", frozenset)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(BuildError, match="no AVX2 with FMA"):
        build(tmp_path / "builds", compiler=script(tmp_path, COUNTING))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert build(tmp_path / "builds", compiler=script(tmp_path, COUNTING)).exists()


@needs_compiler
def test_auto_takes_the_compiled_engine_where_it_works(tiny: TinyPaths) -> None:
    assert isinstance(load_target(tiny.target, tiny.feature_layers), CompiledK2)
    assert isinstance(load_drafter(tiny.drafter, tiny.target), CompiledDFlash)


@needs_compiler
@pytest.mark.parametrize(
    ("target", "field"),
    [
        (TinyTarget(layers=1, value=24), "v_head_dim"),
        (TinyTarget(layers=1, kv_rank=40), "kv_lora_rank"),
        (TinyTarget(layers=1, nope=24), "qk_nope_head_dim"),
    ],
)
def test_sizes_without_code_are_named_and_torch_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, target: TinyTarget, field: str
) -> None:
    paths = write_tiny(tmp_path, target, TinyDrafter(feature_layers=(0,)))
    with pytest.raises(ConfigError) as refused:
        load_target(paths.target, (0,), "compiled")
    assert refused.value.name == field
    assert isinstance(load_target(paths.target, (0,)), K2Model)
    assert field in caplog.text


@needs_compiler
def test_a_drafters_size_without_code_is_named_and_torch_serves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = write_tiny(tmp_path, drafter=TinyDrafter(head_dim=24))
    with pytest.raises(ConfigError) as refused:
        load_drafter(paths.drafter, paths.target, "compiled")
    assert refused.value.name == "head_dim"
    assert isinstance(load_drafter(paths.drafter, paths.target), DFlashModel)
    assert "head_dim" in caplog.text


@needs_compiler
def test_wrong_draws_and_wrong_trees_are_found_by_the_self_check(
    tiny: TinyPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A draw of the next position's noise, and trees that lack a node."""
    right, trees = CompiledK2.walk, CompiledDFlash.trees

    def late(self: CompiledK2, logits: torch.Tensor, rows: Sequence[WalkRows]) -> list[Walked]:
        shifted = [row._replace(law=row.law._replace(position=row.law.position + 1)) for row in rows]
        return right(self, logits, shifted)

    def short(self: CompiledDFlash, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]) -> Any:
        return trees(self, logits, [budget - 1 for budget in budgets], caps)

    monkeypatch.setattr(CompiledK2, "walk", late)
    monkeypatch.setattr(CompiledDFlash, "trees", short)
    assert isinstance(load_target(tiny.target, tiny.feature_layers), K2Model)
    assert isinstance(load_drafter(tiny.drafter, tiny.target), DFlashModel)
    assert "self-check: other tokens are drawn" in caplog.text
    assert "self-check: a tree of 15 nodes, PyTorch's has 16" in caplog.text


@needs_compiler
def test_a_wrong_answer_is_found_by_the_self_check(
    tiny: TinyPaths, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts that weigh a thousandth more."""
    config = K2Config.from_folder(tiny.target)
    config = dataclasses.replace(config, routed_scaling_factor=config.routed_scaling_factor * 1.001)
    wrong = CompiledK2(Library(build()), config, Checkpoint(tiny.target), tiny.feature_layers)
    with pytest.raises(SelfCheckFailed, match="logits differ from PyTorch's"):
        check_target(wrong, K2Model.load(tiny.target, tiny.feature_layers))
    monkeypatch.setattr(selfcheck, "TOLERANCE", 0.0)
    assert isinstance(load_target(tiny.target, tiny.feature_layers), K2Model)
    assert "self-check: logits differ" in caplog.text
    assert isinstance(load_drafter(tiny.drafter, tiny.target), DFlashModel)
    for load in (
        lambda: load_target(tiny.target, tiny.feature_layers, "compiled"),
        lambda: load_drafter(tiny.drafter, tiny.target, "compiled"),
    ):
        with pytest.raises(SelfCheckFailed):
            load()


@needs_compiler
@pytest.mark.parametrize("number", FAULTS, ids=FAULTS.values())
def test_bits_that_depend_on_the_tree_are_found_by_the_self_check(tiny: TinyPaths, number: int) -> None:
    """Faults within rounding: only the comparison of bits sees them (a missing ancestor also differs from PyTorch)."""
    reference = K2Model.load(tiny.target, tiny.feature_layers)
    faulty = of_build(plain_build(), tiny.target, tiny.feature_layers)
    plant(faulty, number)
    if number == 0:
        check_target(faulty, reference)
        return
    with pytest.raises(SelfCheckFailed, match="logits differ" if number == 3 else "other bits"):
        check_target(faulty, reference)


KNOWN = ("2c09dee50a987ab5", "c2-89dd18a1", "f52afb3e19c7931c")  # checkpoint, law, logits


@needs_compiler
def test_the_law_of_arithmetic_has_the_bits_that_it_had(tmp_path: Path) -> None:
    """A change of any bit needs a new LAW: sessions that were computed by the old one must not go on with it."""
    paths = write_tiny(tmp_path)
    model = CompiledK2.load(paths.target, paths.feature_layers)
    if (model.checkpoint_hash[:16], model.kernel_law) != KNOWN[:2]:
        pytest.skip("this machine's torch makes other random weights or rotary tables")
    text = [(37 * i) % 512 for i in range(150)]
    out = model.forward([SequenceRows(0, range(3), text, range(-1, 149), [0, 70, 149])], model.new_cache(3))
    assert hashlib.sha256(out.logits.numpy().tobytes()).hexdigest()[:16] == KNOWN[2]
