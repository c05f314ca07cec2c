"""Conditional trees on the compiled engine: the search is the oracle's bit for bit, scores and drafts are torch's."""

from __future__ import annotations

import random
from array import array
from pathlib import Path

import pytest
import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.compiled_dflash import CompiledDFlash
from hedgerow.model.compiled_pairs import FlatPairs, build, pair_logprobs, pair_trees, tree_asks
from hedgerow.model.dflash import DFlashModel
from hedgerow.model.draft_config import SelectorSize
from hedgerow.model.select import load_drafter
from hedgerow.model.selector import FromPairs, Pairs, Selector
from hedgerow.model.selector import build as search
from kernels.cpu.build import build as build_library
from kernels.cpu.library import Library
from kernels.tree_build import PlainTree
from kernels.tree_pairs import MOST_DEPTH, MOST_WIDTH, tree_pairs_heap
from tests.compiled_builds import missing_compiler, plain_build
from tests.dflash2 import DFLASH2, SHAPES, write_dflash2
from tests.tiny import TinyDrafter, TinyTarget, write_target
from tests.unit.test_tree_pairs import scores

pytestmark = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
TARGET = TinyTarget(layers=3, positions=512)


@pytest.fixture(scope="module", params=["usual build", "no vector instructions"])
def library(request: pytest.FixtureRequest) -> Library:
    return Library(build_library() if request.param == "usual build" else plain_build())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs") / "target"
    write_target(folder, TARGET)
    return folder


def flat(pairs: Pairs) -> FlatPairs:
    sequences, depth, width = pairs.tokens.shape
    return FlatPairs(
        array("f", pairs.logprobs.flatten().tolist()), array("i", pairs.choice.flatten().tolist()),
        array("i", pairs.tokens.flatten().tolist()), (sequences, depth, width),
    )  # fmt: skip


def searched(library: Library, pairs: Pairs, budgets: list[int]) -> list[PlainTree]:
    return build(library, flat(pairs), budgets, tree_asks(budgets, [0] * len(budgets)))


@pytest.mark.parametrize("kind", ["drawn", "grid", "flat", "bare"])
def test_ten_thousand_trees_are_the_oracles(library: Library, kind: str) -> None:
    """2,500 of each kind: drawn scores, ties on a grid, all scores equal, most of them impossible."""
    choose = random.Random(kind)
    for case in range(250):
        depth, width = choose.randint(1, 7), choose.randint(1, 8)
        pairs = Pairs(*scores(10, depth, width, kind, case))
        budgets = [choose.choice((0, 1, 2, 7, 15, 16, 33, 63)) for _ in range(10)]
        trees = searched(library, pairs, budgets)
        logprobs, choice, tokens = (part.tolist() for part in pairs)
        for s, budget in enumerate(budgets):
            assert trees[s] == tree_pairs_heap(logprobs[s], choice[s], tokens[s], budget), (case, s)


@pytest.mark.parametrize(
    ("depth", "width", "budget"), [(MOST_DEPTH, MOST_WIDTH, 256), (MOST_DEPTH, 1, 20), (1, 16, 256)]
)
def test_the_largest_trees_are_the_oracles(library: Library, depth: int, width: int, budget: int) -> None:
    for kind in ("drawn", "flat"):
        pairs = Pairs(*scores(1, depth, width, kind, budget))
        logprobs, choice, tokens = (part[0].tolist() for part in pairs)
        assert searched(library, pairs, [budget]) == [tree_pairs_heap(logprobs, choice, tokens, budget)]


def random_selector(vocabulary: int, hidden: int, size: SelectorSize) -> Selector:
    g = torch.Generator().manual_seed(3)
    codebooks = (torch.randn(vocabulary, size.rank, generator=g) for _ in range(2))
    return Selector(size, *codebooks, torch.randn(size.rank, hidden, generator=g) * hidden**-0.5)


@pytest.mark.parametrize("size", [SelectorSize(24, 16), SelectorSize(7, 5), SelectorSize(64, 31), SelectorSize(1, 1)])
def test_scores_are_torchs(library: Library, size: SelectorSize) -> None:
    selector, g = random_selector(512, 48, size), torch.Generator().manual_seed(4)
    logits, hidden = torch.randn(4, 7, 512, generator=g) * 3, torch.randn(4, 7, 48, generator=g)
    logits[1, 2, 100:] = -torch.inf  # fewer candidates than are asked for, where they are many
    anchors, caps = [0, 511, 7, 7], [0, 2, 1, 99]
    ask = tree_asks([16] * 4, caps)
    mine = pair_logprobs(library, selector, logits, hidden, anchors, ask)
    torchs = selector.pairs(logits, hidden, torch.tensor(anchors), torch.tensor(caps))
    shape = torchs.logprobs.shape
    got = torch.tensor(mine.logprobs).view(shape)
    assert torch.tensor(mine.tokens).view(shape[:3]).tolist() == torchs.tokens.tolist()
    torch.testing.assert_close(got, torchs.logprobs, rtol=1e-5, atol=1e-4)
    apart = torch.tensor(mine.choice).view(shape) != torchs.choice
    nearly = (torchs.logprobs - got.roll(1, -1)).abs().minimum((torchs.logprobs - got.roll(-1, -1)).abs()) < 1e-4
    assert not bool((apart & torchs.logprobs.isfinite() & ~nearly).any()), "ranks differ where scores do"
    assert float((apart & torchs.logprobs.isfinite()).float().mean()) < 0.01


def test_what_cannot_be_ranked_is_in_no_tree(library: Library) -> None:
    selector = random_selector(512, 48, SelectorSize(24, 16))
    logits = torch.full((1, 3, 512), torch.nan)
    assert pair_trees(library, selector, logits, torch.zeros(1, 3, 48), [1], [15], [0]) == [PlainTree([], [], [])]
    assert pair_trees(library, selector, logits[:0], torch.zeros(0, 3, 48), [], [], []) == []
    for anchor in (-1, 512):
        with pytest.raises(InvalidRequest, match="anchors"):
            pair_trees(library, selector, logits, torch.zeros(1, 3, 48), [anchor], [15], [0])


@pytest.mark.parametrize("name", SHAPES)
def test_drafts_of_the_second_kind_are_the_references(tmp_path: Path, target: Path, name: str) -> None:
    """Convolutions around both halves, over growing contexts of three sequences, on two threads."""
    write_dflash2(tmp_path, TARGET, *SHAPES[name])
    a, b = CompiledDFlash.load(tmp_path, target, threads=2), DFlashModel.load(tmp_path, target)
    mine, theirs = [a.new_state() for _ in range(3)], [b.new_state() for _ in range(3)]
    draw, selector = torch.Generator().manual_seed(1), Selector.find(tmp_path, b.config)
    assert selector is not None
    proposers, equal = (FromPairs(a, selector), FromPairs(b, selector)), 0
    assert proposers[0].builds is a
    for rows in (1, 5, 64, 30, 3):
        for x, y in zip(mine, theirs, strict=True):
            features = torch.randn(rows, a.feature_width, generator=draw)
            a.append(x, features, x.end)
            b.append(y, features, y.end)
        positions = [state.end for state in mine]
        got, expected = a.draft_states(mine, [1, 2, 3], positions), b.draft_states(theirs, [1, 2, 3], positions)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        ask = ([1, 2, 3], positions, [15, 31, 7], [0, 2, 1])
        trees = [p.propose(s, *ask).trees for p, s in zip(proposers, (mine, theirs), strict=True)]  # type: ignore[misc]
        equal += sum(x.tokens == y.tokens and x.parents == y.parents for x, y in zip(*trees, strict=True))
    assert equal >= 14, "of 15 trees more than one differs"


def test_more_rows_than_a_tile_and_one_thread_give_the_same_bits(tmp_path: Path, target: Path) -> None:
    write_dflash2(tmp_path, TARGET, TinyDrafter(window=20), None, DFLASH2)
    drafts = []
    for threads in (1, 3):
        model = CompiledDFlash.load(tmp_path, target, threads=threads)
        states = [model.new_state() for _ in range(11)]
        drafts.append(model.draft(states, range(11), [0] * 11))
    assert torch.equal(*drafts)
    assert torch.equal(drafts[0][10], model.draft(states[10:], [10], [0])[0])


def test_auto_takes_the_compiled_engine_for_the_second_kind(tmp_path: Path, target: Path) -> None:
    write_dflash2(tmp_path, TARGET, *SHAPES["causal in sliding layers"])
    assert isinstance(load_drafter(tmp_path, target), CompiledDFlash)
    assert isinstance(load_drafter(tmp_path, target, "compiled"), CompiledDFlash)


def test_torchs_proposer_searches_as_the_compiled_one(library: Library) -> None:
    selector, g = random_selector(512, 48, SelectorSize(24, 16)), torch.Generator().manual_seed(9)
    logits, hidden = torch.randn(5, 7, 512, generator=g) * 3, torch.randn(5, 7, 48, generator=g)
    budgets, anchors = [15, 63, 1, 0, 31], [1, 2, 3, 4, 5]
    mine = pair_logprobs(library, selector, logits, hidden, anchors, tree_asks(budgets, [0] * 5))
    shape = torch.Size((5, 7, 16, 16))
    pairs = Pairs(
        torch.tensor(mine.logprobs).view(shape), torch.tensor(mine.choice).view(shape),
        torch.tensor(mine.tokens).view(shape[:3]),
    )  # fmt: skip
    assert search(pairs, budgets) == pair_trees(library, selector, logits, hidden, anchors, budgets, [0] * 5)
