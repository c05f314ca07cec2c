"""A span for each call with one answer that comes with a trace context. Streams make their own.

In the service that owns its callers' trees it is below the caller's span. Elsewhere it is a trace of its own, linked to
the caller's: that one may die before it gives its span out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from hedgerow.rpc import tracing
from hedgerow.rpc.interceptors import Context

KEY = "traceparent"


class TraceInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """`owns`: whether its spans are below those of its callers. Goes before the interceptor that makes statuses."""

    def __init__(self, *, owns: bool) -> None:
        self._owns = owns

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wrap the method's handler where there is a context and one answer."""
        handler = await continuation(handler_call_details)
        caller = str(dict(handler_call_details.invocation_metadata or ()).get(KEY, ""))
        if handler is None or handler.request_streaming or handler.response_streaming or not tracing.is_sampled(caller):
            return handler
        inner: Any = handler.unary_unary
        method = str(handler_call_details.method).lstrip("/")
        parent, links = (caller, []) if self._owns else ("", [caller])

        async def call(request: Any, context: Any) -> Any:
            span = tracing.begin(method, parent, links, kind="server", attributes=tracing.of_call(method))
            if session := getattr(request, "session_id", ""):
                span.set_attribute("hedgerow.session.id", session)
            failed: BaseException | None = None
            try:
                return await inner(request, context)
            except (Exception, asyncio.CancelledError) as error:
                failed = error
                raise
            finally:
                code = _code(context, failed)
                fault = code if code in tracing.FAULTS else None
                about: dict[str, tracing.Attribute] = {"rpc.response.status_code": code}
                tracing.end(span, fault, about | {"error.type": code} if fault else about)

        return grpc.unary_unary_rpc_method_handler(call, handler.request_deserializer, handler.response_serializer)


def _code(context: Context, failed: BaseException | None) -> str:
    if isinstance(failed, asyncio.CancelledError):
        return "CANCELLED"
    code: Any = context.code()
    if failed is None and not code:
        return "OK"
    return str(getattr(code, "name", "") or {each.value[0]: each.name for each in grpc.StatusCode}.get(code, "UNKNOWN"))
