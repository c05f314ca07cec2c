"""The kvstore and its Redis in trouble: restarts, pauses, forgotten scripts, wrong policies, full memory, SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.cli.ports import free_ports
from hedgerow.errors import Overloaded, Unavailable
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from services.kvstore.keys import owner_keys
from tests.kvstore_calls import Gateway, Session, error_of, gateway_on
from tests.polling import eventually, soon
from tests.redis_servers import QUICK, SERVERS, Service

LOG = list(range(300, 400))
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedRedis]:
    """A server that the tests hurt; each leaves it well."""
    folder = tmp_path_factory.mktemp("redis")
    with EmbeddedRedis(folder, binary=SERVERS[request.param], backoff=QUICK) as running:
        yield running


@pytest.fixture(scope="module")
def service(server: EmbeddedRedis) -> Iterator[Service]:
    started = Service("services.kvstore", redis_url=server.url, redis_timeout=0.5)
    yield started
    started.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[EmbeddedRedis]:
    """A server for one test alone."""
    with EmbeddedRedis(tmp_path / "redis", backoff=QUICK) as running:
        yield running


def client_of(server: EmbeddedRedis) -> redis.Redis:
    return redis.Redis.from_url(server.url)


async def health_of(port: int) -> Any:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True, timeout=5)).status


async def healthy(port: int, expected: Any) -> None:
    """Watch until the status is as expected."""
    async with asyncio.timeout(30), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        async for response in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
            if response.status == expected:
                return
    raise AssertionError(f"the Watch ended before {expected}")


async def test_scripts_are_loaded_again_when_redis_forgot_them(server: EmbeddedRedis, service: Service) -> None:
    async with gateway_on(service.port) as gateway:
        sessions = [await gateway.create(Session()) for _ in range(3)]
        with client_of(server) as client:
            for start in (0, 2, 4):
                client.script_flush()
                results = await gateway.append(*(each.entry(LOG, start, start + 2) for each in sessions))
                assert [result.status for result in results] == [pb.APPEND_STATUS_OK] * 3
        for session in sessions:
            assert list((await gateway.get(session)).tokens) == LOG[:6]


async def test_killed_redis_costs_answers_but_no_committed_token(server: EmbeddedRedis, service: Service) -> None:
    """Committed tokens were synced before the kill; meanwhile appends say UNAVAILABLE, and the same ones go through."""
    port = service.port
    async with gateway_on(port) as gateway:
        session = await gateway.create(Session())
        assert (await gateway.status(session.entry(LOG, 0, 10)))[0] == "OK"
        with client_of(server) as client:
            client.config_set("appendfsync", "always")
            assert (await gateway.status(session.entry(LOG, 10, 20)))[0] == "OK"
        names, end = [], 20
        async with asyncio.timeout(60):
            while "UNAVAILABLE" not in names:  # it may be back before anybody asks
                server.kill()
                for _ in range(4):
                    while (name := (await gateway.status(session.entry(LOG, end, end + 5)))[0]) != "OK":
                        assert name == "UNAVAILABLE"
                        names.append(name)
                        await asyncio.sleep(0.01)
                    end += 5
                assert end < len(LOG), "no append met a Redis that is away"
                server.wait_ready(30)
        answer = await gateway.get(session)
        assert list(answer.tokens) == LOG[:end]
        assert answer.state.digest == session.digests(LOG[:end])[-1]
    await healthy(port, SERVING)


async def test_silent_redis_is_noticed_within_its_timeout(server: EmbeddedRedis, service: Service) -> None:
    port = service.port
    async with gateway_on(port) as gateway:
        session = await gateway.create(Session())
        os.kill(server.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            assert (await gateway.status(session.entry(LOG, 0, 5)))[0] == "UNAVAILABLE"
            error = await error_of(gateway.get(session))
            assert isinstance(error, Unavailable)
            assert error.retry_after
            assert time.monotonic() - began < 10
            await healthy(port, NOT_SERVING)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        await healthy(port, SERVING)
        # The stopped Redis may have read the first one; the same append then compares equal.
        assert (await gateway.status(session.entry(LOG, 0, 5)))[0] == "OK"
        assert list((await gateway.get(session)).tokens) == LOG[:5]
    assert "no answer within 0.5 s" in service.text


async def test_kvstore_without_redis_is_not_serving_and_starts_by_itself(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path / "redis")
    server.start()
    server.stop()
    service = Service("services.kvstore", redis_url=server.url)
    try:
        port, _ = service.bound()
        assert await health_of(port) == NOT_SERVING
        assert service.lines == []
        server.start()
        await soon(lambda: service.lines, what="the ready line")
        assert service.lines[0].split()[:3] == ["ready", "kvstore", str(port)]
        assert await health_of(port) == SERVING
    finally:
        service.stop()
        server.stop()


async def test_redis_that_evicts_is_refused_with_a_reason(own_server: EmbeddedRedis) -> None:
    with client_of(own_server) as client:
        client.config_set("maxmemory-policy", "allkeys-lru")
        service = Service("services.kvstore", redis_url=own_server.url)
        try:
            port, _ = service.bound()
            await soon(lambda: "set noeviction" in service.text, what="the reason in the log")
            assert await health_of(port) == NOT_SERVING
            assert service.lines == []
            client.config_set("maxmemory-policy", "noeviction")
            await healthy(port, SERVING)
        finally:
            service.stop()


async def test_replica_is_refused_because_it_takes_no_writes(server: EmbeddedRedis, service: Service) -> None:
    port = service.port
    async with gateway_on(port) as gateway:
        session = await gateway.create(Session())
        with client_of(server) as client:
            client.replicaof("127.0.0.1", 1)
            assert (await gateway.status(session.entry(LOG, 0, 2)))[0] == "UNAVAILABLE"
            await healthy(port, NOT_SERVING)
            client.replicaof("NO", "ONE")
        await healthy(port, SERVING)
        assert (await gateway.status(session.entry(LOG, 0, 2)))[0] == "OK"


async def test_full_memory_refuses_new_sessions_and_holds_running_ones(server: EmbeddedRedis, service: Service) -> None:
    """Nothing is half applied: with the script refused before its first write, the same append goes through later."""
    async with gateway_on(service.port) as gateway:
        session = await gateway.create(Session())
        with client_of(server) as client:
            client.config_set("maxmemory", "1")
            refused = await error_of(gateway.stub.CreateSession(Session().creation()))
            assert isinstance(refused, Overloaded)
            assert int(refused.metadata["queued"]) > int(refused.metadata["limit"]) == 1
            before = client.hgetall(f"hedgerow:{{{session.session_id}}}:record")
            assert (await gateway.status(session.entry(LOG, 0, 2)))[0] == "UNAVAILABLE"
            assert client.hgetall(f"hedgerow:{{{session.session_id}}}:record") == before
            doomed = pb.KvStoreServiceDeleteSessionRequest(session_id=session.session_id)
            client.config_set("maxmemory", "0")
            assert (await gateway.status(session.entry(LOG, 0, 2)))[0] == "OK"
            client.config_set("maxmemory", "1")
            assert (await gateway.stub.DeleteSession(doomed)).existed  # what frees memory must work
            client.config_set("maxmemory", "0")


async def test_full_memory_costs_no_lease_and_no_cancel(server: EmbeddedRedis, service: Service) -> None:
    """A gateway whose renewals fail loses its sessions; none of this writes more than a few bytes."""
    async with gateway_on(service.port) as gateway:
        stub, session, other = gateway.stub, await gateway.create(Session()), await gateway.create(Session())
        lease = common_pb2.Lease(epoch=1, owner=session.owner)
        named: dict[str, Any] = {"session_id": session.session_id, "lease": lease, "birth": session.birth}
        with client_of(server) as client:
            client.config_set("maxmemory", "1")
            try:
                await stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner))
                assert (await stub.MarkCancel(pb.MarkCancelRequest(session_id=session.session_id))).was_running
                renewed = await stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner))
                assert list(renewed.cancelled_sessions) == [session.session_id]
                lost = Session()
                repair = pb.AcquireLeaseRequest(
                    session_id=lost.session_id, owner=lost.owner, record=lost.creation().record, digest=bytes(16)
                )
                assert isinstance(await error_of(stub.AcquireLease(repair)), Unavailable)
                refused = Session(owner=session.owner)
                assert isinstance(await error_of(stub.CreateSession(refused.creation())), Overloaded)
                await stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner))
                members = client.zrange(owner_keys(session.owner).sessions, 0, -1)
                assert members == [session.session_id.encode()], "a refused creation leaves nothing"
                await stub.ReleaseLease(pb.ReleaseLeaseRequest(**named))
                claim = pb.AcquireLeaseRequest(
                    session_id=session.session_id, owner=session.owner, only_expired=True, birth=session.birth
                )
                assert (await stub.AcquireLease(claim)).lease.epoch == 2
                named["lease"] = common_pb2.Lease(epoch=2, owner=session.owner)
                finish = common_pb2.FINISH_REASON_CANCELLED
                closed = await stub.CloseSession(pb.CloseSessionRequest(**named, finish_reason=finish))
                assert closed.state.finish_reason == finish
            finally:
                client.config_set("maxmemory", "0")
        assert (await gateway.status(other.entry(LOG, 0, 2)))[0] == "OK"


async def test_sigterm_answers_what_is_in_flight_then_ends_streams_and_exits_0(own_server: EmbeddedRedis) -> None:
    service = Service("services.kvstore", redis_url=own_server.url, grace=40)
    port = service.port
    async with gateway_on(port) as gateway, grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        session = await gateway.create(Session())
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        tail = gateway.stub.Tail(pb.TailRequest(session_id=session.session_id))
        committed = 0

        async def append_on() -> None:
            nonlocal committed
            while True:
                assert (await gateway.status(session.entry(LOG, committed, committed + 1)))[0] == "OK"
                committed += 1

        appending = asyncio.create_task(append_on())
        await soon(lambda: committed >= 5)
        began = time.monotonic()
        service.process.send_signal(signal.SIGTERM)
        refused = [await error_of(appending)]
        assert (await watch.read()).status == NOT_SERVING
        refused.append(await error_of(asyncio.create_task(drained(tail))))
    assert [type(error) for error in refused] == [Unavailable, Unavailable]
    # a write that meets the end of its call loses the status' text inside gRPC; a reader always gets it
    assert "draining" in refused[0].message or refused[0].message == "Internal error from Core"
    assert "draining" in refused[1].message
    assert service.wait() == 0
    assert time.monotonic() - began < 15, "open streams must not hold the drain for its whole grace"


async def drained(call: Any) -> list[Any]:
    return [message async for message in call]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"redis_url": "redis://:hunter2@[bad"}, "HEDGEROW_REDIS_URL"),
        ({"redis_url": "redis://x", "listen": "nowhere:77777"}, "HEDGEROW_LISTEN"),
    ],
)
def test_bad_configuration_ends_the_process_with_the_variable(settings: dict[str, str], words: str) -> None:
    service = Service("services.kvstore", **settings)
    assert service.wait() != 0
    assert words in service.text
    assert "hunter2" not in service.text
    assert "Traceback" not in service.text


@pytest.mark.parametrize("name", list(SERVERS))
async def test_cluster_takes_every_call(tmp_path: Path, name: str) -> None:
    """A cluster refuses a script whose keys lie in two slots, or that touches a key it did not name."""
    settings = {"cluster-enabled": "yes", "cluster-port": str(next(free_ports(1)))}
    with EmbeddedRedis(tmp_path / "redis", binary=SERVERS[name], settings=settings) as server:
        await every_call_on(server)


async def every_call_on(server: EmbeddedRedis) -> None:
    with client_of(server) as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        eventually(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok", 10, "the cluster")
    service = Service("services.kvstore", redis_url=server.url)
    try:
        async with gateway_on(service.port) as gateway:
            await calls_of_every_kind(gateway)
    finally:
        service.stop()


async def calls_of_every_kind(gateway: Gateway) -> None:
    stub, sessions = gateway.stub, [await gateway.create(Session()) for _ in range(8)]
    first, second = sessions[:2]
    for start, end in ((0, 4), (2, 9), (1, 12)):
        results = await gateway.append(*(session.entry(LOG, start, end) for session in sessions))
        assert {result.status for result in results} == {pb.APPEND_STATUS_OK}
    await stub.RenewOwner(pb.RenewOwnerRequest(owner=first.owner))
    await stub.MarkCancel(pb.MarkCancelRequest(session_id=first.session_id))
    renewed = await stub.RenewOwner(pb.RenewOwnerRequest(owner=first.owner))
    assert list(renewed.cancelled_sessions) == [first.session_id]
    lease = (await stub.AcquireLease(pb.AcquireLeaseRequest(session_id=second.session_id, owner=first.owner))).lease
    closed = await stub.CloseSession(
        pb.CloseSessionRequest(
            session_id=second.session_id,
            lease=lease,
            birth=second.birth,
            finish_reason=common_pb2.FINISH_REASON_CANCELLED,
        )
    )
    assert closed.state.length == 12
    last = [message async for message in stub.Tail(pb.TailRequest(session_id=second.session_id))][-1]
    assert last.state == closed.state
    assert (await stub.DeleteSession(pb.KvStoreServiceDeleteSessionRequest(session_id=first.session_id))).existed
    blocks = [bytes([i]) * 16 for i in range(20)]
    await stub.PutPrefixes(pb.PutPrefixesRequest(verifier="v", block_hashes=blocks, ttl_ms=5000))
    assert (await stub.FindPrefix(pb.FindPrefixRequest(block_hashes=blocks))).holders[0].blocks == 20
