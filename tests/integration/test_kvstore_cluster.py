"""Redis Cluster: a message is one round trip to each node that it touches; slots move, and nodes fail over."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis
from redis.crc import key_slot

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from services.kvstore.keys import session_keys
from tests.kvstore_calls import Gateway, Session, gateway_on
from tests.polling import eventually, soon
from tests.redis_groups import HOST, client_of, cluster
from tests.redis_servers import Service, overheard, scripts_on

LOG = list(range(800, 900))
PRIMARIES = 3


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EmbeddedRedis]]:
    """Three primaries and a fourth node that has no slots yet."""
    with cluster(tmp_path_factory.mktemp("cluster"), PRIMARIES) as running:
        for node in running:
            with client_of(node) as client:
                client.config_set("cluster-require-full-coverage", "no")
        yield running


@pytest.fixture(scope="module")
def service(nodes: list[EmbeddedRedis]) -> Iterator[Service]:
    # the first of the seeds is nobody
    url = f"redis+cluster://{HOST}:1," + ",".join(f"{HOST}:{node.port}" for node in nodes[:2])
    started = Service("services.kvstore", redis_url=url, redis_timeout=1.0)
    yield started
    started.stop()


def slot_of(session: Session) -> int:
    return key_slot(session_keys(session.session_id)[0])


def session_on(node: int) -> Session:
    """A session whose slot lies on one of the primaries."""
    while True:
        session = Session()
        if slot_of(session) * PRIMARIES // 16384 == node:
            return session


def reads(client: redis.Redis) -> int:
    return int(client.info("stats")["total_reads_processed"])


async def test_message_is_one_round_trip_to_each_node(nodes: list[EmbeddedRedis], service: Service) -> None:
    async with gateway_on(service.port) as gateway:
        sessions = [await gateway.create(session_on(i % PRIMARIES)) for i in range(30)]
        await gateway.append(*(each.entry(LOG, 0, 2) for each in sessions))
        with ExitStack() as stack:
            clients = [stack.enter_context(client_of(node)) for node in nodes[:PRIMARIES]]
            before = [reads(client) for client in clients]
            with ExitStack() as ears:
                heard = [ears.enter_context(overheard(client)) for client in clients]
                for start in range(2, 22, 2):
                    results = await gateway.append(*(each.entry(LOG, start, start + 2) for each in sessions))
                    assert {result.status for result in results} == {pb.APPEND_STATUS_OK}
                after = [reads(client) for client in clients]
        for first, last, said in zip(before, after, heard, strict=True):
            assert len(scripts_on([each.session_id for each in sessions], said)) == 10 * 10
            # ten messages, our own looks, those of health and of the lists' tidying, which go on. Entry by entry: 100
            assert last - first < 60
        for each in sessions:
            assert list((await gateway.get(each)).tokens) == LOG[:22]


async def test_every_call_works_wherever_its_keys_are(service: Service) -> None:
    async with gateway_on(service.port) as gateway:
        for node in range(PRIMARIES):
            await calls_of_a_session(gateway, session_on(node))


async def calls_of_a_session(gateway: Gateway, session: Session) -> None:
    stub = gateway.stub
    await gateway.create(session)
    await stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner))
    (newest,) = (await stub.ListSessions(pb.KvStoreServiceListSessionsRequest(tenant="t", limit=1))).sessions
    assert (newest.summary.session_id, newest.owner_lives) == (session.session_id, True)
    watch = stub.WatchCancels(pb.WatchCancelsRequest(owner=session.owner))
    assert list((await watch.read()).session_ids) == []
    assert (await stub.MarkCancel(pb.MarkCancelRequest(session_id=session.session_id))).was_running
    async with asyncio.timeout(10):
        assert list((await watch.read()).session_ids) == [session.session_id]
    watch.cancel()
    renewed = await stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner))
    assert list(renewed.cancelled_sessions) == [session.session_id]
    lease = common_pb2.Lease(epoch=1, owner=session.owner)
    released = pb.ReleaseLeaseRequest(session_id=session.session_id, lease=lease, birth=session.birth)
    assert (await stub.ReleaseLease(released)).state.owner == bytes(16)
    swept = await stub.ListExpired(pb.ListExpiredRequest())
    assert session.session_id in [each.session_id for each in swept.sessions]
    acquired = pb.AcquireLeaseRequest(session_id=session.session_id, owner=session.owner, only_expired=True)
    session.epoch = (await stub.AcquireLease(acquired)).lease.epoch
    assert (await gateway.status(session.entry(LOG, 0, 5)))[0] == "OK"
    close = pb.CloseSessionRequest(
        session_id=session.session_id,
        lease=common_pb2.Lease(epoch=session.epoch, owner=session.owner),
        birth=session.birth,
        finish_reason=common_pb2.FINISH_REASON_CANCELLED,
    )
    assert (await stub.CloseSession(close)).state.length == 5
    tail = [message async for message in stub.Tail(pb.TailRequest(session_id=session.session_id))]
    assert [list(message.tokens) for message in tail] == [LOG[:5]]
    deletion = pb.KvStoreServiceDeleteSessionRequest(session_id=session.session_id)
    assert (await stub.DeleteSession(deletion)).existed
    blocks = [bytes([i]) * 16 for i in range(20)]
    await stub.PutPrefixes(pb.PutPrefixesRequest(verifier="v", block_hashes=blocks, ttl_ms=5000))
    assert (await stub.FindPrefix(pb.FindPrefixRequest(block_hashes=blocks))).holders[0].blocks == 20


async def test_slot_may_move_under_a_running_session(nodes: list[EmbeddedRedis], service: Service) -> None:
    """ASK while it moves, MOVED when it has: no append is refused, and none is applied twice."""
    spare = nodes[PRIMARIES]
    async with gateway_on(service.port) as gateway:
        session = await gateway.create(session_on(0))
        slot, source = slot_of(session), nodes[0]
        assert (await gateway.status(session.entry(LOG, 0, 5)))[0] == "OK"
        with client_of(source) as old, client_of(spare) as new:
            old_id, new_id = (client.execute_command("CLUSTER", "MYID").decode() for client in (old, new))
            new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", old_id)
            old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", new_id)
            assert (await gateway.status(session.entry(LOG, 5, 7)))[0] == "OK", "its keys have not moved yet"
            keys = old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
            old.execute_command("MIGRATE", HOST, spare.port, "", 0, 5000, "KEYS", *keys)
            for start in range(7, 12):
                assert (await gateway.status(session.entry(LOG, start, start + 1)))[0] == "OK", "by ASK"
            for client in (new, old):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", new_id)
            for start in range(12, 20):
                assert (await gateway.status(session.entry(LOG, start, start + 1)))[0] == "OK", "by MOVED"
            assert list((await gateway.get(session)).tokens) == LOG[:20]
            assert new.hget(session_keys(session.session_id)[0], "length") == b"20"  # type: ignore[arg-type]
            # it goes back, so that the spare node may become a replica
            new.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", old_id)
            old.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", new_id)
            keys = new.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100)
            new.execute_command("MIGRATE", HOST, source.port, "", 0, 5000, "KEYS", *keys)
            for client in (old, new):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", old_id)
        assert (await gateway.status(session.entry(LOG, 20, 22)))[0] == "OK"


async def test_kvstore_that_is_told_of_one_node_only_is_not_serving_and_says_how(nodes: list[EmbeddedRedis]) -> None:
    service = Service("services.kvstore", redis_url=nodes[0].url)
    try:
        service.bound()
        await soon(lambda: "of a cluster: use redis+cluster://" in service.text)
        assert service.lines == []
    finally:
        service.stop()


async def test_node_that_fails_holds_its_own_sessions_until_its_replica_takes_over(
    nodes: list[EmbeddedRedis], service: Service
) -> None:
    """The last test: the node stays dead."""
    lost, spare = nodes[0], nodes[PRIMARIES]
    with client_of(lost) as primary, client_of(spare) as replica:
        replica.execute_command("CLUSTER", "REPLICATE", primary.execute_command("CLUSTER", "MYID"))
        eventually(lambda: replica.info("replication").get("master_link_status") == "up", 30, "the replica's link")
        async with gateway_on(service.port) as gateway:
            sessions = [await gateway.create(session_on(i)) for i in range(PRIMARIES)]
            await gateway.append(*(each.entry(LOG, 0, 5) for each in sessions))
            primary.set(f"{{{sessions[0].session_id}}}mark", 1, px=1000)
            assert primary.wait(1, 30_000) == 1
            lost.kill()
            ends, held = [5] * PRIMARIES, 0
            async with asyncio.timeout(60):
                while ends[0] < 15:
                    entries = [each.entry(LOG, end, end + 1) for each, end in zip(sessions, ends, strict=True)]
                    names = [pb.AppendStatus.Name(r.status) for r in await gateway.append(*entries)]
                    assert names[1] == names[2] == "APPEND_STATUS_OK", "the others go on"
                    assert names[0] in ("APPEND_STATUS_OK", "APPEND_STATUS_UNAVAILABLE")
                    held += names[0] != "APPEND_STATUS_OK"
                    ends = [
                        end + (name == "APPEND_STATUS_OK") * (end < 90) for end, name in zip(ends, names, strict=True)
                    ]
                    await asyncio.sleep(0.02)
            assert held
            watch = gateway.stub.WatchCancels(pb.WatchCancelsRequest(owner=sessions[0].owner))
            assert list((await watch.read()).session_ids) == []
            await gateway.stub.MarkCancel(pb.MarkCancelRequest(session_id=sessions[0].session_id))
            assert list((await watch.read()).session_ids) == [sessions[0].session_id]
            watch.cancel()
            for each, end in zip(sessions, ends, strict=True):
                assert list((await gateway.get(each)).tokens) == LOG[:end]
