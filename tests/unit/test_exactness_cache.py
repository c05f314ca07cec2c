"""One position of one session has one set of bits in the cache, however it came to be computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from bench.drive import Job, drive_now
from hedgerow.engine.step import NoDrafter
from hedgerow.engine.types import DraftAnswer, DraftBatch, Sampling
from hedgerow.engine.verifier import VerifierEngine
from tests.engine_rig import Oracle, Rig, latents, one_thread, oracle, prompt, spoil

PROMPT, TOKENS = 70, 70


@pytest.fixture(scope="module", params=["torch", "compiled"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    yield from one_thread(tmp_path_factory.mktemp("tiny"), request.param)


@pytest.fixture(scope="module")
def job() -> Job:
    sampling = Sampling(temperature=1.0, seed=11, max_tokens=TOKENS, ignore_eos=True)
    return Job("s", prompt(PROMPT), sampling, budget=12)


@pytest.fixture(scope="module")
def undisturbed(rig: Rig, job: Job) -> torch.Tensor:
    return final_latents(rig.engine(), NoDrafter(), replace(job, budget=0))


def final_latents(engine: VerifierEngine, drafter: object, job: Job, beside: tuple[Job, ...] = ()) -> torch.Tensor:
    """Latents of every position that the job's sequence computed, read after its end from the pages that it had."""
    pages: list[tuple[int, ...]] = []

    class Watched:
        async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
            sequence = engine.sequence(job.name)
            if sequence is not None:
                pages.append(sequence.pages)
            answer: DraftAnswer | None = await drafter.draft(batch)  # type: ignore[attr-defined]
            return answer

    # with a budget there is a draft in every step, so the pages are seen while they are held
    drive_now(engine, Watched(), [replace(job, budget=max(job.budget or 0, 1)), *beside])
    return latents(engine, pages[-1], len(job.prompt) + TOKENS - 1)


@pytest.mark.parametrize("rows", [1, 5, 64, 70])
def test_prefill_in_chunks_of_any_size_writes_the_same_bits(
    rig: Rig, job: Job, undisturbed: torch.Tensor, rows: int
) -> None:
    assert torch.equal(final_latents(rig.engine(prefill_rows=rows), NoDrafter(), job), undisturbed)


@pytest.mark.parametrize("budget", [1, 7, 12, 16, 32, 63])
def test_accepted_paths_of_any_tree_leave_the_bits_of_plain_decoding(
    rig: Rig, job: Job, undisturbed: torch.Tensor, budget: int
) -> None:
    job = replace(job, budget=budget)
    drafter = oracle([job], rig.plain_all([job]), seed=budget)
    assert torch.equal(final_latents(rig.engine(), drafter, job), undisturbed)


@pytest.mark.parametrize("offset", [1, 2, 30, 58, 59, 69])
@pytest.mark.parametrize("replay_rows", [64, 5])
def test_a_session_rebuilt_at_any_offset_has_the_bits_of_the_undisturbed_one(
    rig: Rig, job: Job, undisturbed: torch.Tensor, offset: int, replay_rows: int
) -> None:
    rebuilt = replace(job, committed=rig.plain(job)[:offset])
    drafter = oracle([rebuilt], rig.plain_all([job]))
    engine = rig.engine(replay_rows=replay_rows, prefill_rows=40)
    assert torch.equal(final_latents(engine, drafter, rebuilt), undisturbed)


def test_no_page_layout_and_no_neighbour_changes_a_bit(rig: Rig, job: Job, undisturbed: torch.Tensor) -> None:
    engine = rig.engine(pages=40)
    shuffle_pages(engine, seed=5)
    beside = tuple(
        Job(f"n{i}", prompt(40 + 9 * i, i), replace(job.sampling, seed=i), budget=7, arrives=3 * i) for i in range(5)
    )
    jobs = [job, *beside]
    drafter = oracle(jobs, rig.plain_all(jobs))
    assert torch.equal(final_latents(engine, drafter, job, beside), undisturbed)


def shuffle_pages(engine: VerifierEngine, seed: int) -> None:
    """Hands pages out in random order: descending, with holes, never neighbours but by chance."""
    order = list(range(engine.pool.pages))
    random.Random(seed).shuffle(order)
    reserve: Callable[[int], tuple[int, ...] | None] = engine.pool.reserve
    names = dict(enumerate(order))
    real = {page: name for name, page in names.items()}
    release, share, holders = engine.pool.release, engine.pool.share, engine.pool.holders

    def shuffled(pages: int) -> tuple[int, ...] | None:
        taken = reserve(pages)
        return None if taken is None else tuple(names[page] for page in taken)

    engine.pool.reserve = shuffled  # type: ignore[method-assign]
    engine.pool.release = lambda pages: release([real[page] for page in pages])  # type: ignore[method-assign]
    engine.pool.share = lambda pages: share([real[page] for page in pages])  # type: ignore[method-assign]
    engine.pool.holders = lambda page: holders(real[page])  # type: ignore[method-assign]
    engine.scheduler.check = lambda: None  # type: ignore[method-assign]


def test_rejected_branch_leaves_nothing_behind(rig: Rig, job: Job) -> None:
    """Whatever lies in slots past a sequence's last committed position is never read again."""
    job = replace(job, budget=32)
    expected = rig.plain_all([job])
    engine = rig.engine()

    class Spoiled(Oracle):
        async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
            sequence = engine.sequence("s")
            if sequence is not None and sequence.pages:
                kept = {sequence.pages[p // 64] * 64 + p % 64 for p in range(sequence.cached)}
                rest = [slot for slot in range(engine.pool.pages * 64) if slot not in kept]
                spoil(engine, rest)
            return await super().draft(batch)

    drafter = Spoiled({1: [*job.prompt, *expected["s"]]}, seed=1)
    assert drive_now(engine, drafter, [job]).tokens == expected
