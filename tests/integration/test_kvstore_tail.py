"""Tail: following a session through this kvstore and through another replica."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.errors import SessionDeleted, SessionUnknown
from hedgerow.rpc import status
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from tests.kvstore_calls import Gateway, Session, gateway_on
from tests.redis_servers import Service, kvstore, redis_server  # noqa: F401  (fixtures)

LOG = list(range(700, 760))
STOP = common_pb2.FINISH_REASON_STOP


@pytest.fixture(scope="module")
def replica(redis_server: EmbeddedRedis) -> Iterator[Service]:  # noqa: F811
    """A second kvstore on the same Redis."""
    service = Service("services.kvstore", redis_url=redis_server.url)
    yield service
    service.stop()


@pytest_asyncio.fixture
async def gateway(kvstore: Service) -> AsyncIterator[Gateway]:  # noqa: F811
    async with gateway_on(kvstore.port) as connected:
        yield connected


@pytest_asyncio.fixture(params=["same", "replica"])
async def reader(request: pytest.FixtureRequest, kvstore: Service, replica: Service) -> AsyncIterator[Gateway]:  # noqa: F811
    """A gateway that reads through the same kvstore as the writer, or through another one."""
    async with gateway_on((kvstore if request.param == "same" else replica).port) as connected:
        yield connected


class Reading:
    """A Tail, its tokens so far, and how it ended."""

    def __init__(self, gateway: Gateway, session: Session, start: int) -> None:
        self.tokens: list[int] = []
        self.position, self.session = start, session
        self.final: pb.SessionState | None = None
        self.error: Any = None
        self.grown = asyncio.Event()
        call = gateway.stub.Tail(pb.TailRequest(session_id=session.session_id, from_offset=start))
        self.task = asyncio.create_task(self._read(call))

    async def _read(self, call: Any) -> None:
        try:
            async for message in call:
                assert self.final is None, "nothing follows the last message"
                assert not message.tokens or message.offset == self.position
                self.tokens += message.tokens
                self.position += len(message.tokens)
                if message.tokens:
                    assert message.digest == self.session.digests(LOG[: self.position])[-1]
                self.final = message.state if message.HasField("state") else None
                self.grown.set()
        except grpc.aio.AioRpcError as error:
            self.error = status.from_rpc_error(error)

    async def until(self, length: int) -> None:
        async with asyncio.timeout(5):
            while self.position < length:
                self.grown.clear()
                await self.grown.wait()


async def test_tail_gives_what_is_there_then_what_comes_then_the_end(gateway: Gateway, reader: Gateway) -> None:
    session = await gateway.create(Session())
    await gateway.append(session.entry(LOG, 0, 7))
    readings = [Reading(reader, session, start) for start in (0, 3, 7)]
    for reading in readings:
        await reading.until(7)
    for start in range(7, 27, 4):
        await gateway.append(session.entry(LOG, start, start + 4))
    for reading in readings:
        await reading.until(27)
    await gateway.append(session.entry(LOG, 27, 30, finish_reason=STOP, usage=common_pb2.Usage(steps=3)))
    for reading, start in zip(readings, (0, 3, 7), strict=True):
        await asyncio.wait_for(reading.task, 5)
        assert reading.tokens == LOG[start:30]
        assert reading.final is not None
        assert (reading.final.finish_reason, reading.final.length, reading.final.usage.steps) == (STOP, 30, 3)


async def test_tail_of_an_ended_session_ends_at_once(gateway: Gateway, reader: Gateway) -> None:
    session = await gateway.create(Session())
    await gateway.append(session.entry(LOG, 0, 5, finish_reason=STOP))
    for start, expected in ((0, LOG[:5]), (2, LOG[2:5]), (5, []), (9, [])):
        reading = Reading(reader, session, start)
        await asyncio.wait_for(reading.task, 5)
        assert reading.tokens == expected
        assert reading.final is not None
        assert reading.final.length == 5


async def test_tail_sees_an_end_without_tokens(gateway: Gateway, reader: Gateway) -> None:
    session = await gateway.create(Session())
    await gateway.append(session.entry(LOG, 0, 2))
    reading = Reading(reader, session, 0)
    await reading.until(2)
    await gateway.append(session.entry(LOG, 2, 2, finish_reason=common_pb2.FINISH_REASON_DEADLINE))
    await asyncio.wait_for(reading.task, 5)
    assert reading.final is not None
    assert reading.final.finish_reason == common_pb2.FINISH_REASON_DEADLINE


async def test_tail_from_beyond_the_end_waits_for_the_log_to_get_there(gateway: Gateway, reader: Gateway) -> None:
    session = await gateway.create(Session())
    reading = Reading(reader, session, 6)
    for start in range(0, 9, 3):
        await gateway.append(session.entry(LOG, start, start + 3))
    await reading.until(9)
    assert reading.tokens == LOG[6:9]
    reading.task.cancel()


async def test_tail_tells_of_a_deletion(gateway: Gateway, reader: Gateway) -> None:
    session = await gateway.create(Session())
    await gateway.append(session.entry(LOG, 0, 2))
    reading = Reading(reader, session, 0)
    await reading.until(2)
    await gateway.stub.DeleteSession(pb.KvStoreServiceDeleteSessionRequest(session_id=session.session_id))
    await asyncio.wait_for(reading.task, 5)
    assert isinstance(reading.error, SessionDeleted)
    unknown = Reading(reader, Session(), 0)
    await asyncio.wait_for(unknown.task, 5)
    assert isinstance(unknown.error, SessionUnknown)
