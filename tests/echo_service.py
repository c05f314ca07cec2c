"""A service that answers, fails and waits as it is told; run by the tests of `hedgerow.rpc` as a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from hedgerow import errors
from hedgerow.rpc.config import from_env_or_exit
from hedgerow.rpc.health import Health
from hedgerow.rpc.logs import set_up_logging
from hedgerow.rpc.server import ServerConfig, serve

SERVICE = "hedgerow.test.Echo"
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, kw_only=True)
class EchoConfig(ServerConfig):
    """`ready_file`: the service is well while this file is there."""

    ready_file: Path = field(metadata={"help": "a file"})


async def obey(order: bytes) -> bytes:
    """Echo, fail or wait."""
    if order in (b"stubborn", b"block"):
        print("arrived", file=sys.stderr, flush=True)
    if order == b"invalid":
        raise errors.InvalidRequest("top_p", 1.5, "in (0, 1]")
    if order == b"overloaded":
        raise errors.Overloaded("queue", 212, 200, retry_after=0.25)
    if order == b"bug":
        raise KeyError("the password is hunter2")
    if order == b"cancelled":
        raise asyncio.CancelledError
    if order == b"stubborn":
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(60)
    if order == b"block":
        time.sleep(60)  # noqa: ASYNC251  the event loop hangs
    if order.startswith(b"wait "):
        await asyncio.sleep(float(order.split()[1]))
    return order


async def unary_unary(request: bytes, context: Context) -> bytes:
    return await obey(request)


async def unary_stream(request: bytes, context: Context) -> AsyncIterator[bytes]:
    yield b"first"
    yield await obey(request)


async def unary_written(request: bytes, context: Context) -> None:
    await context.write(b"first")
    await context.write(await obey(request))


async def stream_unary(requests: AsyncIterator[bytes], context: Context) -> bytes:
    return b",".join([await obey(request) async for request in requests])


async def stream_stream(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
    async for request in requests:
        yield await obey(request)


def register(server: grpc.aio.Server) -> None:
    """All four kinds of methods, and both styles of streaming."""
    methods = {
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(unary_unary),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(unary_stream),
        "UnaryWritten": grpc.unary_stream_rpc_method_handler(unary_written),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(stream_unary),
        "StreamStream": grpc.stream_stream_rpc_method_handler(stream_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))


async def main() -> None:
    """Serve until SIGTERM."""
    config = from_env_or_exit(EchoConfig, os.environ)
    set_up_logging("echo", config.log_level)

    async def file_is_there() -> str | None:
        return None if config.ready_file.exists() else f"{config.ready_file.name} is missing"

    await serve("echo", register, config, Health([SERVICE], {"file": file_is_there}, interval=0.2))


if __name__ == "__main__":
    asyncio.run(main())
