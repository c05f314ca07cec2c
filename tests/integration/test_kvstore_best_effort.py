"""Sessions that are not exact from some offset on: what is committed stays, and the caller goes on from there."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hedgerow.errors import InvalidRequest
from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from tests.kvstore_calls import Gateway, Session, error_of, gateway_on
from tests.redis_servers import Service, kvstore, redis_server  # noqa: F401  (fixtures)

LOG = list(range(100, 160))
OTHER = [*LOG[:9], *(token + 1000 for token in LOG[9:])]
STOP = common_pb2.FINISH_REASON_STOP


@pytest_asyncio.fixture
async def gateway(kvstore: Service) -> AsyncIterator[Gateway]:  # noqa: F811
    async with gateway_on(kvstore.port) as connected:
        yield connected


@pytest_asyncio.fixture
async def session(gateway: Gateway) -> Session:
    """A running exact session with LOG[:10] committed."""
    created = await gateway.create(Session())
    assert (await gateway.status(created.entry(LOG, 0, 10)))[0] == "OK"
    return created


async def inexact(gateway: Gateway, kind: str) -> Session:
    """A session with LOG[:12] committed that is best effort, of one `kind`."""
    session = Session()
    request = session.creation()
    if kind == "by its record":
        request.record.mode = common_pb2.EXECUTION_MODE_BEST_EFFORT
    assert (await gateway.stub.CreateSession(request)).created
    assert (await gateway.status(session.entry(LOG, 0, 10)))[0] == "OK"
    fields = {} if kind == "by its record" else {"best_effort_from": 10}
    assert (await gateway.status(session.entry(LOG, 10, 12, **fields)))[0] == "OK"
    return session


async def test_first_offset_counts_and_every_answer_tells_it(gateway: Gateway, session: Session) -> None:
    assert not (await gateway.get(session)).state.HasField("best_effort_from")
    name, state = await gateway.status(session.entry(LOG, 10, 12, best_effort_from=10))
    assert (name, state.HasField("best_effort_from"), state.best_effort_from) == ("OK", True, 10)
    name, state = await gateway.status(session.entry(LOG, 12, 14, best_effort_from=12))
    assert (name, state.best_effort_from) == ("OK", 10)
    name, state = await gateway.status(session.entry(LOG, 14, 15))
    assert (name, state.best_effort_from) == ("OK", 10)
    assert (await gateway.get(session)).state.best_effort_from == 10
    heir = pb.AcquireLeaseRequest(session_id=session.session_id, owner=secrets.token_bytes(16))
    assert (await gateway.stub.AcquireLease(heir)).state.best_effort_from == 10


async def test_offset_zero_is_an_offset(gateway: Gateway) -> None:
    session = await gateway.create(Session())
    state = (await gateway.status(session.entry(LOG, 0, 2, best_effort_from=0)))[1]
    assert (state.HasField("best_effort_from"), state.best_effort_from) == (True, 0)


@pytest.mark.parametrize("kind", ["by its record", "by an append"])
async def test_another_token_is_no_conflict_and_nothing_of_the_entry_is_applied(gateway: Gateway, kind: str) -> None:
    session = await inexact(gateway, kind)
    for offset, end in ((9, 14), (11, 12), (0, 20)):
        name, state = await gateway.status(session.entry(OTHER, offset, end))
        assert (name, state.length, state.digest) == ("GAP", 12, session.digests(LOG[:12])[-1])
    # what the same caller had sent behind it
    name, state = await gateway.status(session.entry(OTHER, 12, 14))
    assert (name, state.length) == ("GAP", 12)
    name, state = await gateway.status(session.entry(OTHER, 9, 11, finish_reason=STOP))
    assert (name, state.finish_reason) == ("GAP", common_pb2.FINISH_REASON_UNSPECIFIED)
    name, state = await gateway.status(session.entry(LOG, 8, 11, finish_reason=STOP))
    assert (name, state.finish_reason) == ("GAP", common_pb2.FINISH_REASON_UNSPECIFIED)
    assert list((await gateway.get(session)).tokens) == LOG[:12]
    assert (await gateway.status(session.entry(LOG, 12, 14)))[0] == "OK"


async def test_entry_that_says_so_makes_the_difference_where_the_store_had_not_heard(
    gateway: Gateway, session: Session
) -> None:
    name, state = await gateway.status(session.entry(OTHER, 9, 12, best_effort_from=9))
    assert (name, state.length, state.HasField("best_effort_from")) == ("GAP", 10, False)
    assert (await gateway.status(session.entry(OTHER, 9, 12)))[0] == "CONFLICT"


async def test_ended_best_effort_session_answers_with_its_finish(gateway: Gateway) -> None:
    session = await inexact(gateway, "by an append")
    await gateway.append(session.entry(LOG, 12, 13, finish_reason=STOP))
    name, state = await gateway.status(session.entry(OTHER, 9, 14))
    assert (name, state.finish_reason, state.length) == ("FINISHED", STOP, 13)
    exact = await gateway.create(Session())
    await gateway.append(exact.entry(LOG, 0, 2, finish_reason=STOP))
    name, state = await gateway.status(exact.entry(LOG, 0, 2, best_effort_from=0, finish_reason=STOP))
    assert (name, state.HasField("best_effort_from")) == ("OK", False), "what has ended stays as it was"


async def test_offset_out_of_range_is_refused(gateway: Gateway, session: Session) -> None:
    error = await error_of(gateway.append(session.entry(LOG, 10, 12, best_effort_from=2**31)))
    assert isinstance(error, InvalidRequest)
    assert error.field == "entries[0].best_effort_from"
