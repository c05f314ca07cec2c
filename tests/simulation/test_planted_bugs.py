"""The checker has teeth: every planted bug is found within a few schedules of the usual distribution."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.planted import BUGS
from tests.simulation.schedule import run_schedule

MOST = 2000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("bug", list(BUGS))
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    with BUGS[bug](tmp_path):
        for seed in range(1, MOST + 1):
            outcome = run_schedule(seed)
            if outcome.violations:
                print(f"{bug}: seed {seed}: {outcome.violations[0]}")
                return
    pytest.fail(f"{bug} was not caught in {MOST} schedules")
