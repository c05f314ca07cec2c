"""DFlash 2 on a GPU against PyTorch's engine, and under Triton's interpreter against the PyPI package `dflash` too."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

pytest.importorskip("triton")

from hedgerow.model.cuda_dflash import CudaDFlash
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.loader import load_embedding_and_head
from hedgerow.model.selector import FromPairs, Selector, build
from kernels.tree_build import PlainTree
from tests.dflash2 import SHAPES, write_dflash2
from tests.tiny import TinyTarget, write_target

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE, TYPE = ("cpu", torch.float32) if INTERPRETED else ("cuda", torch.bfloat16)
TARGET = TinyTarget(layers=3, positions=512)
ROUNDS, FEWER_ROUNDS = 20, 8  # a drafter's draft takes a second or two in the interpreter
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Two(NamedTuple):
    """The same drafter on both engines, and its selector for each."""

    model: CudaDFlash
    reference: DFlashModel
    selectors: tuple[Selector, Selector]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dflash2") / "target"
    write_target(folder, TARGET)
    return folder


def load(folder: Path, target: Path, name: str) -> Two:
    shape, causal, sizes = SHAPES[name]
    write_dflash2(folder, TARGET, shape, causal, sizes)
    reference = DFlashModel.load(folder, target)
    found = [Selector.find(folder, reference.config) for _ in range(2)]
    assert found[0] is not None
    assert found[1] is not None
    return Two(CudaDFlash(folder, target, torch.device(DEVICE), TYPE), reference, (found[0], found[1]))


def near(got: torch.Tensor, expected: torch.Tensor, closest: float = 1e-4) -> None:
    assert got.shape == expected.shape
    if INTERPRETED:
        assert float((got - expected).abs().max()) <= closest
    else:
        assert float((got.float().cpu() - expected).square().mean().sqrt() / expected.std()) < 0.05


def same(got: Sequence[PlainTree], expected: Sequence[PlainTree]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.tokens, mine.parents) == (theirs.tokens, theirs.parents)
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


def of_these(selector: Selector, states: tuple[torch.Tensor, torch.Tensor], *asked: Sequence[int]) -> list[PlainTree]:
    """The trees that the CPU makes of a GPU's logits and states."""
    logits, hidden = (part.float().cpu() for part in states)
    anchors, budgets, caps = asked
    return build(selector.pairs(logits, hidden, torch.tensor(anchors), torch.tensor(caps)), budgets)


@pytest.mark.skipif(not INTERPRETED, reason="the package is compared in float32")
@pytest.mark.parametrize("name", SHAPES)
def test_hidden_states_and_proposals_are_the_packages(tmp_path: Path, target: Path, name: str) -> None:
    """Round after round, of which each keeps some rows of a block and forgets the others."""
    pytest.importorskip("dflash")
    from tests.parity.test_dflash2_peer import Peer
    from tests.peers import embed_block

    model, reference, selectors = load(tmp_path, target, name)
    block, state = model.block_size, model.new_state()
    peer: Any = Peer(tmp_path, block)
    head = load_embedding_and_head(target).head.float()
    rng, g = random.Random(3), torch.Generator().manual_seed(3)
    end, fresh, moved = 0, 30, 0
    rounds = FEWER_ROUNDS if SHAPES[name][0].layers > 2 else ROUNDS
    for _ in range(rounds):
        features, anchor = torch.randn(fresh, model.feature_width, generator=g), rng.randrange(TARGET.vocab)
        model.append(state, features, end)
        end += fresh
        expected = peer.round(features, embed_block(reference, anchor), end)
        states = model.draft_states([state], [anchor], [end])
        near(states[1][0], expected)
        chain = peer.model.propose(expected[None], torch.tensor([anchor]), lambda h: h @ head.T, 0.0)[0][0].tolist()
        (tree,) = of_these(selectors[0], states, [anchor], [block - 1], [1])
        assert (tree.tokens, tree.parents) == (chain, list(range(-1, block - 2)))
        moved += chain != (expected @ head.T).argmax(-1).tolist()
        fresh = rng.randint(1, block)
    assert end > 2 * SHAPES[name][0].window
    assert moved > rounds / 2, "a selector that changes nothing would go unseen"


@pytest.mark.parametrize("name", list(SHAPES)[1:] if INTERPRETED else SHAPES)
def test_sequences_of_other_lengths_draft_what_they_do_on_a_cpu(tmp_path: Path, target: Path, name: str) -> None:
    """In one pass, round after round; then one of them again from its features alone, in other parts."""
    model, reference, selectors = load(tmp_path, target, name)
    proposer, other = (FromPairs(of, mine) for of, mine in zip((model, reference), selectors, strict=True))
    starts, counts = (0, 61, 0), [1, 5, 70]  # the third behind a page's end
    rng, g = random.Random(4), torch.Generator().manual_seed(4)
    kept: list[list[torch.Tensor]] = [[], [], []]
    mine, theirs = ([of.new_state() for _ in starts] for of in (model, reference))  # type: ignore[attr-defined]
    for states in (mine, theirs):
        for state, start in zip(states, starts, strict=True):
            state.reset(start)
    for _ in range(3 if INTERPRETED else ROUNDS):
        anchors, budgets, caps = [rng.randrange(TARGET.vocab) for _ in starts], [12, 4, 7], [0, 2, 1]
        for s, count in enumerate(counts):
            rows = torch.randn(count, model.feature_width, generator=g)
            kept[s].append(rows)
            model.append(mine[s], rows, mine[s].end)
            reference.append(theirs[s], rows, theirs[s].end)
        ends = [state.end for state in theirs]
        states, expected = model.draft_states(mine, anchors, ends), reference.draft_states(theirs, anchors, ends)
        near(states[1], expected[1])
        near(states[0], expected[0], 1e-3)
        trees = of_these(selectors[1], states, anchors, budgets, caps)
        got = proposer.propose(mine, anchors, ends, budgets, caps).trees
        same(got, trees)
        if INTERPRETED:
            same(got, other.propose(theirs, anchors, ends, budgets, caps).trees)
        counts = [rng.randint(1, model.block_size) for _ in starts]
    logits = model.draft(mine[1:2], anchors[1:2], ends[1:2]).clone()
    near(logits, expected[0][1:2], 1e-3)
    again, rows = model.new_state(), torch.cat(kept[1])
    again.reset(starts[1])
    for part in rows.split(7):
        model.append(again, part, again.end)
    near(model.draft([again], anchors[1:2], ends[1:2]), expected[0][1:2], 1e-3)


def test_trees_of_marginals_in_one_pass(tmp_path: Path, target: Path) -> None:
    """What `trees: marginal` asks of a drafter of the second kind: the same graph, convolutions in it."""
    model, reference, _ = load(tmp_path, target, "three taps, groups of 8")
    mine, theirs = model.new_state(), reference.new_state()
    features = torch.randn(9, model.feature_width, generator=torch.Generator().manual_seed(6))
    model.append(mine, features, 0)
    reference.append(theirs, features, 0)
    got = model.propose([mine, mine], [3, 4], [9, 10], [6, 2], [0, 0]).trees
    logits = model.draft([mine, mine], [3, 4], [9, 10]).cpu()
    same(got, reference.trees(logits, [6, 2], [0, 0]))
    if INTERPRETED:
        same(got, reference.trees(reference.draft([theirs, theirs], [3, 4], [9, 10]), [6, 2], [0, 0]))


@pytest.mark.skipif(INTERPRETED, reason="slow: seventy passes, and nothing is recorded")
def test_what_was_prepared_is_not_made_again(tmp_path: Path, target: Path) -> None:
    """Conditional trees are recorded where a selector is known, and drafts of every size then find their pass."""
    model, _, selectors = load(tmp_path, target, "causal in sliding layers")
    proposer = FromPairs(model, selectors[0])
    model.prepare(4, 16)
    kept = set(model._passes._values)
    assert {shape.pairs for shape in kept if shape.nodes} == {True}
    states = [model.new_state() for _ in range(4)]
    for count, budget in ((1, 3), (3, 9), (4, 16)):
        for state in states[:count]:
            model.append(state, torch.randn(9, model.feature_width), state.end)
        ends = [state.end for state in states[:count]]
        trees = proposer.propose(states[:count], [5] * count, ends, [budget] * count, [0] * count).trees
        assert [len(tree.tokens) for tree in trees] == [budget] * count
    assert set(model._passes._values) == kept


def test_a_pass_of_padding_changes_nothing(tmp_path: Path, target: Path) -> None:
    """Five sequences fill a pass of eight; what stands in the others' places reaches none of them."""
    model, _, _ = load(tmp_path, target, "three taps, groups of 8")
    states = [model.new_state() for _ in range(5)]
    for s, state in enumerate(states):
        model.append(state, torch.randn(s + 1, model.feature_width, generator=torch.Generator().manual_seed(s)), 0)
    ends, anchors = [state.end for state in states], [5, 6, 7, 8, 9]
    whole = model.draft(states, anchors, ends).clone()
    room: Any = model._room.convolution
    for tensor in (room.into, room.out_of, room.dynamic):
        tensor.fill_(torch.nan)
    for s, state in enumerate(states[:2]):
        one = model.draft([state], anchors[s : s + 1], ends[s : s + 1])
        near(one[0], whole[s].float().cpu(), 1e-5)
