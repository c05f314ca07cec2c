"""Whoever leaves a stream, in whatever way, ends its session; nothing is left running, and nothing waits for long."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from hedgerow.client import AsyncClient, Chunk, Position, Retry
from hedgerow.errors import Cancelled, Unavailable
from tests.polling import soon
from tests.unit.client_gateway import ScriptedGateway, chunk, digest, finished, for_ever, gateway, started

STUCK = [started(), chunk(0, [1], "a"), for_ever]
WHOLE = [started(), chunk(0, [1], "a"), finished("STOP", 1)]


async def until_left(server: ScriptedGateway, *sessions: str) -> None:
    await soon(lambda: server.cancels == list(sessions or ("s1",)) and not server.running, 30)


async def test_leaving_the_loop_and_dropping_the_stream_cancels_the_session() -> None:
    """grpc.aio never cancels a call that nobody reads any more (grpc/grpc#43462)."""
    async with gateway(STUCK) as server, AsyncClient(server.address) as client:
        async for _ in client.generate("x"):
            break
        gc.collect()
        await until_left(server)


async def test_a_reference_cycle_does_not_keep_an_abandoned_call() -> None:
    async with gateway(STUCK) as server, AsyncClient(server.address) as client:
        stream = client.generate("x")
        await anext(stream)
        stream.me = stream  # type: ignore[attr-defined]
        gone = weakref.ref(stream)
        del stream
        gc.collect()
        assert gone() is None
        await until_left(server)


async def test_closing_cancels_and_ends_the_loop() -> None:
    async with gateway(STUCK) as server, AsyncClient(server.address) as client:
        async with client.generate("x") as stream:
            await anext(stream)
        assert server.cancels == ["s1"], "whoever closes waits until the gateway knows"
        await until_left(server)
        assert [chunk async for chunk in stream] == []
        assert stream.finished is None


async def test_leaving_the_events_cancels_as_well() -> None:
    async with gateway(STUCK) as server, AsyncClient(server.address) as client:
        events = client.generate("x").events()
        async for event in events:
            if isinstance(event, Chunk):
                break
        await events.aclose()  # type: ignore[attr-defined]
        await until_left(server)


async def test_a_cancelled_task_cancels_its_session() -> None:
    async with gateway(STUCK) as server, AsyncClient(server.address) as client:
        stream = client.generate("x")
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert server.cancels == ["s1"]
        await until_left(server)


async def test_a_program_that_is_interrupted_cancels_before_its_loop_ends() -> None:
    """asyncio.run cancels every task: one in the background would not even begin."""
    async with gateway(STUCK) as server:

        def program() -> None:
            async def main() -> None:
                client = AsyncClient(server.address)
                async with asyncio.timeout(0.5):
                    await client.complete("x")

            with pytest.raises(TimeoutError):
                asyncio.run(main())

        await asyncio.to_thread(program)
        await until_left(server)


async def test_a_session_whose_id_is_not_known_yet_is_cancelled_when_it_is() -> None:
    """The call alone does not end a session that is detached from it."""
    slow = asyncio.Event()
    async with gateway([slow.wait, *STUCK]) as server, AsyncClient(server.address) as client:
        reading = asyncio.create_task(client.complete("x"))
        await soon(lambda: server.running == 1, 30)
        asyncio.get_running_loop().call_later(0.1, slow.set)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until_left(server)


async def test_leaving_does_not_wait_long_for_a_gateway_that_is_slow_to_answer() -> None:
    async with gateway([for_ever]) as server, AsyncClient(server.address) as client:
        stream = client.generate("x")
        reading = asyncio.create_task(stream.result())
        await soon(lambda: server.running == 1, 30)
        began = asyncio.get_running_loop().time()
        await stream.aclose()
        assert asyncio.get_running_loop().time() - began < 2
        with pytest.raises(Cancelled):  # the other task's stream was closed
            await asyncio.wait_for(reading, 10)
    assert asyncio.get_running_loop().time() - began < 12


async def test_nothing_is_sent_for_a_stream_that_nobody_began() -> None:
    async with gateway() as server, AsyncClient(server.address) as client:
        async with client.generate("x"):
            pass
        assert server.metadata == []


async def test_what_has_ended_is_not_cancelled() -> None:
    async with gateway(WHOLE, WHOLE) as server, AsyncClient(server.address) as client:
        await client.complete("x")
        async with client.generate("x") as stream:
            assert [piece.text async for piece in stream] == ["a"]
    assert server.cancels == []


async def test_leaving_while_it_waits_to_resume_cancels_at_the_next_gateway() -> None:
    slow = Retry(first_delay=30.0, last_delay=30.0)
    broken = [*STUCK[:2], Unavailable("verifier", "away", 0.0)]
    async with gateway(broken) as server, AsyncClient(server.address, retry=slow) as client:
        stream = client.generate("x")
        await anext(stream)
        reading = asyncio.create_task(anext(stream))  # type: ignore[arg-type]
        await soon(lambda: not server.running, 30)
        await asyncio.wait_for(stream.aclose(), 5)
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(reading, 5)
        assert server.cancels == ["s1"]


async def test_leave_running_and_detach_leave_the_session_going_on() -> None:
    async with gateway(STUCK, STUCK, STUCK) as server, AsyncClient(server.address) as client:
        async for _ in client.generate("x", leave_running=True):
            break
        gc.collect()
        await soon(lambda: not server.running, 30)
        stream = client.generate("x")
        await anext(stream)
        assert await stream.detach() == Position("s1", 1, digest(1), 1) == stream.position
        assert [piece async for piece in stream] == []
        fresh = client.generate("x")
        assert await fresh.detach() == Position("s1", 0, b"", 0), "it waits until there is a session"
        await soon(lambda: not server.running, 30)
    assert server.cancels == []
    assert all(request.detach for request in server.requests)


async def test_a_session_may_be_tied_to_its_connection() -> None:
    async with gateway(WHOLE) as server, AsyncClient(server.address) as client:
        await client.complete("x", detach=False)
        assert not server.requests[0].detach


async def test_closing_the_client_ends_its_streams_and_sessions() -> None:
    async with gateway(STUCK, STUCK) as server:
        client = AsyncClient(server.address)
        idle, read = client.generate("x"), client.generate("y")
        await anext(idle)
        await anext(read)
        reading = asyncio.create_task(anext(read))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        await client.aclose()
        for waiting in (reading, anext(idle), client.models(), client.complete("x")):
            with pytest.raises(Cancelled, match="the client is closed"):
                await asyncio.wait_for(waiting, 5)  # type: ignore[arg-type]
        await until_left(server, "s1", "s1")
        await client.aclose()


async def test_closing_the_client_ends_a_call_that_waits() -> None:
    async with gateway() as server:
        server.refused = [for_ever]
        client = AsyncClient(server.address)
        waiting = asyncio.create_task(client.models())
        await soon(lambda: server.metadata, 30)
        await client.aclose()
        with pytest.raises(Cancelled, match="the client is closed"):
            await asyncio.wait_for(waiting, 5)


async def test_an_error_of_the_stream_leaves_the_session_and_takes_no_time() -> None:
    broken = [*STUCK[:2], Unavailable("verifier", "away", 0.0)]
    async with gateway(broken) as server, AsyncClient(server.address, retry=Retry.never()) as client:
        stream = client.generate("x")
        await anext(stream)
        with pytest.raises(Unavailable):
            await anext(stream)
        assert stream.position.token_offset == 1
        with pytest.raises(Cancelled, match="resume"):
            await anext(stream)
        await stream.aclose()
    assert server.cancels == []


async def test_nothing_is_kept_of_streams_that_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they ended: no call, no task, no entry."""
    monkeypatch.setattr("hedgerow.client._wire.FAREWELL", 0.2)
    away = Unavailable("verifier", "away", 0.0)
    scripts = [WHOLE, STUCK, [*STUCK[:2], away], STUCK, STUCK, [for_ever]] * 5
    async with gateway(*scripts) as server, AsyncClient(server.address, retry=Retry.never()) as client:
        before = len(asyncio.all_tasks())
        for _ in range(5):
            await client.complete("x")
            async with client.generate("x") as closed:
                await anext(closed)
            with pytest.raises(Unavailable):
                await client.complete("x")
            dropped = client.generate("x")
            await anext(dropped)
            del dropped
            gc.collect()
            await soon(lambda: not client._gateways.streams, 30)  # so that the scripts come in their order
            detached = client.generate("x")
            await anext(detached)
            await detached.detach()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.complete("x")
            await soon(lambda: not client._gateways._background, 10)
        await soon(lambda: len(asyncio.all_tasks()) <= before and not server.running, 30)
        assert not client._gateways.streams
        assert len(client._gateways._channels) == 1
