"""A group whose ranks are processes with a GPU each: one process with two shards, token for token; and a lost rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.drive import drive_now
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.step import Drafter, NoDrafter
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.model.interface import Prepares, Target, WholeSteps
from hedgerow.model.selfcheck import check_rows
from kernels.collectives import Ranks
from tests.engine_rig import oracle
from tests.unit.test_rank_group import group, jobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")]
ROOT = Path(__file__).resolve().parents[2]
BUNDLED, LAYERS = Path("models/sapling"), (1, 4, 7)
STEPS = """
import os, sys
from pathlib import Path
from hedgerow.engine.ranks import RankGroup
from tests.cuda_rank import steps
target = RankGroup(Path("models/sapling"), 2, on_lost=lambda why: os._exit(7), engine="cuda").load()
print(*target.group.pids, flush=True)
while True:
    steps(target, 20, 2)
    print("alive", flush=True)
"""


@pytest.mark.timeout(300)
def test_the_bundled_model_on_two_gpus_is_the_one_with_two_shards() -> None:
    """Trees and plain, sampled and greedy, three sequences beside each other; whole steps on every rank."""
    from hedgerow.model.cuda_ranked import RankedK2

    one = RankedK2.of(BUNDLED, LAYERS, torch.device("cuda", 0), Ranks(2))
    work = jobs(one, 24)

    def run(model: Target, drafter: Drafter) -> dict[str, list[int]]:
        engine = VerifierEngine(
            model, EngineConfig(max_sequences=4, pages=64), [b"x"] * model.config.vocab_size, frozenset()
        )
        done = drive_now(engine, drafter, work)
        accepted = sum(usage.accepted_draft_tokens for usage in done.usage.values())
        assert bool(accepted) == (not isinstance(drafter, NoDrafter))
        return done.tokens

    expected = run(one, NoDrafter())
    assert all(len(tokens) == 24 for tokens in expected.values())
    assert run(one, oracle(work, expected, seed=3)) == expected
    with group(BUNDLED, 2, LAYERS, "cuda") as (target, lost):
        assert isinstance(target, WholeSteps)
        assert isinstance(target, Prepares)
        assert (target.kernel_law, target.shards) == (one.kernel_law, 2)
        assert target.model.direct, "the ranks do not read each other's memory"
        check_rows(target)
        target.prepare(2, 4, 16)
        assert run(target, NoDrafter()) == expected
        assert run(target, oracle(work, expected, seed=3)) == expected
    assert not lost


@pytest.mark.timeout(120)
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_the_first_that_waits_for_it_on_its_device(blow: signal.Signals) -> None:
    """Within ten seconds; no step is an error before that."""
    first = subprocess.Popen([sys.executable, "-c", STEPS], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout is not None
        other = int(first.stdout.readline())
        assert first.stdout.readline() == "alive\n"
        begun = time.monotonic()
        os.kill(other, blow)
        assert first.wait(20) == 7
        assert time.monotonic() - begun < 10
    finally:
        first.kill()
