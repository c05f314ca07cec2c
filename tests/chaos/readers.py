"""Clients whose transcript a judge can read: one over raw stubs that resumes by itself, and the SDK."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio

from hedgerow.client import AsyncClient
from hedgerow.client._gateways import OPTIONS
from hedgerow.client._status import decode
from hedgerow.errors import Fenced, HedgerowError, Overloaded, Unavailable
from hedgerow.v1 import common_pb2
from hedgerow.v1 import gateway_pb2 as pb
from hedgerow.v1.gateway_pb2_grpc import GatewayServiceStub
from tests.chaos.judge import Heard, Transcript

DETACH = True  # the session outlives its call: what the SDK asks for
PATIENCE = 150.0  # seconds for a whole stream; no fault here lasts longer
FIRST_DELAY, LAST_DELAY = 0.1, 1.0  # seconds between two calls
RETRIED = (Unavailable, Overloaded, Fenced)  # everything else is an end


@dataclass(frozen=True)
class Ask:
    """One generation to be asked for."""

    prompt: str
    tokens: int
    temperature: float
    seed: int
    budget: int = 8

    def request(self, key: str) -> pb.GenerateRequest:
        """On the wire."""
        return pb.GenerateRequest(
            text=self.prompt,
            sampling=common_pb2.SamplingParams(
                temperature=self.temperature, seed=self.seed, max_tokens=self.tokens, ignore_eos=True
            ),
            speculation=common_pb2.SpeculationParams(budget=self.budget),
            idempotency_key=key,
            detach=DETACH,
        )


class RawReader:
    """A client of the plain contract: Generate, and after a break Resume at the next gateway with what it has.

    `hold`, where given, is awaited before each read: a slow reader.
    """

    def __init__(self, addresses: Sequence[str], ask: Ask, name: str, hold: Callable[[], Any] | None = None) -> None:
        self._addresses, self._ask, self._hold = list(addresses), ask, hold
        self._key = f"{name}-{random.SystemRandom().getrandbits(64):x}"
        self._turn = 0
        self.transcript = Transcript(name)

    @property
    def address(self) -> str:
        """Where it reads, or will next."""
        return self._addresses[self._turn % len(self._addresses)]

    def twin(self, addresses: Sequence[str], name: str) -> RawReader:
        """Another client that asks for the same with the same key, and so joins the session from its beginning."""
        made = RawReader(addresses, self._ask, name)
        made._key = self._key
        return made

    async def read(self) -> Transcript:
        """To the end, or to an error that no retry helps. Never raises one."""
        delay, got = FIRST_DELAY, self.transcript  # of a reader that was read, what it got
        end = time.monotonic() + PATIENCE
        while not got.finishes and got.error is None:
            had = len(got.heard)
            try:
                async with asyncio.timeout(max(0.1, end - time.monotonic())):
                    await self._call()
            except TimeoutError as late:
                got.error = late
            except HedgerowError as error:
                got.resumes.append(f"{self.address}: {error.reason}: {error.message}")
                if not isinstance(error, RETRIED):
                    got.error = error
                self._turn += 1
                delay = FIRST_DELAY if len(got.heard) > had else min(2 * delay, LAST_DELAY)
                await asyncio.sleep(max(error.retry_after or 0, delay * random.uniform(0.5, 1)))
        return got

    async def _call(self) -> None:
        """One call, from where the transcript ends."""
        got = self.transcript
        async with grpc.aio.insecure_channel(self.address, options=OPTIONS) as channel:
            stub: Any = GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
            try:
                if not got.session_id:
                    got.prompt = await self._tokens(stub)
                call = stub.Resume(self._resume()) if got.session_id else stub.Generate(self._ask.request(self._key))
                while (answer := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
                    self._take(answer.event)
                    if self._hold is not None:
                        await self._hold()
            except grpc.aio.AioRpcError as error:
                raise decode(error, self.address) from None
        if not got.finishes:
            raise Unavailable(self.address, "the stream ended without its last event", retry_after=0.0)

    async def _tokens(self, stub: Any) -> Sequence[int]:
        answer = await stub.Tokenize(pb.TokenizeRequest(text=self._ask.prompt), timeout=10)
        return tuple(answer.tokens)

    def _resume(self) -> pb.ResumeRequest:
        got = self.transcript
        last = got.heard[-1] if got.heard else None
        return pb.ResumeRequest(
            session_id=got.session_id,
            token_offset=last.token_offset + len(last.tokens) if last else 0,
            text_offset=last.text_offset + len(last.text.encode()) if last else 0,
            digest=last.digest if last else got.first_digest,
            detach=DETACH,
        )

    def _take(self, event: pb.SessionEvent) -> None:
        got, kind = self.transcript, event.WhichOneof("kind")
        if kind == "started":
            if got.session_id and got.session_id != event.started.session_id:
                got.error = AssertionError(f"another session answered: {event.started.session_id}")
            got.session_id = event.started.session_id
            if not got.heard:  # a resume's is the digest at its offset or at 0; the first one counts
                got.first_digest = got.first_digest or event.started.digest
        elif kind == "chunk":
            c = event.chunk
            now = time.monotonic()
            got.heard.append(Heard(now, c.token_offset, c.text_offset, tuple(c.tokens), c.text, c.digest))
        elif kind == "finished":
            f = event.finished
            got.finishes.append(common_pb2.FinishReason.Name(f.reason).removeprefix("FINISH_REASON_").lower())
            got.end = (f.token_offset, f.text_offset, f.digest)
            got.exact = f.mode == common_pb2.EXECUTION_MODE_EXACT


class SdkReader:
    """The SDK as a user has it: one `async for`. It is given every gateway's address, and resumes by itself."""

    def __init__(self, addresses: Sequence[str], ask: Ask, name: str, hold: Callable[[], Any] | None = None) -> None:
        self._client, self.address = AsyncClient(",".join(addresses)), addresses[0]
        self._ask, self._hold = ask, hold
        self.transcript = Transcript(name)

    async def read(self) -> Transcript:
        """To the end, or to an error. Never raises one."""
        got, ask = self.transcript, self._ask
        stream = self._client.generate(
            ask.prompt, max_tokens=ask.tokens, temperature=ask.temperature, seed=ask.seed, budget=ask.budget,
            ignore_eos=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(PATIENCE), self._client:
                got.prompt = tuple(await self._client.tokenize(ask.prompt))
                async for c in stream:
                    if stream.started is not None and not got.session_id:
                        got.session_id, got.first_digest = stream.started.session_id, stream.started.digest
                    now = time.monotonic()
                    got.heard.append(Heard(now, c.token_offset, c.text_offset, tuple(c.tokens), c.text, c.digest))
                    if self._hold is not None:
                        await self._hold()
        except (HedgerowError, TimeoutError) as error:
            got.error = error
        if (end := stream.finished) is not None:
            got.finishes.append(str(end.reason))
            got.end, got.exact = (end.token_offset, end.text_offset, end.digest), end.exact
        return got


READERS: dict[str, type[RawReader] | type[SdkReader]] = {"raw": RawReader, "sdk": SdkReader}
