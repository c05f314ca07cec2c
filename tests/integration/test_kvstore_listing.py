"""A tenant's sessions as the store lists them: what is told of each, by pages, and what becomes of stale members."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio
import redis

from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.errors import InvalidRequest
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import kvstore_pb2 as pb
from services.kvstore.index import Index
from services.kvstore.keys import session_keys, tenant_key
from services.kvstore.records import NewSession
from services.kvstore.runner import Runner
from services.kvstore.topology import topology_of
from tests.kvstore_calls import Gateway, Session, error_of, gateway_on
from tests.redis_servers import Service, inspector, kvstore, redis_server  # noqa: F401  (fixtures)

# ruff: noqa: F811  (fixtures again, as arguments)

LOG = list(range(800, 900))
OWNER = b"o" * 16
HOUR = 3_600_000


async def created(gateway: Gateway, tenant: str, **fields: Any) -> Session:
    """A session of a tenant."""
    session = Session()
    request = session.creation()
    request.record.MergeFrom(pb.SessionRecord(tenant=tenant, **fields))
    assert (await gateway.stub.CreateSession(request)).created
    return session


async def listed(gateway: Gateway, tenant: str, limit: int = 0) -> list[pb.ListedSession]:
    """All pages, each of at most `limit`."""
    request, found = pb.KvStoreServiceListSessionsRequest(tenant=tenant, limit=limit), list[pb.ListedSession]()
    while True:
        answer = await gateway.stub.ListSessions(request)
        assert len(answer.sessions) <= (limit or 100)
        found += answer.sessions
        request.cursor = answer.cursor
        if not request.cursor:
            return found


def ids(found: Sequence[pb.ListedSession]) -> list[str]:
    return [each.summary.session_id for each in found]


async def test_a_list_tells_what_each_session_is_and_nothing_of_its_prompt(
    kvstore: Service, inspector: redis.Redis
) -> None:
    tenant = "{of} braces: and spaces"
    async with gateway_on(kvstore.port) as gateway:
        running, paused, orphan, ended = [
            await created(
                gateway, tenant, prompt=[77] * n, created_unix_ms=n, resolved=common.SamplingParams(max_tokens=9)
            )
            for n in range(1, 5)
        ]
        await created(gateway, "another")
        await gateway.append(running.entry(LOG, 0, 3), ended.entry(LOG, 0, 2, finish_reason=common.FINISH_REASON_STOP))
        await gateway.stub.RenewOwner(pb.RenewOwnerRequest(owner=running.owner))
        lease = common.Lease(epoch=1, owner=paused.owner)
        await gateway.stub.ReleaseLease(
            pb.ReleaseLeaseRequest(session_id=paused.session_id, lease=lease, birth=paused.birth)
        )
        found = await listed(gateway, tenant)
        assert ids(found) == [each.session_id for each in (ended, orphan, paused, running)], "the newest first"
        about = {each.summary.session_id: each for each in found}
        summary = about[running.session_id].summary
        assert (summary.model, summary.prompt_tokens, summary.max_tokens) == ("sapling", 4, 9)
        assert (summary.created_unix_ms, summary.detach) == (1, True)
        state = {name: (each.state.length, each.state.finish_reason, each.owner_lives) for name, each in about.items()}
        assert state == {
            running.session_id: (3, 0, True),
            paused.session_id: (0, 0, False),
            orphan.session_id: (0, 0, False),
            ended.session_id: (2, common.FINISH_REASON_STOP, False),
        }
        assert about[paused.session_id].state.owner == bytes(16)
        assert about[orphan.session_id].state.owner == orphan.owner
        assert await listed(gateway, "of nobody") == []
    members = inspector.zrange(tenant_key(tenant), 0, -1)
    assert len(members) == 4
    assert max(map(len, members)) < 120, "a member is no place for a prompt"


async def test_pages_have_each_session_once_and_new_ones_do_not_move_them(kvstore: Service) -> None:
    async with gateway_on(kvstore.port) as gateway:
        made = [(await created(gateway, "pages")).session_id for _ in range(7)]
        for limit in (1, 2, 7, 1000):
            assert ids(await listed(gateway, "pages", limit)) == made[::-1]
        first = await gateway.stub.ListSessions(pb.KvStoreServiceListSessionsRequest(tenant="pages", limit=3))
        await created(gateway, "pages")
        request = pb.KvStoreServiceListSessionsRequest(tenant="pages", cursor=first.cursor)
        assert ids((await gateway.stub.ListSessions(request)).sessions) == made[3::-1]


@pytest.mark.parametrize(("field", "value"), [("limit", 1001), ("cursor", "x"), ("cursor", "-1"), ("cursor", "9" * 18)])
async def test_what_is_no_page_is_refused_by_its_field(kvstore: Service, field: str, value: Any) -> None:
    async with gateway_on(kvstore.port) as gateway:
        error = await error_of(gateway.stub.ListSessions(pb.KvStoreServiceListSessionsRequest(**{field: value})))
    assert isinstance(error, InvalidRequest)
    assert error.field == field


async def test_deleted_and_expired_sessions_are_in_no_list(kvstore: Service, inspector: redis.Redis) -> None:
    async with gateway_on(kvstore.port) as gateway:
        kept, deleted, expired = [await created(gateway, "gone") for _ in range(3)]
        await gateway.stub.DeleteSession(pb.KvStoreServiceDeleteSessionRequest(session_id=deleted.session_id))
        inspector.delete(*session_keys(expired.session_id)[:2])
        assert ids(await listed(gateway, "gone", 1)) == [kept.session_id]


async def test_a_session_that_the_store_lost_is_in_the_list_once_again(
    kvstore: Service, inspector: redis.Redis
) -> None:
    async with gateway_on(kvstore.port) as gateway:
        session = await created(gateway, "lost", created_unix_ms=5)
        inspector.delete(*session_keys(session.session_id), tenant_key("lost"))
        creation = session.creation()
        creation.record.MergeFrom(pb.SessionRecord(tenant="lost", created_unix_ms=5))
        await gateway.stub.AcquireLease(
            pb.AcquireLeaseRequest(
                session_id=session.session_id, owner=session.owner, birth=session.birth, epoch_floor=1,
                record=creation.record, digest=creation.digest,
            )
        )  # fmt: skip
        assert ids(await listed(gateway, "lost")) == [session.session_id]


@pytest_asyncio.fixture
async def index(redis_server: EmbeddedRedis) -> AsyncIterator[Index]:
    """Of this process, without mercy for members that may be about to be created."""
    runner = Runner(topology_of(redis_server.url, timeout=1.0, connections=4), timeout=1.0)
    yield Index(runner, keep=HOUR, grace=0)
    await runner.close()


async def test_an_index_that_nobody_lists_does_not_grow(index: Index, kvstore: Service, inspector: redis.Redis) -> None:
    """A thousand sessions enter and never are; of those that are there none is lost."""
    async with gateway_on(kvstore.port) as gateway:
        there = [(await created(gateway, "busy")).session_id for _ in range(20)]
        key, most = tenant_key("busy"), 0
        for i in range(1000):
            await index.enter(
                OWNER, f"never-{i}", NewSession(f"never-{i}", b"", b"", OWNER, b"", HOUR, tenant="busy", summary=b"s")
            )
            if i % 50 == 49:
                await index.listing.tidy()
                most = max(most, inspector.zcard(key))
        assert most <= 200
        assert ids(await listed(gateway, "busy")) == there[::-1]
    assert 0 < inspector.pttl(key) <= 30 * HOUR, "without new sessions it ends, a day after those that it had"


async def test_a_list_drops_what_it_finds_stale(index: Index, inspector: redis.Redis) -> None:
    for i in range(30):
        await index.enter(
            OWNER, f"stale-{i}", NewSession(f"stale-{i}", b"", b"", OWNER, b"", HOUR, tenant="stale", summary=b"s")
        )
    found, cursor = await index.listing.sessions("stale", 2, "")
    assert (found, bool(cursor)) == ([], True), "a bounded look, and where to go on"
    while cursor:
        found, cursor = await index.listing.sessions("stale", 2, cursor)
    assert found == []
    assert inspector.zcard(tenant_key("stale")) == 0
