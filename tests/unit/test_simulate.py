"""The runner of simulated schedules: what a result is labelled with, and that its workers end with it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from bench import simulate

DEADLINE = 60.0


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The only file that is driven."""
    path = tmp_path / "driven.py"
    path.write_text("one = 1\n")
    monkeypatch.setattr(simulate, "ROOT", tmp_path)
    monkeypatch.setattr(simulate, "DRIVEN", ("*.py",))
    simulate.loaded.cache_clear()
    yield path
    simulate.loaded.cache_clear()


def schedules(monkeypatch: pytest.MonkeyPatch, at: Callable[[int], object] = lambda seed: None) -> list[int]:
    """In place of the simulation; gives the seeds that were run."""
    run: list[int] = []

    def run_schedule(seed: int) -> SimpleNamespace:
        run.append(seed)
        at(seed)
        return SimpleNamespace(violations=[], faults=[], tokens=1, seconds=1.0, digest="")

    monkeypatch.setitem(sys.modules, "tests.simulation.schedule", SimpleNamespace(run_schedule=run_schedule))
    return run


def test_a_part_says_what_it_ran(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = schedules(monkeypatch)
    part, ran, tally = simulate.run_part(simulate.Part(5, 3))
    assert (part.first, ran, tally.tokens, run) == (5, simulate.sources(), 3, [5, 6, 7])


def test_a_part_during_which_its_sources_change_does_not_count(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it ran was imported before; the digest of what is there now would name code that it never ran."""
    schedules(monkeypatch, lambda seed: source.write_text("one = 2\n") if seed == 6 else None)
    assert simulate.run_part(simulate.Part(5, 3))[1] is None


def test_a_worker_whose_sources_have_changed_runs_nothing_more(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = schedules(monkeypatch)
    simulate.run_part(simulate.Part(1, 1))
    source.write_text("one = 2\n")
    assert simulate.run_part(simulate.Part(2, 1))[1] is None
    assert run == [1]


def test_such_a_part_has_no_result_and_ends_the_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Pool:
        def __init__(self, *_: object, **__: object) -> None:
            pass

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def imap_unordered(self, run: Callable[..., object], left: list[simulate.Part]) -> Iterator[object]:
            yield left[0], "a digest", simulate.Tally(1)
            yield left[1], None, simulate.Tally(1)
            raise AssertionError("it goes on")

    monkeypatch.setattr(simulate.multiprocessing, "get_context", lambda _: SimpleNamespace(Pool=Pool))
    parts, results = list(simulate.parts(1, 300)), tmp_path / "results"
    assert simulate.simulate(parts, results, 1, 0, any_sources=False) == 1
    assert "sources changed while part 101 ran" in capsys.readouterr().out
    assert Counter(path.name for path in results.iterdir()) == {"1-100.json": 1}


@pytest.mark.timeout(180)
@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_workers_end_with_a_parent_that_is_terminated(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bench.simulate", "--jobs", "1", "--results", str(tmp_path / "results")]
    with subprocess.Popen(command, cwd=simulate.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as parent:
        found: list[psutil.Process] = []
        try:
            eventually(lambda: found.extend(running(parent.pid)) or bool(found))
            parent.send_signal(signal.SIGTERM)
            assert parent.wait(DEADLINE) == -signal.SIGTERM
            eventually(lambda: all(is_over(worker) for worker in found))
        finally:
            parent.kill()
            for worker in found:
                if not is_over(worker):
                    worker.kill()


def running(parent: int) -> list[psutil.Process]:
    """Its workers that have imported what they run."""
    workers = psutil.Process(parent).children()
    return [worker for worker in workers if "cygrpc" in Path(f"/proc/{worker.pid}/maps").read_text()]


def is_over(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
