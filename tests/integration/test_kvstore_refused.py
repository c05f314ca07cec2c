"""A session that failed before its first token gives way to one that names it, and to nothing else."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
import redis

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.errors import InvalidRequest, SessionDeleted
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from services.kvstore.keys import owner_keys
from tests.kvstore_calls import Gateway, Session, error_of, gateway_on
from tests.redis_servers import Service, inspector, kvstore, redis_server  # noqa: F401  (fixtures)

LOG = list(range(50, 60))
ERROR, STOP = common_pb2.FINISH_REASON_ERROR, common_pb2.FINISH_REASON_STOP


@pytest_asyncio.fixture
async def gateway(kvstore: Service) -> AsyncIterator[Gateway]:  # noqa: F811
    async with gateway_on(kvstore.port) as connected:
        yield connected


def another(session: Session) -> Session:
    """The same id, of another creation."""
    return replace(session, birth=secrets.token_bytes(16), owner=secrets.token_bytes(16))


async def create(gateway: Gateway, session: Session, replaces: bytes) -> pb.CreateSessionResponse:
    request = session.creation()
    request.replaces = replaces
    answer: pb.CreateSessionResponse = await gateway.stub.CreateSession(request)
    return answer


async def test_a_failed_session_gives_way_under_a_higher_epoch(gateway: Gateway) -> None:
    failed = await gateway.create(Session())
    await gateway.append(failed.entry(LOG, 0, 0, finish_reason=ERROR))
    new = another(failed)
    for _ in range(2):  # a repeated call is the same creation
        answer = await create(gateway, new, failed.birth)
        assert (answer.created, answer.lease) == (True, common_pb2.Lease(epoch=2, owner=new.owner))
    new.epoch = 2
    assert (await gateway.status(failed.entry(LOG, 0, 1)))[0] == "GONE", "who knew it before is told"
    assert (await gateway.status(new.entry(LOG, 0, 2)))[0] == "OK"
    stored = await gateway.get(new)
    assert (stored.record.birth, list(stored.tokens), stored.state.finish_reason) == (new.birth, LOG[:2], 0)
    late = await create(gateway, another(failed), failed.birth)
    assert (late.created, late.existing.length) == (False, 2), "its place is taken"
    assert not (await create(gateway, failed, failed.birth)).created


@pytest.mark.parametrize(
    ("tokens", "finish", "named"),
    [(0, ERROR, False), (1, ERROR, True), (0, STOP, True), (0, common_pb2.FINISH_REASON_CANCELLED, True), (0, 0, True)],
)
async def test_nothing_else_gives_way(gateway: Gateway, tokens: int, finish: int, named: bool) -> None:
    there = await gateway.create(Session())
    await gateway.append(there.entry(LOG, 0, tokens, finish_reason=finish))
    answer = await create(gateway, another(there), there.birth if named else secrets.token_bytes(16))
    assert (answer.created, answer.existing.length, answer.existing.finish_reason) == (False, tokens, finish)
    assert (await gateway.get(there)).record.birth == there.birth


async def test_what_was_deleted_gives_way_to_nothing(gateway: Gateway) -> None:
    there = await gateway.create(Session())
    await gateway.append(there.entry(LOG, 0, 0, finish_reason=ERROR))
    await gateway.stub.DeleteSession(pb.KvStoreServiceDeleteSessionRequest(session_id=there.session_id))
    assert isinstance(await error_of(create(gateway, another(there), there.birth)), SessionDeleted)


async def test_a_mark_of_another_length_is_refused(gateway: Gateway) -> None:
    refused = await error_of(create(gateway, Session(), b"short"))
    assert isinstance(refused, InvalidRequest)
    assert refused.field == "replaces"


@pytest.mark.parametrize("by_append", [True, False])
async def test_one_that_takes_the_place_at_the_same_gateway_stays_in_its_index(
    gateway: Gateway,
    inspector: redis.Redis,  # noqa: F811
    by_append: bool,
) -> None:
    """The end of the one before takes that one out, and not the one of its id that runs by then."""
    failed = await gateway.create(Session())
    if by_append:
        await gateway.append(failed.entry(LOG, 0, 0, finish_reason=ERROR))
    else:
        lease = common_pb2.Lease(epoch=1, owner=failed.owner)
        close = pb.CloseSessionRequest(
            session_id=failed.session_id, lease=lease, birth=failed.birth, finish_reason=ERROR
        )
        await gateway.stub.CloseSession(close)
    assert (await create(gateway, replace(failed, birth=secrets.token_bytes(16)), failed.birth)).created
    await gateway.stub.RenewOwner(pb.RenewOwnerRequest(owner=failed.owner, ttl_ms=600_000))
    assert inspector.zrange(owner_keys(failed.owner).sessions, 0, -1) == [failed.session_id.encode()]


async def test_a_request_of_a_session_that_has_ended_leaves_nothing_in_the_index(
    gateway: Gateway,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    """A gateway that is asked for the same old answer again and again remembers none of them."""
    ended = await gateway.create(Session())
    await gateway.append(ended.entry(LOG, 0, 2, finish_reason=STOP))
    renewal = pb.RenewOwnerRequest(owner=ended.owner, ttl_ms=600_000)
    await gateway.stub.RenewOwner(renewal)
    assert not (await create(gateway, replace(ended, birth=secrets.token_bytes(16)), b"")).created
    await gateway.stub.RenewOwner(renewal)
    assert inspector.zrange(owner_keys(ended.owner).sessions, 0, -1) == []


async def test_its_owner_writes_again_what_the_store_lost_over_the_failed_one(
    gateway: Gateway,
    redis_server: EmbeddedRedis,  # noqa: F811
) -> None:
    """A fail-over brings the failed one back in place of the one that had taken its place."""
    failed = await gateway.create(Session())
    await gateway.append(failed.entry(LOG, 0, 0, finish_reason=ERROR))
    lose = remembered(redis_server, failed.session_id)
    new = another(failed)
    new.epoch = (await create(gateway, new, failed.birth)).lease.epoch
    await gateway.append(new.entry(LOG, 0, 3))
    lose()
    assert (await gateway.status(new.entry(LOG, 3, 4)))[0] == "FORGOTTEN"
    assert (await gateway.status(failed.entry(LOG, 0, 1)))[0] == "FINISHED", "the old one's owner brings nothing back"
    record = new.creation().record
    repair = pb.AcquireLeaseRequest(
        session_id=new.session_id, owner=new.owner, birth=new.birth, epoch_floor=new.epoch, record=record,
        digest=new.creation().digest,
    )  # fmt: skip
    without = pb.AcquireLeaseRequest(session_id=new.session_id, owner=new.owner, birth=new.birth, epoch_floor=1)
    assert isinstance(await error_of(gateway.stub.AcquireLease(without)), SessionDeleted)
    granted = await gateway.stub.AcquireLease(repair)
    assert (granted.lease.epoch, granted.state.length, granted.state.finish_reason) == (new.epoch + 1, 0, 0)
    new.epoch = granted.lease.epoch
    assert (await gateway.status(new.entry(LOG, 0, 4)))[0] == "OK"
    assert (await gateway.get(new)).record.birth == new.birth


def remembered(server: EmbeddedRedis, session_id: str) -> Callable[[], None]:
    """Take the session's keys back to what they are now."""
    with redis.Redis.from_url(server.url) as store:
        keys = store.keys(f"*{session_id}*")
        dumps = {key: store.dump(key) for key in keys}

    def restore() -> None:
        with redis.Redis.from_url(server.url) as store:
            for key in store.keys(f"*{session_id}*"):
                if key not in dumps:
                    store.delete(key)
            for key, value in dumps.items():
                store.restore(key, 60_000, value, replace=True)

    return restore
