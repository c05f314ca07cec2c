"""The drafter on a GPU against PyTorch's. Under Triton's interpreter: a tiny one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.errors import InvalidRequest
from hedgerow.model.cuda_dflash import FLUSH_FROM, CudaDFlash
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.projection import FeatureProjection
from kernels.gpu.block_attention import block_attention
from tests.tiny import TinyTarget, write_tiny

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SAPLING = Path("models/sapling")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Pair:
    """The same checkpoint on both engines."""

    def __init__(self, folder: Path, target: Path) -> None:
        device, dtype = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
        self.model = CudaDFlash(folder, target, torch.device(device), dtype)
        self.reference = DFlashModel.load(folder, target)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    if INTERPRETED:
        paths = write_tiny(tmp_path_factory.mktemp("tiny"), TinyTarget(layers=2, experts=4))
        return Pair(paths.drafter, paths.target)
    return Pair(SAPLING.with_name("sapling-dflash"), SAPLING)


def features(pair: Pair, rows: int) -> torch.Tensor:
    return torch.randn(rows, pair.model.feature_width, generator=torch.Generator().manual_seed(rows))


def test_drafts_are_what_pytorch_computes(pair: Pair) -> None:
    """Contexts of other lengths and starts, one of them in parts, over two pages and more than a pass's features."""
    lengths, starts, anchors = (70, 3, FLUSH_FROM + 5), (30, 0, 0), (1, 2, 3)
    if INTERPRETED:
        lengths = (35, 1, 2)
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    drafts = []
    for drafter in (pair.model, pair.reference):
        states = [drafter.new_state() for _ in lengths]
        for state, start, length in zip(states, starts, lengths, strict=True):
            state.reset(start)
            rows = features(pair, length)
            drafter.append(state, rows[: length // 2], start)
            drafter.append(state, rows[length // 2 :], start + length // 2)
        first = drafter.draft(states[:1], anchors[:1], ends[:1]).clone()
        drafts.append((first.cpu(), drafter.draft(states, anchors, ends).cpu()))
    for got, expected in zip(*drafts, strict=True):
        assert got.shape == expected.shape
        error = float((got - expected).square().mean().sqrt() / expected.std())
        assert error < (1e-5 if INTERPRETED else 0.05)
    assert float((drafts[0][1][0] - drafts[0][0][0]).abs().max()) < 1e-4, "a draft depends on the batch"


def test_where_contexts_may_be_long_they_are_read_in_splits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the other attention in the layers that see all of it, and with the same drafts but for rounding."""
    calls = list[int | None]()

    def noted(*given: Any) -> None:
        calls.append(given[8])
        block_attention(*given)

    monkeypatch.setattr("hedgerow.model.cuda_draft_step.block_attention", noted)
    length, made, most = 9 if INTERPRETED else 1500, [], pair.model.positions
    for least in (most, most - 1):
        monkeypatch.setattr("hedgerow.model.cuda_draft_step.LONG", least)
        pair.model._passes.clear()
        states = [pair.model.new_state() for _ in range(2)]
        for state, rows in zip(states, (length, 3), strict=True):
            pair.model.append(state, features(pair, rows), 0)
        before = len(calls)
        made.append(pair.model.draft(states, [5, 6], [length, 4]).cpu().clone())
        assert (len(calls) > before) is (least < most)
    pair.model._passes.clear()
    assert set(calls) == {None}, "a layer with a window reads little"
    error = float((made[1] - made[0]).square().mean().sqrt() / made[0].std())
    assert error < (1e-5 if INTERPRETED else 0.02)


@pytest.mark.skipif(INTERPRETED, reason="slow: nothing of it is the ops'")
def test_a_context_that_was_reset_is_another(pair: Pair) -> None:
    state, other = pair.model.new_state(), pair.model.new_state()
    rows = features(pair, 6)
    pair.model.append(state, rows, 0)
    before = pair.model.draft([state], [5], [6]).cpu()
    state.reset(64)
    assert not state.pages
    pair.model.append(state, rows, 64)
    pair.model.append(other, rows, 0)
    assert torch.equal(pair.model.draft([other], [5], [6]).cpu(), before)
    assert not torch.equal(pair.model.draft([state], [5], [70]).cpu(), before)


def test_what_makes_no_sense_is_refused(pair: Pair) -> None:
    state = pair.model.new_state()
    pair.model.append(state, features(pair, 2), 0)
    with pytest.raises(InvalidRequest, match="position"):
        pair.model.append(state, features(pair, 2), 3)
    with pytest.raises(InvalidRequest, match="features"):
        pair.model.append(state, features(pair, 2)[:, 1:], 2)
    with pytest.raises(InvalidRequest, match="anchors"):
        pair.model.draft([state], [-1], [2])
    with pytest.raises(InvalidRequest, match="positions"):
        pair.model.draft([state], [1], [1])


def test_trees_in_one_pass_are_those_of_two(pair: Pair) -> None:
    """Of other lengths, budgets and caps; another context in between."""
    lengths, budgets, caps = (3, 9), (6, 3), (0, 1)
    made = []
    for whole in (False, True):
        states = [pair.model.new_state() for _ in lengths]
        for state, length in zip(states, lengths, strict=True):
            pair.model.append(state, features(pair, length), 0)
        if whole:
            made.append(pair.model.propose(states, (5, 6), lengths, budgets, caps).trees)
        else:
            logits = pair.model.draft(states, (5, 6), lengths)
            made.append(pair.model.trees(logits, budgets, caps))
    assert made[0] == made[1]
    assert [len(tree.tokens) for tree in made[0]] == [6, 3]


@pytest.mark.skipif(INTERPRETED, reason="slow, and test_cuda_walk.py has trees")
def test_trees(pair: Pair) -> None:
    state = pair.model.new_state()
    pair.model.append(state, features(pair, 3), 0)
    logits = pair.model.draft([state, state], [5, 6], [3, 4])
    expected = pair.reference.trees(logits.cpu(), [12, 5], [0, 2])
    for got, wanted in zip(pair.model.trees(logits, [12, 5], [0, 2]), expected, strict=True):
        assert (got.tokens, got.parents) == (wanted.tokens, wanted.parents)
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)


def test_features_that_were_projected_before_draft_the_same(tmp_path: Path) -> None:
    paths = write_tiny(tmp_path, TinyTarget(layers=2, experts=4)) if INTERPRETED else None
    drafter, target = (SAPLING.with_name("sapling-dflash"), SAPLING) if paths is None else (paths.drafter, paths.target)
    device, dtype = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
    whole, narrow = (
        CudaDFlash(drafter, target, torch.device(device), dtype, projected=projected) for projected in (False, True)
    )
    rows = torch.randn(5, whole.feature_width, generator=torch.Generator().manual_seed(1))
    drafts = []
    for model, given in ((whole, rows), (narrow, FeatureProjection.load(drafter)(rows))):
        state = model.new_state()
        model.append(state, given, 0)
        drafts.append(model.draft([state], [3], [5]).cpu().clone())
    error = float((drafts[0] - drafts[1]).square().mean().sqrt() / drafts[0].std())
    assert error < (1e-5 if INTERPRETED else 0.05)


def test_states_are_those_of_the_logits(pair: Pair) -> None:
    state, other = pair.model.new_state(), pair.reference.new_state()
    for model, mine in ((pair.model, state), (pair.reference, other)):
        model.append(mine, features(pair, 5), 0)  # type: ignore[attr-defined]
    logits, hidden = pair.model.draft_states([state, state], [3, 4], [5, 6])
    expected, wanted = pair.reference.draft_states([other, other], [3, 4], [5, 6])
    for got, reference in ((logits, expected), (hidden, wanted)):
        assert got.shape == reference.shape
        error = float((got.float().cpu() - reference).square().mean().sqrt() / reference.std())
        assert error < (1e-5 if INTERPRETED else 0.05)
