"""A drafter without a card: wrong layers are found by their neighbours, and right ones are left in peace."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.reads import Hidden, Projected, Tokens
from hedgerow.engine.step import LocalDrafter
from hedgerow.engine.types import DraftAnswer, DraftBatch, DraftTree, TreeNodes
from hedgerow.errors import InvalidRequest
from hedgerow.model.batch import SequenceRows
from hedgerow.model.compiled import CompiledK2
from hedgerow.model.k2 import K2Model
from hedgerow.model.select import load_drafter, load_target
from services.verifier import neighbours
from services.verifier.agreement import Described
from services.verifier.neighbours import TEXTS, Text, Tried, encoded, shifts, try_layers, write, writing
from services.verifier.probe import AcceptanceProbe
from services.verifier.trial import LayerTrial
from services.verifier.vocabulary import read_vocabulary
from tests.compiled_builds import missing_compiler
from tests.tiny import TinyPaths, TinyTarget, write_tiny
from tests.unit.test_acceptance_probe import Engine

SAPLING, DRAFTER = Path("models/sapling"), Path("models/sapling-dflash")
RIGHT = (1, 4, 7)
needs_compiler = pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())


def described(checkpoint: str = "ab", layers: tuple[int, ...] = RIGHT) -> Described:
    return Described(512, layers, 64, 32, "", 8, 63, checkpoint_hash=checkpoint)


@needs_compiler
@pytest.mark.parametrize("by", [-1, 0, 1, 2])
def test_the_bundled_drafters_layers_off_by_some_are_found(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by: int
) -> None:
    """Its ids shifted in its configuration, its card removed; by 0 it is right, and nothing is said."""
    layers = tuple(layer + by for layer in RIGHT)
    folder = tmp_path / "drafter"
    shutil.copytree(DRAFTER, folder)
    (folder / "acceptance.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = layers
    (folder / "config.json").write_text(json.dumps(config))
    target, drafter = load_target(SAPLING, layers), load_drafter(folder, SAPLING)
    texts = write(target, Hidden(target.feature_width), read_vocabulary(SAPLING, target.config.vocab_size))
    assert len(texts) == len(TEXTS)
    assert target.feature_layers == layers, "as they were before"
    engine = DrafterEngine(drafter, DrafterConfig(4, 63))
    tried = asyncio.run(try_layers(LocalDrafter(engine), texts, 7))
    assert tried is not None
    probe = AcceptanceProbe(Engine(), 0.9)
    assert probe.lacks_card(described(layers=layers))
    probe.tried(described(layers=layers), tried)
    warned = [record for record in caplog.records if record.levelname == "WARNING"]
    assert probe.measured is not None
    if by == 0:
        assert not warned
        assert probe.measured.ratio == 1
        assert tried.per_step > 1.2 * tried.best[1], "far from an alarm"
        assert probe.said.endswith("the drafter has no card")
        return
    (record,) = warned
    assert "better from its layers' neighbours" in record.getMessage()
    assert tried.best[0] == (-1 if by > 0 else 1), "towards the right ones"
    assert probe.measured.ratio < 0.85
    assert probe.said.startswith("LOW: ")
    assert not probe.lacks_card(described(layers=layers)), "once a drafter"


def outputs(model: K2Model | CompiledK2) -> torch.Tensor:
    rows = SequenceRows(0, [0], [1, 2, 3], range(-1, 2), [2], True)
    return model.forward([rows], model.new_cache(1)).features.clone()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    return write_tiny(tmp_path_factory.mktemp("tiny"), TinyTarget(layers=4))


@needs_compiler
@pytest.mark.parametrize("kind", [K2Model, CompiledK2])
def test_other_layers_are_tapped_as_if_they_had_been_asked_for(
    tiny: TinyPaths, kind: type[K2Model] | type[CompiledK2]
) -> None:
    """The last layer too, whose last product is otherwise left out."""
    model = kind.load(tiny.target, (0, 2))
    before = outputs(model)
    for layers in ((1, 3), (3, 0), (0, 2)):
        model.tap(layers)
        assert model.feature_layers == layers
        assert torch.equal(outputs(model), outputs(kind.load(tiny.target, layers)))
    assert torch.equal(outputs(model), before)
    for bad in ((1,), (1, 4), (-1, 2)):
        with pytest.raises(InvalidRequest, match="2 of the target's 4 layers"):
            model.tap(bad)
    assert model.feature_layers == (0, 2)


def test_what_cannot_be_tried_is_not(tiny: TinyPaths) -> None:
    model = K2Model.load(tiny.target, (0, 3))
    pieces = read_vocabulary(tiny.target, model.config.vocab_size)
    assert shifts((0, 3), 4) == [0]
    assert shifts((0, 2), 4) == [0, 1]
    assert shifts((1, 2), 4) == [0, -1, 1]
    assert shifts((), 4) == [0]
    assert write(model, Hidden(model.feature_width), pieces) == []
    model = K2Model.load(tiny.target, (1,))
    assert write(model, Tokens(), pieces) == []
    assert write(model, Hidden(model.feature_width), [b""] * len(pieces)) == [], "no text without pieces"
    assert asyncio.run(try_layers(Answering([]), [], 7)) is None


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> int:
    """Two texts of six tokens; the passes that one takes."""
    monkeypatch.setattr(neighbours, "TEXTS", TEXTS[:2])
    monkeypatch.setattr(neighbours, "WRITTEN", 6)
    return 6 + 3


def test_steps_go_on_between_two_passes(tiny: TinyPaths, brief: int) -> None:
    """At every turn the layers are the drafter's own again, and a step beside it has the features it always had."""
    model = K2Model.load(tiny.target, (1,))
    pieces, expected = read_vocabulary(tiny.target, model.config.vocab_size), outputs(model)
    found, turns = list[Text](), 0
    for _ in writing(found, model, Hidden(model.feature_width), pieces):
        turns += 1
        assert model.feature_layers == (1,)
        assert torch.equal(outputs(model), expected)
    assert turns == 2 * brief
    alone = write(model, Hidden(model.feature_width), pieces)
    for a, b in zip(found, alone, strict=True):
        assert (a.tokens, a.begin) == (b.tokens, b.begin)
        assert all(torch.equal(a.features[by], b.features[by]) for by in b.features)


def test_a_slow_target_writes_less(tiny: TinyPaths, brief: int) -> None:
    """By the time of its own passes: what runs between two of them does not count. Texts are whole, or not there."""
    model = K2Model.load(tiny.target, (1,))
    reads, pieces = Hidden(model.feature_width), read_vocabulary(tiny.target, model.config.vocab_size)
    for seconds, texts in ((1.5 * brief, 1), (2 * brief + 0.5, 2), (brief - 1.0, 0), (0.0, 0)):
        found, ticks = list[Text](), itertools.count()
        for _ in writing(found, model, reads, pieces, seconds, lambda: float(next(ticks))):  # noqa: B023
            next(ticks)  # a step of others
        assert len(found) == texts
        assert model.feature_layers == (1,)


def test_a_trial_takes_turns_with_the_steps(tiny: TinyPaths, brief: int) -> None:
    """Every pass is a work of its own in the steps' thread, once; a second drafter drafts the same texts."""
    model = K2Model.load(tiny.target, (1,))
    pieces, works = read_vocabulary(tiny.target, model.config.vocab_size), list[object]()
    probe, told, drafter = AcceptanceProbe(Engine(), 0.9), list[str](), Answering([])

    class Steps:
        async def aside(self, work: Callable[[], object]) -> object:
            works.append(work)
            return work()

    passes = partial(writing, model=model, reads=Hidden(model.feature_width), vocabulary=pieces)
    trial = LayerTrial(probe, Steps(), drafter, passes, lambda: told.append(probe.said))  # type: ignore[arg-type]

    async def tried(checkpoint: str) -> int:
        before = len(drafter.batches)
        trial.connected(replace(described(checkpoint, (1,)), block_size=2))
        assert trial._task is not None
        await trial._task
        assert len(works) == 2 * brief + 1
        return len(drafter.batches) - before

    assert asyncio.run(tried("one")) == asyncio.run(tried("two")) > 0
    assert told == [], "too few steps to judge by"


def test_features_come_as_the_drafter_reads_them(tiny: TinyPaths, brief: int) -> None:
    model = K2Model.load(tiny.target, (1,))
    pieces = read_vocabulary(tiny.target, model.config.vocab_size)
    plain = write(model, Hidden(model.feature_width), pieces)
    halves = write(model, Projected(3, lambda rows: rows[:, :3] / 2), pieces)
    for a, b in zip(plain, halves, strict=True):
        assert a.tokens == b.tokens
        assert a.begin == len(a.tokens) - brief + 3
        assert list(a.features) == [0, -1, 1]
        assert not torch.equal(a.features[0], a.features[1])
        for by, rows in a.features.items():
            assert rows.shape == (len(a.tokens) - 1, model.feature_width)
            assert torch.equal(b.features[by], rows[:, :3] / 2)


def test_a_text_is_cut_into_the_longest_pieces() -> None:
    pieces = {b"a": 1, b"ab": 2, b"abc": 3, b"c": 4, b"d": 5}
    assert encoded(b"abcdabac", pieces) == [3, 5, 2, 1, 4]
    assert encoded(b"abx", pieces) == []


@dataclass
class Answering:
    """Chains from a list, one an asked tree; None: no answer."""

    chains: list[list[int] | None]
    batches: list[DraftBatch] = field(default_factory=list)

    async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
        self.batches.append(batch)
        if not batch.works or not batch.works[0].budget:
            return DraftAnswer(batch.step_id, (), b"")
        chain = self.chains.pop(0) if self.chains else []
        if chain is None:
            return None
        nodes = TreeNodes(chain, range(-1, len(chain) - 1), [0.0] * len(chain))
        return DraftAnswer(batch.step_id, [DraftTree(batch.works[0].sequence, nodes, 0)], b"")


def text(by: Sequence[int] = (0, 1)) -> Text:
    """Twenty tokens, 100 .. 119, of which five were given."""
    return Text(list(range(100, 120)), 5, {shift: torch.full((19, 2), float(shift)) for shift in by})


def test_steps_are_counted_as_a_verifier_would_count_them() -> None:
    """Accepted 2, 0, 3; then near the end no step is made that could not accept all of its 3 nodes."""
    drafter = Answering([[106, 107, 9], [7, 8, 9], [110, 111, 112], [9]])
    tried = asyncio.run(try_layers(drafter, [text()] * 1, 3))
    assert tried is None, "four steps are too few to judge by"
    works = [batch.works[0] for batch in drafter.batches if batch.works][:4]
    assert [work.anchor for work in works] == [105, 108, 109, 113]
    assert [(work.feature_position, len(work.features)) for work in works] == [(0, 5), (5, 3), (8, 1), (9, 4)]
    assert all(len({work.sequence for work in batch.works}) == 1 for batch in drafter.batches if batch.works)


def test_layers_are_compared_over_all_texts() -> None:
    drafter = Answering([[]] * 44 + [[t] for t in range(106, 118, 2)] * 4)
    tried = asyncio.run(try_layers(drafter, [text()] * 4, 3))
    assert tried == Tried(1.0, {1: 2.0})
    released = [batch.release for batch in drafter.batches if batch.release]
    assert len(released) == len({number for (number,) in released}) == 8, "every sequence is given back"
    assert len({batch.step_id for batch in drafter.batches}) == len(drafter.batches)


def test_a_drafter_that_does_not_answer_is_not_judged() -> None:
    assert asyncio.run(try_layers(Answering([[], None]), [text()] * 4, 3)) is None


def test_rounding_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    probe = AcceptanceProbe(Engine(), 0.9)
    probe.tried(described(), Tried(2.0, {-1: 1.4, 1: 2.1}))
    assert not probe.said.startswith("LOW")
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert not AcceptanceProbe(Engine(), 0.0).lacks_card(described()), "switched off"
