"""Reading a call until it ends or the server does, over a real server; and work beside serving."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from hedgerow.rpc.streams import until
from hedgerow.rpc.work import serve_while
from tests.polling import soon

ECHO = "/test.Echo/Echo"


@asynccontextmanager
async def echo(
    stop: asyncio.Event, open_calls: set[object], first_within: float | None = None
) -> AsyncIterator[grpc.aio.Channel]:
    async def handler(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        open_calls.add(context)
        try:
            async for request in until(stop, requests, first_within):
                yield request
        finally:
            open_calls.discard(context)

    server = grpc.aio.server()
    methods = {"Echo": grpc.stream_stream_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def test_messages_pass_until_the_caller_is_done() -> None:
    async with echo(asyncio.Event(), set()) as channel:
        call = channel.stream_stream(ECHO)()
        for text in (b"one", b"two"):
            await call.write(text)
            assert await call.read() == text
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_call_that_says_nothing_ends_and_one_that_spoke_may_wait() -> None:
    stop, open_calls = asyncio.Event(), set[object]()
    async with echo(stop, open_calls, first_within=0.2) as channel:
        spoke, silent = channel.stream_stream(ECHO)(), channel.stream_stream(ECHO)()
        await spoke.write(b"hello")
        assert await spoke.read() == b"hello"
        with pytest.raises(grpc.aio.AioRpcError):
            await silent.read()
        await soon(lambda: len(open_calls) == 1)
        await spoke.write(b"still here")
        assert await spoke.read() == b"still here"
        spoke.cancel()


async def test_a_stop_ends_calls_that_wait_for_a_message() -> None:
    stop, open_calls = asyncio.Event(), set[object]()
    async with echo(stop, open_calls) as channel:
        calls = [channel.stream_stream(ECHO)() for _ in range(50)]
        for call in calls:
            await call.write(b"hello")
            assert await call.read() == b"hello"
        assert len(open_calls) == 50
        stop.set()
        for call in calls:
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        await soon(lambda: not open_calls)


async def test_a_cancelled_call_is_let_go() -> None:
    open_calls = set[object]()
    async with echo(asyncio.Event(), open_calls) as channel:
        for _ in range(50):
            call = channel.stream_stream(ECHO)()
            await call.write(b"hello")
            assert await call.read() == b"hello"
            call.cancel()
        await soon(lambda: not open_calls)


async def test_work_goes_on_while_the_server_drains_and_ends_after_it() -> None:
    seen: list[str] = []

    async def serving() -> None:
        await asyncio.sleep(0.01)
        seen.append("drained")

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("work ended")

    await serve_while(serving(), work())
    assert seen == ["drained", "work ended"]


async def test_work_that_fails_drains_the_server_and_is_raised() -> None:
    """A process whose engine failed must not go on answering health."""
    seen: list[str] = []

    async def serving() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            seen.append("drained")

    async def work() -> None:
        raise RuntimeError("a step failed")

    with pytest.raises(RuntimeError, match="a step failed"):
        await serve_while(serving(), work())
    assert seen == ["drained"]


async def test_work_that_is_done_leaves_the_server_running() -> None:
    done = asyncio.Event()

    async def serving() -> None:
        await done.wait()

    async def work() -> None:
        done.set()

    await serve_while(serving(), work())
    assert done.is_set()
