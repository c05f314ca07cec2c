"""GatewayService: convert, one call, convert."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc.aio

from hedgerow.v1 import gateway_pb2 as pb
from hedgerow.v1.common_pb2 import TraceContext
from hedgerow.v1.gateway_pb2_grpc import GatewayServiceServicer, add_GatewayServiceServicer_to_server
from services.gateway import convert, limits, listing
from services.gateway.access import caller, tenant_of
from services.gateway.gateway import Gateway
from services.gateway.metrics import Call, Calls
from services.gateway.resolve import INLINE_BYTES
from services.gateway.stream import Stream
from services.gateway.types import Generation, Trace

SERVICE = "hedgerow.v1.GatewayService"
Context = grpc.aio.ServicerContext[Any, Any]
Request = TypeVar("Request", pb.GenerateRequest, pb.TokenizeRequest)
Asked = TypeVar("Asked")


class GatewayServicer(GatewayServiceServicer):
    """The public contract. Errors leave as exceptions; the server's interceptor makes statuses of them."""

    def __init__(self, gateway: Gateway, calls: Calls | None = None) -> None:
        self._gateway, self._calls = gateway, calls or Calls()

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """A call that breaks, or is left, closes the stream: that cancels the session unless it is detached."""
        with self._calls.call("generate", _trace(context, request.trace)) as call:
            limits.check_generate(request, self._gateway.context_length)
            asked = self._owned(await _converted(convert.generation, request))
            if call.trace.traceparent:
                asked = dataclasses.replace(asked, trace=call.trace)
            call.asked(asked)
            self._gateway.quotas.generate(caller())
            with self._gateway.quotas.reading(caller()):
                stream = await self._gateway.generate(asked, context.time_remaining())
                async with aclosing(_events(stream, call, with_steps=asked.return_steps)) as events:
                    async for event in events:
                        yield pb.GenerateResponse(event=event)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.ResumeResponse]:
        """As Generate, from where the client is."""
        with self._calls.call("resume", _trace(context)) as call, self._gateway.quotas.reading(caller()):
            at, tenant = convert.position(request), caller().name
            stream = await self._gateway.resume(request.session_id, tenant, at, call.trace, detach=request.detach)
            with_steps = stream.session.record.return_steps
            async with aclosing(_events(stream, call, with_steps=with_steps)) as events:
                async for event in events:
                    yield pb.ResumeResponse(event=event)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Within one step."""
        return pb.CancelResponse(was_running=await self._gateway.cancel(request.session_id, caller().name))

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:
        """As the store has it."""
        return convert.session(await self._gateway.session(request.session_id, caller().name))

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Context) -> pb.ListSessionsResponse:
        """Those of the caller's tenant that run here."""
        sessions = self._gateway.table.sessions
        found, cursor = listing.page(sessions, caller().name, request.limit, request.cursor)
        return pb.ListSessionsResponse(sessions=map(convert.running, found), cursor=cursor)

    async def ListStoredSessions(
        self, request: pb.ListStoredSessionsRequest, context: Context
    ) -> pb.ListStoredSessionsResponse:
        """Those of the caller's tenant that the store has."""
        tenant = caller().name
        limits.check_bytes("cursor", request.cursor, limits.KEY_BYTES)
        found, cursor = await self._gateway.stored(tenant, listing.most(request.limit), request.cursor)
        return pb.ListStoredSessionsResponse(sessions=map(convert.listed, found), cursor=cursor, tenant=tenant)

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        """A running one is cancelled first."""
        existed = await self._gateway.delete(request.session_id, caller().name)
        return pb.DeleteSessionResponse(existed=existed)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """The verifier's, as far as it is known."""
        models = [convert.model(model, ready=ready) for model, ready in self._gateway.models()]
        return pb.ListModelsResponse(models=models)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """What Generate would use."""
        self._gateway.quotas.spend(caller())
        limits.check_chat(request, self._gateway.context_length)
        prompt = await _converted(convert.prompt, request)
        assert not isinstance(prompt, tuple), "TokenizeRequest has no token ids"
        return pb.TokenizeResponse(tokens=await self._gateway.tokenize(request.model, prompt))

    def _owned(self, asked: Generation) -> Generation:
        """With its tenant, and a priority that this one may have. Raises InvalidRequest."""
        priority = self._gateway.quotas.priority(caller(), asked.priority)
        return dataclasses.replace(asked, tenant=tenant_of(asked.tenant), priority=priority)

    def register(self, server: grpc.aio.Server) -> None:
        """Add this service to `server`."""
        add_GatewayServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]


async def _events(stream: Stream, call: Call, *, with_steps: bool) -> AsyncGenerator[pb.SessionEvent, None]:
    try:
        async with aclosing(stream.events()) as events:
            async for event in events:
                call.sent(event, stream.session)
                yield convert.event(event, with_steps=with_steps)
    finally:
        call.streamed(stream.making)
        stream.close()


async def _converted(convert: Callable[[Request], Asked], request: Request) -> Asked:
    """Off the event loop where it may take long."""
    if request.ByteSize() <= INLINE_BYTES:
        return convert(request)
    return await asyncio.to_thread(convert, request)


def _trace(context: Context, named: TraceContext | None = None) -> Trace:
    """The trace context that the request names, else that of the metadata; empty where there is none that is sound."""
    if named is not None and named.traceparent:
        return Trace(*limits.known_trace(named.traceparent, named.tracestate))
    metadata = dict(context.invocation_metadata() or ())
    return Trace(*limits.known_trace(str(metadata.get("traceparent", "")), str(metadata.get("tracestate", ""))))
