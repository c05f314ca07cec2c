"""A gateway whose answers a test writes down: the wire is real, the sessions are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from hedgerow.errors import HedgerowError
from hedgerow.rpc.interceptors import StatusInterceptor
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import gateway_pb2 as pb
from hedgerow.v1.gateway_pb2_grpc import GatewayServiceServicer, add_GatewayServiceServicer_to_server

Context = grpc.aio.ServicerContext[Any, Any]
Act = pb.SessionEvent | HedgerowError | Callable[[], Any]
Script = Sequence[Act]
UNSAID = 1 << 63
"""A text offset that the gateway fills in: the bytes that it has sent, or that the client says it has."""


def started(session_id: str = "s1", seed: int = 42) -> pb.SessionEvent:
    sampling = common.SamplingParams(seed=seed, temperature=0.5, max_tokens=9)
    return pb.SessionEvent(
        started=pb.SessionStarted(session_id=session_id, model="m", prompt_tokens=3, sampling=sampling, mode=1)  # type: ignore[arg-type]
    )


def chunk(offset: int, tokens: Sequence[int], text: str, text_offset: int = UNSAID) -> pb.SessionEvent:
    step = common.StepStats(step_id=7, budget=8, tree_nodes=5, accepted=len(tokens) - 1, emitted=len(tokens))
    return pb.SessionEvent(
        chunk=pb.TokenChunk(
            token_offset=offset, text_offset=text_offset, tokens=tokens, text=text, steps=[step],
            digest=digest(offset + len(tokens)),
        )
    )  # fmt: skip


def finished(reason: str = "STOP", tokens: int = 0, text_offset: int = UNSAID) -> pb.SessionEvent:
    usage = common.Usage(prompt_tokens=3, completion_tokens=tokens, steps=2)
    number = common.FinishReason.Value(f"FINISH_REASON_{reason}")
    return pb.SessionEvent(
        finished=pb.SessionFinished(
            reason=number, usage=usage, token_offset=tokens, text_offset=text_offset, mode=1,  # type: ignore[arg-type]
            digest=digest(tokens) if tokens else b"",
        )
    )  # fmt: skip


def digest(offset: int) -> bytes:
    """What stands for the digest after so many tokens."""
    return b"%016d" % offset


class ScriptedGateway(GatewayServiceServicer):
    """Plays one script a call: events are sent, errors raised, callables awaited."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.requests: list[pb.GenerateRequest] = []
        self.resumes: list[pb.ResumeRequest] = []
        self.cancels: list[str] = []
        self.metadata: list[dict[str, Any]] = []
        self.remaining: list[float] = []  # seconds until the deadline that each stream's call came with
        self.refused: list[Any] = []  # errors that the next calls of one answer raise, or what they await
        self.running = 0
        self.idle = asyncio.Event()
        self.address = ""
        self.server: grpc.aio.Server | None = None
        self.dead: asyncio.Event | None = None

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        async for event in self._play(context, 0):
            yield pb.GenerateResponse(event=event)

    async def Resume(self, request: pb.ResumeRequest, context: Context) -> AsyncIterator[pb.ResumeResponse]:
        self.resumes.append(request)
        async for event in self._play(context, request.text_offset):
            yield pb.ResumeResponse(event=event)

    async def _play(self, context: Context, text_offset: int) -> AsyncIterator[pb.SessionEvent]:
        self._note(context)
        self.remaining.append(context.time_remaining() or 0.0)
        self.running += 1
        self.idle.clear()
        try:
            for act in self.scripts.pop(0):
                if isinstance(act, HedgerowError):
                    raise act
                if not isinstance(act, pb.SessionEvent):
                    await act()
                    continue
                event = pb.SessionEvent()
                event.CopyFrom(act)
                for kind in (event.chunk, event.finished):
                    if kind.text_offset == UNSAID:
                        kind.text_offset = text_offset
                text_offset += len(act.chunk.text.encode())
                yield event
        finally:
            self.running -= 1
            self.idle.set()

    def _note(self, context: Context) -> None:
        self.metadata.append(dict(context.invocation_metadata() or ()))  # type: ignore[arg-type]

    async def _answer(self, context: Context) -> None:
        self._note(context)
        if self.refused:
            act = self.refused.pop(0)
            if isinstance(act, HedgerowError):
                raise act
            await act()

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        await self._answer(context)
        return pb.ListModelsResponse(models=[pb.Model(name="m", context_length=64, vocab_size=99, ready=True)])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        await self._answer(context)
        text = request.text or "".join(f"{m.role}:{m.content};" for m in request.chat.messages)
        return pb.TokenizeResponse(tokens=text.encode())

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        await self._answer(context)
        self.cancels.append(request.session_id)
        return pb.CancelResponse(was_running=request.session_id == "s1")

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:
        await self._answer(context)
        return pb.GetSessionResponse(session_id=request.session_id, model="m", token_count=5, digest=b"d" * 16)

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        await self._answer(context)
        return pb.DeleteSessionResponse(existed=True)

    async def die(self) -> None:
        """Breaks every connection at once and listens no more, as a killed process does."""
        assert self.server is not None
        self.dead = asyncio.Event()
        try:
            await self.server.stop(0)
        finally:
            self.dead.set()


async def for_ever() -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def gateway(*scripts: Script, port: int = 0) -> AsyncIterator[ScriptedGateway]:
    """A running one; no call may be left when the test is over."""
    servicer, server = ScriptedGateway(*scripts), grpc.aio.server(interceptors=(StatusInterceptor(),))
    add_GatewayServiceServicer_to_server(servicer, server)
    servicer.address, servicer.server = f"localhost:{server.add_insecure_port(f'localhost:{port}')}", server
    await server.start()
    try:
        yield servicer
        if servicer.running:
            await asyncio.wait_for(servicer.idle.wait(), 5)
    finally:
        if servicer.dead is None:
            await server.stop(0)
        else:  # a second stop at the same time is cancelled by the first
            await asyncio.wait_for(servicer.dead.wait(), 5)
