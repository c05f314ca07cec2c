"""A group of true processes over gloo: one process with as many shards, bit for bit; and what a lost rank does."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench.drive import Job, drive_now
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.rank_target import GroupTarget
from hedgerow.engine.ranks import RankGroup
from hedgerow.engine.step import Drafter, NoDrafter
from hedgerow.engine.types import Sampling
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import HedgerowError, Unavailable
from hedgerow.model.batch import SequenceRows
from hedgerow.model.interface import Target, least_free
from hedgerow.model.k2 import K2Model
from hedgerow.model.loader import CheckpointError
from hedgerow.model.ranked import RankEngine
from hedgerow.model.selfcheck import check_rows
from hedgerow.weights.convert import convert
from kernels.collectives import Ranks
from tests.engine_rig import oracle, prompt
from tests.polling import eventually
from tests.thread_ranks import Together, prompt_and_tree
from tests.tiny import TinyTarget, write_target, write_vocabulary

ROOT = Path(__file__).resolve().parents[2]
TARGET = TinyTarget(expert_width=128, dense_width=256, heads=4)
PARENTS = (-1, 0, 0, 1, 1, 3, 5, 2, 6)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_target(folder, TARGET)
    write_vocabulary(folder, TARGET.vocab)
    return folder


@contextmanager
def group(
    folder: Path, count: int = 2, layers: Sequence[int] = (1, 2), engine: RankEngine = "torch"
) -> Iterator[tuple[GroupTarget, list[str]]]:
    """A group, and why it was lost."""
    lost: list[str] = []
    made = RankGroup(folder, count, on_lost=lost.append, engine=engine, feature_layers=layers)
    target = made.load()
    try:
        yield target, lost
    finally:
        made.close()
        assert not [pid for pid in made.pids if alive(pid)], "a rank outlived its group"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def step(model: Target, prefill: int = 70) -> list[torch.Tensor]:
    """Logits and features of a prompt, then of a tree beside a chain, then after accepted rows were moved."""
    cache, found = model.new_cache(6), list[torch.Tensor]()
    tokens = [(11 * i + 5) % TARGET.vocab for i in range(prefill)]
    steps = [
        [SequenceRows(0, (4, 1), tokens, range(-1, prefill - 1), [prefill - 1], True)],
        [
            SequenceRows(prefill, (4, 1), range(3, 12), PARENTS, range(9)),
            SequenceRows(0, (2,), [9, 8, 7], range(-1, 2), [2], True),
        ],
        [SequenceRows(prefill + 3, (4, 1), [4], (-1,), [0])],
    ]
    for number, rows in enumerate(steps):
        out = model.forward(rows, cache)
        found += [out.logits.clone(), out.features.clone()]
        if number == 1:
            cache.copy([1 * 64 + 9, 1 * 64 + 11], [1 * 64 + 7, 1 * 64 + 8])
    return found


@pytest.mark.parametrize("count", [2, 4])
def test_processes_have_the_bits_of_shards_in_one(folder: Path, count: int) -> None:
    one = K2Model.load(folder, (1, 2), ranks=Ranks(count))
    with group(folder, count) as (target, lost):
        assert (target.kernel_law, target.checkpoint_hash, target.shards) == (
            one.kernel_law,
            one.checkpoint_hash,
            count,
        )
        for there, here in zip(step(target), step(one), strict=True):
            assert torch.equal(there, here)
        check_rows(target)
    assert not lost


def test_compiled_processes_have_the_bits_of_compiled_ranks_in_one(folder: Path) -> None:
    one = Together(folder, 2)
    with group(folder, 2, engine="compiled") as (target, lost):
        assert target.kernel_law == one.kernel_law
        for there, here in zip(prompt_and_tree(target), prompt_and_tree(one), strict=True):
            assert torch.equal(there, here)
        check_rows(target)
    assert not lost


def test_every_rank_taps_other_layers(folder: Path) -> None:
    """The last one too, whose sum is otherwise left out; and caches that nobody has any more go everywhere."""
    one, rows = K2Model.load(folder, (0, 1), ranks=Ranks(2)), [SequenceRows(0, [0], [1, 2, 3], range(-1, 2), [2], True)]
    with group(folder, 2, (0, 1)) as (target, lost):
        for layers in ((1, 2), (0, 1)):
            for model in (target, one):
                model.tap(layers)
                assert model.feature_layers == layers
            expected = one.forward(rows, one.new_cache(1)).features
            assert torch.equal(target.forward(rows, target.new_cache(1)).features, expected)
        with pytest.raises(HedgerowError, match="2 of the target's 3 layers"):
            target.tap((1, 3))
        assert torch.equal(target.forward(rows, target.new_cache(1)).features, expected), "the group goes on"
    assert not lost


def test_converted_files_are_served_by_as_many_processes(folder: Path, tmp_path: Path) -> None:
    """Each rank opens its own file, and the bits and the hash are those of the published folder."""
    convert(folder, tmp_path / "out", 2, lambda text: None)
    one = K2Model.load(folder, (1, 2), ranks=Ranks(2))
    with group(tmp_path / "out", 2) as (target, lost):
        assert target.checkpoint_hash == one.checkpoint_hash
        for there, here in zip(step(target), step(one), strict=True):
            assert torch.equal(there, here)
    with pytest.raises(CheckpointError, match="files of 4 ranks"):
        RankGroup(tmp_path / "out", 4)
    assert not lost


def jobs(model: Target, tokens: int) -> list[Job]:
    vocab = model.config.vocab_size
    texts = [[token % vocab for token in prompt(length, length)] for length in (40, 5, 70)]
    return [
        Job(f"j{i}", text, Sampling(temperature=0.8 * (i % 2), seed=7 + i, max_tokens=tokens), 12, arrives=2 * i)
        for i, text in enumerate(texts)
    ]


@pytest.mark.timeout(300)
def test_the_bundled_model_on_two_processes_is_the_one_with_two_shards(tmp_path: Path) -> None:
    """Token for token, trees and plain, sampled and greedy, three sequences beside each other."""
    bundled, layers = ROOT / "models" / "sapling", (1, 4, 7)
    one = K2Model.load(bundled, layers, ranks=Ranks(2))
    work = jobs(one, 24)

    def run(model: Target, drafter: Drafter) -> dict[str, list[int]]:
        vocabulary = [b"x"] * model.config.vocab_size
        engine = VerifierEngine(model, EngineConfig(max_sequences=4, pages=64), vocabulary, frozenset())
        done = drive_now(engine, drafter, work)
        accepted = sum(usage.accepted_draft_tokens for usage in done.usage.values())
        assert bool(accepted) == (not isinstance(drafter, NoDrafter))
        return done.tokens

    expected = run(one, NoDrafter())
    assert all(len(tokens) == 24 for tokens in expected.values())
    with group(bundled, 2, layers) as (target, lost):
        assert run(target, NoDrafter()) == expected
        assert run(target, oracle(work, expected, seed=3)) == expected
    assert not lost


def test_a_rank_that_dies_takes_the_group_down(folder: Path) -> None:
    with group(folder) as (target, lost):
        os.kill(target.group.pids[0], signal.SIGKILL)
        eventually(lambda: lost, 25, "the loss of a rank")
        assert lost == ["rank 1 ended with status -9"]
        with pytest.raises(Unavailable, match="rank 1 ended with status -9"):
            step(target)


def test_a_rank_that_hangs_takes_the_group_down_soon(folder: Path) -> None:
    with group(folder, 4) as (target, lost):
        step(target)
        os.kill(target.group.pids[1], signal.SIGSTOP)
        eventually(lambda: lost, 25, "the loss of a rank")
        assert "rank 2 hangs" in lost[0]
        eventually(lambda: not any(map(alive, target.group.pids)), 30, "the end of the others")


def test_a_first_rank_that_stood_still_finds_no_other_one_silent(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is moved, or a stopped process: it took its own pause for theirs, and loaded for minutes."""
    ahead, stopped = [0.0], threading.Event()

    class Stopped(selectors.DefaultSelector):
        """Stopped for a minute while it waits: it comes back with nothing, and its time is over."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if stopped.is_set():
                ahead[0] += 60
                stopped.clear()
                return []
            return super().select(timeout)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead[0])
    monkeypatch.setattr("hedgerow.engine.ranks.time", clock)
    names = SimpleNamespace(DefaultSelector=Stopped, EVENT_READ=selectors.EVENT_READ)
    monkeypatch.setattr("hedgerow.engine.ranks.selectors", names)
    with group(folder) as (target, lost):
        for _ in range(2):
            stopped.set()
            eventually(lambda: not stopped.is_set(), 10)
            step(target)
        assert lost == []


def test_a_rank_that_hangs_in_a_step_ends_the_step(folder: Path) -> None:
    """Rank 0 waits in a collective meanwhile."""
    with group(folder) as (target, lost):
        os.kill(target.group.pids[0], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(Unavailable, match="rank group"):
            step(target)
        assert time.monotonic() - began < 25
        assert len(lost) == 1


def test_after_a_loss_a_new_group_is_as_good(folder: Path) -> None:
    with group(folder) as (target, lost):
        os.kill(target.group.pids[0], signal.SIGKILL)
        eventually(lambda: lost, 25)
    one = K2Model.load(folder, (1, 2), ranks=Ranks(2))
    with group(folder) as (target, lost):
        for there, here in zip(step(target), step(one), strict=True):
            assert torch.equal(there, here)


def test_ranks_end_with_the_first(folder: Path) -> None:
    """Its process is killed: nothing tells them, and nobody reaps them."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read)
            made = RankGroup(folder, 2)
            made.load()
            os.write(write, b"%d" % made.pids[0])
            threading.Event().wait(60)
        finally:
            os._exit(1)
    os.close(write)
    pid = int(os.read(read, 100))
    os.close(read)
    assert alive(pid)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    eventually(lambda: not alive(pid), 10, "the rank's end")


def test_what_does_not_divide_is_refused_before_a_rank_is_started(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: object, **named: object) -> None:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("hedgerow.engine.rank_channels.subprocess.Popen", never)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight: \[512, 64\] .*rows that 3 ranks can share"):
        RankGroup(folder, 3)


def test_the_cache_is_for_the_fullest_device(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was made for the first rank's: where somebody else uses another one, that rank ran out of memory."""
    own, hear = SimpleNamespace(config=None, checkpoint_hash="c", kernel_law="l", architecture="cuda-sm90"), []
    own.feature_width, own.shards = 0, 3
    monkeypatch.setattr("hedgerow.engine.ranks.load_rank", lambda *given: own)
    monkeypatch.setattr(RankGroup, "_meet", lambda group: None)
    monkeypatch.setattr(
        RankGroup, "_start", lambda group: group._ranks.update(dict.fromkeys((1, 2, 3), SimpleNamespace(name="")))
    )
    for number, free in ((1, 700), (2, 300), (3, 500)):
        hear.append((number, f'ready ["l", "", {free}]'))
    monkeypatch.setattr(RankGroup, "_listen", lambda group: [group._hear(*each) for each in hear])
    target = RankGroup(folder, 4, engine="cuda").load()
    assert least_free(target) == 300
    assert least_free(own) is None


def test_a_group_that_nobody_watches_is_lost(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What its watcher did not expect ended the thread, and whoever loaded waited for ever."""
    lost: list[str] = []
    monkeypatch.setattr(RankGroup, "_listen", lambda group: [][0])
    made = RankGroup(folder, 2, on_lost=lost.append)
    with pytest.raises(Unavailable, match="nobody watches the ranks: IndexError"):
        made.load()
    assert len(lost) == 1
    assert not any(map(alive, made.pids))


def test_a_rank_that_cannot_load_is_told_of(folder: Path, tmp_path: Path) -> None:
    """Its folder is gone by the time it gets there."""
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    lost: list[str] = []
    made = RankGroup(moved, 2, on_lost=lost.append)
    (moved / "config.json").unlink()
    with pytest.raises(HedgerowError, match=r"config\.json"):
        made.load()
    assert not any(map(alive, made.pids))


@pytest.mark.parametrize(("bound", "prepared"), [("STEP", False), ("PREPARED_STEP", True)])
def test_a_step_on_devices_that_does_not_end_loses_the_group(
    folder: Path, monkeypatch: pytest.MonkeyPatch, bound: str, prepared: bool
) -> None:
    """Nothing else bounds what waits for a rank on a GPU: that rank may live and answer, and never come."""
    for name in ("STEP", "PREPARED_STEP"):
        monkeypatch.setattr(f"hedgerow.engine.ranks.{name}", 1.0 if name == bound else 1e9)
    with group(folder) as (target, lost):
        target.group.prepared = prepared
        with target.group.bounded():
            pass
        with target.group.bounded():
            eventually(lambda: bool(lost), 10)
        assert "a step is not over after" in lost[0]
        with pytest.raises(Unavailable, match="a step is not over"):
            target.new_cache(1)
