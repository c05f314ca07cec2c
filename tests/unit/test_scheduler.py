"""Admission, chunks and budgets, on sequences without a model."""

from __future__ import annotations

import itertools

import pytest
import torch

from hedgerow.engine.config import EngineConfig
from hedgerow.engine.kv_cache import PagePool
from hedgerow.engine.scheduler import Scheduler, Work
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.types import Sampling, Start
from hedgerow.errors import InvalidRequest

NUMBERS = itertools.count(1)


def sequence(
    prompt: int = 10, output: int = 20, budget: int = 8, committed: int = 0, priority: int = 0
) -> AttachedSequence:
    start = Start(
        session_id=f"s{next(NUMBERS)}",
        epoch=1,
        attempt=1,
        prompt=[1] * prompt,
        sampling=Sampling(max_tokens=output),
        committed=[2] * committed,
        priority=priority,
    )
    return AttachedSequence(next(NUMBERS), start, budget, 64, [b"x"] * 4, frozenset())


def scheduler(pages: int = 64, **limits: int) -> Scheduler:
    return Scheduler(EngineConfig(**limits), PagePool(pages, 64))


def run(scheduled: list[Work]) -> None:
    """What a step does to the sequences: chunks become cached rows, and one token is emitted where one was drawn."""
    for work in scheduled:
        work.sequence.keep(torch.zeros(work.rows, 1))
        if work.phase is Phase.DECODING or (work.sequence.phase is not Phase.PREFILLING and not work.sequence.output):
            work.sequence.output.append(3)


def test_a_sequence_waits_until_its_worst_case_fits() -> None:
    s = scheduler(pages=4)
    first, second = sequence(prompt=100, output=20), sequence(prompt=100, output=50)
    assert (first.slots, second.slots) == (127, 157)
    s.add(first)
    s.add(second)
    s.schedule()
    assert (s.running, s.waiting, s.pool.free) == ([first], [second], 2)
    s.remove(first)
    s.schedule()
    assert (s.running, s.waiting, s.pool.free) == ([second], [], 1)


def test_nothing_overtakes_the_first_in_the_queue() -> None:
    """Small requests that kept fitting would otherwise starve a large one for ever."""
    s = scheduler(pages=4)
    large, small = sequence(prompt=200, output=20), sequence(prompt=10, output=20)
    held = sequence(prompt=100, output=20)
    for item in (held, large, small):
        s.add(item)
        s.schedule()
    assert (s.running, s.waiting) == ([held], [large, small])


def test_a_larger_priority_is_admitted_first_and_equals_in_their_order() -> None:
    s = scheduler(max_sequences=1)
    running = sequence()
    s.add(running)
    s.schedule()
    queued = [sequence(priority=p) for p in (0, 5, 0, 5)]
    for item in queued:
        s.add(item)
    assert s.waiting == [queued[1], queued[3], queued[0], queued[2]]


def test_prompts_share_the_prefill_rows_and_decoding_goes_on_beside_them() -> None:
    s = scheduler(prefill_rows=32)
    decoding = sequence(prompt=5)
    s.add(decoding)
    run(s.schedule())
    long, short = sequence(prompt=50), sequence(prompt=20)
    s.add(long)
    s.add(short)
    steps = []
    for _ in range(4):
        works = s.schedule()
        steps.append([(w.sequence, w.rows) for w in works])
        run(works)
    assert steps[0] == [(decoding, 1), (long, 32)]
    assert steps[1] == [(decoding, 1), (long, 18), (short, 14)]
    assert steps[2] == [(decoding, 1), (long, 1), (short, 6)]
    assert steps[3] == [(decoding, 1), (long, 1), (short, 1)]


def test_committed_output_is_replayed_in_chains_up_to_the_anchor() -> None:
    s = scheduler(replay_rows=16)
    item = sequence(prompt=10, output=60, committed=40)
    s.add(item)
    seen = []
    for _ in range(5):
        works = s.schedule()
        seen += [(w.phase, w.prefix, w.rows) for w in works]
        run(works)
    replay = [(Phase.REPLAYING, 10, 16), (Phase.REPLAYING, 26, 16), (Phase.REPLAYING, 42, 7)]
    assert seen == [(Phase.PREFILLING, 0, 10), *replay, (Phase.DECODING, 49, 1)]


def test_a_sequence_that_runs_too_far_ahead_of_its_store_is_held() -> None:
    s = scheduler(run_ahead=3)
    item = sequence()
    s.add(item)
    for _ in range(3):
        run(s.schedule())
    assert len(item.output) == 3
    assert (s.schedule(), s.ready()) == ([], False)
    item.committed = 1
    assert s.ready()
    run(s.schedule())
    assert len(item.output) == 4
    assert s.schedule() == []


def test_the_last_token_gets_no_tree() -> None:
    s = scheduler()
    item = sequence(output=3, budget=8)
    s.add(item)
    budgets = []
    for _ in range(3):
        works = s.schedule()
        budgets += [w.budget for w in works]
        run(works)
    assert budgets == [0, 8, 0]  # prompt, two tokens left, one token left


@pytest.mark.parametrize(
    ("field", "value"), [("max_sequences", 0), ("prefill_rows", 0), ("max_budget", -1), ("pages", 0)]
)
def test_a_limit_out_of_range_names_itself(field: str, value: int) -> None:
    with pytest.raises(InvalidRequest) as raised:
        EngineConfig(**{field: value})
    assert (raised.value.field, raised.value.value) == (field, value)
