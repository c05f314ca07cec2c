"""A group of ranks on GPUs in a process of its own: `python -m tests.cuda_group tokens OUT` or `... steps`.

Of its own: a process ends badly while NCCL is in its graphs, and services end without tidying up.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from bench.drive import drive_now
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.ranks import RankGroup
from hedgerow.engine.step import Drafter, NoDrafter
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.model.interface import Target
from hedgerow.model.selfcheck import check_rows
from tests.cuda_rank import steps
from tests.engine_rig import oracle
from tests.unit.test_rank_group import jobs

BUNDLED, LAYERS, TOKENS = Path("models/sapling"), (1, 4, 7), 24


def run(model: Target, drafter: Drafter) -> dict[str, list[int]]:
    """Three sequences beside each other, sampled and greedy."""
    vocabulary = [b"x"] * model.config.vocab_size
    engine = VerifierEngine(model, EngineConfig(max_sequences=4, pages=64), vocabulary, frozenset())
    done = drive_now(engine, drafter, jobs(model, TOKENS))
    accepted = sum(usage.accepted_draft_tokens for usage in done.usage.values())
    assert bool(accepted) == (not isinstance(drafter, NoDrafter))
    return done.tokens


def both(model: Target) -> list[dict[str, list[int]]]:
    """Plainly, and with trees that hold what plain decoding gave."""
    plain = run(model, NoDrafter())
    return [plain, run(model, oracle(jobs(model, TOKENS), plain, seed=3))]


def main() -> None:
    what, *rest = sys.argv[1:]
    group = RankGroup(BUNDLED, 2, on_lost=lambda why: os._exit(7), engine="cuda", feature_layers=LAYERS)
    target = group.load()
    print(*group.pids, flush=True)
    if what == "steps":
        while True:
            steps(target, 20, 2)
            print("alive", flush=True)
    check_rows(target)
    target.prepare(2, 4, 16)  # type: ignore[attr-defined]
    found = {"tokens": both(target), "law": target.kernel_law, "direct": target.model.direct}
    Path(rest[0]).write_text(json.dumps(found))
    os._exit(0)


if __name__ == "__main__":
    main()
