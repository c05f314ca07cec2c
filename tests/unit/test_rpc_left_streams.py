"""A stream that its client leaves while an answer is written: what the handler holds is released there and then."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator

import grpc
import grpc.aio
import pytest

from hedgerow.rpc.interceptors import Context, StatusInterceptor
from tests.polling import soon

BIG = bytes(1 << 20)  # more than the connection's window: a write waits for its reader


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What only the garbage collector would release stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("ends", ["cancelled", "disconnected"])
async def test_a_stream_that_is_left_in_a_write_is_released_without_the_collector(
    no_collector: None, ends: str
) -> None:
    written, released, handlers = 0, list[asyncio.Task[object] | None](), list[asyncio.Task[object] | None]()

    async def answers(request: bytes, context: Context) -> AsyncIterator[bytes]:
        nonlocal written
        handlers.append(asyncio.current_task())
        try:
            while True:
                written += 1
                yield BIG
        finally:
            released.append(asyncio.current_task())

    server = grpc.aio.server(interceptors=(StatusInterceptor(),))
    handler = {"Ask": grpc.unary_stream_rpc_method_handler(answers)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.Y", handler),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    call = channel.unary_stream("/x.Y/Ask")(b"")
    assert await call.read() == BIG
    seen = 0
    while seen != written:  # until a write waits
        seen = written
        await asyncio.sleep(0.05)
    if ends == "cancelled":
        call.cancel()
    await channel.close()
    await soon(lambda: bool(released), 30)
    assert released == handlers, "by the handler's own task, not by whoever collects it"
    await server.stop(0)
