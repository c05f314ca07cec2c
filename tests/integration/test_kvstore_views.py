"""What clients asked to see of their tokens, in the log: read from any offset, followed, repeated, and in parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from hedgerow.v1 import common_pb2
from hedgerow.v1 import kvstore_pb2 as pb
from tests.kvstore_calls import Gateway, Session, gateway_on
from tests.redis_servers import Service, kvstore, redis_server  # noqa: F401  (fixtures)

LOG = list(range(300, 400))
STOP = common_pb2.FINISH_REASON_STOP


@pytest_asyncio.fixture
async def gateway(kvstore: Service) -> AsyncIterator[Gateway]:  # noqa: F811
    async with gateway_on(kvstore.port) as connected:
        yield connected


def step(end: int, **stats: Any) -> pb.CommittedStep:
    timings = common_pb2.Timings(draft_ns=end, total_ns=10 * end)
    return pb.CommittedStep(end=end, stats=common_pb2.StepStats(step_id=end, **stats), timings=timings)


async def test_steps_come_back_with_their_tokens_from_any_offset(gateway: Gateway) -> None:
    session, steps = await gateway.create(Session()), {end: step(end, emitted=2) for end in (2, 5, 6, 9)}
    await gateway.append(session.entry(LOG, 0, 2, committed_steps=[steps[2]]))
    await gateway.append(session.entry(LOG, 2, 6, committed_steps=[steps[5], steps[6]]))
    await gateway.append(session.entry(LOG, 6, 7))
    await gateway.append(session.entry(LOG, 7, 9, committed_steps=[steps[9]], finish_reason=STOP))
    for offset in range(11):
        answer = await gateway.get(session, offset)
        assert list(answer.steps) == [each for end, each in steps.items() if end > offset]
        assert (list(answer.tokens), answer.more_steps_from) == (LOG[offset:9], 0)
        told = [each async for each in gateway.stub.Tail(tail(session, offset))]
        assert [each for message in told for each in message.steps] == list(answer.steps)


async def test_steps_of_a_repeated_append_are_there_once(gateway: Gateway) -> None:
    """It was applied and its answer lost: it comes again, joined with the next one."""
    session, steps = await gateway.create(Session()), [step(2), step(4), step(5)]
    first = session.entry(LOG, 0, 4, committed_steps=steps[:2])
    for entry in (first, first, session.entry(LOG, 0, 5, committed_steps=steps)):
        assert (await gateway.status(entry))[0] == "OK"
    assert list((await gateway.get(session)).steps) == steps


async def test_steps_are_followed_as_they_come(gateway: Gateway) -> None:
    session = await gateway.create(Session())
    call = gateway.stub.Tail(tail(session, 1))
    for begin, end in ((0, 3), (3, 5)):
        await gateway.append(session.entry(LOG, begin, end, committed_steps=[step(end)]))
        message = await call.read()
        assert (message.offset, list(message.steps)) == (max(begin, 1), [step(end)])
    call.cancel()


async def test_more_steps_than_a_message_holds_are_told_in_parts(gateway: Gateway) -> None:
    session = await gateway.create(Session())
    large = {end: step(end, tree_tokens=[2**31] * 180_000) for end in range(1, 8)}  # 0.9 MB each
    for end, each in large.items():
        await gateway.append(session.entry(LOG, end - 1, end, committed_steps=[each]))
    found, offset, parts = list[pb.CommittedStep](), 0, 0
    while True:
        answer = await gateway.get(session, offset)
        assert list(answer.tokens) == LOG[offset:7]
        found, offset, parts = found + list(answer.steps), answer.more_steps_from, parts + 1
        if not offset:
            break
        assert offset == found[-1].end
    assert (found, parts) == (list(large.values()), 2)
    await gateway.append(session.entry(LOG, 7, 7, finish_reason=STOP))
    told = [message async for message in gateway.stub.Tail(tail(session, 0))]
    assert [each for message in told for each in message.steps] == found
    assert [each for message in told for each in message.tokens] == LOG[:7]
    assert max(message.ByteSize() for message in told) < 5.5e6


async def test_what_a_running_session_has_cost_is_told_where_it_is_read_or_granted(gateway: Gateway) -> None:
    session = await gateway.create(Session())
    first, second = (common_pb2.Usage(steps=n, completion_tokens=3 * n) for n in (1, 2))
    assert not (await gateway.get(session)).state.HasField("usage")
    for number, spent in enumerate((first, second)):
        name, state = await gateway.status(session.entry(LOG, 3 * number, 3 * number + 3, spent=spent))
        assert (name, state.HasField("usage")) == ("OK", False)
        assert (await gateway.get(session)).state.usage == spent
    await gateway.status(session.entry(LOG, 3, 6, spent=first))  # a repeated append changes nothing
    assert (await gateway.get(session)).state.usage == second
    taken = await gateway.stub.AcquireLease(pb.AcquireLeaseRequest(session_id=session.session_id, owner=b"n" * 16))
    assert (taken.state.usage, taken.state.length) == (second, 6)
    session.owner, session.epoch = b"n" * 16, taken.lease.epoch
    whole = common_pb2.Usage(steps=3, completion_tokens=7)
    await gateway.append(session.entry(LOG, 6, 7, finish_reason=STOP, usage=whole))
    assert (await gateway.get(session)).state.usage == whole


def tail(session: Session, offset: int) -> pb.TailRequest:
    return pb.TailRequest(session_id=session.session_id, from_offset=offset)
