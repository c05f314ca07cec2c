"""Speculative output is plain one-by-one decoding's, token for token: any budget, batch, drafter, setting or restart.

Random weights have flat logits, so an arithmetic that depended on the batch or the tree would flip tokens soon.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from bench.drive import Job, drive_now
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.step import LocalDrafter, NoDrafter
from hedgerow.engine.types import Sampling
from tests.engine_rig import SETTINGS, Rig, oracle, prompt
from tests.random_drafter import RandomDrafter

BUDGETS = (0, 1, 7, 12, 16, 32, 63)
LENGTHS = (63, 1, 130, 20, 64, 5, 65, 31)  # ragged, and at the borders of the 64-token pages
TOKENS = 40


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # rows this small gain nothing from a second thread
    yield Rig(tmp_path_factory.mktemp("tiny"))
    torch.set_num_threads(threads)


def jobs(setting: str, budget: int | None = 8, tokens: int = TOKENS, count: int = 8) -> list[Job]:
    sampling = replace(SETTINGS[setting], max_tokens=tokens)
    return [
        Job(f"{setting}-{i}", prompt(length, i), replace(sampling, seed=100 + i), budget, arrives=2 * i)
        for i, length in enumerate(LENGTHS[:count])
    ]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_staggered_batch_gives_the_tokens_of_plain_decoding(rig: Rig, setting: str, budget: int) -> None:
    work = jobs(setting, budget)
    expected = rig.plain_all(work)
    drafter = oracle(work, expected, seed=budget)
    run = drive_now(rig.engine(prefill_rows=48), drafter, work)
    assert run.tokens == expected
    if budget >= 7:
        accepted = sum(usage.accepted_draft_tokens for usage in run.usage.values())
        assert accepted > sum(map(len, expected.values())) / 4, "the trees were not good enough to test anything"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("budget", BUDGETS)
def test_one_at_a_time_gives_the_tokens_of_plain_decoding(rig: Rig, setting: str, budget: int) -> None:
    work = jobs(setting, budget, count=3)
    expected = rig.plain_all(work)
    assert drive_now(rig.engine(max_sequences=1), oracle(work, expected, seed=budget), work).tokens == expected


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("budget", [7, 16, 63])
def test_a_real_drafter_changes_no_token(rig: Rig, setting: str, budget: int) -> None:
    work = [replace(job, topk_cap=i % 3) for i, job in enumerate(jobs(setting, budget, tokens=20))]
    engine, drafter = rig.engine(), LocalDrafter(DrafterEngine(rig.draft_model, DrafterConfig()))
    run = drive_now(engine, drafter, work)
    assert run.tokens == rig.plain_all(work)
    assert (engine.load().refused_trees, engine.load().missed_drafts, drafter.engine.held) == ({}, 0, 0)
    assert all(usage.draft_tokens >= usage.steps - 2 for usage in run.usage.values()), "nothing was drafted"


@pytest.mark.parametrize("setting", SETTINGS)
def test_random_valid_trees_change_no_token(rig: Rig, setting: str) -> None:
    work = jobs(setting, 63, tokens=20)
    expected = rig.plain_all(work)
    drafter = RandomDrafter(5, sorted({token for tokens in expected.values() for token in tokens}))
    run = drive_now(rig.engine(), drafter, work)
    assert run.tokens == expected
    assert sum(usage.accepted_draft_tokens for usage in run.usage.values()) > 0


def test_every_budget_in_one_batch_changes_no_token(rig: Rig) -> None:
    work = [replace(job, budget=budget) for job, budget in zip(jobs("t1"), (*BUDGETS, None), strict=True)]
    expected = rig.plain_all(work)
    assert drive_now(rig.engine(), oracle(work, expected), work).tokens == expected


@pytest.mark.parametrize("budget", [0, 7, 32])
def test_what_depends_on_the_offset_is_the_same_at_every_node(rig: Rig, budget: int) -> None:
    """min_tokens is counted per node: a tree that crosses it bars the end of sequence above and not below."""
    sampling = Sampling(temperature=1.0, max_tokens=TOKENS, min_tokens=15, logit_bias={510: 7.0, 5: 2.0})
    work = [replace(job, sampling=replace(sampling, seed=i)) for i, job in enumerate(jobs("t1", budget))]
    expected = rig.plain_all(work)
    assert all(len(tokens) >= 16 for tokens in expected.values())
    assert any(len(tokens) < 20 for tokens in expected.values())
    run = drive_now(rig.engine(), oracle(work, expected, seed=budget), work)
    assert run.tokens == expected


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_no_size_of_prefill_chunk_changes_a_token(rig: Rig, rows: int) -> None:
    work = jobs("t1", 7, tokens=12)
    expected = rig.plain_all(work)
    assert drive_now(rig.engine(prefill_rows=rows), oracle(work, expected), work).tokens == expected


@pytest.mark.parametrize("setting", ["greedy", "t1"])
def test_a_session_rebuilt_at_any_offset_goes_on_with_the_same_tokens(rig: Rig, setting: str) -> None:
    whole = jobs(setting)
    expected = rig.plain_all(whole)
    offsets = (1, 2, 7, 19, 33, 38, 39, 40)
    work = [
        replace(job, committed=expected[job.name][:offset], arrives=0)
        for job, offset in zip(whole, offsets, strict=True)
    ]
    run = drive_now(rig.engine(replay_rows=16), oracle(work, expected), work)
    assert run.tokens == expected
    assert {name: usage.completion_tokens for name, usage in run.usage.items()} == {
        name: len(tokens) for name, tokens in expected.items()
    }


def test_more_sequences_than_pages_change_no_token(rig: Rig) -> None:
    """Admission by free pages: most of the eight wait, and reuse pages that others filled and left."""
    work = [replace(job, arrives=0) for job in jobs("t08-p095", 12)]
    expected = rig.plain_all(work)
    run = drive_now(rig.engine(pages=6), oracle(work, expected), work)
    assert run.tokens == expected


def test_no_drafter_at_all_changes_no_token(rig: Rig) -> None:
    work = jobs("t1", 16)
    engine = rig.engine()
    assert drive_now(engine, NoDrafter(), work).tokens == rig.plain_all(work)
    assert engine.load().missed_drafts > 0


def test_the_tokens_do_depend_on_seed_and_prompt(rig: Rig) -> None:
    """Else all of the above would hold for an engine that ignores both."""
    first = jobs("t1")[3]
    others = [replace(first, sampling=replace(first.sampling, seed=7)), replace(first, prompt=prompt(20, 99))]
    assert len({tuple(rig.plain(job)) for job in [first, *others]}) == 3
