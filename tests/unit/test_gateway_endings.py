"""Sessions that are over here and still running in the store: they must not stay so."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from hedgerow.errors import DeadlineExceeded, Fenced, InvariantViolation, SessionUnknown, Unavailable
from services.gateway.config import GatewayConfig
from services.gateway.endings import Endings
from services.gateway.gateway import Gateway
from services.gateway.messages import Append, Appended, AppendStatus, Created, Granted, State, Stored, Usage
from services.gateway.periodic import every
from services.gateway.templates import template_of
from services.gateway.tokenizer import Tokenizer
from services.gateway.types import Fingerprint, Finish, Generation, Model, Record, Sampling
from tests.polling import soon
from tests.unit.gateway_peers import CANCELLED, ERROR, OWNER, Bench, record, update
from tests.unit.test_tokenizer import BUNDLED

OTHER = b"x" * 16
MODEL = Model("m", Fingerprint(), 4096, 64, max_budget=63, default_budget=8)
ASKED = Generation("", (1, 2, 3), Sampling(max_tokens=9), idempotency_key="k")


class RecordedSessions:
    """What a store has of sessions; it may be away, and other owners live or not."""

    def __init__(self) -> None:
        self.owner, self.records, self.states = OWNER, dict[str, Record](), dict[str, State]()
        self.away = self.forgets_to_answer = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.alive = {OWNER}
        self.marked: list[str] = []
        self.unanswered = 0

    def put(self, new: Record, **state: Any) -> None:
        self.records[new.session_id] = new
        self.states[new.session_id] = State(**{"epoch": 1, "owner": OWNER, **state})

    async def create(self, new: Record, digest: bytes, replaces: bytes = b"") -> Created:
        await self.gate.wait()
        self._check()
        if new.session_id in self.records:
            return Created(0, self.states[new.session_id])
        self.put(new, digest=digest)
        if self.forgets_to_answer:
            raise Unavailable("kvstore", "no answer")
        return Created(1)

    async def get(self, session_id: str, from_offset: int = 0) -> Stored:
        self._check()
        if session_id not in self.records:
            raise SessionUnknown(session_id)
        tokens = [7] * self.states[session_id].length if not from_offset else []
        return Stored(self.records[session_id], self.states[session_id], tokens)

    async def acquire(self, record: Record) -> Granted:
        self._check()
        state = self.states[record.session_id]
        if state.owner in self.alive:
            raise Fenced(record.session_id, 0, state.epoch)
        taken = self.states[record.session_id] = state._replace(epoch=state.epoch + 1, owner=OWNER)
        return Granted(taken.epoch, taken)

    async def end(self, record: Record, epoch: int, finish: Finish, usage: Usage) -> State:
        self._check()
        state = self.states[record.session_id]
        if (state.epoch, state.owner) != (epoch, OWNER):
            raise Fenced(record.session_id, epoch, state.epoch)
        if not state.finish:
            self.states[record.session_id] = state._replace(finish=finish, usage=usage)
        return self.states[record.session_id]

    async def mark_cancel(self, session_id: str) -> bool:
        self._check()
        self.states[session_id] = self.states[session_id]._replace(cancel_marked=True)
        return not self.states[session_id].finish

    async def renew(self) -> list[str]:
        self._check()
        return self.marked

    def append(self, entries: list[Append]) -> None:
        pass

    def forget(self, session_id: str) -> None:
        pass

    def _check(self) -> None:
        if self.away:
            raise Unavailable("kvstore", "away")


class IdleVerifier:
    """Attached, and told things."""

    address, model, attached, draining = "v", MODEL, True, False

    def start(self, *told: object) -> None:
        pass

    cancel = committed = start


@pytest.fixture
def store() -> RecordedSessions:
    return RecordedSessions()


@pytest.fixture
def gateway(store: RecordedSessions) -> Gateway:
    config = GatewayConfig(verifier="v", kvstore="k", model_path=BUNDLED, tenant_secret="s" * 16)
    template = template_of(BUNDLED, Tokenizer.from_folder(BUNDLED))
    return Gateway(config, template, [IdleVerifier()], store)  # type: ignore[arg-type]


async def failed(gateway: Gateway) -> str:
    """A session that ended here, loudly, while the store has it as running."""
    stream = await gateway.generate(ASKED, None)
    gateway.table.appended([Appended(stream.session.id, AppendStatus.CONFLICT, State())])
    assert not gateway.table.sessions
    stream.close()
    return stream.session.id


@pytest.mark.parametrize(
    ("status", "left"),
    [
        (AppendStatus.UNAVAILABLE, False),
        (AppendStatus.CONFLICT, True),
        (AppendStatus.DIGEST_MISMATCH, True),
        (AppendStatus.FENCED, False),
        (AppendStatus.GONE, False),
        (AppendStatus.FINISHED, False),
    ],
)
def test_a_session_that_ends_without_a_record_is_told_unless_it_is_anothers(status: AppendStatus, left: bool) -> None:
    bench = Bench()
    session = bench.begin()
    bench.step(update(session, [1]))
    bench.table.appended([Appended("s1", status, State(epoch=1))])
    assert bench.unrecorded == ([session.record] if left else [])
    assert bench.leases.released == ([("s1", 1)] if status is AppendStatus.UNAVAILABLE else [])


def test_a_lost_store_leaves_every_session_to_a_resume() -> None:
    bench = Bench()
    for i in range(3):
        bench.begin(record(f"s{i}"))
    bench.table.store_lost(Unavailable("kvstore", "away"))
    assert bench.unrecorded == []
    assert bench.leases.released == [(f"s{i}", 1) for i in range(3)]


async def test_a_session_that_failed_with_its_store_is_ended_there_when_it_is_back(
    gateway: Gateway, store: RecordedSessions
) -> None:
    """It stayed `running` for an hour; nobody acted on a cancel."""
    session_id = await failed(gateway)
    store.states[session_id] = store.states[session_id]._replace(length=5)
    store.away = True
    await gateway._endings.record()
    assert gateway.held()["unrecorded"] == 1
    store.away = False
    await gateway._endings.record()
    assert (store.states[session_id].finish, store.states[session_id].usage) == (ERROR, Usage(3, 5))
    assert gateway.held()["unrecorded"] == 0


async def test_what_was_created_again_under_the_same_id_is_left_alone(
    gateway: Gateway, store: RecordedSessions
) -> None:
    session_id = await failed(gateway)
    store.records[session_id] = dataclasses.replace(store.records[session_id], birth=b"n" * 16)
    await gateway._endings.record()
    assert not store.states[session_id].finish
    assert gateway.held()["unrecorded"] == 0


@pytest.mark.parametrize(("owner", "alive", "ended"), [(OWNER, True, True), (OTHER, False, True), (OTHER, True, False)])
async def test_a_cancel_ends_what_no_gateway_runs(
    gateway: Gateway, store: RecordedSessions, owner: bytes, alive: bool, ended: bool
) -> None:
    store.put(record(), owner=owner, length=2)
    store.alive = {owner} if alive else set()
    assert await gateway.cancel("s1", "")
    assert store.states["s1"].cancel_marked
    assert (store.states["s1"].finish is CANCELLED) is ended


async def test_a_cancel_mark_on_a_session_that_is_not_held_here_is_acted_on_at_a_renewal(
    gateway: Gateway, store: RecordedSessions
) -> None:
    store.put(record(), cancel_marked=True)
    running = await gateway.generate(ASKED, None)
    store.marked = ["s1", "gone", running.session.id]
    await gateway._renew()
    assert store.states["s1"].finish is CANCELLED
    assert running.session.end is not None
    assert running.session.end.reason is CANCELLED


async def test_ends_that_wait_are_bounded_and_the_oldest_goes() -> None:
    store = RecordedSessions()
    endings = Endings(store, 3)
    for i in range(5):
        store.put(record(f"s{i}"))
        endings.remember(record(f"s{i}"))
    assert len(endings) == 3
    await endings.record()
    assert [state.finish for state in store.states.values()] == [Finish.NONE, Finish.NONE, ERROR, ERROR, ERROR]


async def test_a_periodic_task_that_fails_is_done_again(caplog: pytest.LogCaptureFixture) -> None:
    """One session's fault in a sweep ended the process, and all sessions with it."""
    done = 0
    again = asyncio.Event()

    async def work() -> None:
        nonlocal done
        done += 1
        if done == 1:
            raise ValueError("max() arg is an empty sequence")
        if done == 2:
            raise InvariantViolation("odd")
        again.set()

    task = asyncio.create_task(every(0.001, work))
    async with asyncio.timeout(5):
        await again.wait()
    task.cancel()
    await asyncio.wait([task])
    assert [str(entry.exc_info[1]) for entry in caplog.records if entry.exc_info] == [
        "max() arg is an empty sequence",
        "odd",
    ]


@pytest.mark.parametrize("detach", [False, True])
async def test_a_deadline_passes_while_a_session_is_written(
    gateway: Gateway, store: RecordedSessions, detach: bool
) -> None:
    """A store that hangs kept the client beyond its deadline, and the session would have run for nobody."""
    store.gate.clear()
    began = asyncio.get_running_loop().time()
    with pytest.raises(DeadlineExceeded):
        await gateway.generate(dataclasses.replace(ASKED, deadline_ms=50, detach=detach), None)
    assert asyncio.get_running_loop().time() - began < 10
    store.gate.set()
    await soon(lambda: not gateway.held()["creating"])
    (session,) = gateway.table.sessions.values()
    assert session.end is not None
    assert session.end.reason is Finish.DEADLINE
