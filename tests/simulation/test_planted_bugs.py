"""The checker has teeth: each planted bug is found within 2,000 schedules of the usual distribution.

The search begins shortly before a seed that found the bug when this was written, so that it is quick. Where the code
has changed and that seed does not find it any more, it goes on: then the test is slower, not weaker.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.planted import BUGS
from tests.simulation.schedule import run_schedule

MOST = 2000
BEGIN = {
    "skip_the_epoch_check": 580,
    "skip_the_attempt_check": 35,
    "apply_before_compare": 315,
    "release_before_commit": 1,
    "finish_in_a_separate_call": 1,
    "lose_a_suffix_silently": 50,
    "accept_an_epoch_that_went_backwards": 205,
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("bug", list(BUGS))
def test_a_planted_bug_is_caught(bug: str, tmp_path: Path) -> None:
    for seed in range(BEGIN[bug], BEGIN[bug] + MOST):
        with BUGS[bug](tmp_path / str(seed)):
            caught = run_schedule(seed).violations
        if caught and not run_schedule(seed).violations:  # found, and it is the bug that was found
            print(f"{bug}: seed {seed}: {caught[0]}")
            return
    pytest.fail(f"{bug} was not caught in {MOST} schedules")
