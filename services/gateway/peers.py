"""The gateway's peers over gRPC: here its Attach stream to one verifier, in store_peer.py its one Append stream.

Such streams live as long as the process and are opened again with back-off when they break. A stream has one writer,
because gRPC allows one write at a time; what piles up during a write goes out together.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from hedgerow.certificates import Watched
from hedgerow.errors import HedgerowError, InvalidRequest, Unavailable
from hedgerow.rpc.channel import open_channel
from hedgerow.rpc.logs import get_log
from hedgerow.v1 import verifier_pb2 as engine
from hedgerow.v1.verifier_pb2_grpc import VerifierServiceStub
from services.gateway import convert
from services.gateway.messages import Start, Timings, Update
from services.gateway.outgoing import At, Outgoing
from services.gateway.silence import Silence
from services.gateway.store_calls import unreachable
from services.gateway.types import Model
from services.gateway.verifiers import Work

FIRST_DELAY, LAST_DELAY = 0.05, 2.0  # seconds between attempts to reach a peer
COMMIT_DELAY = 0.03  # seconds for which committed offsets wait for more; at most one message a step all the same
PATIENCE = 3.0  # seconds without a sign of life after which a verifier that has work is lost
Report = Callable[[str | None], None]
"""Told what is wrong with a peer, None when nothing is."""
log = get_log(__name__)


class Sessions(Protocol):
    """What runs on a verifier, and is told how that goes."""

    def stepped(self, updates: Sequence[Update], timings: Timings) -> None:
        """A message came."""

    def verifier_opened(self, verifier: VerifierPeer) -> None:
        """A stream to it is open."""

    def verifier_lost(self, verifier: VerifierPeer, error: HedgerowError) -> None:
        """An open stream broke. Told before the next one is tried."""

    def verifier_work(self, verifier: VerifierPeer) -> Work:
        """What it should be doing."""


class VerifierPeer:
    """One verifier. See ports.Verifier. It is lost when its stream breaks, or when it has work and gives no sign of
    life for about `patience` seconds; a stream that it never knew to be broken is dropped then.
    """

    def __init__(
        self,
        address: str,
        owner: bytes,
        vocab_size: int,
        report: Report,
        patience: float = PATIENCE,
        tls: Watched | None = None,
    ) -> None:
        self.address, self._owner, self._vocab_size, self._report = address, owner, vocab_size, report
        self.model: Model | None = None
        self.attached = self.draining = False
        self.messages_sent = self.messages_received = 0
        self._silence, self._dead = Silence(patience), ""
        self._channel = open_channel(address, tls)
        self._stub = VerifierServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._out = Outgoing()
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()

    def start(self, start: Start) -> None:
        """See ports.Verifier."""
        self._out.start(start)
        self._wake.set()

    def cancel(self, session_id: str, epoch: int, attempt: int) -> None:
        """See ports.Verifier."""
        self._out.cancel(At(session_id, epoch, attempt))
        self._wake.set()

    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None:
        """See ports.Verifier. Offsets wait for each other: the verifier only needs them before its bound is reached."""
        self._out.committed(At(session_id, epoch, attempt, offset))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COMMIT_DELAY, self._wake.set)

    async def run(self, sessions: Sessions) -> None:
        """Keep a stream open, for ever."""
        delay = FIRST_DELAY
        while True:
            before = self.messages_received
            try:
                await self._look()
                await self._attach(sessions)
            except grpc.aio.AioRpcError as broken:
                error = unreachable("verifier", broken)
            except HedgerowError as wrong:
                error = wrong
            if self.attached:
                self.attached = False
                self._out.clear()
                log.warning("the verifier's stream broke", address=self.address, why=error.message)
                sessions.verifier_lost(self, error)
            if self.messages_received > before:  # one that breaks before it has said anything is not hurried
                delay = FIRST_DELAY
            self._report(error.message)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, LAST_DELAY)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    async def _look(self) -> None:
        """What it serves, and whether it takes sequences."""
        model = convert.described(await self._stub.Describe(engine.DescribeRequest(), timeout=LAST_DELAY))
        if model.vocab_size != self._vocab_size:
            limit = f"the tokenizer's {self._vocab_size}"
            raise InvalidRequest(f"vocab_size of {self.address}", model.vocab_size, limit)
        self.model = model
        if (await self._probe(LAST_DELAY)).draining:
            raise Unavailable("verifier", f"{self.address} is draining")

    async def _probe(self, seconds: float) -> engine.GetLoadResponse:
        load: engine.GetLoadResponse = await self._stub.GetLoad(engine.GetLoadRequest(), timeout=seconds)
        self.draining = load.draining
        return load

    async def _attach(self, sessions: Sessions) -> None:
        call, loop = self._stub.Attach(), asyncio.get_running_loop()
        helpers: list[asyncio.Task[None]] = []
        try:
            await call.write(engine.AttachRequest(gateway=self._owner))
            if await call.read() is EOF:  # the hello
                raise Unavailable("verifier", "it takes no gateways")
            self.attached, self._dead = True, ""
            self._silence.opened(loop.time())
            helpers = [asyncio.create_task(self._write(call)), asyncio.create_task(self._watch(call, sessions))]
            self._report(None)
            log.info("attached", verifier=self.address)
            sessions.verifier_opened(self)
            while (message := await call.read()) is not EOF:
                self.messages_received += 1
                self._silence.heard(loop.time())
                sessions.stepped(*convert.step(message))
            raise Unavailable("verifier", "it ended the stream")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._dead and task is not None and not task.cancelling():  # the watch broke the call, nobody this task
                raise Unavailable("verifier", self._dead) from None
            raise
        finally:
            call.cancel()
            for helper in helpers:
                await ended(helper)

    async def _watch(
        self, call: grpc.aio.StreamStreamCall[engine.AttachRequest, engine.AttachResponse], sessions: Sessions
    ) -> None:
        """Break the call when the verifier is dead, though its connection is not."""
        loop, patience = asyncio.get_running_loop(), self._silence.patience
        while (why := self._silence.is_lost(loop.time(), sessions.verifier_work(self))) is None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                steps = (await self._probe(patience / 4)).steps
                self._silence.answered(loop.time(), steps)
            await asyncio.sleep(patience / 8)
        self._dead = why
        call.cancel()

    async def _write(self, call: grpc.aio.StreamStreamCall[engine.AttachRequest, engine.AttachResponse]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the reader tells
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._timer is not None:
                    self._timer.cancel()
                    self._timer = None
                while (told := self._out.take()) is not None:
                    self.messages_sent += 1
                    await call.write(convert.attach(told))


async def ended(task: asyncio.Task[None] | None) -> None:
    """Cancel a task, where there is one, and return when it has ended."""
    if task is not None:
        task.cancel()
        await asyncio.wait([task])
