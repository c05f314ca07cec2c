"""Who may call: asked once for each call of one service, before its message is parsed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from hedgerow.errors import HedgerowError
from hedgerow.rpc import status
from hedgerow.rpc.interceptors import Context

Metadata = Mapping[str, str]


class AccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # not generic at run time
    """`admit` gets the metadata of every call of `service`, of whatever method, and raises what refuses it.

    It runs in the task of the call: context variables that it sets are the handler's. Other services (health,
    reflection) are not asked about. Goes first: a call that is refused costs no span.
    """

    def __init__(self, service: str, admit: Callable[[Metadata], None]) -> None:
        self._prefix, self._admit = f"/{service}/", admit

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The method's handler, or one that refuses."""
        if str(handler_call_details.method).startswith(self._prefix):
            try:
                self._admit(_flat(handler_call_details.invocation_metadata))
            except HedgerowError as error:
                return _refusal(error)
        return await continuation(handler_call_details)


def _flat(metadata: Any) -> Metadata:
    """A key that is there twice has its values with a comma between them, as HTTP says; binary ones are left out."""
    found: dict[str, str] = {}
    for key, value in metadata or ():
        if isinstance(value, str):
            found[key] = f"{found[key]}, {value}" if key in found else value
    return found


def _refusal(error: HedgerowError) -> grpc.RpcMethodHandler[Any, Any]:
    """Of any method. It takes the message, as bytes: else a caller that still sends hears that its write failed."""
    wire = status.to_wire(error)

    async def refuse(request: bytes, context: Context) -> None:
        await context.abort(wire.code, wire.details, wire.trailers)

    return grpc.unary_stream_rpc_method_handler(refuse, None, None)
