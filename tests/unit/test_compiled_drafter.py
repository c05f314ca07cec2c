"""The compiled drafter answers as the reference does, over any context, and refuses what makes no sense."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.types import DraftBatch, DraftWork
from hedgerow.errors import InvalidRequest
from hedgerow.model.compiled_dflash import CompiledDFlash, CompiledDraftState
from hedgerow.model.dflash import DFlashModel, DraftState
from tests.compiled_builds import missing_compiler
from tests.tiny import TinyDrafter, TinyPaths, write_tiny

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
SHAPES = {
    "default": TinyDrafter(),
    "window of a page and a bit, odd block": TinyDrafter(window=70, block=5, layer_types=(FULL, SLIDING)),
    "three layers, block above a vector": TinyDrafter(
        layers=3, layer_types=(SLIDING, SLIDING, FULL), block=17, window=9
    ),
    "yarn, no grouping": TinyDrafter(kv_heads=4, rope_scaling=YARN),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def model(tiny: TinyPaths) -> CompiledDFlash:
    return CompiledDFlash.load(tiny.drafter, tiny.target)


def grow(
    compiled: tuple[CompiledDFlash, list[CompiledDraftState]],
    reference: tuple[DFlashModel, list[DraftState]],
    rows: int,
    draw: torch.Generator,
) -> None:
    """The same new features for every sequence of both."""
    for a, b in zip(compiled[1], reference[1], strict=True):
        features = torch.randn(rows, compiled[0].feature_width, generator=draw)
        compiled[0].append(a, features, a.end)
        reference[0].append(b, features, b.end)


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_are_those_of_the_reference_over_a_growing_context(tmp_path: Path, name: str) -> None:
    """Chunks of one row and of many pages, a late start, an empty context, gaps before the anchor, three at once."""
    paths = write_tiny(tmp_path, drafter=SHAPES[name])
    a = CompiledDFlash.load(paths.drafter, paths.target, threads=2)
    b = DFlashModel.load(paths.drafter, paths.target)
    assert (a.feature_layers, a.feature_width, a.block_size, a.vocab_size, a.checkpoint_hash, a.target_head_hash) == (
        b.feature_layers, b.feature_width, b.block_size, b.vocab_size, b.checkpoint_hash, b.target_head_hash
    )  # fmt: skip
    states = [a.new_state() for _ in range(3)], [b.new_state() for _ in range(3)]
    for side in states:
        side[1].reset(37)
        side[2].reset(1000)
    draw = torch.Generator().manual_seed(1)
    for rows in (0, 1, 5, 64, 130, 3, 200, 1):
        grow((a, states[0]), (b, states[1]), rows, draw)
        for gap in (0, 3):
            positions = [state.end + gap for state in states[0]]
            expected = b.draft(states[1], [1, 2, 3], positions)
            torch.testing.assert_close(a.draft(states[0], [1, 2, 3], positions), expected, rtol=0, atol=1e-4)
            told, wanted = (
                a.draft_states(states[0], [1, 2, 3], positions),
                b.draft_states(states[1], [1, 2, 3], positions),
            )
            torch.testing.assert_close(told, wanted, rtol=0, atol=1e-4)


def test_a_draft_changes_no_state_and_threads_change_no_bit(tiny: TinyPaths, model: CompiledDFlash) -> None:
    several = CompiledDFlash.load(tiny.drafter, tiny.target, threads=3)
    draw, drafts = torch.Generator().manual_seed(2), []
    features = torch.randn(100, model.feature_width, generator=draw)
    for drafter in (model, several):
        state = drafter.new_state()
        drafter.append(state, features[:70], 0)
        drafter.append(state, features[70:], 70)
        drafts += [drafter.draft([state], [5], [100]) for _ in range(2)]
        drafter.draft([state], [6], [110])
        drafts.append(drafter.draft([state, state], [7, 5], [100, 100])[1:])
    assert all(torch.equal(draft, drafts[0]) for draft in drafts)


def test_a_context_that_was_reset_forgets(model: CompiledDFlash) -> None:
    fresh, used = model.new_state(), model.new_state()
    model.append(used, torch.randn(90, model.feature_width), 0)
    features = torch.randn(3, model.feature_width)
    for state in (fresh, used):
        state.reset(10)
        model.append(state, features, 10)
    assert torch.equal(model.draft([fresh], [1], [13]), model.draft([used], [1], [13]))


def test_what_makes_no_sense_is_refused_and_changes_nothing(model: CompiledDFlash) -> None:
    state, width, positions = model.new_state(), model.feature_width, model.config.max_position_embeddings
    model.append(state, torch.ones(4, width), 0)
    before = model.draft([state], [1], [4])
    for features, position, field in [
        (torch.ones(1, width), 3, "position"),
        (torch.ones(1, width + 1), 4, "features"),
        (torch.ones(1, width, dtype=torch.float64), 4, "features"),
        (torch.ones(positions, width), 4, "position"),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            model.append(state, features, position)
        assert refused.value.field == field
    for anchor, position, field in [
        (model.vocab_size, 4, "anchors[0]"),
        (-1, 4, "anchors[0]"),
        (1, 3, "states[0]"),
        (1, positions, "positions[0]"),
    ]:
        with pytest.raises(InvalidRequest) as refused:
            model.draft([state], [anchor], [position])
        assert refused.value.field == field
    with pytest.raises(InvalidRequest):
        model.draft([state], [1, 2], [4, 4])
    assert torch.equal(model.draft([state], [1], [4]), before)
    assert model.draft([], [], []).shape == (0, model.block_size - 1, model.vocab_size)


def test_the_engine_takes_it_and_builds_the_same_trees(tiny: TinyPaths, model: CompiledDFlash) -> None:
    reference = DFlashModel.load(tiny.drafter, tiny.target)
    features, answers = torch.randn(80, model.feature_width, generator=torch.Generator().manual_seed(3)), []
    for drafter in (model, reference):
        engine = DrafterEngine(drafter, DrafterConfig())
        work = DraftWork(1, 0, features, anchor=3, anchor_position=80, budget=16, topk_cap=0)
        answers.append(engine.draft(DraftBatch(1, [work], ())).trees[0].nodes)
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].parents == answers[1].parents
    assert len(answers[0].tokens) == 16
