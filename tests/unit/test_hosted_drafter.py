"""A drafter in the verifier's process: the same tokens whatever it does, and what it costs when it fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from bench.drive import Job, Run, drive
from hedgerow.engine.drafter import DrafterConfig, DrafterEngine
from hedgerow.engine.step import step, step_here
from hedgerow.engine.types import DraftAnswer, DraftBatch
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.rpc.config import ConfigError
from services.verifier.agreement import Described, Disagreement, Wanted, configured
from services.verifier.config import IN_PROCESS, VerifierServiceConfig
from services.verifier.hosted import HostedDrafter, feed, load_hosted
from services.verifier.peers import Patience
from services.verifier.service import _target, load
from tests.engine_rig import SETTINGS, Rig, prompt
from tests.fed_host import HostFed
from tests.stack import Models
from tests.tiny import TinyDrafter, write_tiny

SAID = Described(512, (0, 1), 1, 64, "", 8, 63)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(tmp_path_factory.mktemp("rig"))


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as one:
        yield one


def jobs(budget: int = 8) -> list[Job]:
    return [
        Job(f"{name}{n}", prompt(20 + n, n), replace(SETTINGS[name], seed=n, max_tokens=40), budget=budget)
        for n in range(2)
        for name in ("greedy", "t08-p095")
    ]


class Breaking(DrafterEngine):
    """Raises at some of its calls, after it has taken the features."""

    def __init__(self, rig: Rig, at: set[int], most: int = 63) -> None:
        super().__init__(rig.draft_model, DrafterConfig(max_budget=most))
        self.at, self.calls, self.threads = at, 0, set[int]()

    def draft(self, batch: DraftBatch) -> DraftAnswer:
        self.calls += 1
        self.threads.add(threading.get_ident())
        answer = super().draft(batch)
        if self.calls in self.at:
            raise RuntimeError("the card is on fire")
        return answer


class Clock:
    """Moves a second with every look."""

    def __init__(self, pace: float = 1.0) -> None:
        self.now, self.pace = 0.0, pace

    def __call__(self) -> float:
        self.now += self.pace
        return self.now


async def run(engine: VerifierEngine, drafter: HostedDrafter, given: list[Job], worker: ThreadPoolExecutor) -> Run:
    """`bench.drive`, with the service's own worker."""
    done = Run()
    for job in given:
        done.tokens[job.name] = []
        engine.start(job.start())
    while engine.has_work():
        result = await step(engine, drafter, worker)
        if result is not None:
            done.take(result)
            for update in result.updates:
                assert update.error is None
                engine.committed(update.session_id, update.epoch, update.attempt, len(done.tokens[update.session_id]))
    engine.check()
    return done


async def test_its_trees_are_of_use_and_made_in_the_steps_thread(rig: Rig, worker: ThreadPoolExecutor) -> None:
    engine = Breaking(rig, set())
    drafter = HostedDrafter(engine, SAID)
    done = await run(rig.engine(), drafter, jobs(), worker)
    assert done.tokens == rig.plain_all(jobs())
    assert drafter.counters.answered == engine.calls > 10
    assert sum(usage.draft_tokens for usage in done.usage.values()) > 100
    assert engine.threads == {worker.submit(threading.get_ident).result()}
    assert drafter.connected


async def test_a_failure_costs_trees_and_no_token(rig: Rig, worker: ThreadPoolExecutor) -> None:
    """At the first call, in the middle, and twice in a row; what it held is gone, and it is sent all of it again."""
    engine, clock = Breaking(rig, {1, 6, 7}), Clock(0.0)
    drafter = HostedDrafter(engine, SAID, Patience(penalty=0.0, most_penalty=0.0), clock=clock)
    first = engine.incarnation
    done = await run(rig.engine(), drafter, jobs(), worker)
    assert done.tokens == rig.plain_all(jobs())
    assert drafter.counters.failed == 3
    assert engine.incarnation != first
    assert drafter.counters.answered > 10
    assert sum(usage.draft_tokens for usage in done.usage.values()) > 100, "it must have come back"


async def test_one_that_always_fails_is_left_alone_for_longer_and_longer(rig: Rig, worker: ThreadPoolExecutor) -> None:
    engine, clock = Breaking(rig, set(range(1, 999))), Clock()
    drafter = HostedDrafter(engine, SAID, Patience(penalty=2.0, most_penalty=8.0), clock=clock)
    done = await run(rig.engine(), drafter, jobs(), worker)
    assert done.tokens == rig.plain_all(jobs())
    assert 2 <= drafter.counters.failed == engine.calls <= 12
    assert drafter.counters.unasked > 3 * drafter.counters.failed
    assert not any(usage.draft_tokens for usage in done.usage.values())


async def test_budgets_above_what_it_can_build_are_cut(rig: Rig) -> None:
    drafter = HostedDrafter(Breaking(rig, set(), most=3), SAID)
    given = jobs(budget=40)
    done = await drive(rig.engine(), drafter, given)
    assert done.tokens == rig.plain_all(given)
    assert drafter.counters.failed == 0
    assert sum(usage.draft_tokens for usage in done.usage.values()) > 50


def settings(models: Models, **more: object) -> VerifierServiceConfig:
    given = {"model_path": models.target, "model_name": "m", "drafter": IN_PROCESS, "drafter_path": models.drafter}
    return VerifierServiceConfig(**given | {"cache_pages": 16, "engine": "torch"} | more)  # type: ignore[arg-type]


def test_the_process_has_both(tiny: Models) -> None:
    config = settings(tiny, max_sequences=3, max_budget=100)
    wanted = configured(config)
    assert wanted == Wanted("hidden", tiny.feature_layers)
    hosted, group = load_hosted(config), load(config, wanted)
    assert hosted.engine.config == DrafterConfig(3, 63)
    assert hosted.described.head_hash == group.head_hash != ""
    hosted.check(_target(config, group))
    assert asyncio.run(hosted.draft(DraftBatch(1, ()))) is not None


def test_steps_feed_each_other_where_both_are_on_one_gpu(tiny: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(tiny, max_sequences=3)
    hosted, group = load_hosted(config), load(config, configured(config) or Wanted("hidden", ()))
    assert not feed(group.engine, group.model, hosted), "on a CPU"
    made = list[tuple[int, list[int]]]()

    class Prepared(HostFed):
        def prepare(self, sequences: int, budgets: Sequence[int]) -> None:
            made.append((sequences, list(budgets)))

    monkeypatch.setattr("services.verifier.hosted.fed_steps", Prepared)
    assert feed(group.engine, group.model, hosted)
    assert made == [(3, [0, 7, 8, 63])]
    engine, job = group.engine, Job("s0", prompt(9), SETTINGS["greedy"], 7)
    engine.start(job.start())
    while engine.has_work():
        step_here(engine, hosted)
    assert engine.load().fed > 0
    assert hosted.counters.answered >= engine.load().fed
    hosted.model = None  # trees are conditional
    assert not feed(group.engine, group.model, hosted)


def test_its_amplitude_can_be_set_too(tiny: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()

    def load_drafter(*_: object, amplitude: object, **__: object) -> object:
        asked.append(amplitude)
        raise InterruptedError

    monkeypatch.setattr("services.verifier.hosted.load_drafter", load_drafter)
    for given in ({}, {"yarn_amplitude": 1.41589}):
        with pytest.raises(InterruptedError):
            load_hosted(settings(tiny, **given))
    assert asked == [None, 1.41589]


def test_what_does_not_fit_stops_the_start(tiny: Models, tmp_path: Path) -> None:
    """A process of its own would be left alone, and decoding be plain; here the one start says it."""
    with pytest.raises(ConfigError, match="HEDGEROW_DRAFTER_PATH"):
        configured(settings(tiny, drafter_path=None))
    with pytest.raises(ConfigError, match="HEDGEROW_DRAFTER_PATH"):
        load_hosted(settings(tiny, drafter_path=None))
    for features in ("tokens", "projected"):
        with pytest.raises(ConfigError, match="HEDGEROW_FEATURES"):
            configured(settings(tiny, features=features))
    other = write_tiny(tmp_path, drafter=TinyDrafter(feature_layers=tuple(reversed(tiny.feature_layers))))
    config = settings(tiny, drafter_path=other.drafter, feature_layers=",".join(map(str, tiny.feature_layers)))
    wanted = configured(config)
    assert wanted is not None
    with pytest.raises(Disagreement, match="feature_layer_ids"):
        load_hosted(config).check(_target(config, load(config, wanted)))
