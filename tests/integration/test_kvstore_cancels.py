"""WatchCancels: an owner hears of a cancel mark as it is written, from any kvstore, and after Redis was away."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import pytest_asyncio
import redis

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.errors import InvalidRequest, Unavailable
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from tests.kvstore_calls import Gateway, Session, error_of, gateway_on, soon_it_is
from tests.polling import soon
from tests.redis_servers import QUICK, Service, inspector, kvstore, redis_server  # noqa: F401  (fixtures)


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


class Watching:
    """A WatchCancels call and what it told."""

    def __init__(self, gateway: Gateway, owner: bytes) -> None:
        self.messages: list[list[str]] = []
        self.call = gateway.stub.WatchCancels(pb.WatchCancelsRequest(owner=owner))
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self.call:
            self.messages.append(list(message.session_ids))

    @property
    def told(self) -> set[str]:
        return {session_id for message in self.messages for session_id in message}


@asynccontextmanager
async def watching(gateway: Gateway, owner: bytes) -> AsyncIterator[Watching]:
    watch = Watching(gateway, owner)
    try:
        await soon(lambda: watch.messages, what="the first message")
        yield watch
    finally:
        watch.call.cancel()
        await asyncio.wait([watch.task])


async def cancel(gateway: Gateway, session: Session) -> None:
    assert (await gateway.stub.MarkCancel(pb.MarkCancelRequest(session_id=session.session_id))).was_running


async def test_first_message_has_the_marks_from_before_or_nothing(gateway: Gateway) -> None:
    owner = secrets.token_bytes(16)
    async with watching(gateway, owner) as watch:
        assert watch.messages == [[]]
    marked, plain, ended = [await gateway.create(Session(owner=owner)) for _ in range(3)]
    await cancel(gateway, marked)
    await cancel(gateway, ended)
    await gateway.append(ended.entry([], 0, 0, finish_reason=common_pb2.FINISH_REASON_CANCELLED))
    async with watching(gateway, owner) as watch:
        assert watch.messages == [[marked.session_id]]
    assert plain.session_id not in watch.told


@pytest.mark.parametrize("through", ["same", "another"])
async def test_mark_is_told_to_its_owner_alone_through_any_kvstore(
    gateway: Gateway, replica: Service, through: str
) -> None:
    mine, other = await gateway.create(Session()), await gateway.create(Session())
    async with (
        gateway_on(replica.port) as second,
        watching(gateway if through == "same" else second, mine.owner) as watch,
        watching(second, mine.owner) as twin,
        watching(gateway, other.owner) as stranger,
    ):
        await cancel(gateway, mine)
        await soon(lambda: watch.told == {mine.session_id})
        await soon(lambda: twin.told == {mine.session_id})
        await cancel(gateway, other)
        await soon(lambda: stranger.told == {other.session_id})
        assert watch.told == {mine.session_id}


async def test_one_process_needs_one_subscription_for_all_its_owners(
    gateway: Gateway,
    kvstore: Service,  # noqa: F811
    replica: Service,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    owners = [secrets.token_bytes(16) for _ in range(5)]
    watches = [Watching(gateway, owner) for owner in owners]
    await soon(lambda: all(watch.messages for watch in watches))
    two = [(b"hedgerow:cancels", 2)]  # this process, and the replica
    await soon(lambda: inspector.pubsub_numsub("hedgerow:cancels") == two)
    for watch in watches:
        watch.call.cancel()
    await asyncio.wait([watch.task for watch in watches])


async def test_marks_from_while_the_subscription_was_down_are_told_when_it_is_up(
    gateway: Gateway,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    session, later = await gateway.create(Session()), Session()
    later.owner = session.owner
    await gateway.create(later)
    async with watching(gateway, session.owner) as watch:
        # the subscription of every kvstore here breaks; the connections for calls do not
        inspector.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        await cancel(gateway, session)
        await soon(lambda: session.session_id in watch.told)
        await soon(lambda: inspector.pubsub_numsub("hedgerow:cancels")[0][1] > 0)
        await cancel(gateway, later)
        await soon(lambda: later.session_id in watch.told)


async def test_watch_goes_on_after_redis_was_killed(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", backoff=QUICK, settings={"appendfsync": "always"}) as server:
        service = Service("services.kvstore", redis_url=server.url, redis_timeout=0.5)
        try:
            async with gateway_on(service.port) as gateway:
                session = await gateway.create(Session())
                async with watching(gateway, session.owner) as watch:
                    server.kill()
                    mark = pb.MarkCancelRequest(session_id=session.session_id)
                    await soon_it_is(pb.MarkCancelResponse, lambda: gateway.stub.MarkCancel(mark))
                    await soon(lambda: session.session_id in watch.told)
        finally:
            service.stop()


async def test_watch_ends_with_unavailable_where_redis_is_away_and_when_the_process_drains(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis", backoff=QUICK) as server:
        service = Service("services.kvstore", redis_url=server.url, redis_timeout=0.3, grace=10)
        try:
            async with gateway_on(service.port) as gateway:
                watch = Watching(gateway, secrets.token_bytes(16))
                await soon(lambda: watch.messages)
                os.kill(server.pid, signal.SIGSTOP)
                silent = gateway.stub.WatchCancels(pb.WatchCancelsRequest(owner=secrets.token_bytes(16)))
                assert isinstance(await error_of(silent.read()), Unavailable)
                os.kill(server.pid, signal.SIGCONT)
                service.process.send_signal(signal.SIGTERM)
                assert isinstance(await error_of(watch.task), Unavailable)
            assert service.wait() == 0
        finally:
            service.stop()


async def test_nobody_cannot_watch(gateway: Gateway) -> None:
    for owner in (b"", b"x", bytes(16)):
        call = gateway.stub.WatchCancels(pb.WatchCancelsRequest(owner=owner))
        error = await error_of(call.read())
        assert isinstance(error, InvalidRequest)
        assert error.field == "owner"
