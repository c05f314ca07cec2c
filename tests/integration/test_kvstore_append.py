"""Append: what the store accepts, compares and refuses, over gRPC and against every Redis here."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import redis

from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from tests.kvstore_calls import Gateway, Session, gateway_on, next_digest
from tests.redis_servers import (  # noqa: F401  (fixtures)
    Service,
    inspector,
    kvstore,
    overheard,
    redis_server,
    scripts_on,
)

LOG = list(range(100, 160))


@pytest_asyncio.fixture
async def gateway(kvstore: Service) -> AsyncIterator[Gateway]:  # noqa: F811
    async with gateway_on(kvstore.port) as connected:
        yield connected


@pytest_asyncio.fixture
async def session(gateway: Gateway) -> Session:
    """A running session with LOG[:10] committed in chunks of 4, 4 and 2."""
    created = await gateway.create(Session())
    for start, end in ((0, 4), (4, 8), (8, 10)):
        assert (await gateway.status(created.entry(LOG, start, end)))[0] == "OK"
    return created


async def stored(gateway: Gateway, session: Session) -> list[int]:
    return list((await gateway.get(session)).tokens)


async def test_tokens_are_committed_in_order_with_their_digest(gateway: Gateway, session: Session) -> None:
    answer = await gateway.get(session)
    assert list(answer.tokens) == LOG[:10]
    assert answer.state.length == 10
    assert answer.state.digest == session.digests(LOG[:10])[-1]
    assert answer.state.epoch == 1
    assert answer.state.owner == session.owner
    assert answer.state.finish_reason == common_pb2.FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize(("offset", "end"), [(8, 10), (0, 10), (3, 7), (9, 10)])
async def test_repeated_append_is_compared_and_changes_nothing(
    gateway: Gateway, session: Session, offset: int, end: int
) -> None:
    name, state = await gateway.status(session.entry(LOG, offset, end))
    assert (name, state.length) == ("OK", 10)
    assert await stored(gateway, session) == LOG[:10]


@pytest.mark.parametrize("offset", [0, 3, 4, 9])
@pytest.mark.parametrize("with_token_digests", [False, True])
async def test_append_behind_the_length_adds_only_the_rest(
    gateway: Gateway, session: Session, offset: int, with_token_digests: bool
) -> None:
    digests = session.digests(LOG[:15])
    fields: dict[str, Any] = {"token_digests": digests[offset + 1 :]} if with_token_digests else {}
    name, state = await gateway.status(session.entry(LOG, offset, 15, **fields))
    assert (name, state.length, state.digest) == ("OK", 15, digests[15])
    assert await stored(gateway, session) == LOG[:15]


async def test_gap_applies_nothing_and_tells_where_the_log_ends(gateway: Gateway, session: Session) -> None:
    name, state = await gateway.status(session.entry(LOG, 12, 15))
    assert (name, state.epoch, state.length) == ("GAP", 1, 10)
    assert state.digest == session.digests(LOG[:10])[-1]
    assert await stored(gateway, session) == LOG[:10]


@pytest.mark.parametrize("offset", [0, 5, 9])
async def test_another_token_at_a_committed_offset_is_a_conflict(
    gateway: Gateway, session: Session, offset: int
) -> None:
    other = [*LOG[:9], 7, *LOG[10:]]
    name, state = await gateway.status(session.entry(other, offset, 12))
    assert (name, state.length) == ("CONFLICT", 10)
    assert await stored(gateway, session) == LOG[:10]


@pytest.mark.parametrize("offset", [10, 8, 4, 0])
async def test_another_history_before_the_offset_is_a_digest_mismatch(
    gateway: Gateway, session: Session, offset: int
) -> None:
    entry = session.entry(LOG, offset, 12)
    entry.digest_before = secrets.token_bytes(16)
    assert (await gateway.status(entry))[0] == "DIGEST_MISMATCH"
    assert await stored(gateway, session) == LOG[:10]


@pytest.mark.parametrize("end", [4, 10])
async def test_another_digest_after_committed_tokens_is_a_mismatch(
    gateway: Gateway, session: Session, end: int
) -> None:
    entry = session.entry(LOG, 2, end)
    entry.digest_after = secrets.token_bytes(16)
    assert (await gateway.status(entry))[0] == "DIGEST_MISMATCH"


async def test_another_token_digest_at_the_stored_length_is_a_mismatch(gateway: Gateway, session: Session) -> None:
    digests = session.digests(LOG[:12])
    digests[10] = secrets.token_bytes(16)
    entry = session.entry(LOG, 6, 12, token_digests=digests[7:])
    assert (await gateway.status(entry))[0] == "DIGEST_MISMATCH"
    assert await stored(gateway, session) == LOG[:10]


async def test_finish_and_usage_are_written_with_the_last_tokens(gateway: Gateway, session: Session) -> None:
    usage = common_pb2.Usage(prompt_tokens=3, completion_tokens=12, steps=4)
    finish = common_pb2.FINISH_REASON_STOP
    last = session.entry(LOG, 10, 12, finish_reason=finish, usage=usage, matched_stop="\n\n", matched_token=0)
    for _ in range(2):  # the answer to the first may have been lost
        name, state = await gateway.status(last)
        assert (name, state.length, state.finish_reason, state.usage) == ("OK", 12, finish, usage)
        assert (state.matched_stop, state.HasField("matched_token"), state.matched_token) == ("\n\n", True, 0)


@pytest.mark.parametrize("reason", [common_pb2.FINISH_REASON_CANCELLED, common_pb2.FINISH_REASON_DEADLINE])
async def test_finish_comes_with_an_empty_append_too(gateway: Gateway, session: Session, reason: Any) -> None:
    for _ in range(2):
        name, state = await gateway.status(session.entry(LOG, 10, 10, finish_reason=reason))
        assert (name, state.length, state.finish_reason) == ("OK", 10, reason)


async def test_nothing_follows_a_finish(gateway: Gateway, session: Session) -> None:
    await gateway.append(session.entry(LOG, 10, 12, finish_reason=common_pb2.FINISH_REASON_LENGTH))
    cancelled = common_pb2.FINISH_REASON_CANCELLED
    later = {
        "FINISHED": [
            session.entry(LOG, 12, 14),
            session.entry(LOG, 11, 14),
            session.entry(LOG, 14, 15),
            session.entry(LOG, 12, 12, finish_reason=cancelled),
            session.entry(LOG, 10, 12, finish_reason=cancelled),
            session.entry(LOG, 12, 12),
        ],
        "OK": [session.entry(LOG, 10, 12), session.entry(LOG, 0, 3)],  # already there
        "CONFLICT": [session.entry([*LOG[:11], 5], 10, 12)],
    }
    for expected, entries in later.items():
        for entry in entries:
            name, state = await gateway.status(entry)
            assert (name, state.finish_reason) == (expected, common_pb2.FINISH_REASON_LENGTH)
    assert await stored(gateway, session) == LOG[:12]


async def test_finish_behind_committed_tokens_ends_nothing(gateway: Gateway, session: Session) -> None:
    stop, cancelled = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_CANCELLED
    assert (await gateway.status(session.entry(LOG, 4, 8, finish_reason=stop)))[0] == "CONFLICT"
    name, state = await gateway.status(session.entry(LOG, 8, 8, finish_reason=cancelled))
    assert (name, state.length, state.finish_reason) == ("GAP", 10, common_pb2.FINISH_REASON_UNSPECIFIED)


async def test_lease_birth_and_tombstone_fence(gateway: Gateway, session: Session) -> None:
    acquired = await gateway.stub.AcquireLease(
        pb.AcquireLeaseRequest(session_id=session.session_id, owner=secrets.token_bytes(16))
    )
    assert acquired.lease.epoch == 2
    other = secrets.token_bytes(16)
    lease = common_pb2.Lease
    cases = {
        "FENCED": [lease(epoch=1, owner=session.owner), lease(epoch=2, owner=session.owner)],
        "FORGOTTEN": [lease(epoch=3, owner=session.owner), lease(epoch=9, owner=acquired.lease.owner)],
    }
    for expected, leases in cases.items():
        for held in leases:
            name, state = await gateway.status(session.entry(LOG, 10, 12, lease=held))
            assert (name, state.epoch, state.length, state.owner) == (expected, 2, 10, acquired.lease.owner)
    reborn = session.entry(LOG, 10, 12, birth=other, lease=acquired.lease)
    assert (await gateway.status(reborn))[0] == "GONE"
    assert await stored(gateway, session) == LOG[:10]
    assert (await gateway.status(session.entry(LOG, 10, 12, lease=acquired.lease)))[0] == "OK"
    await gateway.stub.DeleteSession(pb.KvStoreServiceDeleteSessionRequest(session_id=session.session_id))
    assert (await gateway.status(session.entry(LOG, 12, 13, lease=acquired.lease)))[0] == "GONE"


async def test_append_to_a_session_without_a_trace_says_forgotten(gateway: Gateway) -> None:
    name, state = await gateway.status(Session().entry(LOG, 0, 3))
    assert (name, state) == ("FORGOTTEN", pb.SessionState())


async def test_statuses_of_one_message_are_independent(gateway: Gateway, session: Session) -> None:
    second = await gateway.create(Session())
    third = Session()
    results = await gateway.append(session.entry(LOG, 20, 22), second.entry(LOG, 0, 5), third.entry(LOG, 0, 1))
    assert [result.status for result in results] == [
        pb.APPEND_STATUS_GAP,
        pb.APPEND_STATUS_OK,
        pb.APPEND_STATUS_FORGOTTEN,
    ]
    assert await stored(gateway, second) == LOG[:5]


async def test_messages_in_flight_are_applied_in_order(gateway: Gateway) -> None:
    session = await gateway.create(Session())
    call = gateway.stub.Append()
    for i in range(40):
        await call.write(pb.AppendRequest(batch_id=i, entries=[session.entry(LOG, i, i + 1)]))
    for i in range(40):
        response = await call.read()
        assert (response.batch_id, response.results[0].status) == (i, pb.APPEND_STATUS_OK)
    call.cancel()
    assert await stored(gateway, session) == LOG[:40]


async def test_one_message_is_one_round_trip_with_one_script_an_entry(
    gateway: Gateway,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    sessions = [await gateway.create(Session()) for _ in range(32)]
    await gateway.append(*(each.entry(LOG, 0, 4) for each in sessions))
    before = inspector.info("stats")["total_reads_processed"]
    with overheard(inspector) as heard:
        for start in range(4, 44, 4):
            results = await gateway.append(*(each.entry(LOG, start, start + 4) for each in sessions))
            assert {result.status for result in results} == {pb.APPEND_STATUS_OK}
        reads = inspector.info("stats")["total_reads_processed"] - before
    assert len(scripts_on([each.session_id for each in sessions], heard)) == 10 * 32
    # Ten messages; our own words, and those of health and of the lists' tidying, which go on. Entry by entry: 320.
    assert reads < 160


async def test_fifty_appenders_and_two_owners_write_one_log(gateway: Gateway, kvstore: Service) -> None:  # noqa: F811
    """The old owner goes on while a new one takes over: its tokens before the takeover stay, none after it comes in."""
    session = await gateway.create(Session())
    new = Session(session_id=session.session_id, birth=session.birth)
    taken = asyncio.Event()
    outcomes: Counter[tuple[str, str]] = Counter()

    async def append(who: Session, name: str, number: int) -> None:
        async with gateway_on(kvstore.port) as mine:
            for attempt in range(6):
                if name == "new":
                    await taken.wait()
                length = (await mine.get(session)).state.length
                got, state = await mine.status(who.entry(LOG, min(length, 50), min(length, 50) + 1 + number % 3))
                outcomes[name, got] += 1
                if name == "old" and number == 0 and attempt == 2:
                    answer = await mine.stub.AcquireLease(
                        pb.AcquireLeaseRequest(session_id=new.session_id, owner=new.owner, birth=new.birth)
                    )
                    new.epoch = answer.lease.epoch
                    taken.set()
                if taken.is_set() and name == "old" and got == "OK":
                    assert state.epoch == 1  # it was applied before the takeover

    await asyncio.gather(*(append(session if i % 2 == 0 else new, ("old", "new")[i % 2], i) for i in range(50)))
    state = (await gateway.get(session)).state
    assert set(outcomes) <= {("old", "OK"), ("old", "FENCED"), ("new", "OK")}
    assert outcomes["old", "FENCED"] > 0
    assert outcomes["new", "OK"] == 25 * 6
    assert (state.epoch, state.owner) == (2, new.owner)
    assert await stored(gateway, session) == LOG[: state.length]
    assert state.digest == session.digests(LOG[: state.length])[-1]


async def test_digest_chain_holds_over_every_chunk_border(
    gateway: Gateway,
    inspector: redis.Redis,  # noqa: F811
) -> None:
    """Overlapping appends cut chunks at odd places; each chunk's digest is still the chain's at its end."""
    draw = random.Random(5)
    session, log = await gateway.create(Session()), [draw.randrange(2**32) for _ in range(200)]
    length = 0
    while length < len(log):
        start, end = draw.randrange(max(0, length - 9), length + 1), min(len(log), length + draw.randrange(1, 9))
        assert (await gateway.status(session.entry(log, start, end)))[0] == "OK"
        length = end
    digest, position = session.digests([])[0], 0
    for entry_id, fields in inspector.xrange(f"hedgerow:{{{session.session_id}}}:log"):
        assert int(entry_id.split(b"-")[0]) == position + 1
        for i in range(0, len(fields[b"tokens"]), 4):
            token = int.from_bytes(fields[b"tokens"][i : i + 4], "little")
            assert token == log[position]
            digest, position = next_digest(digest, token), position + 1
        assert fields[b"digest"] == digest
    assert position == 200


async def test_random_appends_agree_with_a_model_in_ten_lines(gateway: Gateway) -> None:
    draw = random.Random(11)
    session = await gateway.create(Session())
    log, other, length = LOG, [token + 1000 for token in LOG], 0
    seen: Counter[str] = Counter()
    for _ in range(300):
        offset = max(0, min(55, length + draw.randrange(-6, 4)))
        end = min(len(log), offset + draw.randrange(0, 5))
        source = other if draw.random() < 0.1 else log
        if source is other and end == offset:
            continue
        entry = session.entry(log, offset, end)
        if source is other:
            entry = session.entry([*log[:offset], *other[offset:]], offset, end)
        if offset > length:
            expected = "GAP"
        elif source is other and offset < length:
            expected = "CONFLICT"
        else:
            expected = "OK"
        if source is other and offset == length:
            continue  # a store cannot know that a first token is wrong
        name, state = await gateway.status(entry)
        length = max(length, end) if expected == "OK" else length
        seen[name] += 1
        assert (name, state.length) == (expected, length), (offset, end)
        assert state.digest == session.digests(log[:length])[-1]
    assert min(seen[name] for name in ("OK", "GAP", "CONFLICT")) > 5
