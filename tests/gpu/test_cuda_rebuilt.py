"""Engines on a GPU that die at random steps: whoever goes on from the committed tokens continues to the bit."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bench.drive import Job, plain
from bench.subjects import Subjects
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.step import step
from hedgerow.engine.types import Sampling
from hedgerow.engine.verifier import VerifierEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOKENS, STREAMS = 160, 8
SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.95)]


@pytest.fixture(scope="module")
def subjects() -> Subjects:
    models = Path("models")
    return Subjects.read(
        models / "sapling", models / "sapling-dflash", models / "heldout/heads.jsonl", most_tokens=60, device="cuda"
    )


async def live(subjects: Subjects, jobs: list[Job], tokens: dict[str, list[int]], steps: int) -> None:
    """Goes on with the jobs from `tokens` for `steps` steps, then dies with all that it holds."""
    engine = VerifierEngine(subjects.model, EngineConfig(max_sequences=STREAMS), subjects.vocabulary, subjects.eos)
    drafter = subjects.drafter()
    for job in jobs:
        if len(tokens[job.name]) < TOKENS:
            engine.start(replace(job, committed=tuple(tokens[job.name])).start())
    while steps and engine.has_work():
        steps -= 1
        result = await step(engine, drafter)
        for update in result.updates if result else ():
            assert update.error is None
            assert update.offset == len(tokens[update.session_id])
            tokens[update.session_id] += update.tokens
            engine.committed(update.session_id, 1, 1, len(tokens[update.session_id]))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "seeded"])
def test_eight_streams_whose_engine_dies_again_and_again(subjects: Subjects, sampling: Sampling) -> None:
    choose, jobs, tokens = random.Random(0), list[Job](), dict[str, list[int]]()
    for n in range(STREAMS):
        own = replace(sampling, seed=n, max_tokens=TOKENS, ignore_eos=True)
        jobs.append(Job(f"s{n}", subjects.prompts[n], own, budget=(0, 7, 16, 63)[n % 4]))
        tokens[f"s{n}"] = []
    deaths = 0
    while any(len(text) < TOKENS for text in tokens.values()):
        asyncio.run(live(subjects, jobs, tokens, choose.randint(3, 30)))
        deaths += 1
    assert deaths > 5
    for job in jobs:
        assert tokens[job.name] == plain(subjects.model, job.prompt, job.sampling, subjects.eos), job.name
