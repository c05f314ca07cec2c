"""WAIT: what a replica has not got does not count, however often it is sent; and when it has, it does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.errors import Unavailable
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from tests.kvstore_calls import Session, error_of, gateway_on, soon_it_is
from tests.polling import soon
from tests.redis_groups import client_of, follow, paused, servers
from tests.redis_servers import SERVERS, Service, overheard, scripts_on

LOG = list(range(400, 460))
STOP = common_pb2.FINISH_REASON_STOP
WAIT_MS = 250


@pytest.fixture(scope="module", params=list(SERVERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EmbeddedRedis]]:
    """A primary and its replica."""
    with servers(tmp_path_factory.mktemp("redis"), 2, SERVERS[request.param], {}) as both:
        follow(both[1], both[0])
        yield both


@pytest.fixture(scope="module")
def service(pair: list[EmbeddedRedis]) -> Iterator[Service]:
    started = Service("services.kvstore", redis_url=pair[0].url, redis_wait_replicas=1, redis_wait_ms=WAIT_MS)
    yield started
    started.stop()


async def test_append_counts_once_a_replica_has_it(pair: list[EmbeddedRedis], service: Service) -> None:
    async with gateway_on(service.port) as gateway:
        sessions = [await gateway.create(Session()) for _ in range(5)]
        results = await gateway.append(*(each.entry(LOG, 0, 4) for each in sessions))
        assert {result.status for result in results} == {pb.APPEND_STATUS_OK}
        with client_of(pair[1]) as replica:
            for each in sessions:
                assert replica.hget(f"hedgerow:{{{each.session_id}}}:record", "length") == b"4"


async def test_shortfall_answers_unavailable_however_often_it_is_sent_and_until_a_replica_has_it(
    pair: list[EmbeddedRedis], service: Service
) -> None:
    """A repeated append changes nothing. WAIT after nothing was written on a connection answers at once, and would
    count replicas that never saw the append.
    """
    async with gateway_on(service.port) as gateway:
        sessions = [await gateway.create(Session()) for _ in range(3)]
        entries = [each.entry(LOG, 0, 6) for each in sessions]
        with paused(pair[1]):
            for _ in range(3):
                results = await gateway.append(*entries)
                assert {result.status for result in results} == {pb.APPEND_STATUS_UNAVAILABLE}
            # the connections that other callers use meanwhile have nothing of the append in them either
            async with gateway_on(service.port) as other:
                outcomes = await asyncio.gather(*(mine.append(*entries) for mine in (gateway, other)))
            assert {r.status for results in outcomes for r in results} == {pb.APPEND_STATUS_UNAVAILABLE}
        async with asyncio.timeout(10):
            while pb.APPEND_STATUS_UNAVAILABLE in [result.status for result in results]:
                results = await gateway.append(*entries)
        assert {result.status for result in results} == {pb.APPEND_STATUS_OK}
        for each, result in zip(sessions, results, strict=True):
            assert (result.state.length, result.state.digest) == (6, each.digests(LOG[:6])[-1])
            assert list((await gateway.get(each)).tokens) == LOG[:6]
            with client_of(pair[1]) as replica:
                assert replica.hget(f"hedgerow:{{{each.session_id}}}:record", "length") == b"6"
    assert f"0 of 1 replicas have it after {WAIT_MS} ms" in service.text


async def test_finish_of_a_shortfall_is_kept_and_repeated(pair: list[EmbeddedRedis], service: Service) -> None:
    async with gateway_on(service.port) as gateway:
        session = await gateway.create(Session())
        last = session.entry(LOG, 0, 3, finish_reason=STOP, usage=common_pb2.Usage(steps=2))
        with paused(pair[1]):
            assert (await gateway.status(last))[0] == "UNAVAILABLE"
        async with asyncio.timeout(10):
            while (answer := await gateway.status(last))[0] != "OK":
                assert answer[0] == "UNAVAILABLE"
        assert (answer[1].finish_reason, answer[1].usage.steps, answer[1].length) == (STOP, 2, 3)


async def test_other_changes_wait_too_and_may_be_repeated(pair: list[EmbeddedRedis], service: Service) -> None:
    async with gateway_on(service.port) as gateway:
        session, gone = Session(), await gateway.create(Session())
        doomed = pb.KvStoreServiceDeleteSessionRequest(session_id=gone.session_id)
        with paused(pair[1]):
            assert isinstance(await error_of(gateway.stub.CreateSession(session.creation())), Unavailable)
            assert isinstance(await error_of(gateway.stub.CreateSession(session.creation())), Unavailable)
            assert isinstance(await error_of(gateway.stub.DeleteSession(doomed)), Unavailable)
            await gateway.stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner))  # liveness needs no replica
        created = await soon_it_is(pb.CreateSessionResponse, lambda: gateway.stub.CreateSession(session.creation()))
        assert (created.created, created.lease.epoch) == (True, 1)


async def test_tokens_that_no_replica_has_are_told_to_nobody(pair: list[EmbeddedRedis], service: Service) -> None:
    """Another gateway follows the log, or reads it for a client that comes back."""
    async with gateway_on(service.port) as gateway:
        session = await gateway.create(Session())
        assert (await gateway.status(session.entry(LOG, 0, 3)))[0] == "OK"
        following = gateway.stub.Tail(pb.TailRequest(session_id=session.session_id))
        assert list((await following.read()).tokens) == LOG[:3]
        with paused(pair[1]):
            assert (await gateway.status(session.entry(LOG, 3, 5)))[0] == "UNAVAILABLE"
            assert isinstance(await error_of(following.read()), Unavailable)
            assert isinstance(await error_of(gateway.get(session)), Unavailable)
            for nothing in ({"state_only": True}, {"from_offset": 2**31 - 1}):  # asked by who wants to know whose it is
                request = pb.KvStoreServiceGetSessionRequest(session_id=session.session_id, **nothing)
                assert (await gateway.stub.GetSession(request)).state.owner == session.owner
        again = await soon_it_is(
            pb.TailResponse,
            lambda: gateway.stub.Tail(pb.TailRequest(session_id=session.session_id, from_offset=3)).read(),
        )
        assert list(again.tokens) == LOG[3:5]
        assert list((await gateway.get(session)).tokens) == LOG[:5]


async def test_waiting_costs_no_further_round_trip(pair: list[EmbeddedRedis], service: Service) -> None:
    async with gateway_on(service.port) as gateway:
        sessions = [await gateway.create(Session()) for _ in range(32)]
        await gateway.append(*(each.entry(LOG, 0, 4) for each in sessions))
        with client_of(pair[0]) as client:
            before = client.info("stats")["total_reads_processed"]
            with overheard(client) as heard:
                for start in range(4, 44, 4):
                    results = await gateway.append(*(each.entry(LOG, start, start + 4) for each in sessions))
                    assert {result.status for result in results} == {pb.APPEND_STATUS_OK}
                reads = client.info("stats")["total_reads_processed"] - before
        ours = scripts_on([each.session_id for each in sessions], heard)
        said = {who: [(i in ours, word) for i, (by, word) in enumerate(heard) if by == who] for who, _ in heard}
        # what follows a message on its connection: the write that WAIT is to cover, and one WAIT
        after = [
            (each[i + 1][1].rpartition(":")[2], each[i + 2][1])
            for each in said.values()
            for i in range(len(each) - 2)
            if each[i][0] and each[i + 1][1].endswith(":beat")
        ]
        assert (len(ours), after) == (10 * 32, [("beat", f"WAIT 1 {WAIT_MS}")] * 10)
        # ten messages; the replica's acknowledgements, looks of health and ours are reads too. Entry by entry: 320
        assert reads < 160


async def test_full_memory_holds_what_frees_it_no_longer_than_without_replicas(
    pair: list[EmbeddedRedis], service: Service
) -> None:
    async with gateway_on(service.port) as gateway:
        session = await gateway.create(Session())
        with client_of(pair[0]) as client:
            client.config_set("maxmemory", "1")
            try:
                assert (await gateway.status(session.entry(LOG, 0, 2)))[0] == "UNAVAILABLE"
                doomed = pb.KvStoreServiceDeleteSessionRequest(session_id=session.session_id)
                assert (await gateway.stub.DeleteSession(doomed)).existed
            finally:
                client.config_set("maxmemory", "0")


async def test_kvstore_without_its_replicas_is_not_serving_and_says_why(pair: list[EmbeddedRedis]) -> None:
    service = Service("services.kvstore", redis_url=pair[0].url, redis_wait_replicas=2)
    try:
        service.bound()
        await soon(lambda: "1 replicas are connected, and redis_wait_replicas is 2" in service.text)
        assert service.lines == []
    finally:
        service.stop()
