"""The drafter's engine: what it keeps of each sequence, what it answers, what it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.tree import validate_tree
from hedgerow.engine.types import DraftAnswer, DraftBatch, DraftTree, DraftWork
from hedgerow.errors import InvalidRequest
from hedgerow.model.dflash import DFlashModel
from kernels.tree_build import PlainTree, plain_trees, top_logprobs, tree_build_heap
from tests.random_drafter import RandomDrafter
from tests.tiny import TinyPaths, write_tiny

WIDTH, VOCABULARY, BLOCK, REACH = 4, 97, 8, 500


class NotedState:
    """A context that is the list of its positions."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, position: int) -> None:
        self.start = self.end = position
        self.values: list[float] = []


class NotedModel:
    """Stands for DFlashModel: features carry their position, and what is appended where is kept."""

    feature_width, vocab_size, block_size = WIDTH, VOCABULARY, BLOCK
    config = SimpleNamespace(max_position_embeddings=REACH)

    def __init__(self) -> None:
        self.states: list[NotedState] = []
        self.drafted: list[tuple[list[list[float]], list[int], list[int]]] = []

    def new_state(self) -> NotedState:
        self.states.append(NotedState())
        return self.states[-1]

    def append(self, state: NotedState, features: torch.Tensor, position: int) -> None:
        assert position == state.end
        assert len(features)
        state.values += features[:, 0].tolist()
        state.end += len(features)

    def draft(self, states: Sequence[NotedState], anchors: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
        self.drafted.append(([list(state.values) for state in states], list(anchors), list(positions)))
        keys = [(anchor, position) for anchor, position in zip(anchors, positions, strict=True)]
        return torch.stack([row_logits(*key) for key in keys])

    def trees(self, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]:
        return plain_trees(logits, budgets, caps)


def row_logits(anchor: int, position: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(anchor * 1000 + position)
    return torch.randn(BLOCK - 1, VOCABULARY, generator=g) * 3


def features(begin: int, end: int) -> torch.Tensor:
    return torch.arange(begin, end, dtype=torch.float32)[:, None].expand(-1, WIDTH)


def work(sequence: int, begin: int, end: int, budget: int = 8, **changed: Any) -> DraftWork:
    """Features of begin .. end-1 and an anchor right behind them."""
    return replace(DraftWork(sequence, begin, features(begin, end), 5, end, budget, 0), **changed)


@pytest.fixture
def model() -> NotedModel:
    return NotedModel()


@pytest.fixture
def engine(model: NotedModel) -> DrafterEngine:
    return DrafterEngine(model, DrafterConfig(max_sequences=4, max_budget=16))  # type: ignore[arg-type]


def one(engine: DrafterEngine, *works: DraftWork, release: Sequence[int] = ()) -> list[DraftTree]:
    return list(engine.draft(DraftBatch(1, works, release)).trees)


def heap(anchor: int, position: int, budget: int, cap: int = 0) -> tuple[list[int], list[int], list[float]]:
    best = top_logprobs(row_logits(anchor, position)[None], 16)
    tree = tree_build_heap(best.logprobs[0].tolist(), best.tokens[0].tolist(), budget, cap)
    return tree.tokens, tree.parents, tree.logprobs


def test_one_call_answers_every_sequence_with_its_own_tree(engine: DrafterEngine, model: NotedModel) -> None:
    works = [work(1, 0, 10, 16), work(2, 0, 3, 1, anchor=9), work(3, 0, 30, 0), work(4, 0, 7, 12, topk_cap=2)]
    answer = engine.draft(DraftBatch(77, works))
    assert answer.step_id == 77
    assert [tree.sequence for tree in answer.trees] == [1, 2, 4]
    assert [tuple(tree.nodes) for tree in answer.trees] == [heap(5, 10, 16), heap(9, 3, 1), heap(5, 7, 12, 2)]
    assert [tree.features_from for tree in answer.trees] == [10, 3, 7]
    assert len(model.drafted) == 1, "one block forward for all"
    assert answer.forward_ns > 0
    assert answer.build_ns > 0


def test_a_tree_does_not_depend_on_its_company(engine: DrafterEngine) -> None:
    alone = one(engine, work(1, 0, 10, 7))[0].nodes
    together = one(engine, work(1, 10, 10, 7), work(2, 0, 9, 16), work(3, 0, 4, 3))[0].nodes
    assert tuple(together) == tuple(alone)


def test_features_already_held_are_skipped(engine: DrafterEngine, model: NotedModel) -> None:
    for begin, end in [(0, 4), (2, 6), (0, 6), (6, 6), (5, 9)]:
        assert one(engine, work(1, begin, end))[0].features_from == end
    assert model.states[0].values == list(range(9))


def test_a_gap_starts_the_context_later(engine: DrafterEngine, model: NotedModel) -> None:
    one(engine, work(1, 0, 4))
    assert len(one(engine, work(1, 7, 9))[0].nodes.tokens) == 8
    assert model.drafted[-1] == ([[7.0, 8.0]], [5], [9])
    assert (model.states[0].start, model.states[0].end) == (7, 9)


def test_older_features_rebuild_the_context_from_there(engine: DrafterEngine, model: NotedModel) -> None:
    """After a restart the drafter meets the newest features first; the verifier then sends all that its ring holds."""
    one(engine, work(1, 20, 24))
    (tree,) = one(engine, work(1, 10, 22, anchor_position=24))
    assert (len(tree.nodes.tokens), tree.features_from) == (0, 22)
    assert len(one(engine, work(1, 22, 24))[0].nodes.tokens) == 8
    assert model.states[0].values == list(range(10, 24))


def test_a_context_may_begin_anywhere(engine: DrafterEngine, model: NotedModel) -> None:
    assert len(one(engine, work(1, 300, 310))[0].nodes.tokens) == 8
    assert model.states[0].start == 300


def test_without_features_up_to_the_anchor_there_is_no_tree(engine: DrafterEngine, model: NotedModel) -> None:
    """The answer names the first position that is missing."""
    (unknown,) = one(engine, work(1, 5, 5, anchor_position=5))
    assert (len(unknown.nodes.tokens), unknown.features_from) == (0, 0)
    assert engine.held == 0
    (short,) = one(engine, work(1, 0, 4, anchor_position=6))
    assert (len(short.nodes.tokens), short.features_from) == (0, 4)
    assert model.drafted == []
    (whole,) = one(engine, work(1, 4, 6))
    assert (len(whole.nodes.tokens), whole.features_from) == (8, 6)


def test_a_budget_of_zero_only_takes_features(engine: DrafterEngine, model: NotedModel) -> None:
    assert one(engine, work(1, 0, 64, 0, anchor=0), work(2, 0, 5, 0, anchor=0)) == []
    assert [state.end for state in model.states] == [64, 5]
    assert model.drafted == []


def test_empty_features_of_any_width_are_no_features(engine: DrafterEngine) -> None:
    one(engine, work(1, 0, 4))
    (tree,) = one(engine, work(1, 4, 4, features=torch.empty(0, 0)))
    assert len(tree.nodes.tokens) == 8


def test_the_least_recently_used_sequence_is_evicted(engine: DrafterEngine) -> None:
    for sequence in (1, 2, 3, 4):
        one(engine, work(sequence, 0, 4))
    one(engine, work(1, 4, 5))  # 2 is now the oldest
    one(engine, work(5, 0, 4))
    assert engine.held == 4
    assert one(engine, work(2, 4, 4))[0].features_from == 0
    assert one(engine, work(1, 5, 5))[0].features_from == 5


def test_a_batch_never_evicts_its_own_sequences(engine: DrafterEngine) -> None:
    for sequence in (1, 2, 3, 4):
        one(engine, work(sequence, 0, 4))
    trees = one(engine, *(work(sequence, 0, 4) for sequence in (5, 6, 7, 1)))
    assert [len(tree.nodes.tokens) for tree in trees] == [8] * 4
    assert engine.held == 4


def test_released_sequences_leave_nothing(engine: DrafterEngine) -> None:
    one(engine, work(1, 0, 4), work(2, 0, 4))
    one(engine, release=[1, 99])
    assert engine.held == 1
    assert one(engine, work(1, 4, 4))[0].features_from == 0


def test_a_new_incarnation_has_forgotten_everything(engine: DrafterEngine, model: NotedModel) -> None:
    first = engine.draft(DraftBatch(1, [work(1, 0, 4)])).incarnation
    assert len(first) == 16
    assert engine.draft(DraftBatch(2, [work(1, 4, 5)])).incarnation == first
    engine.drop_all()
    assert engine.held == 0
    assert engine.draft(DraftBatch(3, [])).incarnation != first
    assert DrafterEngine(model, engine.config).incarnation != engine.incarnation  # type: ignore[arg-type]


def test_a_batch_meant_for_another_incarnation_is_answered_as_unknown_and_not_drafted_on(
    engine: DrafterEngine, model: NotedModel
) -> None:
    """Its features were taken for a context that began there, and a tree was drafted on that."""
    one(engine, work(1, 0, 10), work(2, 0, 4))
    stale = DraftBatch(2, [work(1, 10, 12), work(2, 4, 6, budget=0), work(3, 8, 9)], release=[2], drafter=b"x" * 16)
    answer = engine.draft(stale)
    assert [(tree.sequence, tree.features_from, len(tree.nodes.tokens)) for tree in answer.trees] == [
        (1, 0, 0),
        (3, 0, 0),
    ]
    assert answer.incarnation == engine.incarnation
    assert len(model.drafted) == 1
    assert engine.held == 1, "a release is about numbers, and those are the verifier's own"
    (again,) = engine.draft(DraftBatch(3, [work(1, 10, 12)], drafter=engine.incarnation)).trees
    assert (again.features_from, len(again.nodes.tokens)) == (12, 8)
    assert model.states[0].values == list(range(12))


def test_beyond_the_models_positions_there_is_no_tree_and_nothing_to_send_again(engine: DrafterEngine) -> None:
    (last,) = one(engine, work(1, REACH - 5, REACH - 1))
    assert len(last.nodes.tokens) == 8
    (full,) = one(engine, work(1, REACH - 1, REACH))
    assert (len(full.nodes.tokens), full.features_from) == (0, REACH)
    (beyond,) = one(engine, work(1, REACH, REACH + 3))
    assert (len(beyond.nodes.tokens), beyond.features_from) == (0, REACH + 3)
    assert engine.held == 0


@pytest.mark.parametrize(
    ("field", "changed"),
    [
        ("features", {"features": torch.zeros(4, WIDTH + 1)}),
        ("features", {"features": torch.zeros(4 * WIDTH)}),
        ("features", {"features": torch.zeros(4, WIDTH, dtype=torch.float64)}),
        ("feature_position", {"feature_position": -1}),
        ("budget", {"budget": 17}),
        ("budget", {"budget": -1}),
        ("topk_cap", {"topk_cap": -1}),
        ("anchor", {"anchor": VOCABULARY}),
        ("anchor", {"anchor": -1}),
        ("anchor_position", {"anchor_position": -1, "budget": 0}),
        ("anchor_position", {"anchor_position": 7}),  # inside the features that come with it
        (
            "anchor_position",
            {"feature_position": 0, "features": features(0, 0), "anchor_position": 3},
        ),  # inside those held
    ],
)
def test_nonsense_is_refused_and_nothing_of_its_batch_done(
    engine: DrafterEngine, model: NotedModel, field: str, changed: dict[str, Any]
) -> None:
    one(engine, work(1, 0, 4))
    with pytest.raises(InvalidRequest) as refused:
        one(engine, work(2, 0, 4), replace(work(1, 4, 8), **changed), release=[1])
    assert refused.value.field == field
    assert engine.held == 1
    assert model.states[0].end == 4


def test_a_batch_is_bounded_and_names_each_sequence_once(engine: DrafterEngine) -> None:
    with pytest.raises(InvalidRequest, match="works"):
        one(engine, *(work(sequence, 0, 4) for sequence in range(5)))
    with pytest.raises(InvalidRequest, match="works"):
        one(engine, work(1, 0, 4), work(1, 4, 8))
    assert engine.held == 0


@pytest.mark.parametrize(("field", "value"), [("max_sequences", 0), ("max_budget", -1), ("max_budget", 129)])
def test_limits_have_limits(field: str, value: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        replace(DrafterConfig(), **{field: value})
    assert refused.value.field == field


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyPaths, DFlashModel]:
    paths = write_tiny(tmp_path_factory.mktemp("tiny"))
    return paths, DFlashModel.load(paths.drafter, paths.target)


def rounds(engine: DrafterEngine, model: DFlashModel) -> list[DraftAnswer]:
    """Two sequences: a prompt in chunks, then steps of a few accepted tokens; the second starts later."""
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 80, model.feature_width, generator=g)
    spans = [(0, 16), (16, 29), (29, 33), (33, 34), (34, 42)]
    answers = []
    for step, (begin, end) in enumerate(spans):
        works = [DraftWork(1, begin, rows[0, begin:end], 7 + step, end, 16 if step else 0, 0)]
        if step:
            works.append(DraftWork(2, begin, rows[1, begin:end], 11, end, 63, 4))
        answers.append(engine.draft(DraftBatch(step, works)))
    return answers


def test_the_real_drafter_gives_valid_trees_of_its_own_marginals(tiny: tuple[TinyPaths, DFlashModel]) -> None:
    paths, model = tiny
    engine = DrafterEngine(model, DrafterConfig())
    answers = rounds(engine, model)
    assert [[tree.sequence for tree in answer.trees] for answer in answers] == [[]] + [[1, 2]] * 4
    for answer in answers[1:]:
        for tree, (budget, cap) in zip(answer.trees, [(16, 0), (63, 4)], strict=True):
            limits = {"budget": budget, "topk_cap": cap, "max_depth": 7, "vocab_size": paths.shape.vocab}
            assert len(validate_tree(tree.nodes, **limits).tokens) == budget
    states = [engine._states[sequence] for sequence in (1, 2)]
    best = top_logprobs(model.draft(states, [11, 11], [42, 42]), 63)
    expected = tree_build_heap(best.logprobs[1].tolist(), best.tokens[1].tolist(), 63, 4)
    assert tuple(answers[-1].trees[1].nodes) == tuple(expected)


def test_the_real_drafter_answers_the_same_twice(tiny: tuple[TinyPaths, DFlashModel]) -> None:
    first, second = (rounds(DrafterEngine(tiny[1], DrafterConfig()), tiny[1]) for _ in range(2))
    assert [answer.trees for answer in first] == [answer.trees for answer in second]


async def test_the_random_drafter_gives_valid_trees_that_depend_on_their_own_work_only() -> None:
    drafter = RandomDrafter(3, range(100), max_depth=5)
    works = [
        work(s, 0, p, budget, topk_cap=cap)
        for s, p, budget, cap in [(1, 9, 63, 0), (2, 9, 16, 3), (3, 4, 1, 0), (4, 5, 0, 0)]
    ]
    answer = await drafter.draft(DraftBatch(5, works))
    assert [tree.sequence for tree in answer.trees] == [1, 2, 3]
    for tree, asked in zip(answer.trees, works, strict=False):
        checked = validate_tree(tree.nodes, budget=asked.budget, topk_cap=asked.topk_cap, max_depth=5, vocab_size=100)
        assert len(checked.tokens) > asked.budget // 2
        alone = await drafter.draft(DraftBatch(6, [asked]))
        assert alone.trees[0] == tree
    assert (await RandomDrafter(4, range(100)).draft(DraftBatch(5, works))).trees != answer.trees
