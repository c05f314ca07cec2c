"""Our drafter against the PyPI package `dflash`, over rounds of drafting and committing: the caches are compared too.

The peer appends context and drafts in one call and crops its cache; ours appends when features arrive.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hedgerow.model.dflash import DFlashModel, DraftState
from hedgerow.model.loader import load_embedding_and_head
from tests.peers import TOLERANCE, DraftPeer, embed_block
from tests.tiny import TinyDrafter, TinyTarget, write_drafter, write_target

TARGET = TinyTarget(layers=4)
YARN: Mapping[str, Any] = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32.0}
KIMI_YARN = {**YARN, "factor": 64.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
DRAFTERS = {
    "sliding-full": TinyDrafter(),
    "full": TinyDrafter(layers=1, layer_types=("full_attention",), heads=2, kv_heads=2, block=4),
    "sliding": TinyDrafter(layer_types=("sliding_attention",) * 2, window=9, feature_layers=(2, 0, 3)),
    "yarn": TinyDrafter(rope_scaling=YARN, heads=6, kv_heads=2, head_dim=32),
    "kimi-yarn": TinyDrafter(
        rope_scaling=KIMI_YARN, layers=3, layer_types=("sliding_attention", "sliding_attention", "full_attention")
    ),
}


def load(folder: Path, drafter: TinyDrafter, seed: int = 0) -> DFlashModel:
    write_target(folder / "target", TARGET, seed)
    write_drafter(folder / "drafter", TARGET, drafter, seed)
    return DFlashModel.load(folder / "drafter", folder / "target")


@pytest.mark.parametrize("name", DRAFTERS)
def test_hidden_states_equal_the_packages_over_rounds(tmp_path: Path, name: str) -> None:
    """A prompt and eleven rounds that accept 0 to L tokens; two sequences of different length in one call of ours."""
    drafter = DRAFTERS[name]
    model, rng, g = load(tmp_path, drafter), random.Random(1), torch.Generator().manual_seed(1)
    peers = [DraftPeer(tmp_path / "drafter", drafter.block) for _ in range(2)]
    states, fresh = [model.new_state() for _ in peers], [40, 3]
    ends = [0, 0]
    for _ in range(12):
        anchors = [rng.randrange(TARGET.vocab) for _ in peers]
        expected = []
        for s, peer in enumerate(peers):
            features = torch.randn(fresh[s], model.feature_width, generator=g)
            model.append(states[s], features, ends[s])
            ends[s] += fresh[s]
            expected.append(peer.round(features, embed_block(model, anchors[s]), ends[s]))
        got = model.hidden(states, anchors, ends)
        assert (got - torch.stack(expected)).abs().max() <= TOLERANCE
        fresh = [rng.randint(1, drafter.block) for _ in peers]
    assert max(ends) > drafter.window, "the window must have moved"


def test_logits_are_the_targets_head_on_the_hidden_states(tmp_path: Path) -> None:
    model = load(tmp_path, DRAFTERS["sliding-full"])
    state = model.new_state()
    model.append(state, torch.randn(20, model.feature_width), 0)
    head = load_embedding_and_head(tmp_path / "target").head.float()
    logits = model.draft([state], [5], [20])
    assert logits.shape == (1, model.block_size - 1, TARGET.vocab)
    assert torch.allclose(logits, model.hidden([state], [5], [20]) @ head.T, atol=1e-4)


def append_in_parts(model: DFlashModel, state: DraftState, features: torch.Tensor, sizes: list[int]) -> None:
    start = 0
    for size in sizes:
        model.append(state, features[start : start + size], start)
        start += size


@pytest.mark.parametrize("name", ["sliding", "sliding-full"])
def test_a_draft_does_not_depend_on_how_the_context_came(tmp_path: Path, name: str) -> None:
    """One append of 300 features, or many: past the window, and past the buffers' first size."""
    model = load(tmp_path, DRAFTERS[name])
    features = torch.randn(300, model.feature_width)
    drafts = []
    for sizes in ([300], [1] * 300, [7] * 42 + [6], [150, 150], [299, 1]):
        state = model.new_state()
        append_in_parts(model, state, features, sizes)
        drafts.append(model.draft([state], [9], [300]))
    assert all((draft - drafts[0]).abs().max() <= TOLERANCE for draft in drafts)


def test_drafting_leaves_the_state_as_it_was(tmp_path: Path) -> None:
    model = load(tmp_path, DRAFTERS["sliding-full"])
    state = model.new_state()
    model.append(state, torch.randn(50, model.feature_width), 0)
    first = model.draft([state], [1], [50])
    model.draft([state], [2], [50])
    assert torch.equal(model.draft([state], [1], [50]), first)
    assert (state.start, state.end) == (0, 50)


def test_a_later_start_sees_only_what_was_appended(tmp_path: Path) -> None:
    """After a reset at 100 the draft equals that of a sequence whose earlier context lies outside every window."""
    model = load(tmp_path, DRAFTERS["sliding"])
    features = torch.randn(150, model.feature_width)
    whole, late = model.new_state(), model.new_state()
    model.append(whole, features, 0)
    model.append(late, features[:10], 0)
    late.reset(100)
    model.append(late, features[100:], 100)
    assert (late.start, late.end) == (100, 150)
    assert (model.draft([whole], [3], [150]) - model.draft([late], [3], [150])).abs().max() <= TOLERANCE


def test_a_sliding_layer_holds_no_more_than_its_window(tmp_path: Path) -> None:
    model = load(tmp_path, DRAFTERS["sliding"])
    state = model.new_state()
    for start in range(0, 2000, 5):
        model.append(state, torch.randn(5, model.feature_width), start)
    assert all(layer.data.shape[2] <= 64 for layer in state.layers)


def test_appending_moves_the_context_rarely(tmp_path: Path) -> None:
    """Growth and the window's moves are amortised: moving with every append would make long texts quadratic."""
    model = load(tmp_path, DRAFTERS["sliding-full"])
    state, row = model.new_state(), torch.randn(1, model.feature_width)
    moves = [0, 0]
    for position in range(1500):
        before = [(layer.data.data_ptr(), layer.length) for layer in state.layers]
        model.append(state, row, position)
        for i, (layer, (where, length)) in enumerate(zip(state.layers, before, strict=True)):
            moves[i] += (layer.data.data_ptr(), layer.length) != (where, length + 1)
    sliding, full = moves
    assert full <= 6  # 64 doubled until 1,500 fit
    assert sliding <= 1500 / 20


def test_the_amplitude_of_yarn_can_be_set(tmp_path: Path) -> None:
    """Kimi's drafter: mscale and mscale_all_dim give 1.0, other readers of the same config take 1.41589."""
    load(tmp_path, DRAFTERS["kimi-yarn"])
    drafts = []
    for amplitude in (None, 1.0, 1.41589):
        model = DFlashModel.load(tmp_path / "drafter", tmp_path / "target", amplitude=amplitude)
        state = model.new_state()
        model.append(state, torch.ones(30, model.feature_width).cumsum(0).sin(), 0)
        drafts.append(model.draft([state], [3], [30]))
    assert torch.equal(drafts[0], drafts[1])
    assert (drafts[0] - drafts[2]).abs().max() > 0.01
