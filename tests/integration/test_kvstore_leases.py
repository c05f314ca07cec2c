"""Leases that are given up, that end, and that are repaired; the sweep that finds sessions without an owner."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis

from hedgerow.errors import Fenced, InvalidRequest, SessionDeleted, SessionExpired, SessionUnknown
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from services.kvstore.keys import (
    SHARDS,
    owner_keys,
    owner_shard,
    owners_key,
    released_key,
    session_keys,
    session_shard,
)
from tests.kvstore_calls import Gateway, Session, error_of, gateway_on, soon_it_is
from tests.redis_servers import Service, inspector, kvstore, redis_server  # noqa: F401  (fixtures)

LOG = list(range(900, 940))
NOBODY = bytes(16)
STOP = common_pb2.FINISH_REASON_STOP


@pytest_asyncio.fixture
async def gateway(kvstore: Service) -> AsyncIterator[Gateway]:  # noqa: F811
    async with gateway_on(kvstore.port) as connected:
        yield connected


@pytest_asyncio.fixture
async def session(gateway: Gateway) -> Session:
    """A running session with LOG[:6] committed, whose owner lives."""
    created = await gateway.create(Session())
    await renew(gateway, created.owner)
    assert (await gateway.status(created.entry(LOG, 0, 6)))[0] == "OK"
    return created


async def renew(gateway: Gateway, owner: bytes, ttl_ms: int = 600_000) -> None:
    await gateway.stub.RenewOwner(pb.RenewOwnerRequest(owner=owner, ttl_ms=ttl_ms))


def release(session: Session, **fields: Any) -> pb.ReleaseLeaseRequest:
    request = pb.ReleaseLeaseRequest(
        session_id=session.session_id,
        lease=common_pb2.Lease(epoch=session.epoch, owner=session.owner),
        birth=session.birth,
    )
    request.MergeFrom(pb.ReleaseLeaseRequest(**fields))
    return request


def acquire(session: Session, owner: bytes, **options: Any) -> pb.AcquireLeaseRequest:
    return pb.AcquireLeaseRequest(session_id=session.session_id, owner=owner, **options)


def repair(session: Session, floor: int, **options: Any) -> pb.AcquireLeaseRequest:
    """As a living owner writes again what the store has lost."""
    creation = session.creation()
    fields = {"birth": session.birth, "record": creation.record, "digest": creation.digest} | options
    return acquire(session, session.owner, epoch_floor=floor, **fields)


async def expired(gateway: Gateway, limit: int = 0) -> list[pb.ExpiredSession]:
    """A whole sweep."""
    found, cursor = [], ""
    while True:
        page = await gateway.stub.ListExpired(pb.ListExpiredRequest(limit=limit, cursor=cursor))
        assert len(page.sessions) <= (limit or 1024)
        found += page.sessions
        cursor = page.cursor
        if not cursor:
            return found


async def named(gateway: Gateway, session: Session) -> pb.ExpiredSession | None:
    return next((each for each in await expired(gateway) if each.session_id == session.session_id), None)


async def test_released_session_is_granted_at_once_and_fences_who_released_it(
    gateway: Gateway, session: Session
) -> None:
    heir = secrets.token_bytes(16)
    for _ in range(2):  # the answer to the first may have been lost
        released = (await gateway.stub.ReleaseLease(release(session))).state
        assert (released.owner, released.epoch, released.length) == (NOBODY, 1, 6)
    assert (await gateway.status(session.entry(LOG, 6, 8)))[0] == "FENCED"
    granted = await gateway.stub.AcquireLease(acquire(session, heir, only_expired=True))
    assert granted.lease == common_pb2.Lease(epoch=2, owner=heir)
    assert isinstance(await error_of(gateway.stub.ReleaseLease(release(session))), Fenced)
    assert (await gateway.get(session)).state.owner == heir


async def test_release_is_fenced_like_every_change(gateway: Gateway, session: Session) -> None:
    lease, other = common_pb2.Lease, secrets.token_bytes(16)
    for held in (lease(epoch=1, owner=other), lease(epoch=2, owner=session.owner)):
        assert isinstance(await error_of(gateway.stub.ReleaseLease(release(session, lease=held))), Fenced)
    wrong = await error_of(gateway.stub.ReleaseLease(release(session, birth=other)))
    assert isinstance(wrong, SessionDeleted)
    assert isinstance(await error_of(gateway.stub.ReleaseLease(release(Session()))), SessionUnknown)
    assert (await gateway.get(session)).state.owner == session.owner
    assert await named(gateway, session) is None


async def test_released_session_is_listed_until_somebody_takes_it(gateway: Gateway, session: Session) -> None:
    assert await named(gateway, session) is None
    await gateway.stub.ReleaseLease(release(session))
    found = await named(gateway, session)
    assert found is not None
    assert (found.state.owner, found.state.length, found.detach, found.deadline_unix_ms) == (NOBODY, 6, True, 0)
    await gateway.stub.AcquireLease(acquire(session, session.owner, only_expired=True))
    assert await named(gateway, session) is None


async def test_sessions_of_a_dead_owner_are_listed_with_what_a_sweep_must_know(gateway: Gateway) -> None:
    owner, living = secrets.token_bytes(16), secrets.token_bytes(16)
    sessions = [Session(owner=owner) for _ in range(5)]
    for i, each in enumerate(sessions):
        request = each.creation()
        request.record.detach, request.record.deadline_unix_ms = i % 2 == 0, 1000 * i
        assert (await gateway.stub.CreateSession(request)).created
    kept, ended, taken, gone, running = sessions
    await gateway.append(kept.entry(LOG, 0, 3), ended.entry(LOG, 0, 3, finish_reason=STOP))
    await gateway.stub.MarkCancel(pb.MarkCancelRequest(session_id=running.session_id))
    await renew(gateway, owner, 300)
    await renew(gateway, living)
    assert {each.session_id for each in sessions}.isdisjoint(each.session_id for each in await expired(gateway))
    await gateway.stub.AcquireLease(acquire(taken, living))
    await gateway.stub.DeleteSession(pb.KvStoreServiceDeleteSessionRequest(session_id=gone.session_id))

    async def found() -> dict[str, pb.ExpiredSession]:
        ids = {each.session_id for each in sessions}
        return {each.session_id: each for each in await expired(gateway) if each.session_id in ids}

    async with asyncio.timeout(10):
        while not (told := await found()):  # each look is a call of its own
            pass
    assert sorted(told) == sorted([kept.session_id, running.session_id])
    assert (told[kept.session_id].detach, told[kept.session_id].deadline_unix_ms) == (True, 0)
    assert (told[kept.session_id].state.owner, told[kept.session_id].state.length) == (owner, 3)
    assert (told[running.session_id].detach, told[running.session_id].deadline_unix_ms) == (True, 4000)
    assert told[running.session_id].state.cancel_marked


async def test_session_whose_owner_never_renewed_is_listed(gateway: Gateway) -> None:
    """A gateway that died right after its first creation."""
    orphan = await gateway.create(Session())
    assert await named(gateway, orphan) is not None
    await renew(gateway, orphan.owner)
    assert await named(gateway, orphan) is None


@pytest.mark.parametrize("limit", [1, 3, 7])
async def test_pages_of_any_size_tell_every_session_once(gateway: Gateway, limit: int) -> None:
    owners = [secrets.token_bytes(16) for _ in range(4)]
    sessions = [await gateway.create(Session(owner=owners[i % 4])) for i in range(20)]
    for each in sessions[:6]:
        await gateway.stub.ReleaseLease(release(each))
    ids = [each.session_id for each in await expired(gateway, limit)]
    assert len(ids) == len(set(ids))
    assert set(ids) >= {each.session_id for each in sessions}


async def test_indexes_forget_what_has_ended_without_a_sweep(
    gateway: Gateway,
    session: Session,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    """An owner that lives for weeks must not remember every session that it ever had."""
    key = owner_keys(session.owner).sessions
    closed, deleted, released = [await gateway.create(Session(owner=session.owner)) for _ in range(3)]
    members = {each.session_id.encode() for each in (session, closed, deleted, released)}
    assert set(inspector.zrange(key, 0, -1)) == members
    await gateway.append(session.entry(LOG, 6, 8, finish_reason=STOP))
    close = pb.CloseSessionRequest(
        session_id=closed.session_id, lease=release(closed).lease, birth=closed.birth, finish_reason=STOP
    )
    await gateway.stub.CloseSession(close)
    await gateway.stub.DeleteSession(pb.KvStoreServiceDeleteSessionRequest(session_id=deleted.session_id))
    await gateway.stub.ReleaseLease(release(released))
    await renew(gateway, session.owner)
    assert inspector.zrange(key, 0, -1) == []
    assert inspector.zscore(released_key(session_shard(released.session_id)), released.session_id) is not None


async def test_refused_calls_leave_nothing_in_an_index_and_take_nothing_out(
    gateway: Gateway,
    session: Session,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    other = secrets.token_bytes(16)
    same_key_again = Session(session_id=session.session_id, owner=session.owner)
    assert not (await gateway.stub.CreateSession(same_key_again.creation())).created
    assert not (await gateway.stub.CreateSession(Session(session.prompt, session.session_id).creation())).created
    await error_of(gateway.stub.AcquireLease(acquire(session, other, birth=other)))
    await error_of(gateway.stub.AcquireLease(acquire(Session(), other)))
    await error_of(gateway.stub.AcquireLease(acquire(session, session.owner, birth=other)))
    await renew(gateway, session.owner)
    assert inspector.zrange(owner_keys(session.owner).sessions, 0, -1) == [session.session_id.encode()]
    assert inspector.zrange(owner_keys(other).sessions, 0, -1) == []


async def test_a_release_that_comes_too_late_takes_its_session_out_of_the_index(
    gateway: Gateway,
    session: Session,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    """It stayed in the index of its former owner for as long as that lived."""
    other, key = secrets.token_bytes(16), owner_keys(session.owner).sessions
    await gateway.stub.AcquireLease(acquire(session, other))
    assert isinstance(await error_of(gateway.stub.ReleaseLease(release(session))), Fenced)
    await renew(gateway, session.owner)
    assert inspector.zrange(key, 0, -1) == []
    assert inspector.zrange(owner_keys(other).sessions, 0, -1) == [session.session_id.encode()]
    assert inspector.zscore(released_key(session_shard(session.session_id)), session.session_id) is None


async def test_stale_members_are_dropped_when_found_but_not_young_ones(
    gateway: Gateway,
    session: Session,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    """A young one may stand for a session that is about to be created."""
    owner, now = secrets.token_bytes(16), int(time.time() * 1e6)
    sessions, owners = owner_keys(owner).sessions, owners_key(owner_shard(owner))
    old, young = now - 600_000_000, now - 1_000_000
    inspector.zadd(sessions, {"old": old, "young": young, session.session_id: old - 1})
    inspector.zadd(owners, {owner.hex(): old})
    released = released_key(session_shard(session.session_id))
    inspector.zadd(released, {session.session_id: old})
    assert {"old", "young", session.session_id}.isdisjoint(each.session_id for each in await expired(gateway))
    assert inspector.zrange(sessions, 0, -1) == [b"young"]
    assert inspector.zscore(released, session.session_id) is None
    assert inspector.zscore(owners, owner.hex()) is not None
    inspector.delete(sessions)
    await expired(gateway)
    assert inspector.zscore(owners, owner.hex()) is None


async def test_no_index_is_without_an_end(
    gateway: Gateway,
    session: Session,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    long = await gateway.create(Session(owner=session.owner), ttl_ms=10 * 86_400_000)
    await gateway.stub.ReleaseLease(release(session))
    owner = session.owner
    for key in (owner_keys(owner).sessions, owners_key(owner_shard(owner))):
        assert inspector.pttl(key) > 10 * 86_400_000, "an index outlives its sessions"
    assert inspector.pttl(released_key(session_shard(session.session_id))) > 10 * 86_400_000
    assert long.session_id.encode() in inspector.zrange(owner_keys(owner).sessions, 0, -1)


async def test_lost_session_is_written_again_above_the_owners_epoch(
    gateway: Gateway,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    """The store forgot everything: record, log, and index."""
    session = await gateway.create(Session(prompt=[5, 6, 7]))
    await gateway.append(session.entry(LOG, 0, 8))
    inspector.flushall()
    session.epoch = 7
    assert (await gateway.status(session.entry(LOG, 8, 10)))[0] == "FORGOTTEN"
    assert isinstance(await error_of(gateway.stub.AcquireLease(acquire(session, session.owner))), SessionUnknown)
    answer = await gateway.stub.AcquireLease(repair(session, 7))
    assert answer.lease == common_pb2.Lease(epoch=8, owner=session.owner)
    assert (answer.state.length, answer.state.digest) == (0, session.digests([])[0])
    session.epoch = 8
    assert (await gateway.status(session.entry(LOG, 0, 10)))[0] == "OK"
    stored = await gateway.get(session)
    assert stored.record == session.creation().record
    assert list(stored.tokens) == LOG[:10]
    assert await named(gateway, session) is not None, "it is in the index again"


async def test_repair_of_what_is_there_is_an_ordinary_lease(gateway: Gateway, session: Session) -> None:
    answer = await gateway.stub.AcquireLease(repair(session, 4))
    assert (answer.lease.epoch, answer.state.length) == (5, 6)
    other = Session(session_id=session.session_id)
    assert isinstance(await error_of(gateway.stub.AcquireLease(repair(other, 9))), SessionDeleted)
    assert (await gateway.get(session)).state.epoch == 5


@pytest.mark.parametrize("only_expired", [False, True])
async def test_tombstone_wins_over_a_repair(gateway: Gateway, session: Session, only_expired: bool) -> None:
    await gateway.stub.DeleteSession(pb.KvStoreServiceDeleteSessionRequest(session_id=session.session_id))
    claim = repair(session, 1, only_expired=only_expired)
    assert isinstance(await error_of(gateway.stub.AcquireLease(claim)), SessionDeleted)
    brief = await gateway.create(Session(), ttl_ms=1000)
    await soon_it_is(SessionExpired, lambda: gateway.get(brief))
    claim = repair(brief, 1, only_expired=only_expired)
    assert isinstance(await error_of(gateway.stub.AcquireLease(claim)), SessionExpired)
    assert isinstance(await error_of(gateway.get(session)), SessionDeleted)


async def test_lost_session_is_repaired_by_only_expired_too(gateway: Gateway) -> None:
    lost = Session()
    answer = await gateway.stub.AcquireLease(repair(lost, 3, only_expired=True))
    assert answer.lease == common_pb2.Lease(epoch=4, owner=lost.owner)


async def test_a_lost_session_is_written_again_with_its_own_life(
    gateway: Gateway,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    """It got the store's default, whatever the gateway keeps its sessions for."""
    brief, usual = Session(), Session()
    await gateway.stub.AcquireLease(repair(brief, 3, ttl_ms=60_000))
    await gateway.stub.AcquireLease(repair(usual, 3))
    lives = [inspector.pttl(session_keys(each.session_id)[0]) for each in (brief, usual)]
    assert 60_000 < lives[0] + 1000 <= 65_000 < lives[1]


async def test_of_many_repairs_at_once_each_has_an_epoch_of_its_own(gateway: Gateway) -> None:
    """Several gateways with forgotten epochs: the last grant holds, the others are fenced."""
    first = Session()
    rivals = [Session(session_id=first.session_id, birth=first.birth, epoch=i) for i in range(1, 9)]
    answers = await asyncio.gather(*(gateway.stub.AcquireLease(repair(each, each.epoch)) for each in rivals))
    epochs = [answer.lease.epoch for answer in answers]
    assert len(set(epochs)) == len(rivals)
    for rival, answer in zip(rivals, answers, strict=True):
        assert answer.lease.epoch > rival.epoch
        rival.epoch = answer.lease.epoch
    outcomes = {rival.epoch: (await gateway.status(rival.entry(LOG, 0, 2)))[0] for rival in rivals}
    assert outcomes == {epoch: "OK" if epoch == max(epochs) else "FENCED" for epoch in epochs}


async def test_bad_lease_input_names_field_value_and_limit(gateway: Gateway, session: Session) -> None:
    stub, nobody = gateway.stub, common_pb2.Lease(epoch=1, owner=NOBODY)
    other = Session()
    mixed, unnamed = repair(session, 1), repair(session, 1)
    mixed.record.session_id, unnamed.record.birth = other.session_id, other.birth
    late = session.creation()
    late.record.deadline_unix_ms = 2**60
    cases = [
        (stub.ReleaseLease(release(session, lease=nobody)), "lease.owner"),
        (stub.ReleaseLease(release(session, birth=b"x")), "birth"),
        (stub.AcquireLease(acquire(session, NOBODY)), "owner"),
        (stub.RenewOwner(pb.RenewOwnerRequest(owner=NOBODY)), "owner"),
        (stub.CreateSession(Session(owner=NOBODY).creation()), "owner"),
        (stub.CreateSession(late), "record.deadline_unix_ms"),
        (stub.AcquireLease(mixed), "record.session_id"),
        (stub.AcquireLease(unnamed), "record.birth"),
        (stub.AcquireLease(repair(session, 1, digest=b"x")), "digest"),
        (stub.AcquireLease(acquire(session, session.owner, digest=bytes(16))), "digest"),
        (stub.ListExpired(pb.ListExpiredRequest(limit=1025)), "limit"),
        *((stub.ListExpired(pb.ListExpiredRequest(cursor=bad)), "cursor") for bad in BAD_CURSORS),
    ]
    for call, field in cases:
        error = await error_of(call)
        assert isinstance(error, InvalidRequest), field
        assert error.field == field
        assert error.limit
    assert (await gateway.get(session)).state.epoch == 1


BAD_CURSORS = ["x", "1.2", f"{SHARDS}..0", "-1..0", "0.ab.0", "0..-1", "0..x", "0..0.0"]
