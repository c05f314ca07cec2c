"""A client of the plain contract that keeps what it has of a session, and comes back with it anywhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from hedgerow import digest
from hedgerow.errors import HedgerowError
from hedgerow.rpc.status import from_rpc_error
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import gateway_pb2 as pb
from hedgerow.v1.gateway_pb2_grpc import GatewayServiceStub

NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]  # no tokens wait in the connection


@dataclass
class Ask:
    """One generation to be asked for."""

    text: str
    tokens: int = 160
    temperature: float = 0.0
    seed: int = 7
    key: str = ""
    detach: bool = True
    deadline_ms: int = 0
    budget: int = 0
    stop: Sequence[str] = ()
    return_steps: bool = False

    def request(self) -> pb.GenerateRequest:
        sampling = common.SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.tokens, ignore_eos=True, stop=self.stop
        )
        return pb.GenerateRequest(
            text=self.text, sampling=sampling, speculation=common.SpeculationParams(budget=self.budget),
            idempotency_key=self.key, detach=self.detach, deadline_ms=self.deadline_ms, return_steps=self.return_steps,
        )  # fmt: skip


@dataclass
class Got:
    """What a client has: it goes on in one of these through all its calls, and each event must fit."""

    started: pb.SessionStarted | None = None
    finished: pb.SessionFinished | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    digest: bytes = b""
    digests: list[bytes] = field(default_factory=list)
    steps: list[common.StepStats] = field(default_factory=list)
    timings: list[common.Timings] = field(default_factory=list)
    error: HedgerowError | None = None
    first_at: float = 0.0
    """When the first event after the last call's start came."""

    @property
    def id(self) -> str:
        assert self.started is not None
        return self.started.session_id

    @property
    def text_offset(self) -> int:
        return len(self.text.encode())

    def request(self, **more: Any) -> pb.ResumeRequest:
        """To go on from here."""
        fields: dict[str, Any] = {
            "session_id": self.id, "token_offset": len(self.tokens), "digest": self.digest,
            "text_offset": self.text_offset, "detach": True,
        }  # fmt: skip
        return pb.ResumeRequest(**{**fields, **more})

    def take(self, event: pb.SessionEvent) -> None:
        """Takes one event; AssertionError where it does not fit behind what is there."""
        kind = event.WhichOneof("kind")
        assert self.finished is None, f"{kind} after the end"
        if kind == "started":
            assert self.started is None or self.started == event.started
            self.started, self.digest = event.started, self.digest or event.started.digest
            return
        self.first_at = self.first_at or time.monotonic()
        if kind == "finished":
            self.finished = event.finished
            offsets = (event.finished.token_offset, event.finished.text_offset, event.finished.digest)
            assert offsets == (len(self.tokens), self.text_offset, self.digest)
            return
        chunk = event.chunk
        assert (chunk.token_offset, chunk.text_offset) == (len(self.tokens), self.text_offset)
        self.tokens += chunk.tokens
        self.text += chunk.text
        self.steps += chunk.steps
        self.timings += [chunk.timings] if chunk.HasField("timings") else []
        assert chunk.digest == digest.extend(self.digest, chunk.tokens)
        self.digest = chunk.digest

    async def read(self, call: Any, tokens: int = 1 << 30, then: Callable[[], None] = lambda: None) -> Got:
        """Until there are `tokens`, an end or an error, which is kept."""
        self.error, self.first_at = None, 0.0
        try:
            while len(self.tokens) < tokens and (answer := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                self.take(answer.event)
        except grpc.aio.AioRpcError as error:
            self.error = from_rpc_error(error)
        then()
        return self


class Channel:
    """Calls of one client to one gateway. `tenant` goes into the metadata."""

    def __init__(self, address: str, tenant: str = "", *, narrow: bool = True) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=NARROW if narrow else [])
        self.stub: Any = GatewayServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self.metadata = (("hedgerow-tenant", tenant),) if tenant else ()

    async def __aenter__(self) -> Channel:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close(None)

    def generate(self, ask: Ask, timeout: float | None = None) -> Any:
        return self.stub.Generate(ask.request(), metadata=self.metadata, timeout=timeout)

    def resume(self, request: pb.ResumeRequest) -> Any:
        return self.stub.Resume(request, metadata=self.metadata)

    async def get(self, session_id: str) -> pb.GetSessionResponse:
        request = pb.GetSessionRequest(session_id=session_id)
        answer: pb.GetSessionResponse = await self.stub.GetSession(request, metadata=self.metadata)
        return answer

    async def ask(self, method: str, request: Any) -> Any:
        """A unary call's answer, or its error."""
        try:
            return await getattr(self.stub, method)(request, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)

    async def error_of(self, request: pb.ResumeRequest) -> HedgerowError | None:
        """What a resume ends with; None: with its end."""
        try:
            async for _ in self.resume(request):
                pass
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        return None
