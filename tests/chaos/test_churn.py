"""Clients that connect, cancel and vanish at random leave nothing behind. `python -m bench.churn`: 10,000 of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.churn import SETTINGS, churn
from hedgerow.cli.supervisor import Stack, StackConfig
from tests.stack import BUDGET, ROOT, Models


@pytest.mark.long
@pytest.mark.timeout(180)
def test_a_few_hundred_random_clients_leave_nothing_behind(models: Models, tmp_path: Path) -> None:
    config = StackConfig(ROOT, models.target, tmp_path, drafter=models.drafter, budget=BUDGET, settings=SETTINGS)
    with Stack(config) as stack:
        try:
            result = churn(stack, clients=240, seed=7, size=120, say=lambda text: None)
        except BaseException:
            print(*(f"{name}: {line}" for name in stack.services for line in stack.logs(name)[-15:]), sep="\n")
            raise
    assert not result["problems"], result
    assert result["clients"] == 240
    for name, process in result["processes"].items():
        before, after = process["rss_mib"]
        assert after - before < 60, f"{name} grew from {before} to {after} MiB"
