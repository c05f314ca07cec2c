"""The start-up probe: a drafter as good as its card is left in peace, one that is fed the wrong layers is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.drive import Job
from hedgerow.engine.step import step
from hedgerow.engine.types import Finish, Start, StepResult, StepStats, StepTimings, Update
from hedgerow.errors import Overloaded
from hedgerow.model.card import AcceptanceCard
from hedgerow.rpc import telemetry
from services.verifier.agreement import Described
from services.verifier.metrics import watch_acceptance
from services.verifier.probe import SESSION, AcceptanceProbe
from tests.engine_rig import SETTINGS, Rig, oracle, prompt

CARD = AcceptanceCard((1, 2, 3), tokens=13, budget=7, tokens_per_step=3.0, topk_cap=1)


def drafter(checkpoint: str = "ab", card: AcceptanceCard | None = CARD) -> Described:
    return Described(512, (1,), 64, 32, "", 8, 63, checkpoint_hash=checkpoint, card=card)


class Engine:
    """Takes starts and acknowledgements."""

    def __init__(self, full: bool = False) -> None:
        self.started, self.acknowledged, self.full = list[Start](), list[int](), full

    def start(self, start: Start) -> None:
        if self.full:
            raise Overloaded("the waiting queue", 1, 1, retry_after=1.0)
        self.started.append(start)

    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None:
        assert session_id == SESSION
        self.acknowledged.append(offset)


def steps(probe: AcceptanceProbe, emitted: list[int], nodes: int = 7, finish: Finish = Finish.LENGTH) -> None:
    """The prompt's own step, then one of each number of tokens."""
    for number, count in enumerate([1, *emitted]):
        stats = StepStats(number, 7, nodes if number else 0, count - 1, count, 1, 8)
        last = number == len(emitted)
        update = Update(b"", SESSION, 1, 1, 0, [5] * count, finish if last else Finish.NONE, stats=stats)
        other = replace(update, session_id="somebody", stats=stats._replace(emitted=8))
        probe.seen(StepResult(number, [other, update], StepTimings(0, 0, 0, 0, 0)))


def test_acceptance_as_on_the_card_is_told_and_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    probe = AcceptanceProbe(engine, 0.9)
    assert probe.connected(drafter())
    (start,) = engine.started
    assert (start.budget, start.topk_cap, start.priority, start.sampling.max_tokens) == (7, 1, -100, 13)
    steps(probe, [3, 3, 2, 4])
    assert engine.acknowledged == [1, 4, 7, 9, 13]
    assert probe.said == "3.00 tokens a step, its card says 3.00"
    assert probe.measured is not None
    assert probe.measured.ratio == 1
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert not probe.connected(drafter()), "once a drafter"
    assert probe.connected(drafter("cd"))


def test_low_acceptance_warns_in_the_log_the_metric_and_the_status(caplog: pytest.LogCaptureFixture) -> None:
    probe = AcceptanceProbe(Engine(), 0.9)
    watch_acceptance(lambda: probe.measured)
    assert 'hedgerow_verifier_acceptance_ratio{source="probe"}' not in telemetry.numbers()
    probe.connected(drafter())
    steps(probe, [2, 2, 2, 2, 2, 2])
    assert probe.said == "LOW: 2.00 tokens a step, its card says 3.00"
    assert telemetry.numbers()['hedgerow_verifier_acceptance_ratio{source="probe"}'] == pytest.approx(2 / 3)
    (warned,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "below its card's" in warned.getMessage()


def test_without_a_card_or_a_place_or_trees_nothing_is_judged() -> None:
    probe = AcceptanceProbe(Engine(), 0.9)
    assert not probe.connected(drafter(card=None))
    assert probe.said == "not measured: the drafter has no card"
    probe = AcceptanceProbe(Engine(full=True), 0.9)
    assert not probe.connected(drafter())
    assert probe.said.startswith("not measured: ")
    for ending in ({"nodes": 0}, {"finish": Finish.CANCELLED}):
        probe = AcceptanceProbe(Engine(), 0.9)
        probe.connected(drafter())
        steps(probe, [2] * 6, **ending)  # type: ignore[arg-type]
        assert probe.said.startswith("not measured: ")
        assert probe.measured is None
    assert not AcceptanceProbe(Engine(), 0.0).connected(drafter()), "switched off"


async def test_a_probe_runs_through_the_engine_beside_others(tmp_path_factory: pytest.TempPathFactory) -> None:
    rig = Rig(tmp_path_factory.mktemp("rig"))
    probed = Job(SESSION, prompt(5), replace(SETTINGS["greedy"], max_tokens=40, ignore_eos=True), budget=7)
    texts = rig.plain_all([probed])
    engine = rig.engine(run_ahead=8)
    card = AcceptanceCard(tuple(probed.prompt), tokens=40, budget=7, tokens_per_step=1.5)
    probe = AcceptanceProbe(engine, 0.5)
    assert probe.connected(drafter(card=card))
    good = oracle([probed], texts)
    while (result := await step(engine, good)) is not None:
        probe.seen(result)
    assert probe.measured is not None
    assert probe.measured.per_step > 1
    assert engine.load().running == engine.load().kept_ends == 0
    assert not engine.has_work()
