"""Engines on a GPU that die at random steps: whoever goes on from the committed tokens continues to the bit. And what a
prepared model compiles in a long life: nothing."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

from bench.drive import Job, plain
from bench.subjects import Subjects
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.step import step
from hedgerow.engine.types import Sampling
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.model.batch import SequenceRows

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


def latents(subjects: Subjects, job: Job, tokens: Sequence[int], offset: int, chunk: int) -> torch.Tensor:
    """The cache of a session that is rebuilt at `offset`, its prompt in chunks, and then decoded row by row."""
    model, prompt, limit = subjects.model, job.prompt, len(job.prompt) + TOKENS
    count = -(-(limit + 64) // 64)
    pages = range(count, 0, -1) if chunk == 17 else range(count)
    cache, whole = model.new_cache(count + 1), [*prompt, *tokens]
    computed = 0
    while computed < len(whole) - 1:
        left = len(prompt) - computed
        rows = min(chunk, left) if left > 0 else min(64, max(offset + left, 1))
        part = SequenceRows(
            computed, pages, whole[computed : computed + rows], range(-1, rows - 1), [], left > 0, limit
        )
        model.forward([part], cache)
        computed += rows
    return cache.read([pages[slot // 64] * 64 + slot % 64 for slot in range(computed)])


def test_a_rebuilt_session_has_the_bits_of_the_undisturbed_one(subjects: Subjects) -> None:
    job = Job("a", subjects.prompts[0], Sampling(max_tokens=TOKENS, ignore_eos=True))
    tokens = plain(subjects.model, job.prompt, job.sampling, subjects.eos)
    undisturbed = latents(subjects, job, tokens, 0, 1024)
    for offset, chunk in ((1, 1), (2, 17), (63, 1024), (64, 17), (65, 5), (TOKENS - 1, 1024)):
        got = latents(subjects, job, tokens, offset, chunk)
        assert torch.equal(got.view(torch.int16), undisturbed.view(torch.int16)), (offset, chunk)


def test_a_session_in_trees_has_the_bits_of_plain_decoding(subjects: Subjects) -> None:
    """Beside others; accepted rows were moved by the step itself."""
    jobs = [
        Job(f"s{n}", subjects.prompts[n], Sampling(max_tokens=TOKENS, ignore_eos=True), budget)
        for n, budget in enumerate((16, 0, 63, 7))
    ]
    engine = VerifierEngine(subjects.model, EngineConfig(max_sequences=4), subjects.vocabulary, subjects.eos)
    found, drafter = dict[str, tuple[torch.Tensor, list[int]]](), subjects.drafter()
    for job in jobs:
        engine.start(job.start())
    while engine.has_work():
        asyncio.run(step(engine, drafter))
        for job in jobs:
            held = engine.sequence(job.name)
            if held is not None and len(held.output) > TOKENS // 2 and job.name not in found:
                slots = [held.pages[at // 64] * 64 + at % 64 for at in range(held.cached)]
                found[job.name] = engine.cache.read(slots), list(held.output)
    for job in jobs:
        got, tokens = found[job.name]
        assert tokens == plain(subjects.model, job.prompt, job.sampling, subjects.eos)[: len(tokens)]
        assert torch.equal(got, latents(subjects, job, tokens, 0, 1024)), job.name


def variants() -> int:
    """Kernels that were compiled or loaded in this process."""
    functions = [found for found in gc.get_objects() if type(found) in (JITFunction, GluonJITFunction)]
    return sum(len(cache[0]) for function in functions for cache in function.device_caches.values())


def test_a_prepared_model_compiles_nothing_more(subjects: Subjects) -> None:
    """Sequences come and go, prompts beside trees of every size."""
    config = EngineConfig(max_sequences=STREAMS, prefill_rows=128)
    engine = VerifierEngine(subjects.model, config, subjects.vocabulary, subjects.eos)
    subjects.model.prepare(STREAMS, 64, 128)
    subjects.draft_model.prepare(STREAMS, 63)
    choose, before, drafter = random.Random(1), variants(), subjects.drafter()
    assert before > 50
    for n in range(3 * STREAMS):
        sampling = replace(SAMPLINGS[n % 2], seed=n, max_tokens=choose.randint(1, 60), ignore_eos=True)
        engine.start(Job(f"s{n}", subjects.prompts[n], sampling, choose.choice((0, 1, 7, 16, 63))).start())
    while engine.has_work():
        result = asyncio.run(step(engine, drafter))
        for update in result.updates if result else ():
            assert update.error is None
    assert variants() == before
