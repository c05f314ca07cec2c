"""How many experts a step's rows went to: counted by each engine as the router chose, and told to the metrics."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import pytest

from hedgerow.engine.types import StepResult, StepTimings
from hedgerow.model import moe
from hedgerow.model.batch import SequenceRows
from hedgerow.model.compiled import CompiledK2
from hedgerow.model.interface import experts_of
from hedgerow.model.k2 import K2Model
from hedgerow.rpc import telemetry
from kernels.moe_route import Route, moe_route
from services.verifier.metrics import StepMetrics
from tests.compiled_builds import missing_compiler
from tests.tiny import TinyDrafter, TinyPaths, TinyTarget, write_tiny

EXPERTS, TOP_K = 48, 3
METRIC = "hedgerow_verifier_distinct_experts"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    """One dense layer, three with experts."""
    shape = TinyTarget(layers=4, experts=EXPERTS, top_k=TOP_K)
    return write_tiny(tmp_path_factory.mktemp("tiny"), shape, TinyDrafter(feature_layers=(0,)))


def chain(rows: int, seed: int, pages: Sequence[int], *, wanted: bool = True) -> SequenceRows:
    choose = random.Random(seed)
    tokens = [choose.randrange(256) for _ in range(rows)]
    return SequenceRows(0, pages, tokens, range(-1, rows - 1), range(rows if wanted else 0))


def test_the_reference_counts_what_its_router_chose(tiny: TinyPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    model, chosen = K2Model.load(tiny.target, (0,)), list[set[int]]()

    def watched(*args: object) -> Route:
        route = moe_route(*args)  # type: ignore[arg-type]
        chosen.append(set(route.chosen.flatten().tolist()))
        return route

    monkeypatch.setattr(moe, "moe_route", watched)
    assert model.experts() is None, "nothing has been computed"
    cache = model.new_cache(4)
    for rows in (1, 5, 40):
        chosen.clear()
        model.forward([chain(rows, rows, [0]), chain(rows, rows + 1, [1])], cache)
        assert len(chosen) == 3
        assert model.experts() == pytest.approx(sum(map(len, chosen)) / 3)


@pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
@pytest.mark.parametrize("threads", [1, 2])
def test_the_compiled_engine_counts_what_the_reference_counts(tiny: TinyPaths, threads: int) -> None:
    """Over rows, sequences, tiles of 256 rows and layers alike; a step forgets the one before."""
    compiled, plain = CompiledK2.load(tiny.target, (0,), threads), K2Model.load(tiny.target, (0,))
    assert compiled.experts() is None
    pages = [list(range(6)), [6]]
    for parts in ([(300, 1)], [(300, 1), (20, 2)], [(2, 3), (3, 4)], [(1, 5)]):
        rows = [chain(count, seed, own) for (count, seed), own in zip(parts, pages, strict=False)]
        compiled.forward(rows, compiled.new_cache(8))
        plain.forward(rows, plain.new_cache(8))
        assert compiled.experts() == pytest.approx(plain.experts())
    assert compiled.experts() == TOP_K, "of one row"


@pytest.mark.skipif(bool(missing_compiler()), reason=missing_compiler())
def test_a_layer_that_was_not_computed_is_not_counted(tiny: TinyPaths) -> None:
    """The last one, in a chunk of a prompt of which nothing is drawn."""
    compiled = CompiledK2.load(tiny.target, (0,))
    compiled.forward([chain(1, 1, [0], wanted=False)], compiled.new_cache(1))
    assert compiled.experts() == TOP_K


def test_a_model_that_does_not_know_is_not_asked() -> None:
    assert experts_of(object())() is None


def result(verify_ns: int) -> StepResult:
    return StepResult(1, (), StepTimings(1, verify_ns, 1, 1, 1))


def test_steps_that_were_counted_are_in_the_histogram_and_no_others() -> None:
    counted = iter([17.5, None, 300.0])
    metrics = StepMetrics()
    before = telemetry.value(f"{METRIC}_count"), telemetry.value(f"{METRIC}_sum")
    metrics.count(result(5))
    metrics.experts = partial(next, counted)
    metrics.count(result(0))  # it computed nothing: what the model last counted is another step's
    for _ in range(3):
        metrics.count(result(5))
    after = telemetry.value(f"{METRIC}_count"), telemetry.value(f"{METRIC}_sum")
    assert after == (before[0] + 2, before[1] + 317.5)
    assert telemetry.value(f"{METRIC}_bucket", le="24.0") >= 1
