"""A deadline ends a sequence at most one step late, whatever it waits for; and what the counters say meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bench.drive import Job
from hedgerow.engine.sequence import Phase
from hedgerow.engine.types import Finish, Sampling, Update
from hedgerow.engine.verifier import VerifierEngine
from tests.engine_rig import Rig, prompt

LATER = 100.0  # seconds


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Rig(tmp_path_factory.mktemp("tiny"), seed=2)
    torch.set_num_threads(threads)


def job(name: str = "s", length: int = 100, **fields: object) -> Job:
    return Job(name, tuple(prompt(length)), Sampling(max_tokens=50, ignore_eos=True), **fields)  # type: ignore[arg-type]


def one_step(engine: VerifierEngine) -> list[Update]:
    plan = engine.plan()
    return [] if plan is None else list(engine.verify(plan, None).updates)


# Per case: limits of the engine, tokens committed before, steps before the deadline, what the sequence is doing then.
WAITS = {
    "in the inbox": ({}, 0, 0, None),
    "for a place": ({"max_sequences": 1}, 0, 3, Phase.WAITING),
    "for pages": ({"pages": 3}, 0, 3, Phase.WAITING),
    "for its prompt": ({"prefill_rows": 10}, 0, 3, Phase.PREFILLING),
    "for its replay": ({"replay_rows": 5}, 40, 3, Phase.REPLAYING),
    "for the store": ({"run_ahead": 4}, 0, 10, Phase.DECODING),
    "for nothing": ({}, 0, 3, Phase.DECODING),
}


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("waits", WAITS)
def test_a_deadline_ends_a_sequence_one_step_late_at_most_whatever_it_waits_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, waits: str, again: bool
) -> None:
    """`again`: the deadline came with a later attempt, and the sequence was adopted."""
    limits, committed, steps, phase = WAITS[waits]
    engine, work = rig.engine(**limits), job(committed=tuple(rig.plain(job())[:committed]))
    if phase is Phase.WAITING:
        engine.start(job("first", length=30).start())
        one_step(engine)
    clock = time.monotonic
    due = clock() + LATER
    engine.start(replace(work.start(), deadline=None if again else due))
    for _ in range(steps):
        assert not [u for u in one_step(engine) if u.finish]
    if again:
        engine.start(replace(work.start(attempt=2), deadline=due))
        assert not [u for u in one_step(engine) if u.finish and not u.error]
    held = engine.sequence("s")
    assert phase is None or (held is not None and held.phase is phase)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + LATER)
    assert engine.has_work()
    (last,) = [update for update in one_step(engine) if update.session_id == "s" and update.finish]
    assert (last.finish, last.attempt, last.error) == (Finish.DEADLINE, 1 + again, None)
    assert last.usage is not None
    assert engine.sequence("s") is None
    engine.cancel("first", 1, 1)
    one_step(engine)
    one_step(engine)
    load = engine.load()
    assert (load.held_sequences, load.waiting, load.running, load.free_pages) == (0, 0, 0, load.total_pages)


def test_the_earliest_deadline_is_when_an_idle_loop_must_come_back(rig: Rig) -> None:
    engine = rig.engine(run_ahead=1)
    now = time.monotonic()
    for name, seconds in (("a", 500.0), ("b", 300.0), ("c", 400.0)):
        engine.start(replace(job(name).start(), deadline=now + seconds))
    while one_step(engine):
        pass
    assert not engine.has_work()
    assert engine.next_deadline() == now + 300


def test_steps_count_prompts_and_replays_that_tell_nobody_anything(rig: Rig) -> None:
    """Whoever looks from outside must see that a verifier without messages is at work."""
    engine = rig.engine(prefill_rows=10, replay_rows=10)
    engine.start(replace(job().start(), committed=tuple(rig.plain(job())[:40])))
    for n in range(1, 15):
        assert one_step(engine) == []
        assert engine.load().steps == n
    assert one_step(engine) != []


def test_a_sequence_stops_at_the_bound_and_goes_on_as_far_as_the_store_does(rig: Rig) -> None:
    engine, told = rig.engine(run_ahead=5), list[int]()
    engine.start(job(length=20).start())
    # of an offset beyond what was emitted only the emitted part counts
    for offset, most in ((0, 5), (1, 6), (1, 6), (5, 10), (9, 14), (30, 19)):
        engine.committed("s", 1, 1, offset)
        while updates := one_step(engine):
            told += [token for update in updates for token in update.tokens]
        assert not engine.has_work(), "it waits for the store and uses no step"
        assert len(told) == most
    engine.committed("s", 1, 2, 50)
    assert one_step(engine) == [], "of another attempt"
    assert told == rig.plain(job(length=20))[: len(told)]
