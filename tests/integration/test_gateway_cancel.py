"""Clients that go away, however they do it: the sequence stops within a step, and nothing is left anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import grpc.aio
import pytest
import redis
from grpc.aio import EOF

from hedgerow import digest
from hedgerow.cli.supervisor import Stack
from hedgerow.client import AsyncClient, Options, Stream
from hedgerow.errors import HedgerowError, SessionDeleted
from hedgerow.v1 import gateway_pb2 as pb
from hedgerow.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.stack import Models, another_gateway, verifier_load

PROMPT = "def area(width, height):\n    "
ENDLESS: Options = {"max_tokens": 2000, "ignore_eos": True, "temperature": 1.0, "seed": 3}

pytestmark = pytest.mark.usefixtures("idle")


async def until(what: Callable[[], Awaitable[Any]], seconds: float = 10) -> Any:
    """Polls; gives the first answer that is true."""
    end = time.monotonic() + seconds
    while not (answer := await what()):
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.02)
    return answer


async def begun(client: AsyncClient, chunks: int, **more: Any) -> Stream:
    stream = client.generate(PROMPT, **{**ENDLESS, **more})
    for _ in range(chunks):
        await anext(stream)
    return stream


async def leave(client: AsyncClient, draw: random.Random) -> str:
    """Start one and leave it in one of the ways that clients do; its id, empty where it may not have started."""
    stream = await begun(client, draw.randrange(4), seed=draw.randrange(1 << 20))
    way = draw.randrange(5)
    if way == 0:
        await stream.aclose()
    elif way == 1:
        session_id = stream.session_id
        del stream
        return session_id
    elif way == 2 and stream.session_id:
        await client.cancel(stream.session_id)
        assert await stream.result()
        assert stream.finished is not None
        assert stream.finished.reason == "cancelled"
    elif way == 3:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(anext(stream), draw.random() * 0.02)
        await stream.aclose()
    else:
        task = asyncio.create_task(stream.result())
        await asyncio.sleep(draw.random() * 0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    return stream.session_id


async def test_two_hundred_random_cancels_leave_nothing(client: AsyncClient) -> None:
    """Pages, sequences, readers and tasks are counted by the `idle` fixture."""
    draw = random.Random(200)
    left: list[str] = []
    for _ in range(20):
        left += await asyncio.gather(*(leave(client, draw) for _ in range(10)))
    for session_id in draw.sample([i for i in left if i], 10):

        async def recorded(session_id: str = session_id) -> bool:
            return (await client.get_session(session_id)).finish_reason == "cancelled"

        await until(recorded)


async def test_a_cancel_stops_the_sequence_within_a_step(stack: Stack, client: AsyncClient) -> None:
    async def stopped() -> bool:
        return verifier_load(stack).running == 0

    more: list[int] = []
    async with AsyncClient(stack.address("gateway")) as other:
        while not more or (more[-1] > 2 and len(more) < 5):  # where the word itself travels for longer than a step
            stream = await begun(client, 5)
            assert await other.cancel(stream.session_id)
            before = verifier_load(stack)
            result = await stream.result()
            assert stream.finished is not None
            assert result.finish_reason == "cancelled"
            assert not await other.cancel(stream.session_id)
            there = await other.get_session(stream.session_id)
            assert there.token_count == stream.finished.token_offset == there.usage.completion_tokens
            assert there.digest == stream.finished.digest
            await until(stopped)
            more.append(verifier_load(stack).steps - before.steps)
    assert min(more) <= 10, more


async def test_a_connection_that_breaks_cancels(stack: Stack, client: AsyncClient) -> None:
    raw = grpc.aio.insecure_channel(stack.address("gateway"))
    asked = pb.GenerateRequest(text=PROMPT)
    asked.sampling.max_tokens = 2000
    call = GatewayServiceStub(raw).Generate(asked)
    session_id = (await call.read()).event.started.session_id
    await call.read()
    await raw.close(None)

    async def recorded() -> bool:
        return (await client.get_session(session_id)).finish_reason == "cancelled"

    await until(recorded)


async def test_a_session_is_deleted_while_it_runs(client: AsyncClient) -> None:
    stream = await begun(client, 2)
    assert await client.delete_session(stream.session_id)
    await stream.result()
    assert stream.finished is not None
    assert stream.finished.reason == "cancelled"


async def test_a_deletion_by_the_owner_holds_where_the_store_had_forgotten_the_session(
    stack: Stack, client: AsyncClient
) -> None:
    """A store leaves no tombstone of what it never heard of; the owner says that the session is real."""
    stream = await begun(client, 2)
    with redis.Redis.from_url(stack.redis_url) as store:
        store.delete(*store.keys(f"*{stream.session_id}*"))
        await client.delete_session(stream.session_id)
        with contextlib.suppress(HedgerowError):
            await stream.result()
        with pytest.raises(SessionDeleted):
            await client.get_session(stream.session_id)
        assert store.keys(f"*{stream.session_id}*") == [f"hedgerow:{{{stream.session_id}}}:mark".encode()]


@pytest.fixture
def small_gateway(stack: Stack, models: Models) -> Iterator[str]:
    """A second gateway that lets a client be 16 tokens behind."""
    with another_gateway(stack, models, client_lag=16) as address:
        yield address


async def drain(call: grpc.aio.UnaryStreamCall[Any, Any]) -> AsyncIterator[pb.SessionEvent]:
    while (answer := await call.read()) is not EOF:
        yield answer.event


async def test_a_reader_that_stalls_holds_its_sequence_and_loses_nothing(
    stack: Stack, small_gateway: str, client: AsyncClient
) -> None:
    """Elsewhere a stalled reader's queue grew without a bound."""
    tokens = 640
    narrow = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(small_gateway, options=narrow) as channel:
        asked = pb.GenerateRequest(text=PROMPT)
        asked.sampling.max_tokens, asked.sampling.ignore_eos = tokens, True
        before = verifier_load(stack).tokens
        call = GatewayServiceStub(channel).Generate(asked)
        session_id = (await call.read()).event.started.session_id
        seen = [before]

        async def held() -> bool:
            await asyncio.sleep(0.25)
            seen.append(verifier_load(stack).tokens)
            return seen[-1] == seen[-2] > before

        await until(held, seconds=40)
        assert seen[-1] - before < tokens, "it ran on although nobody read"
        events = [event async for event in drain(call)]
    got = [token for event in events for token in event.chunk.tokens]
    assert len(got) == tokens
    assert len(events) < tokens / 2, "what piled up comes in few pieces"
    assert events[-1].finished.token_offset == tokens
    log = digest.extend(digest.first(session_id, await client.tokenize(PROMPT)), got)
    assert log == events[-1].finished.digest == (await client.get_session(session_id)).digest
