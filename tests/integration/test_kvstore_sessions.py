"""Creating, taking over, ending, cancelling, deleting and reading sessions; leases and owners; prefixes."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis

from hedgerow.errors import Fenced, InvalidRequest, SessionDeleted, SessionExpired, SessionUnknown
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from tests.kvstore_calls import Gateway, Session, error_of, gateway_on, outcome_of, soon_it_is
from tests.redis_servers import Service, inspector, kvstore, redis_server  # noqa: F401  (fixtures)

LOG = list(range(500, 540))
CANCELLED, STOP = common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_STOP


@pytest_asyncio.fixture
async def gateway(kvstore: Service) -> AsyncIterator[Gateway]:  # noqa: F811
    async with gateway_on(kvstore.port) as connected:
        yield connected


@pytest_asyncio.fixture
async def session(gateway: Gateway) -> Session:
    """A running session with LOG[:6] committed."""
    created = await gateway.create(Session())
    assert (await gateway.status(created.entry(LOG, 0, 6)))[0] == "OK"
    return created


def acquire(session: Session, owner: bytes, **options: Any) -> pb.AcquireLeaseRequest:
    return pb.AcquireLeaseRequest(session_id=session.session_id, owner=owner, **options)


def delete(session: Session, birth: bytes = b"") -> pb.KvStoreServiceDeleteSessionRequest:
    return pb.KvStoreServiceDeleteSessionRequest(session_id=session.session_id, birth=birth)


def close(session: Session, reason: Any = CANCELLED, **fields: Any) -> pb.CloseSessionRequest:
    request = pb.CloseSessionRequest(
        session_id=session.session_id,
        lease=common_pb2.Lease(epoch=session.epoch, owner=session.owner),
        birth=session.birth,
        finish_reason=reason,
        usage=common_pb2.Usage(prompt_tokens=3),
    )
    request.MergeFrom(pb.CloseSessionRequest(**fields))
    return request


async def test_record_is_read_as_it_was_written(gateway: Gateway) -> None:
    session = Session(prompt=[0, 1, 2**32 - 1])
    request = session.creation()
    request.record.requested.temperature = 0.0
    request.record.resolved.seed = 7
    request.record.fingerprint.digest = "ab"
    request.record.mode = common_pb2.EXECUTION_MODE_EXACT
    assert (await gateway.stub.CreateSession(request)).created
    answer = await gateway.get(session)
    assert answer.record == request.record
    assert answer.record.requested.HasField("temperature")
    assert answer.state.digest == request.digest
    lean = await gateway.stub.GetSession(
        pb.KvStoreServiceGetSessionRequest(session_id=session.session_id, state_only=True)
    )
    assert (list(lean.record.prompt), lean.record.model, lean.state) == ([], "sapling", answer.state)


@pytest.mark.parametrize("start", [0, 1, 5, 6, 9])
async def test_tokens_are_read_from_any_offset(gateway: Gateway, session: Session, start: int) -> None:
    await gateway.append(session.entry(LOG, 6, 9))
    assert list((await gateway.get(session, start)).tokens) == LOG[start:9]


async def test_second_creation_of_an_id_returns_what_is_there(gateway: Gateway, session: Session) -> None:
    """A repeat of the same creation is a lost answer; another birth is another request with the same key."""
    again = await gateway.stub.CreateSession(session.creation())
    assert (again.created, again.lease.epoch) == (True, 1)
    rival = Session(session_id=session.session_id)
    answer = await gateway.stub.CreateSession(rival.creation())
    assert not answer.created
    assert not answer.HasField("lease")
    assert (answer.existing.epoch, answer.existing.length, answer.existing.owner) == (1, 6, session.owner)
    assert list((await gateway.get(session)).tokens) == LOG[:6]


async def test_acquire_grants_the_next_epoch_above_stored_and_floor(gateway: Gateway, session: Session) -> None:
    epochs = []
    for floor in (0, 0, 40, 7, 2**40):
        owner = secrets.token_bytes(16)
        answer = await gateway.stub.AcquireLease(acquire(session, owner, epoch_floor=floor, birth=session.birth))
        assert (answer.lease.owner, answer.state.epoch, answer.state.length) == (owner, answer.lease.epoch, 6)
        epochs.append(answer.lease.epoch)
    assert epochs == [2, 3, 41, 42, 2**40 + 1]


async def test_only_expired_waits_for_the_owner_to_end(gateway: Gateway, session: Session) -> None:
    heir = secrets.token_bytes(16)
    await gateway.stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner, ttl_ms=300))
    refused = await error_of(gateway.stub.AcquireLease(acquire(session, heir, only_expired=True)))
    assert isinstance(refused, Fenced)
    assert refused.metadata["held"] == "1"
    claim = acquire(session, heir, only_expired=True)
    granted = await soon_it_is(pb.AcquireLeaseResponse, lambda: gateway.stub.AcquireLease(claim))
    assert granted.lease == common_pb2.Lease(epoch=2, owner=heir)


async def test_close_is_fenced_and_the_first_finish_wins(gateway: Gateway, session: Session) -> None:
    wrong = common_pb2.Lease(epoch=1, owner=secrets.token_bytes(16))
    assert isinstance(await error_of(gateway.stub.CloseSession(close(session, lease=wrong))), Fenced)
    first = await gateway.stub.CloseSession(close(session))
    assert (first.state.finish_reason, first.state.usage.prompt_tokens, first.state.length) == (CANCELLED, 3, 6)
    assert (await gateway.stub.CloseSession(close(session, STOP))).state == first.state
    assert (await gateway.status(session.entry(LOG, 6, 8)))[0] == "FINISHED"


async def test_cancel_mark_reaches_the_owner_by_append_and_by_renewal(gateway: Gateway, session: Session) -> None:
    other = await gateway.create(Session(owner=session.owner))
    mark = pb.MarkCancelRequest(session_id=session.session_id)
    for _ in range(2):
        marked = await gateway.stub.MarkCancel(mark)
        assert (marked.was_running, marked.owner) == (True, session.owner)
    renewal = pb.RenewOwnerRequest(owner=session.owner)
    assert list((await gateway.stub.RenewOwner(renewal)).cancelled_sessions) == [session.session_id]
    name, state = await gateway.status(session.entry(LOG, 6, 8))
    assert (name, state.cancel_marked) == ("OK", True)
    assert not (await gateway.status(other.entry(LOG, 0, 1)))[1].cancel_marked
    await gateway.append(session.entry(LOG, 8, 8, finish_reason=CANCELLED))
    assert list((await gateway.stub.RenewOwner(renewal)).cancelled_sessions) == []
    assert not (await gateway.stub.MarkCancel(mark)).was_running


async def test_cancel_mark_follows_the_session_to_its_new_owner(gateway: Gateway, session: Session) -> None:
    heir = secrets.token_bytes(16)
    await gateway.stub.MarkCancel(pb.MarkCancelRequest(session_id=session.session_id))
    assert (await gateway.stub.AcquireLease(acquire(session, heir))).state.cancel_marked
    renewed = await gateway.stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner))
    assert list(renewed.cancelled_sessions) == []


async def test_deletion_removes_prompt_and_tokens_and_leaves_a_tombstone(
    gateway: Gateway,
    session: Session,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    assert (await gateway.stub.DeleteSession(delete(session))).existed
    assert not (await gateway.stub.DeleteSession(delete(session))).existed
    assert inspector.keys(f"*{session.session_id}*") == [f"hedgerow:{{{session.session_id}}}:mark".encode()]
    mark = pb.MarkCancelRequest(session_id=session.session_id)
    calls = (
        gateway.get(session),
        gateway.stub.CreateSession(session.creation()),
        gateway.stub.AcquireLease(acquire(session, session.owner)),
        gateway.stub.CloseSession(close(session)),
        gateway.stub.MarkCancel(mark),
    )
    for call in calls:
        assert isinstance(await error_of(call), SessionDeleted)


async def test_deletion_holds_where_the_store_had_forgotten_the_session(gateway: Gateway) -> None:
    """The owner would write the record again: what was deleted is never brought back."""
    session = Session()
    assert not (await gateway.stub.DeleteSession(delete(session, session.birth))).existed
    assert isinstance(await error_of(gateway.stub.CreateSession(session.creation())), SessionDeleted)


async def test_deletion_of_what_never_was_leaves_nothing_behind(
    gateway: Gateway,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    """Each made-up id left a mark for a day: anybody could fill a Redis that evicts nothing."""
    before = inspector.dbsize()
    unborn = [Session() for _ in range(50)]
    for session in unborn:
        assert not (await gateway.stub.DeleteSession(delete(session))).existed
    assert inspector.keys(f"*{unborn[0].session_id}*") == []
    assert inspector.dbsize() <= before
    assert (await gateway.create(unborn[0])).epoch == 1


async def deletion(gateway: Gateway, session: Session, round_trips: int) -> pb.KvStoreServiceDeleteSessionResponse:
    """Deletes a session after so many other calls: a creation takes some of them."""
    for _ in range(round_trips):
        await outcome_of(gateway.get(session))
    answer: pb.KvStoreServiceDeleteSessionResponse = await gateway.stub.DeleteSession(delete(session))
    return answer


async def test_creation_and_deletion_at_once_leave_a_whole_session_or_a_tombstone(gateway: Gateway) -> None:
    outcomes = set()
    for turn in range(60):
        session = Session()
        creating, deleting = gateway.stub.CreateSession(session.creation()), deletion(gateway, session, turn % 3)
        _, deleted = await asyncio.gather(creating, deleting)
        outcomes.add(deleted.existed)
        if deleted.existed:
            assert isinstance(await error_of(gateway.stub.CreateSession(session.creation())), SessionDeleted)
        else:
            assert (await gateway.status(session.entry(LOG, 0, 2)))[0] == "OK"
            assert (await gateway.stub.DeleteSession(delete(session))).existed
        assert isinstance(await error_of(gateway.get(session)), SessionDeleted)
    assert outcomes == {True, False}, "both orders have happened"


async def test_another_deletion_neither_shortens_nor_prolongs_a_tombstone(
    gateway: Gateway,
    session: Session,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    """The second took the session's own life off the mark, which is what keeps its owner from writing it again."""
    mark = f"hedgerow:{{{session.session_id}}}:mark"
    await gateway.stub.DeleteSession(delete(session))
    first = inspector.pttl(mark)
    assert first > 86_400_000 + 3_500_000
    for birth in (b"", session.birth):
        await gateway.stub.DeleteSession(delete(session, birth))
        assert first - 60_000 < inspector.pttl(mark) <= first
    expired = await gateway.create(Session(), ttl_ms=1000)
    await soon_it_is(SessionExpired, lambda: gateway.get(expired))
    assert not (await gateway.stub.DeleteSession(delete(expired))).existed
    assert isinstance(await error_of(gateway.get(expired)), SessionDeleted)


async def test_unknown_expired_and_deleted_sessions_are_told_apart(gateway: Gateway) -> None:
    assert isinstance(await error_of(gateway.get(Session())), SessionUnknown)
    short = await gateway.create(Session(), ttl_ms=1000)
    await soon_it_is(SessionExpired, lambda: gateway.get(short))
    assert (await gateway.status(short.entry(LOG, 0, 2)))[0] == "GONE"
    assert isinstance(await error_of(gateway.stub.CreateSession(short.creation())), SessionExpired)


async def test_append_renews_the_life_of_a_session(
    gateway: Gateway,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    session = await gateway.create(Session(), ttl_ms=60_000)
    tag = f"hedgerow:{{{session.session_id}}}:"
    await gateway.append(session.entry(LOG, 0, 2))
    for entry in (session.entry(LOG, 2, 3), session.entry(LOG, 3, 3)):  # the second has nothing but that effect
        for name in ("record", "log"):
            inspector.pexpire(tag + name, 10_000)
        assert (await gateway.status(entry))[0] == "OK"
        lives = {name: inspector.pttl(tag + name) for name in ("record", "log", "mark")}
        assert 60_000 <= lives["record"] <= 63_750
        assert 60_000 <= lives["log"] <= 63_750
        assert lives["mark"] > lives["record"] + 86_000_000


async def test_no_key_is_without_an_end_and_every_session_has_one_hash_tag(
    gateway: Gateway,
    session: Session,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    await gateway.stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner))
    await gateway.stub.MarkCancel(pb.MarkCancelRequest(session_id=session.session_id))
    await gateway.stub.PutPrefixes(pb.PutPrefixesRequest(verifier="v", block_hashes=[bytes(16)], ttl_ms=1000))
    gone = await gateway.create(Session())
    await gateway.stub.DeleteSession(delete(gone))
    keys = inspector.keys("*")
    assert len(keys) >= 6
    assert [key for key in keys if inspector.pttl(key) == -1] == []
    assert [key for key in keys if key.count(b"{") != 1 or key.count(b"}") != 1] == []


async def test_find_prefix_counts_blocks_from_the_first(gateway: Gateway) -> None:
    blocks = [secrets.token_bytes(16) for _ in range(300)]
    holdings = {"long": blocks[:260], "short": blocks[:2], "holed": blocks[:1] + blocks[2:], "other": blocks[5:]}
    for verifier, held in holdings.items():
        await gateway.stub.PutPrefixes(pb.PutPrefixesRequest(verifier=verifier, block_hashes=held, ttl_ms=60_000))
    answer = await gateway.stub.FindPrefix(pb.FindPrefixRequest(block_hashes=blocks))
    assert [(h.verifier, h.blocks) for h in answer.holders] == [("long", 260), ("short", 2), ("holed", 1)]
    unknown = await gateway.stub.FindPrefix(pb.FindPrefixRequest(block_hashes=[secrets.token_bytes(16)]))
    assert list(unknown.holders) == []


async def test_prefix_hints_end(gateway: Gateway) -> None:
    block = secrets.token_bytes(16)
    for verifier, ttl in (("brief", 200), ("lasting", 60_000)):
        await gateway.stub.PutPrefixes(pb.PutPrefixesRequest(verifier=verifier, block_hashes=[block], ttl_ms=ttl))
    find = pb.FindPrefixRequest(block_hashes=[block])
    seen = [{"brief", "lasting"}]
    async with asyncio.timeout(5):
        while seen[-1] != {"lasting"}:
            seen.append({holder.verifier for holder in (await gateway.stub.FindPrefix(find)).holders})
    assert seen[1] == {"brief", "lasting"}
    assert [held for held in seen if held not in ({"brief", "lasting"}, {"lasting"})] == []


async def test_bad_input_names_field_value_and_limit(gateway: Gateway, session: Session) -> None:
    stub, empty = gateway.stub, Session(prompt=())
    long = Session()
    too_long = long.creation()
    too_long.record.prompt.extend([1] * 300_000)
    cases = [
        (stub.CreateSession(empty.creation()), "record.prompt"),
        (stub.CreateSession(too_long), "record.prompt"),
        (stub.CreateSession(Session(session_id="").creation()), "record.session_id"),
        (stub.CreateSession(Session(birth=b"").creation()), "record.birth"),
        (stub.CreateSession(Session(owner=b"x").creation()), "owner"),
        (stub.CreateSession(Session().creation(ttl_ms=5)), "ttl_ms"),
        (stub.AcquireLease(acquire(session, b"")), "owner"),
        (stub.AcquireLease(acquire(session, session.owner, epoch_floor=2**63)), "epoch_floor"),
        (stub.AcquireLease(acquire(session, session.owner, birth=b"x")), "birth"),
        (stub.RenewOwner(pb.RenewOwnerRequest(owner=session.owner, ttl_ms=1)), "ttl_ms"),
        (stub.CloseSession(close(session, common_pb2.FINISH_REASON_UNSPECIFIED)), "finish_reason"),
        (stub.MarkCancel(pb.MarkCancelRequest(session_id="a b")), "session_id"),
        (stub.DeleteSession(delete(session, b"x")), "birth"),
        (gateway.get(session, 2**31), "from_offset"),
        (stub.PutPrefixes(pb.PutPrefixesRequest(verifier="", ttl_ms=1)), "verifier"),
        (stub.PutPrefixes(pb.PutPrefixesRequest(verifier="v")), "ttl_ms"),
        (stub.FindPrefix(pb.FindPrefixRequest(block_hashes=[b"x"])), "block_hashes[0]"),
    ]
    for call, field in cases:
        error = await error_of(call)
        assert isinstance(error, InvalidRequest), field
        assert error.field == field
        assert error.limit
