"""What waits for a gateway: bounded, in order, and gone when its stream is."""

from __future__ import annotations

import asyncio

import pytest

from hedgerow.engine.types import Finish, StepTimings, Update
from hedgerow.errors import Overloaded
from services.verifier.streams import GatewayStreams, Outgoing

TIMINGS = StepTimings(1, 2, 3, 6, 7)


def update(owner: bytes, session: str, finish: Finish = Finish.NONE) -> Update:
    return Update(owner, session, epoch=1, attempt=1, offset=0, tokens=(1,), finish=finish)


async def test_a_step_is_one_message_a_gateway_with_its_own_sequences_only() -> None:
    streams = GatewayStreams(limit=10)
    one, two = streams.open(), streams.open()
    streams.deliver(5, [update(one.key, "a"), update(two.key, "b"), update(one.key, "c")], TIMINGS)
    assert (len(one), len(two)) == (1, 1)
    message = await one.receive()
    assert message is not None
    assert [each.session_id for each in message.updates] == ["a", "c"]
    assert (message.step_id, message.timings) == (5, TIMINGS)


async def test_a_gateway_that_does_not_read_is_cut_off_and_its_memory_freed() -> None:
    stream = GatewayStreams(limit=3).open()
    for step in range(4):
        stream.send(Outgoing(step, [update(stream.key, "a")]))
    assert len(stream) == 0
    with pytest.raises(Overloaded):
        await stream.receive()


async def test_a_stream_that_ends_still_gives_what_was_queued() -> None:
    stream = GatewayStreams(limit=3).open()
    waiting = asyncio.create_task(stream.receive())
    await asyncio.sleep(0)
    stream.send(Outgoing(1, [update(stream.key, "a")]))
    stream.send(Outgoing(2, [update(stream.key, "a")]))
    stream.end()
    assert await waiting == Outgoing(1, [update(stream.key, "a")])
    assert await stream.receive() == Outgoing(2, [update(stream.key, "a")])
    assert await stream.receive() is None


async def test_sequences_are_live_until_their_last_update_whoever_reads_it() -> None:
    """Orphans of a broken stream are cancelled; one that finished meanwhile must not be."""
    streams = GatewayStreams(limit=3)
    stream = streams.open()
    stream.live |= {"a": (1, 1), "b": (1, 2)}
    stream.end()
    streams.deliver(1, [update(stream.key, "a", Finish.STOP), update(stream.key, "b", Finish.ERROR)], TIMINGS)
    assert stream.live == {"b": (1, 2)}, "an older attempt's end is not the end of a newer one"
    streams.forget(stream)
    streams.deliver(2, [update(stream.key, "b")], TIMINGS)
    assert len(stream) == 0


async def test_empty_returns_when_the_last_message_is_taken() -> None:
    stream = GatewayStreams(limit=3).open()
    await stream.empty()
    stream.send(Outgoing(1, []))
    waiting = asyncio.create_task(stream.empty())
    await asyncio.sleep(0)
    assert not waiting.done()
    await stream.receive()
    await asyncio.wait_for(waiting, 10)
