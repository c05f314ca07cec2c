"""The server interceptor: every error leaves a service as one status, whatever the kind of method.

- A HedgerowError becomes its status (`hedgerow.rpc.status`). An AioRpcError of a peer's call becomes what the peer
  said. Anything else becomes INTERNAL with an id; what it was goes to the log under that id, never to the caller.
- A CancelledError that the handler let out although its call was not cancelled would leave the client waiting for
  ever (grpc/grpc#29248): it becomes INTERNAL too.
- A handler that yields its answers is closed in its own task when its call ends, however that comes about: gRPC leaves
  one whose client goes away during a write to the garbage collector, and with it whatever it holds for that client.
- A request that cannot be read (no message of its type, or text in it that is not UTF-8) is the caller's mistake: gRPC
  would answer UNKNOWN with the name of a Python class, and log a traceback each time.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from hedgerow.errors import HedgerowError, Internal, InvalidRequest
from hedgerow.rpc import status, tracing
from hedgerow.rpc.logs import bind, get_log

log = get_log(__name__)

KEY, MOST_NAME = "traceparent", 128  # of metadata; characters of a session's name in the log
Handler = Callable[..., Any]
Context = grpc.aio.ServicerContext[Any, Any]
Read = Callable[[bytes], Any]
_KINDS = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class StatusInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """Turns exceptions into statuses, for all four kinds of methods and both styles of streaming."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap the method's handler; an unknown method stays unknown."""
        handler = await continuation(handler_call_details)
        return None if handler is None else guarded(str(handler_call_details.method), handler)


def guarded(method: str, handler: grpc.RpcMethodHandler[Any, Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """The method's handler with what this module promises around it; what it yields is written from within."""
    kind, build = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
    inner = getattr(handler, kind)
    call = _write(_guard_generator(method, inner)) if inspect.isasyncgenfunction(inner) else _guard(method, inner)
    read: Read | None = handler.request_deserializer
    if read is not None:
        read = _raising(read) if handler.request_streaming else _returning(read)
    return build(call, read, handler.response_serializer)


def _raising(read: Read) -> Read:
    """For a stream of requests: what reading one raises comes out of the handler's own loop."""

    def reading(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError as error:
            limit = f"a message of its type, the texts in it valid UTF-8 ({error})"
            raise InvalidRequest("request", f"{len(data)} bytes", limit) from None

    return reading


def _returning(read: Read) -> Read:
    """For a single request, which gRPC reads before it calls the handler: `_check` raises what comes in its place."""
    raising = _raising(read)

    def reading(data: bytes) -> Any:
        try:
            return raising(data)
        except InvalidRequest as refused:
            return refused

    return reading


def _guard(method: str, inner: Handler) -> Handler:
    async def call(request: Any, context: Context) -> Any:
        try:
            _check(request)
            _name(request, context)
            return await inner(request, context)
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  the outermost frame of our code
            await _abort(method, error, context)

    return call


def _guard_generator(method: str, inner: Handler) -> Handler:
    async def call(request: Any, context: Context) -> AsyncIterator[Any]:
        try:
            _check(request)
            _name(request, context)
            async with aclosing(inner(request, context)) as answers:
                async for answer in answers:
                    yield answer
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001  the outermost frame of our code
            await _abort(method, error, context)

    return call


def _write(inner: Handler) -> Handler:
    async def call(request: Any, context: Context) -> None:
        # aclosing: a generator that is left in the middle must release what it holds now, not when collected.
        async with aclosing(inner(request, context)) as answers:
            async for answer in answers:
                await context.write(answer)

    return call


def _name(request: Any, context: Context) -> None:
    """What this call's log lines are about, as far as it says so itself. A handler that knows better binds that."""
    caller = str(dict(context.invocation_metadata() or ()).get(KEY, ""))
    about = request.record if hasattr(request, "record") else request
    session = str(getattr(about, "session_id", ""))[:MOST_NAME]
    bind(session=session, trace=tracing.trace_id(caller))


def _check(request: Any) -> None:
    if isinstance(request, InvalidRequest):
        raise request


async def _abort(method: str, error: BaseException, context: Context) -> NoReturn:
    if isinstance(error, asyncio.CancelledError) and _is_cancelled(context):
        raise error
    wire = status.to_wire(_translate(method, error))
    await context.abort(wire.code, wire.details, wire.trailers)
    raise AssertionError("abort returned")


def _is_cancelled(context: Context) -> bool:
    task = asyncio.current_task()
    return context.cancelled() or (task is not None and task.cancelling() > 0)


def _translate(method: str, error: BaseException) -> HedgerowError:
    if isinstance(error, HedgerowError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return status.from_rpc_error(error)
    error_id = secrets.token_hex(8)
    log.error("a handler failed", exception=error, method=method, error_id=error_id)
    return Internal(f"internal error {error_id}; the server's log has it", metadata={"error_id": error_id})
