"""Redis Sentinel: the kvstore follows the master through a crash and through a switch, and streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.v1 import kvstore_pb2 as pb
from tests.kvstore_calls import Gateway, Session, gateway_on, soon_it_is
from tests.polling import soon
from tests.redis_groups import Sentinels, client_of, paused, sentinels
from tests.redis_servers import Service

LOG = list(range(600, 700))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Sentinels]:
    with sentinels(tmp_path) as running:
        yield running


@pytest.fixture(params=[0])
def service(group: Sentinels, request: pytest.FixtureRequest) -> Iterator[Service]:
    """A kvstore that waits for so many replicas."""
    waits = {"redis_wait_replicas": request.param, "redis_wait_ms": 200}
    started = Service("services.kvstore", redis_url=group.url, redis_timeout=0.5, **waits)
    yield started
    started.stop()


async def append_until(gateway: Gateway, session: Session, start: int, end: int) -> list[str]:
    """Append token by token as an owner does: the same again where the store was away, from its length where it lost
    some. The statuses on the way.
    """
    names = []
    async with asyncio.timeout(60):
        while start < end:
            name, state = await gateway.status(session.entry(LOG, start, start + 1))
            names.append(name)
            assert name in ("OK", "UNAVAILABLE", "GAP")
            start = state.length if name in ("OK", "GAP") else start
            await asyncio.sleep(0.005 if name == "OK" else 0.02)
    return names


async def replicated(group: Sentinels) -> None:
    """Everything so far is on the replica."""
    with client_of(group.master) as client:
        client.set("mark", 1, px=1000)
        assert client.wait(1, 30_000) == 1


@pytest.mark.parametrize("how", ["killed", "silent"])
async def test_log_goes_on_after_the_master_is_lost(group: Sentinels, service: Service, how: str) -> None:
    old = group.master
    async with gateway_on(service.port) as gateway:
        session = await gateway.create(Session())
        assert set(await append_until(gateway, session, 0, 10)) == {"OK"}
        await replicated(group)
        if how == "killed":
            old.kill()
            names = await append_until(gateway, session, 10, 30)
        else:
            with paused(old):
                names = await append_until(gateway, session, 10, 30)
        assert "UNAVAILABLE" in names
        assert group.master is not old
        assert list((await gateway.get(session)).tokens) == LOG[:30]
        with client_of(group.master) as client:
            assert client.hget(f"hedgerow:{{{session.session_id}}}:record", "length") == b"30"
        # an old master that wakes up as one is not believed
        assert set(await append_until(gateway, session, 30, 40)) == {"OK"}


def is_replica(server: EmbeddedRedis) -> bool:
    """A server that is demoted closes its connections."""
    try:
        with client_of(server) as client:
            return bool(client.info("replication")["role"] == "slave")
    except redis.ConnectionError:
        return False


@pytest.mark.long
@pytest.mark.parametrize("service", [0, 1], indirect=True, ids=["no WAIT", "WAIT 1"])
async def test_log_follows_a_switch_of_living_masters(
    group: Sentinels, service: Service, request: pytest.FixtureRequest
) -> None:
    """The old one takes writes until it hears that it is a replica: they are lost, unless a replica must have them."""
    old = group.master
    async with gateway_on(service.port) as gateway:
        session = await gateway.create(Session())
        watch = gateway.stub.WatchCancels(pb.WatchCancelsRequest(owner=session.owner))
        assert list((await watch.read()).session_ids) == []
        await append_until(gateway, session, 0, 5)
        await replicated(group)
        group.client.sentinel_failover("hedgerow")
        names = await append_until(gateway, session, 5, 40)
        await soon(lambda: group.master is not old, 30)
        await soon(lambda: is_replica(old), 30)
        names += await append_until(gateway, session, 40, 60)
        answer = await gateway.get(session)
        assert list(answer.tokens) == LOG[:60]
        assert answer.state.digest == session.digests(LOG[:60])[-1]
        if "WAIT 1" in request.node.name:
            assert "GAP" not in names
        mark = pb.MarkCancelRequest(session_id=session.session_id)
        await soon_it_is(pb.MarkCancelResponse, lambda: gateway.stub.MarkCancel(mark))
        async with asyncio.timeout(10):
            assert list((await watch.read()).session_ids) == [session.session_id]
        watch.cancel()
    with client_of(group.master) as client:
        assert client.hget(f"hedgerow:{{{session.session_id}}}:record", "length") == b"60"


async def test_lost_suffix_shows_as_a_gap_and_is_written_again(group: Sentinels, service: Service) -> None:
    """What the replica had not got is gone; its owner has it still."""
    old, replica = group.master, group.data[1]
    async with gateway_on(service.port) as gateway:
        session = await gateway.create(Session())
        await append_until(gateway, session, 0, 10)
        await replicated(group)
        with client_of(replica) as client:
            client.replicaof("127.0.0.1", "1")  # it follows nobody, and stays a replica
        await append_until(gateway, session, 10, 20)
        old.kill()

        names = await append_until(gateway, session, 20, 22)
        assert "GAP" in names
        assert "UNAVAILABLE" in names
        assert list((await gateway.get(session)).tokens) == LOG[:22]


async def test_kvstore_starts_when_a_sentinel_does_and_names_what_is_missing(tmp_path: Path) -> None:
    with sentinels(tmp_path) as group:
        url = group.url
        service = Service("services.kvstore", redis_url=url.replace("/hedgerow", "/another"), redis_timeout=0.5)
        try:
            service.bound()
            await soon(lambda: "No master found for 'another'" in service.text)
            assert service.lines == []
        finally:
            service.stop()


@pytest.mark.parametrize("url", ["redis+sentinel://127.0.0.1:26379", "redis+sentinel:///hedgerow", "redis+other://x/y"])
def test_url_without_a_part_is_refused_without_being_shown(url: str) -> None:
    service = Service("services.kvstore", redis_url=url)
    assert service.wait() != 0
    assert "HEDGEROW_REDIS_URL" in service.text
    assert "redis+sentinel:// or redis+cluster://" in service.text
    assert "Traceback" not in service.text
