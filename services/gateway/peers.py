"""The gateway's peers over gRPC: here its one Attach stream to the verifier, in store_peer.py its one Append stream.

Both streams live as long as the process and are opened again with back-off when they break. A stream has one writer,
because gRPC allows one write at a time; what piles up during a write goes out together.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

import grpc.aio
from grpc.aio import EOF  # type: ignore[attr-defined]  # the stubs lack it

from hedgerow.errors import HedgerowError, InvalidRequest, Unavailable
from hedgerow.rpc.channel import open_channel
from hedgerow.rpc.logs import get_log
from hedgerow.v1 import verifier_pb2 as engine
from hedgerow.v1.verifier_pb2_grpc import VerifierServiceStub
from services.gateway import convert
from services.gateway.messages import Start, Timings, Update
from services.gateway.outgoing import At, Outgoing
from services.gateway.store_calls import unreachable
from services.gateway.types import Model

FIRST_DELAY, LAST_DELAY = 0.05, 2.0  # seconds between attempts to reach a peer
COMMIT_DELAY = 0.03  # seconds for which committed offsets wait for more; at most one message a step all the same
Report = Callable[[str | None], None]
"""Told what is wrong with a peer, None when nothing is."""
log = get_log(__name__)


class VerifierPeer:
    """The verifier. `model` is what it serves as far as is known, `attached` whether a stream to it is open."""

    def __init__(self, address: str, owner: bytes, vocab_size: int, report: Report) -> None:
        self.address, self._owner, self._vocab_size, self._report = address, owner, vocab_size, report
        self.model: Model | None = None
        self.attached = False
        self.messages_sent = self.messages_received = 0
        self._channel = open_channel(address)
        self._stub = VerifierServiceStub(self._channel)  # type: ignore[no-untyped-call]
        self._out = Outgoing()
        self._timer: asyncio.TimerHandle | None = None
        self._wake = asyncio.Event()

    def start(self, start: Start) -> None:
        """See table.Engine."""
        self._out.start(start)
        self._wake.set()

    def cancel(self, session_id: str, epoch: int, attempt: int) -> None:
        """See table.Engine."""
        self._out.cancel(At(session_id, epoch, attempt))
        self._wake.set()

    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None:
        """See table.Engine. Offsets wait for each other: the verifier only needs them before its bound is reached."""
        self._out.committed(At(session_id, epoch, attempt, offset))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(COMMIT_DELAY, self._wake.set)

    async def run(
        self, stepped: Callable[[Sequence[Update], Timings], None], lost: Callable[[HedgerowError], None]
    ) -> None:
        """Keep a stream open, for ever. `lost` is called when an open one broke, before the next is tried."""
        delay = FIRST_DELAY
        while True:
            try:
                self.model = await self._describe()
                await self._attach(stepped)
            except grpc.aio.AioRpcError as broken:
                error = unreachable("verifier", broken)
            except HedgerowError as wrong:
                error = wrong
            if self.attached:
                self.attached, delay = False, FIRST_DELAY
                self._out.clear()
                log.warning("the verifier's stream broke", address=self.address, why=error.message)
                lost(error)
            self._report(error.message)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, LAST_DELAY)

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close(None)

    async def _describe(self) -> Model:
        model = convert.described(await self._stub.Describe(engine.DescribeRequest(), timeout=LAST_DELAY))
        if model.vocab_size != self._vocab_size:
            limit = f"the tokenizer's {self._vocab_size}"
            raise InvalidRequest(f"vocab_size of {self.address}", model.vocab_size, limit)
        return model

    async def _attach(self, stepped: Callable[[Sequence[Update], Timings], None]) -> None:
        call = self._stub.Attach()
        writer: asyncio.Task[None] | None = None
        try:
            await call.write(engine.AttachRequest(gateway=self._owner))
            if await call.read() is EOF:  # the hello
                raise Unavailable("verifier", "it takes no gateways")
            self.attached = True
            writer = asyncio.create_task(self._write(call))
            self._report(None)
            log.info("attached", verifier=self.address)
            while (message := await call.read()) is not EOF:
                self.messages_received += 1
                stepped(*convert.step(message))
            raise Unavailable("verifier", "it ended the stream")
        finally:
            call.cancel()
            await ended(writer)

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
