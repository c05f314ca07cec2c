"""Simulated schedules: a slice of seeds that another day takes elsewhere, and what the simulation itself promises."""

from __future__ import annotations

import time

import pytest

from tests.simulation.schedule import Settings, run_schedule

SLICE, LEAST = 250, 50
SECONDS = 15.0
"""Of processor time; a slower machine takes fewer, but never fewer than LEAST."""


@pytest.mark.timeout(600)
def test_a_rotating_slice_of_schedules_is_clean() -> None:
    first, began = int(time.time() // 86_400) * SLICE, time.process_time()
    failed = []
    for seed in range(first, first + SLICE):
        if seed >= first + LEAST and time.process_time() - began > SECONDS:
            break
        outcome = run_schedule(seed)
        if outcome.violations:
            failed.append(f"python -m bench.simulate --replay {seed}: {outcome.violations[0]}")
    assert not failed, "\n".join(failed[:5])


@pytest.mark.timeout(300)
def test_one_seed_is_one_history() -> None:
    """To the last callback; so a failing seed can be replayed."""
    for seed in range(40, 52):
        first, second = run_schedule(seed), run_schedule(seed)
        assert first.trace == second.trace
        assert first.digest == second.digest
        assert first.tokens == second.tokens


def test_schedules_differ() -> None:
    assert len({run_schedule(seed).digest for seed in range(20)}) == 20


def test_schedules_without_faults_end_as_the_law_says() -> None:
    """Nothing of the checker's patience is needed where nothing goes wrong."""
    tokens = 0
    for seed in range(100, 130):
        outcome = run_schedule(seed, Settings(faults=False))
        assert not outcome.violations, f"seed {seed}: {outcome.violations}"
        tokens += outcome.tokens
    assert tokens > 200  # a user may cancel before the first one
