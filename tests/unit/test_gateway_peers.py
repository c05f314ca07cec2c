"""The gateway's two streams against peers that break them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from hedgerow.errors import HedgerowError, InvariantViolation, NotFound, Unavailable
from hedgerow.rpc.interceptors import StatusInterceptor
from hedgerow.v1 import kvstore_pb2 as kv
from hedgerow.v1 import verifier_pb2 as engine
from hedgerow.v1.kvstore_pb2_grpc import KvStoreServiceServicer, add_KvStoreServiceServicer_to_server
from hedgerow.v1.verifier_pb2_grpc import VerifierServiceServicer, add_VerifierServiceServicer_to_server
from services.gateway.messages import Append, AppendStatus, Start
from services.gateway.peers import VerifierPeer
from services.gateway.store_peer import StorePeer
from services.gateway.types import Trace
from services.gateway.verifiers import Work
from tests.unit.gateway_peers import OWNER, record

Context = grpc.aio.ServicerContext[Any, Any]


class BreakingVerifier(VerifierServiceServicer):
    """Notes what it is sent; `answers` go out, None breaks the stream."""

    def __init__(self) -> None:
        self.vocab_size, self.draining, self.steps = 4096, False, 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.received: list[engine.AttachRequest] = []
        self.answers: asyncio.Queue[engine.AttachResponse | None] = asyncio.Queue()

    async def Describe(self, request: engine.DescribeRequest, context: Context) -> engine.DescribeResponse:
        return engine.DescribeResponse(model="m", vocab_size=self.vocab_size, context_length=64)

    async def GetLoad(self, request: engine.GetLoadRequest, context: Context) -> engine.GetLoadResponse:
        await self.gate.wait()
        return engine.GetLoadResponse(draining=self.draining, steps=self.steps)

    async def Attach(
        self, requests: AsyncIterator[engine.AttachRequest], context: Context
    ) -> AsyncIterator[engine.AttachResponse]:
        reading = asyncio.create_task(self._read(requests))
        try:
            yield engine.AttachResponse(incarnation=b"i" * 16)
            while (answer := await self.answers.get()) is not None:
                yield answer
            raise Unavailable("verifier", "it was told to break")
        finally:
            reading.cancel()

    async def _read(self, requests: AsyncIterator[engine.AttachRequest]) -> None:
        async for request in requests:
            self.received.append(request)


class BreakingStore(KvStoreServiceServicer):
    """Answers `answering` appends a stream, then breaks it; waits for `gate` before each answer."""

    def __init__(self) -> None:
        self.answering = 0
        self.streams: list[list[list[str]]] = []  # streams, their messages, their sessions
        self.last: list[kv.AppendEntry] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.status = 1  # OK
        self.taken: list[int] = []

    async def RenewOwner(self, request: kv.RenewOwnerRequest, context: Context) -> kv.RenewOwnerResponse:
        return kv.RenewOwnerResponse(cancelled_sessions=["s7"])

    async def GetSession(
        self, request: kv.KvStoreServiceGetSessionRequest, context: Context
    ) -> kv.KvStoreServiceGetSessionResponse:
        raise NotFound("session", request.session_id)

    async def Append(
        self, requests: AsyncIterator[kv.AppendRequest], context: Context
    ) -> AsyncIterator[kv.AppendResponse]:
        seen: list[list[str]] = []
        self.streams.append(seen)
        async for request in requests:
            seen.append([entry.session_id for entry in request.entries])
            self.last = list(request.entries)
            await self.gate.wait()
            if len(seen) > self.answering:
                raise Unavailable("kvstore", "it was told to break")
            if self.status == 1:
                self.taken += [token for entry in request.entries for token in entry.tokens]
            results = [kv.AppendResult(session_id=e.session_id, status=self.status) for e in request.entries]  # type: ignore[arg-type]
            yield kv.AppendResponse(batch_id=request.batch_id, results=results)


class Watch:
    """What a peer told, and waiting for it."""

    def __init__(self) -> None:
        self.work, self.opened = Work(False, False), 0
        self.reports: list[str | None] = []
        self.steps: list[Any] = []
        self.lost: list[HedgerowError] = []
        self.answers: list[Any] = []

    def stepped(self, updates: Any, timings: Any) -> None:
        self.steps.append(updates)

    def verifier_opened(self, verifier: VerifierPeer) -> None:
        self.opened += 1

    def verifier_lost(self, verifier: VerifierPeer, error: HedgerowError) -> None:
        self.lost.append(error)

    def verifier_work(self, verifier: VerifierPeer) -> Work:
        return self.work

    async def until(self, what: Callable[[], Any]) -> None:
        end = time.monotonic() + 5
        while not what():
            assert time.monotonic() < end, f"{self.reports} {self.lost} {self.answers}"
            await asyncio.sleep(0.005)


@asynccontextmanager
async def served(add: Callable[[Any, grpc.aio.Server], None], servicer: Any) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=(StatusInterceptor(),))
    add(servicer, server)
    port = server.add_insecure_port("localhost:0")
    await server.start()
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def verifier_peer(servicer: BreakingVerifier, patience: float = 3.0) -> AsyncIterator[tuple[VerifierPeer, Watch]]:
    async with served(add_VerifierServiceServicer_to_server, servicer) as address:
        watch = Watch()
        peer = VerifierPeer(address, OWNER, 4096, watch.reports.append, patience)
        running = asyncio.create_task(peer.run(watch))
        try:
            yield peer, watch
        finally:
            running.cancel()
            await asyncio.wait([running])
            await peer.close()


@asynccontextmanager
async def store_peer(servicer: BreakingStore, patience: float = 5.0) -> AsyncIterator[tuple[StorePeer, Watch]]:
    async with served(add_KvStoreServiceServicer_to_server, servicer) as address:
        watch = Watch()
        peer = StorePeer(address, OWNER, patience, watch.reports.append)
        running = asyncio.create_task(peer.run(watch.answers.append, watch.lost.append))
        try:
            yield peer, watch
        finally:
            running.cancel()
            await asyncio.wait([running])
            await peer.close()


def start(session_id: str = "s1", attempt: int = 1) -> Start:
    return Start(record(session_id), 1, attempt, (), b"d" * 16, 0, 0, Trace(), False)


def append(session_id: str, offset: int = 0) -> list[Append]:
    return [Append(session_id, 1, b"b" * 16, offset, [offset], b"", b"")]


def answered(watch: Watch) -> list[str]:
    return [entry.session_id for answer in watch.answers for entry in answer]


async def test_a_verifier_with_another_vocabulary_is_not_attached() -> None:
    verifier = BreakingVerifier()
    verifier.vocab_size = 163840
    async with verifier_peer(verifier) as (peer, watch):
        await watch.until(lambda: watch.reports)
        assert "163840" in str(watch.reports[0])
        assert "4096" in str(watch.reports[0])
        assert not peer.attached
        verifier.vocab_size = 4096  # another one took its place
        await watch.until(lambda: peer.attached)
        assert watch.reports[-1] is None
        assert watch.lost == []


async def test_a_broken_stream_is_told_once_and_opened_again() -> None:
    verifier = BreakingVerifier()
    async with verifier_peer(verifier) as (peer, watch):
        await watch.until(lambda: peer.attached)
        verifier.answers.put_nowait(None)
        await watch.until(lambda: watch.lost)
        assert isinstance(watch.lost[0], Unavailable)
        assert watch.lost[0].retry_after
        await watch.until(lambda: peer.attached)
        assert len(watch.lost) == 1
        assert watch.reports[-1] is None
        await watch.until(lambda: [bytes(r.gateway) for r in verifier.received] == [OWNER, OWNER])


async def test_what_is_enqueued_together_travels_together() -> None:
    verifier = BreakingVerifier()
    async with verifier_peer(verifier) as (peer, watch):
        await watch.until(lambda: peer.attached)
        for i in range(32):
            peer.start(start(f"s{i}"))
            peer.committed(f"s{i}", 1, 1, 5)
        await watch.until(lambda: len(verifier.received) > 1)
        assert len(verifier.received) == 2, "the hello and one message"
        assert len(verifier.received[1].start) == len(verifier.received[1].committed) == 32
        assert peer.messages_sent == 1


async def test_committed_offsets_wait_for_each_other() -> None:
    """They are needed long before the verifier's bound only; a message a step would cost both sides a fifth."""
    verifier = BreakingVerifier()
    async with verifier_peer(verifier) as (peer, watch):
        await watch.until(lambda: peer.attached)
        for offset in (5, 9, 12):
            peer.committed("s1", 1, 1, offset)
            await asyncio.sleep(0)
        peer.committed("s2", 1, 2, 4)
        await watch.until(lambda: len(verifier.received) > 1)
        (message,) = verifier.received[1:]
        assert [(c.session_id, c.attempt, c.offset) for c in message.committed] == [("s1", 1, 12), ("s2", 2, 4)]
        peer.committed("s1", 1, 1, 13)
        await watch.until(lambda: len(verifier.received) > 2)


async def test_a_start_that_is_cancelled_before_it_left_never_leaves() -> None:
    """A message's cancels are taken before its starts: both in one would leave the sequence running for ever."""
    verifier = BreakingVerifier()
    async with verifier_peer(verifier) as (peer, watch):
        await watch.until(lambda: peer.attached)
        peer.start(start("s1"))
        peer.start(start("s2", attempt=2))
        peer.cancel("s1", 1, 1)
        peer.cancel("s2", 1, 1)  # an older attempt: it may be running
        await watch.until(lambda: len(verifier.received) > 1)
        assert [s.session_id for s in verifier.received[1].start] == ["s2"]
        assert [(c.session_id, c.attempt) for c in verifier.received[1].cancel] == [("s2", 1)]


async def test_an_update_with_an_error_has_it() -> None:
    verifier = BreakingVerifier()
    async with verifier_peer(verifier) as (peer, watch):
        await watch.until(lambda: peer.attached)
        error = engine.SequenceError(reason="OVERLOADED", message="full", metadata={"queued": "9"}, retry_after_ms=250)
        verifier.answers.put_nowait(
            engine.AttachResponse(updates=[engine.SequenceUpdate(session_id="s1", epoch=1, attempt=1, error=error)])
        )
        await watch.until(lambda: watch.steps)
        told = watch.steps[0][0]
        assert (told.error.reason, told.error.message, told.error.retry_after) == ("OVERLOADED", "full", 0.25)
        assert told.error.metadata == {"queued": "9"}


async def test_a_finish_reason_of_another_version_breaks_the_stream_and_not_the_gateway() -> None:
    verifier = BreakingVerifier()
    async with verifier_peer(verifier) as (peer, watch):
        await watch.until(lambda: peer.attached)
        update = engine.SequenceUpdate(session_id="s1", epoch=1, attempt=1, finish_reason=99)  # type: ignore[arg-type]
        verifier.answers.put_nowait(engine.AttachResponse(updates=[update]))
        await watch.until(lambda: watch.lost)
        assert isinstance(watch.lost[0], InvariantViolation)
        assert "Finish 99" in watch.lost[0].message
        await watch.until(lambda: peer.attached)


async def test_appends_without_an_answer_are_sent_again_in_order() -> None:
    store = BreakingStore()
    store.answering = 2
    async with store_peer(store) as (peer, watch):
        for number in range(8):
            peer.append(append(f"s{number}"))
            await watch.until(lambda: peer.messages_sent and (peer.unanswered > 1 or not peer.unanswered))
        await watch.until(lambda: not peer.unanswered)
        assert answered(watch) == [f"s{number}" for number in range(8)]
        assert len(store.streams) > 1
        for before, after in itertools.pairwise(store.streams):
            assert after[0] == before[2], "the first that was not answered comes first"
        assert watch.lost == []
        assert "told to break" in str(watch.reports)


async def test_what_waits_for_a_slow_store_goes_out_as_one() -> None:
    """A store that takes longer than a step would otherwise fall behind for ever, one message a step."""
    store = BreakingStore()
    store.answering = 100
    store.gate.clear()
    async with store_peer(store) as (peer, watch):
        for number in range(10):
            peer.append(append(f"s{number}"))
            await watch.until(lambda sent=number + 1: peer.messages_sent == min(sent, 2))  # type: ignore[misc]
        store.gate.set()
        await watch.until(lambda: not peer.unanswered)
        assert store.streams == [[["s0"], ["s1"], [f"s{number}" for number in range(2, 10)]]]
        assert answered(watch) == [f"s{number}" for number in range(10)]


async def test_a_message_has_one_entry_a_session() -> None:
    """The store refuses a message that names a session twice, and with it the whole stream."""
    store = BreakingStore()
    store.answering = 100
    store.gate.clear()
    async with store_peer(store) as (peer, watch):
        for number in range(2):
            peer.append(append(f"s{number}"))
            await watch.until(lambda sent=number + 1: peer.messages_sent == sent)  # type: ignore[misc]
        for offset in range(1, 6):
            peer.append([*append("s0", offset), *append("s1", offset)])
        store.gate.set()
        await watch.until(lambda: not peer.unanswered)
        assert store.streams == [[["s0"], ["s1"], ["s0", "s1"]]]
        assert [list(entry.tokens) for entry in store.last] == [[1, 2, 3, 4, 5]] * 2


async def test_a_store_that_never_answers_is_lost_after_its_patience() -> None:
    store = BreakingStore()
    async with store_peer(store, patience=0.3) as (peer, watch):
        peer.append(append("s1"))
        began = time.monotonic()
        await watch.until(lambda: watch.lost)
        assert time.monotonic() - began >= 0.3
        assert isinstance(watch.lost[0], Unavailable)
        assert peer.unanswered == 0
        assert watch.answers == []


async def test_a_store_that_hangs_with_its_connection_open_is_lost_after_its_patience() -> None:
    """Nothing breaks then: streams waited for as long as the store slept."""
    store = BreakingStore()
    store.answering = 1000
    store.gate.clear()
    async with store_peer(store, patience=0.5) as (peer, watch):
        peer.append(append("s1"))
        began = time.monotonic()
        await watch.until(lambda: watch.lost)
        assert time.monotonic() - began >= 0.5
        assert isinstance(watch.lost[0], Unavailable)
        assert peer.unanswered == 0
        store.gate.set()
        peer.append(append("s2"))
        await watch.until(lambda: watch.answers)


async def test_a_store_without_its_redis_is_asked_again_until_it_takes_the_entries() -> None:
    """An answer UNAVAILABLE went straight to the sessions and ended them, although the stream itself had not broken."""
    store = BreakingStore()
    store.answering, store.status = 1000, 10  # UNAVAILABLE
    async with store_peer(store) as (peer, watch):
        peer.append(append("s1"))
        await watch.until(lambda: peer.messages_sent >= 3)
        peer.append(append("s1", 1))
        assert answered(watch) == []
        store.status = 1
        await watch.until(lambda: not peer.unanswered)
        assert store.taken == [0, 1]
        assert set(answered(watch)) == {"s1"}
        assert watch.lost == []


async def test_a_store_without_its_redis_for_too_long_ends_what_waits_for_it() -> None:
    store = BreakingStore()
    store.answering, store.status = 1000, 10
    async with store_peer(store, patience=0.3) as (peer, watch):
        began = time.monotonic()
        peer.append(append("s1"))
        await watch.until(lambda: answered(watch))
        assert 0.3 <= time.monotonic() - began < 10
        assert [entry.status for answer in watch.answers for entry in answer] == [AppendStatus.UNAVAILABLE]
        assert peer.unanswered == 0
        sent = peer.messages_sent
        peer.append(append("s2"))
        await watch.until(lambda: peer.messages_sent > sent)


async def test_a_store_that_is_not_there_is_told_as_such() -> None:
    peer = StorePeer("localhost:1", OWNER, 0.5, lambda why: None)
    with pytest.raises(Unavailable, match="kvstore") as raised:
        await peer.get("s1")
    assert raised.value.retry_after
    await peer.close()


async def test_what_the_store_says_is_passed_on() -> None:
    async with store_peer(BreakingStore()) as (peer, watch):
        await watch.until(lambda: watch.reports == [None])
        with pytest.raises(NotFound, match="s9"):
            await peer.get("s9")
        assert list(await peer.renew()) == ["s7"]


async def test_a_verifier_that_is_draining_is_not_attached_until_it_is_not() -> None:
    verifier = BreakingVerifier()
    verifier.draining = True
    async with verifier_peer(verifier) as (peer, watch):
        await watch.until(lambda: watch.reports)
        assert "draining" in str(watch.reports[0])
        assert (peer.attached, watch.opened) == (False, 0)
        verifier.draining = False
        await watch.until(lambda: peer.attached)
        assert watch.opened == 1


async def test_a_verifier_that_begins_to_drain_is_known_to() -> None:
    verifier = BreakingVerifier()
    async with verifier_peer(verifier, patience=0.2) as (peer, watch):
        await watch.until(lambda: peer.attached)
        assert not peer.draining
        verifier.draining = True
        await watch.until(lambda: peer.draining)
        assert watch.lost == []


async def test_a_verifier_that_hangs_with_its_connection_open_is_lost_only_while_it_has_work() -> None:
    """Nothing breaks then: its sessions waited for as long as it slept."""
    verifier = BreakingVerifier()
    async with verifier_peer(verifier, patience=0.4) as (peer, watch):
        await watch.until(lambda: peer.attached)
        verifier.gate.clear()  # it answers nothing any more
        began = time.monotonic()
        await watch.until(lambda: time.monotonic() - began > 1.0)  # longer than its patience: it has no work
        assert watch.lost == []
        watch.work, began = Work(True, True), time.monotonic()
        await watch.until(lambda: watch.lost)
        assert 0.3 < time.monotonic() - began < 10
        assert isinstance(watch.lost[0], Unavailable)
        assert "said nothing" in watch.lost[0].message
        assert not peer.attached
        watch.work = Work(False, False)
        verifier.gate.set()
        await watch.until(lambda: peer.attached)


async def test_a_verifier_that_steps_or_speaks_is_not_lost() -> None:
    verifier = BreakingVerifier()
    async with verifier_peer(verifier, patience=0.8) as (peer, watch):
        await watch.until(lambda: peer.attached)
        watch.work = Work(True, True)
        for _ in range(12):
            verifier.steps += 1
            await asyncio.sleep(0.1)
        assert watch.lost == []
        await watch.until(lambda: watch.lost)
        assert "made no step" in watch.lost[0].message


async def test_a_kvstore_that_is_gone_is_left_for_the_next_replica() -> None:
    first, second = BreakingStore(), BreakingStore()
    first.answering, second.answering = 1, 1000
    async with (
        served(add_KvStoreServiceServicer_to_server, first) as one,
        served(add_KvStoreServiceServicer_to_server, second) as two,
    ):
        watch = Watch()
        peer = StorePeer(f"{one}, {two}", OWNER, 5.0, watch.reports.append)
        running = asyncio.create_task(peer.run(watch.answers.append, watch.lost.append))
        try:
            for offset in range(4):
                peer.append(append("s1", offset))
                await watch.until(lambda: not peer.unanswered)
            assert (peer.address, watch.lost) == (two, [])
            assert first.taken + second.taken == [0, 1, 2, 3]
            with pytest.raises(NotFound):
                await peer.get("s9")  # an answer: nobody is left for it
            assert peer.address == two
        finally:
            running.cancel()
            await asyncio.wait([running])
            await peer.close()


async def test_a_call_that_one_replica_does_not_answer_is_made_at_the_next() -> None:
    async with served(add_KvStoreServiceServicer_to_server, BreakingStore()) as there:
        peer = StorePeer(f"localhost:1,{there}", OWNER, 5.0, lambda why: None)
        assert list(await peer.renew()) == ["s7"]
        assert peer.address == there
        await peer.close()
