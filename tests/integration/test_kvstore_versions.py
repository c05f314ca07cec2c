"""Data that another version of the kvstore wrote: older is read, newer is refused by every call and left as it is."""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
import redis

from hedgerow.errors import Unsupported
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from services.kvstore.keys import owner_keys, session_keys
from tests.kvstore_calls import Gateway, Session, error_of, gateway_on
from tests.polling import soon
from tests.redis_servers import Service, inspector, kvstore, redis_server  # noqa: F401  (fixtures)

LOG = list(range(300, 330))
STOP = common_pb2.FINISH_REASON_STOP


@pytest_asyncio.fixture
async def gateway(kvstore: Service) -> AsyncIterator[Gateway]:  # noqa: F811
    async with gateway_on(kvstore.port) as connected:
        yield connected


def lease(session: Session) -> common_pb2.Lease:
    return common_pb2.Lease(epoch=session.epoch, owner=session.owner)


def acquisition(session: Session, **fields: Any) -> pb.AcquireLeaseRequest:
    return pb.AcquireLeaseRequest(session_id=session.session_id, owner=secrets.token_bytes(16), **fields)


async def tailed(gateway: Gateway, session: Session) -> list[Any]:
    return [message async for message in gateway.stub.Tail(pb.TailRequest(session_id=session.session_id))]


CALLS: dict[str, Callable[[Gateway, Session], Awaitable[Any]]] = {
    "CreateSession": lambda gateway, s: gateway.stub.CreateSession(s.creation()),
    "AcquireLease": lambda gateway, s: gateway.stub.AcquireLease(acquisition(s)),
    "AcquireLease, only expired": lambda gateway, s: gateway.stub.AcquireLease(acquisition(s, only_expired=True)),
    "AcquireLease, repair": lambda gateway, s: gateway.stub.AcquireLease(
        acquisition(s, record=s.creation().record, digest=s.creation().digest, birth=s.birth)
    ),
    "ReleaseLease": lambda gateway, s: gateway.stub.ReleaseLease(
        pb.ReleaseLeaseRequest(session_id=s.session_id, lease=lease(s), birth=s.birth)
    ),
    "GetSession": lambda gateway, s: gateway.get(s),
    "Tail": tailed,
    "CloseSession": lambda gateway, s: gateway.stub.CloseSession(
        pb.CloseSessionRequest(session_id=s.session_id, lease=lease(s), birth=s.birth, finish_reason=STOP)
    ),
    "MarkCancel": lambda gateway, s: gateway.stub.MarkCancel(pb.MarkCancelRequest(session_id=s.session_id)),
    "DeleteSession": lambda gateway, s: gateway.stub.DeleteSession(
        pb.KvStoreServiceDeleteSessionRequest(session_id=s.session_id, birth=s.birth)
    ),
}


def contents(client: redis.Redis, session: Session) -> list[Any]:
    return [client.dump(key) for key in session_keys(session.session_id)]


@pytest_asyncio.fixture
async def newer(gateway: Gateway, inspector: redis.Redis) -> Session:  # noqa: F811
    """A session that runs and carries a mark, as a version after this one left it."""
    session = await gateway.create(Session())
    assert (await gateway.status(session.entry(LOG, 0, 4)))[0] == "OK"
    await gateway.stub.MarkCancel(pb.MarkCancelRequest(session_id=session.session_id))
    inspector.hset(session_keys(session.session_id)[0], "format", "2")  # type: ignore[arg-type]
    return session


@pytest.mark.parametrize("name", CALLS)
async def test_newer_data_is_refused_by_name_and_not_touched(
    gateway: Gateway,
    newer: Session,
    inspector: redis.Redis,  # noqa: F811
    name: str,
) -> None:
    before = contents(inspector, newer)
    error = await error_of(CALLS[name](gateway, newer))
    assert isinstance(error, Unsupported)
    assert "its data was written by another version: FORMAT 2 is not 1" in error.message
    assert contents(inspector, newer) == before


async def test_newer_data_holds_up_no_other_session(
    gateway: Gateway,
    newer: Session,
    inspector: redis.Redis,  # noqa: F811
    kvstore: Service,  # noqa: F811
) -> None:
    """It shares an append, a renewal, a watch and a sweep with sessions of this version."""
    other = await gateway.create(Session(owner=newer.owner))
    await gateway.stub.MarkCancel(pb.MarkCancelRequest(session_id=other.session_id))
    before = contents(inspector, newer)
    results = await gateway.append(newer.entry(LOG, 4, 6), other.entry(LOG, 0, 2))
    assert [result.status for result in results] == [pb.APPEND_STATUS_UNAVAILABLE, pb.APPEND_STATUS_OK]
    await soon(lambda: "FORMAT 2 is not 1" in kvstore.text)
    swept = await gateway.stub.ListExpired(pb.ListExpiredRequest())
    assert other.session_id in {each.session_id for each in swept.sessions}
    assert newer.session_id not in {each.session_id for each in swept.sessions}
    assert inspector.zscore(owner_keys(newer.owner).sessions, newer.session_id) is not None
    watch = gateway.stub.WatchCancels(pb.WatchCancelsRequest(owner=newer.owner))
    async with asyncio.timeout(10):
        assert list((await watch.read()).session_ids) == [other.session_id]
    watch.cancel()
    renewed = await gateway.stub.RenewOwner(pb.RenewOwnerRequest(owner=newer.owner))
    assert list(renewed.cancelled_sessions) == [other.session_id]
    assert contents(inspector, newer) == before
    assert inspector.sismember(owner_keys(newer.owner).cancelled, newer.session_id)  # type: ignore[arg-type]


@pytest.fixture
def older(inspector: redis.Redis) -> Session:  # noqa: F811
    """A session with LOG[:6] in two chunks, exactly as the first version (71fa982) wrote it."""
    session = Session()
    record, log, mark = session_keys(session.session_id)
    creation, digests = session.creation(), session.digests(LOG[:6])
    creation.record.detach = True
    creation.record.deadline_unix_ms = 9_000_000_000_000
    fields: dict[Any, Any] = {
        "record": creation.record.SerializeToString(), "format": "1", "birth": session.birth, "epoch": 1,
        "owner": session.owner, "length": 6, "digest": digests[6], "digest0": digests[0], "finish": 0, "usage": "",
        "matched_stop": "", "matched_token": "", "cancel": 0, "ttl": 3_600_000, "tombstone_ttl": 86_400_000,
    }  # fmt: skip
    inspector.hset(record, mapping=fields)  # type: ignore[arg-type]
    for start, end in ((0, 4), (4, 6)):
        tokens = struct.pack(f"<{end - start}I", *LOG[start:end])
        inspector.xadd(log, {"tokens": tokens, "digest": digests[end]}, id=f"{start + 1}-0")  # type: ignore[arg-type]
    inspector.pexpire(record, 3_825_000)
    inspector.pexpire(log, 3_825_000)
    inspector.set(mark, "live", px=90_225_000)
    return session


async def test_older_data_is_read_appended_to_and_ended(gateway: Gateway, older: Session) -> None:
    stored = await gateway.get(older)
    assert list(stored.tokens) == LOG[:6]
    assert not stored.state.HasField("best_effort_from")
    name, state = await gateway.status(older.entry(LOG, 4, 9))
    assert (name, state.length, state.digest) == ("OK", 9, older.digests(LOG[:9])[-1])
    assert (await gateway.stub.MarkCancel(pb.MarkCancelRequest(session_id=older.session_id))).was_running
    assert (await gateway.stub.CreateSession(older.creation())).created, "the same creation once more"
    name, state = await gateway.status(older.entry(LOG, 9, 10, finish_reason=STOP))
    assert (name, state.finish_reason, state.cancel_marked) == ("OK", STOP, True)
    assert [list(message.tokens) for message in await tailed(gateway, older)] == [LOG[:10]]


async def test_older_session_is_released_found_and_taken_over(gateway: Gateway, older: Session) -> None:
    release = pb.ReleaseLeaseRequest(session_id=older.session_id, lease=lease(older), birth=older.birth)
    await gateway.stub.ReleaseLease(release)
    swept = await gateway.stub.ListExpired(pb.ListExpiredRequest())
    (found,) = [each for each in swept.sessions if each.session_id == older.session_id]
    assert (found.detach, found.deadline_unix_ms, found.state.length) == (True, 9_000_000_000_000, 6)
    granted = await gateway.stub.AcquireLease(acquisition(older, only_expired=True))
    assert (granted.lease.epoch, granted.state.length) == (2, 6)
