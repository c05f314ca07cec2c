"""A prompt's page that another prompt has computed is the page that it would have computed itself: tokens and bits."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.drive import Job, Run, drive_now
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.step import LocalDrafter, NoDrafter
from hedgerow.engine.types import DraftAnswer, DraftBatch, Finish, Sampling
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.model.ranked import RankEngine
from tests.compiled_builds import missing_compiler
from tests.engine_rig import EOS, VOCABULARY, Oracle, Rig, latents, one_thread, oracle, prompt, spoil
from tests.tiny import write_target
from tests.unit.test_rank_group import TARGET, group

TOKENS = 24
SEEN = prompt(200)  # three whole pages and some


@pytest.fixture(scope="module", params=["torch", "compiled"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    yield from one_thread(tmp_path_factory.mktemp("tiny"), request.param)


def job(name: str, tokens: Sequence[int], seed: int = 11, budget: int = 0, **more: object) -> Job:
    sampling = Sampling(temperature=1.0, seed=seed, max_tokens=TOKENS, ignore_eos=True)
    return Job(name, tuple(tokens), sampling, budget, **more)  # type: ignore[arg-type]


def engine(rig: Rig, **limits: object) -> VerifierEngine:
    return VerifierEngine(rig.model, EngineConfig(**{"pages": 64, **limits}), VOCABULARY, EOS)  # type: ignore[arg-type]


def bits(verifier: VerifierEngine, one: Job) -> tuple[torch.Tensor, torch.Tensor, Run]:
    """Of every position that the job ever had in the cache, and its features; read while its pages were its own."""
    seen: list[torch.Tensor] = []

    class Watched:
        async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
            held = verifier.sequence(one.name)
            if held is not None and held.cached:
                assert held.features is not None
                ring = held.features
                seen[:] = [latents(verifier, held.pages, held.cached), ring.read(ring.start, ring.end - ring.start)]
            return None

    run = drive_now(verifier, Watched(), [replace(one, budget=1)])
    return seen[0], seen[1].clone(), run


@pytest.mark.parametrize(("length", "hit"), [(64, 0), (65, 64), (128, 64), (129, 128), (192, 128), (200, 192)])
def test_a_hit_has_the_bits_and_the_tokens_of_computing(rig: Rig, length: int, hit: int) -> None:
    alone = engine(rig, prefix_cache="off")
    expected, features, run = bits(alone, job("s", SEEN[:length]))
    shared = engine(rig, prefill_rows=40)
    drive_now(shared, NoDrafter(), [job("before", SEEN, seed=5)])
    found, brought, again = bits(shared, job("s", SEEN[:length]))
    assert again.usage["s"].cached_prompt_tokens == hit
    assert run.usage["s"].cached_prompt_tokens == 0
    assert torch.equal(found, expected)
    assert torch.equal(brought, features)
    assert again.tokens == run.tokens == {"s": rig.plain(job("s", SEEN[:length]))}


def test_pages_are_read_where_they_lie(rig: Rig) -> None:
    """Hits stand anywhere in the cache, in any order; all that belongs to nobody holds what would show."""
    shared = engine(rig, pages=24)
    for number in range(6):  # whose pages stay, so that what is free lies between them
        drive_now(shared, NoDrafter(), [job(f"b{number}", [*SEEN[: 64 * (number % 4)], *prompt(70, number)])])
    kept = {page * 64 + at for page in shared.scheduler.prefixes.pages for at in range(64)}
    spoil(shared, [slot for slot in range(24 * 64) if slot not in kept])
    expected, _, run = bits(engine(rig, prefix_cache="off"), job("s", SEEN))
    found, _, again = bits(shared, job("s", SEEN))
    assert again.usage["s"].cached_prompt_tokens == 192
    assert torch.equal(found, expected)
    assert again.tokens == run.tokens


def test_a_page_of_other_bits_would_show(rig: Rig) -> None:
    """Else the tests here would hold of an engine that reads no page at all."""
    shared = engine(rig)
    drive_now(shared, NoDrafter(), [job("before", SEEN)])
    spoil(shared, [next(iter(shared.scheduler.prefixes.pages)) * 64 + at for at in range(64)])
    assert drive_now(shared, NoDrafter(), [job("s", SEEN)]).tokens != {"s": rig.plain(job("s", SEEN))}


def test_prompts_that_share_change_no_token_of_each_other(rig: Rig) -> None:
    """In few pages, with trees, in any order of ends, some taken away in the middle of their prompt or later."""
    choose, jobs = random.Random(2), list[Job]()
    for number in range(12):
        own = prompt(choose.randint(1, 30), number)
        shared = (SEEN, prompt(200, 77), prompt(200, 78))[number // 2 % 3][: choose.choice((64, 100, 128, 192))]
        jobs.append(job(f"s{number}", [*shared, *own], seed=number % 3, budget=(0, 7, 16)[number % 3]))
    expected = rig.plain_all(jobs)
    verifier = engine(rig, pages=8, prefill_rows=70, max_sequences=4, default_budget=0)
    drafter, tokens, left = oracle(jobs, expected), {each.name: list[int]() for each in jobs}, set[str]()
    for each in jobs:
        verifier.start(each.start())
    step = 0
    while verifier.has_work():
        plan = verifier.plan()
        if plan is None:
            continue
        step += 1
        for update in verifier.verify(plan, answer_of(drafter, plan.draft)).updates:
            assert update.offset == len(tokens[update.session_id])
            tokens[update.session_id] += update.tokens
            left |= {update.session_id} if update.finish is Finish.CANCELLED else set()
        verifier.check()
        if step % 9 == 0 and verifier.scheduler.running:
            verifier.cancel(choose.choice(verifier.scheduler.running).start.session_id, 1, 1)
    assert 2 <= len(left) <= 9
    assert {name: tokens[name] for name in tokens if name not in left} == {
        name: text for name, text in expected.items() if name not in left
    }
    assert all(expected[name][: len(tokens[name])] == tokens[name] for name in left)
    load = verifier.load()
    assert load.prefixes.hit_tokens >= 5 * 64
    assert load.prefixes.reclaimed_pages > 0
    assert (load.held_sequences, load.free_pages) == (0, load.total_pages)


def answer_of(drafter: object, batch: DraftBatch) -> DraftAnswer | None:
    try:
        drafter.draft(batch).send(None)  # type: ignore[attr-defined]
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    raise AssertionError("it never waits")


@pytest.mark.parametrize("offset", [1, 9, 23])
def test_a_session_that_is_built_anew_hits_its_prompt_and_goes_on_with_its_tokens(rig: Rig, offset: int) -> None:
    whole = job("s", SEEN, budget=8)
    expected = rig.plain(whole)
    verifier = engine(rig)
    drive_now(verifier, NoDrafter(), [job("before", SEEN, seed=4)])
    rebuilt = replace(whole, committed=tuple(expected[:offset]))
    run = drive_now(verifier, Oracle({2: [*SEEN, *expected]}), [rebuilt])
    assert run.tokens == {"s": expected}
    assert run.usage["s"].cached_prompt_tokens == 192


def test_a_held_sequence_keeps_what_it_shares(rig: Rig) -> None:
    """Its store is behind: it pauses, others come and take every page that it does not need."""
    verifier = engine(rig, pages=9, run_ahead=4)
    drive_now(verifier, NoDrafter(), [job("before", SEEN, seed=4)])
    held = job("s", SEEN)
    verifier.start(held.start())
    while not verifier.scheduler.running or verifier.scheduler.running[0].run_ahead() < 4:
        plan = verifier.plan()
        assert plan is not None
        verifier.verify(plan, None)
    pages = verifier.scheduler.running[0].pages
    others = [job(f"o{n}", prompt(200, 50 + n), seed=n) for n in range(2)]
    assert drive_now(verifier, NoDrafter(), others).tokens == rig.plain_all(others)
    assert verifier.load().prefixes.reclaimed_pages > 0
    assert verifier.scheduler.running[0].pages == pages
    offset, tokens = 4, list[int]()
    while verifier.sequence("s") is not None:
        verifier.committed("s", 1, 1, offset)
        plan = verifier.plan()
        assert plan is not None
        for update in verifier.verify(plan, None).updates:
            tokens += update.tokens
            offset = update.offset + len(update.tokens)
    assert tokens == rig.plain(held)[4:]


@pytest.mark.parametrize("budget", [7, 16])
def test_a_real_drafter_drafts_behind_a_hit_what_it_drafts_without(rig: Rig, budget: int) -> None:
    """Features of pages that hit come from the host, so that trees, acceptance and steps are the same."""
    asked = [job(f"s{n}", [*SEEN[: 64 * n + 70], *prompt(9, n)], seed=n, budget=budget) for n in range(3)]
    seen = {}
    for mode in ("off", "shared"):
        verifier = engine(rig, prefix_cache=mode)
        drafter = LocalDrafter(DrafterEngine(rig.draft_model, DrafterConfig()))
        drive_now(verifier, drafter, [job("before", SEEN, seed=9)])  # without trees
        runs = [drive_now(verifier, drafter, [each]) for each in asked]
        seen[mode] = [
            (run.tokens, run.usage[each.name]._replace(cached_prompt_tokens=0))
            for run, each in zip(runs, asked, strict=True)
        ]
        hits = [run.usage[each.name].cached_prompt_tokens for run, each in zip(runs, asked, strict=True)]
        assert hits == ([0, 0, 0] if mode == "off" else [64, 128, 192])
    assert seen["shared"] == seen["off"]
    assert all(usage.draft_tokens > 0 for _, usage in seen["off"])


def test_after_a_step_that_failed_nothing_is_believed(rig: Rig) -> None:
    verifier = engine(rig)
    drive_now(verifier, NoDrafter(), [job("before", SEEN)])
    verifier.start(job("s", SEEN[:100]).start())
    plan = verifier.plan()
    assert plan is not None
    forward = type(rig.model).forward
    try:
        type(rig.model).forward = broken  # type: ignore[method-assign, assignment]
        verifier.verify(plan, None)
    finally:
        type(rig.model).forward = forward  # type: ignore[method-assign]
    load = verifier.load()
    assert (load.faults, load.prefixes.pages, load.free_pages) == (1, 0, load.total_pages)
    verifier.check()


def broken(*_: object) -> None:
    raise RuntimeError("a device fell off")


@pytest.mark.parametrize("kind", ["torch", "compiled"])
def test_every_rank_of_a_group_reads_the_pages_of_a_hit(tmp_path: Path, kind: RankEngine) -> None:
    """Page numbers are rank 0's; a rank that read others would add other parts to the sums."""
    if kind == "compiled" and missing_compiler():
        pytest.skip(missing_compiler())
    write_target(tmp_path, TARGET)
    jobs = [job(f"s{n}", [*SEEN[: 64 * n + 40], *prompt(20, n)], seed=n) for n in range(3)]
    with group(tmp_path, engine=kind) as (target, lost):
        seen = {}
        for mode in ("off", "shared"):
            verifier = VerifierEngine(target, EngineConfig(pages=24, prefix_cache=mode), VOCABULARY, EOS)
            drive_now(verifier, NoDrafter(), [job("before", SEEN, seed=9)])
            run = drive_now(verifier, NoDrafter(), jobs)
            seen[mode] = run.tokens, [run.usage[each.name].cached_prompt_tokens for each in jobs]
    assert not lost
    assert seen["shared"][0] == seen["off"][0]
    assert (seen["shared"][1], seen["off"][1]) == ([0, 64, 128], [0, 0, 0])
