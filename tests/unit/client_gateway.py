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
Script = Sequence[pb.SessionEvent | HedgerowError | Callable[[], Any]]


def started(session_id: str = "s1", seed: int = 42) -> pb.SessionEvent:
    sampling = common.SamplingParams(seed=seed, temperature=0.5, max_tokens=9)
    return pb.SessionEvent(
        started=pb.SessionStarted(session_id=session_id, model="m", prompt_tokens=3, sampling=sampling, mode=1)  # type: ignore[arg-type]
    )


def chunk(offset: int, tokens: Sequence[int], text: str) -> pb.SessionEvent:
    step = common.StepStats(step_id=7, budget=8, tree_nodes=5, accepted=len(tokens) - 1, emitted=len(tokens))
    return pb.SessionEvent(chunk=pb.TokenChunk(token_offset=offset, tokens=tokens, text=text, steps=[step]))


def finished(reason: str = "STOP", tokens: int = 0) -> pb.SessionEvent:
    usage = common.Usage(prompt_tokens=3, completion_tokens=tokens, steps=2)
    number = common.FinishReason.Value(f"FINISH_REASON_{reason}")
    return pb.SessionEvent(finished=pb.SessionFinished(reason=number, usage=usage, token_offset=tokens, mode=1))  # type: ignore[arg-type]


class ScriptedGateway(GatewayServiceServicer):
    """Plays one script a call: events are sent, errors raised, callables awaited."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.requests: list[pb.GenerateRequest] = []
        self.running = 0
        self.idle = asyncio.Event()
        self.address = ""

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        self.requests.append(request)
        self.running += 1
        self.idle.clear()
        try:
            for act in self.scripts.pop(0):
                if isinstance(act, HedgerowError):
                    raise act
                if isinstance(act, pb.SessionEvent):
                    yield pb.GenerateResponse(event=act)
                else:
                    await act()
        finally:
            self.running -= 1
            self.idle.set()

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(name="m", context_length=64, vocab_size=99, ready=True)])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        text = request.text or "".join(f"{m.role}:{m.content};" for m in request.chat.messages)
        return pb.TokenizeResponse(tokens=text.encode())

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        if act := self.scripts and self.scripts.pop(0):
            for error in act:
                raise error
        return pb.CancelResponse(was_running=request.session_id == "s1")

    async def GetSession(self, request: pb.GetSessionRequest, context: Context) -> pb.GetSessionResponse:
        return pb.GetSessionResponse(session_id=request.session_id, model="m", token_count=5, digest=b"d" * 16)

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Context) -> pb.DeleteSessionResponse:
        return pb.DeleteSessionResponse(existed=True)


async def for_ever() -> None:
    await asyncio.Event().wait()


@asynccontextmanager
async def gateway(*scripts: Script) -> AsyncIterator[ScriptedGateway]:
    """A running one; no call may be left when the test is over."""
    servicer, server = ScriptedGateway(*scripts), grpc.aio.server(interceptors=(StatusInterceptor(),))
    add_GatewayServiceServicer_to_server(servicer, server)
    servicer.address = f"localhost:{server.add_insecure_port('localhost:0')}"
    await server.start()
    try:
        yield servicer
        if servicer.running:
            await asyncio.wait_for(servicer.idle.wait(), 5)
    finally:
        await server.stop(0)
