"""Steps are predicted from those that ran, and prompts get the rows that decoding sequences can spare."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from hedgerow.engine.chunk_times import LITTLE, UNKNOWN, ChunkTimes
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.pace import ALL, FIRST, KNOWN, LAST, Alone, Pace
from hedgerow.engine.pace import KINDS as KINDS_ALONE
from hedgerow.engine.scheduler import Work
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.step_times import FAR, KINDS, Load, StepTimes, Table, kind
from hedgerow.engine.types import Sampling, Start

ROWS = 256
NUMBERS = itertools.count(1)


def works(sequences: int, budget: int = 0) -> list[Work]:
    start = Start("s", 1, 1, [1] * 10, Sampling(max_tokens=1000))
    made = [AttachedSequence(next(NUMBERS), start, budget, 4, [b"x"] * 4, frozenset()) for _ in range(sequences)]
    return [Work(sequence, Phase.DECODING, 100, 1, budget, 500) for sequence in made]


def rest(load: Load) -> float:
    """What steps of this file's machine take without their drafts, in ms."""
    return 1 + 0.25 * load.sequences + 0.125 * load.rows + 0.0625 * load.chunk + 1e-5 * load.scores


def taught(times: StepTimes, chunks: bool = True) -> None:
    choose = random.Random(0)
    for _ in range(600):
        sequences = choose.choice([1, 2, 4, 8])
        budget = choose.choice([0, 4, 8])
        chunk = choose.choice([0, 16, 64, 256]) if chunks else 0
        drafts = sequences if budget else 0
        nodes = sequences * budget
        load = Load(
            sequences,
            sequences + nodes,
            100 * sequences,
            drafts,
            nodes,
            2 * drafts,
            chunk,
            chunk * choose.randrange(4000),
        )
        times.took(load, 0.5 + 0.125 * drafts if drafts else 0.0, rest(load))


@pytest.mark.parametrize(
    "load", [Load(8, 8, 800), Load(3, 3, 300), Load(8, 72, 800, 8, 64, 16), Load(6, 36, 600, 6, 30, 9)]
)
def test_steps_are_predicted_seen_or_not(load: Load) -> None:
    times = StepTimes()
    assert times.milliseconds(load) == 0
    taught(times)
    draft = 0.5 + 0.125 * load.drafts if load.drafts else 0.0
    assert times.milliseconds(load) == pytest.approx(rest(load) + draft, rel=0.1)


def test_a_machine_that_others_use_is_slower_in_all_kinds() -> None:
    times, one, other = StepTimes(), Load(8, 8, 800), Load(1, 1, 100)
    taught(times)
    before = times.milliseconds(other)
    for _ in range(200):
        times.took(one, 0, 3 * rest(one))
    assert times.milliseconds(one) == pytest.approx(3 * rest(one), rel=0.15)
    assert times.milliseconds(other) > 1.2 * before


def test_a_table_is_bounded() -> None:
    table = Table(1)
    for n in range(2 * KINDS):
        table.took((n,), (1.0,), 2.0)
    assert len(table) == KINDS
    assert table.milliseconds((-1,), (1.0,)) == pytest.approx(2, rel=0.01)
    assert (kind(0), kind(17), kind(18) > 17) == (0, 17, False)
    assert kind(FAR) == kind(100 * FAR) > kind(1000)


def served(pace: Pace, sequences: int, prompts: int, steps: int) -> tuple[int, float]:
    """Steps with as many prompt rows as may be; the last one's rows and milliseconds."""
    now, rows = 1_000_000, 0
    for _ in range(steps):
        pace.begins(now)
        decoding = pace.choose(works(sequences))
        rows = pace.chunk_rows(decoding, prompts)
        load = Load(sequences, sequences, 100 * sequences, chunk=rows)
        pace.loaded(load)
        now += int(rest(load) * 1e6)
    pace.begins(now)
    return rows, rest(load)


@pytest.mark.parametrize("factor", [1.25, 2.0, 4.0])
def test_a_chunk_keeps_a_step_within_the_factor(factor: float) -> None:
    pace = Pace(EngineConfig(prefill_factor=factor, prefill_rows=ROWS))
    taught(pace.times)
    rows, ms = served(pace, sequences=8, prompts=1, steps=60)
    assert 1 <= rows < ROWS
    assert ms == pytest.approx(factor * rest(Load(8, 8, 800)), rel=0.1)


def test_many_prompts_share_a_step_with_one_that_decodes() -> None:
    pace = Pace(EngineConfig(prefill_factor=2.0, prefill_rows=ROWS))
    taught(pace.times)
    one, _ = served(pace, sequences=1, prompts=1, steps=60)
    assert served(pace, sequences=1, prompts=8, steps=20)[0] == pytest.approx(8 * one, rel=0.2)
    assert pace.chunk_rows(works(8), 8) == pace.chunk_rows(works(8), 1)


def test_a_prompt_always_advances_and_has_all_rows_where_nobody_decodes() -> None:
    pace = Pace(EngineConfig(prefill_factor=1.0, prefill_rows=ROWS))
    assert pace.chunk_rows(works(8), 1) == UNKNOWN
    taught(pace.times)
    assert served(pace, sequences=8, prompts=1, steps=FIRST + 5)[0] == 1
    assert pace.chunk_rows([], 1) == ROWS
    assert Pace(EngineConfig(prefill_rows=ROWS)).chunk_rows(works(8), 1) == ROWS
    assert Pace(EngineConfig(prefill_rows=3, prefill_factor=2)).chunk_rows(works(8), 1) == 3


def small(rows: int) -> float:
    """ms that a chunk adds where a model is small, on a GPU."""
    return 0.35 + 0.0015 * rows


def mixture(rows: int) -> float:
    """Of one rank of a large mixture, beside eight rows: 384 experts of a layer, eight of them a row."""
    return 13.6 * ((1 - 8 / 384) ** 8 - (1 - 8 / 384) ** (8 + rows)) + 0.063 * rows


MACHINES = [
    pytest.param(lambda rows: 0.0625 * rows, 8.0, id="rows are all"),
    pytest.param(small, 0.6, id="small"),
    pytest.param(mixture, 8.1, id="mixture, plain"),
    pytest.param(mixture, 20.0, id="mixture, trees"),
]


@pytest.mark.parametrize(("adds", "allowed"), MACHINES)
def test_chunks_grow_until_they_add_what_they_may(adds: Callable[[int], float], allowed: float) -> None:
    """Within some steps, and without one that takes much more."""
    times, taken = ChunkTimes(), list[float]()
    for _ in range(60):
        rows = times.rows(allowed)
        taken.append(adds(rows))
        times.took(rows, taken[-1], allowed + taken[-1])
    assert times.rows(allowed) == pytest.approx(next(n for n in range(1, 999) if adds(n) >= allowed), rel=0.1)
    assert min(taken[12:]) > 0.85 * allowed
    assert max(taken) < 1.25 * allowed
    assert max(taken[12:]) < 1.1 * allowed


@pytest.mark.parametrize(
    ("first", "each", "allowed"), [(7, 0.1, 6.3), (9, 0.1, 6.3), (7, 0.375, 6.3), (0.4, 0.005, 0.2)]
)
def test_a_long_prompt_keeps_its_rows(first: float, each: float, allowed: float) -> None:
    """Thousands of chunks of one size: what other sizes took was forgotten, and what the first row costs with it."""
    times, seen = ChunkTimes(), list[int]()
    for _ in range(3000):
        seen.append(rows := times.rows(allowed))
        times.took(rows, first + each * rows, 8 + first + each * rows)
    best = max(allowed - first, LITTLE * first) / each
    assert 0.9 * best - 1 <= min(seen[200:]) <= max(seen[200:]) <= 1.1 * best + 1


def test_fewer_rows_than_cost_anything_are_not_chosen() -> None:
    """Where the first row takes more than may be added, the others come with it."""
    times = ChunkTimes()
    for _ in range(40):
        rows = times.rows(0.2)
        times.took(rows, small(rows), 1.0)
    assert 40 < rows < 80
    assert small(rows) < 1.3 * small(1)


def test_chunks_follow_a_prompt_that_gets_longer_and_forgive_one_slow_step() -> None:
    times, before = ChunkTimes(), list[int]()
    for n in range(300):
        rows = times.rows(0.6)
        added = small(rows) * (1 + n / 600)
        times.took(rows, 30 * added if n == 40 else added, 0.6 + added)
        before.append(rows)
        assert n < 60 or added < 1.15 * 0.6
    assert max(before[60:90]) > 60, "a step in which somebody else had the card"
    assert before[-1] >= 15


def test_steps_in_which_something_was_recorded_teach_nothing() -> None:
    """Each size of step is recorded at its first two uses, which takes ten steps' time."""
    uses, now, taken = dict[int, int](), 1_000_000, list[float]()
    pace = Pace(EngineConfig(prefill_factor=2.0, prefill_rows=ROWS), lambda: sum(min(n, 2) for n in uses.values()))
    for step in range(160):
        pace.begins(now)
        rows = 0 if step < 20 else pace.chunk_rows(pace.choose(works(8)), 1)
        pace.loaded(Load(8, 8, 800, chunk=rows))
        size = (8 + rows).bit_length()
        uses[size] = uses.get(size, 0) + 1
        taken.append(8 + (mixture(rows) if rows else 0) + (80 if uses[size] <= 2 else 0))
        now += int(taken[-1] * 1e6)
    assert max(taken[80:]) < 1.1 * 16
    assert min(taken[80:]) > 0.85 * 16


def test_chunks_that_take_longer_and_longer_are_not_allowed_more() -> None:
    """What steps take without their chunks is what such steps took: it does not follow those with chunks."""
    pace, now, taken = Pace(EngineConfig(prefill_factor=1.8, prefill_rows=ROWS)), 1_000_000, list[float]()
    noise, prefix = random.Random(3), 0
    for step in range(400):
        pace.begins(now)
        rows = 0 if step < 60 else pace.chunk_rows(pace.choose(works(8, 7)), 1)
        pace.loaded(Load(8, 64, 800, len(works(8)), 56, chunk=rows, scores=rows * prefix))
        prefix += rows
        taken.append((8 + (small(rows) * 10 * (1 + prefix / 100_000) if rows else 0)) * noise.lognormvariate(0, 0.03))
        now += int(taken[-1] * 1e6)
    beside = sorted(taken[60:])
    assert beside[len(beside) // 2] == pytest.approx(1.8 * 8, rel=0.05)
    assert beside[-4] < 2 * 8


def test_a_kind_of_step_hardly_seen_is_not_known_alone() -> None:
    alone, load = Alone(), Load(8, 8, 800)
    for _ in range(KNOWN):
        assert alone.milliseconds(load) == 0
        alone.took(load, 5.0)
    assert alone.milliseconds(load) == pytest.approx(5)
    for _ in range(3):
        alone.took(load, 500.0)
    assert alone.milliseconds(load) == pytest.approx(5), "somebody else had the cores"
    for _ in range(LAST):
        alone.took(load, 7.0)
    assert alone.milliseconds(load) == pytest.approx(7)
    for n in range(2 * KINDS_ALONE):
        alone.took(Load(n % 16, 9 + n // 16, 0), 1.0)
    assert alone.milliseconds(load) == 0, "the oldest kind has gone"


def test_what_was_thought_to_cost_nothing_is_found_out_at_once() -> None:
    """Chunks that came while streams began seemed free: the next ones are too large, but for few steps."""
    times, taken = ChunkTimes(), list[int]()
    for rows in (8, 16, 24, 32, 48, 64, 128) * 4:
        times.took(rows, 0.0, 0.7)
    for _ in range(40):
        taken.append(min(times.rows(0.55), ROWS))
        times.took(taken[-1], 0.0075 * taken[-1], 0.7 + 0.0075 * taken[-1])
    assert sum(rows > 200 for rows in taken) <= 3
    assert 0.0075 * taken[-1] == pytest.approx(0.55, rel=0.25)


def test_steps_beside_a_prompt_are_fitted_where_budgets_are_chosen() -> None:
    """A fit takes longer than a small model's chunk, and each size would bring another one."""
    for budget, learned in ((0, False), (8, True)):
        pace, now = Pace(EngineConfig(prefill_factor=2.0, prefill_rows=ROWS, auto_budget=budget)), 1_000_000
        for step in range(ALL + 40):
            pace.begins(now)
            chunk = 20 + step if step >= ALL + 8 else 0
            pace.loaded(Load(8, 8, 800, chunk=chunk))
            now += 1_000_000 + 10_000 * chunk
        assert (len(pace.times._steps) > 2) is learned
