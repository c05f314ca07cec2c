"""The drafter as the step loop sees it: one Draft stream, kept open, never waited for beyond a bound."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from hedgerow.certificates import Watched
from hedgerow.engine.types import DraftAnswer, DraftBatch
from hedgerow.rpc.channel import open_channel
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.status import from_rpc_error
from hedgerow.v1 import drafter_pb2, drafter_pb2_grpc
from services.verifier.agreement import Described, Disagreement, Target, Wanted, check
from services.verifier.convert import described_from, draft_answer, draft_request

DESCRIBE_TIMEOUT = 5.0
LAYERS_TIMEOUT, ASK_AGAIN = 60.0, 0.2
HELLO = DraftBatch(0, ())  # says whose the stream is: a verifier may be idle for hours, and a silent stream is ended
log = get_log(__name__)


@dataclass(frozen=True)
class Patience:
    """Seconds. After a step without trees the drafter is left alone for `penalty`, doubled with each one in a row."""

    answer: float = 0.5  # longest wait of a step for its trees
    penalty: float = 0.1
    most_penalty: float = 10.0
    reconnect: float = 0.1
    most_reconnect: float = 2.0
    disagreement: float = 10.0  # before a drafter that does not fit is asked again


@dataclass
class Counters:
    """Since start."""

    connected: int = 0
    answered: int = 0
    late: int = 0  # answers that came after their step had gone on, or to no step of ours
    unasked: int = 0  # steps with work for a drafter that was not there, or is left alone
    failed: int = 0  # steps in which a drafter in this process raised


@dataclass
class _Pending:
    """The one request that is under way."""

    step_id: int
    answer: asyncio.Future[DraftAnswer] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class DrafterPeer:
    """Implements `hedgerow.engine.step.Drafter` over gRPC.

    `run` keeps the stream; `draft` asks once a step and answers None, meaning plain decoding, whenever trees cannot be
    had in time. Both belong to one event loop.
    """

    def __init__(
        self,
        address: str,
        target: Target,
        incarnation: bytes,
        patience: Patience | None = None,
        tls: Watched | None = None,
    ) -> None:
        self.address, self.counters, self._tls = address, Counters(), tls
        self._target, self._incarnation = target, incarnation
        self._patience = patience or Patience()
        self._penalty = self._patience.penalty
        self._not_before = 0.0
        self._requests: asyncio.Queue[drafter_pb2.DraftRequest] | None = None
        self._pending: _Pending | None = None
        self._one = asyncio.Lock()
        self._release: list[int] = []
        self._max_budget = 0
        self._trouble = ""
        self.traced: Callable[[int], Sequence[str]] = lambda step_id: ()
        """The requests that a step's spans link to."""
        self.arrived: Callable[[Described], None] = lambda drafter: None
        """Told of each drafter that fits, once its stream is open."""

    @property
    def connected(self) -> bool:
        """Whether a drafter that fits is there."""
        return self._requests is not None

    async def draft(self, batch: DraftBatch) -> DraftAnswer | None:
        """The step's trees, or None when there is no drafter or it did not answer within its patience.

        One request is under way at a time; another one waits for it.
        """
        async with self._one:
            return await self._draft(batch)

    async def _draft(self, batch: DraftBatch) -> DraftAnswer | None:
        if self._requests is not None:  # one that comes later has no state to release
            self._release.extend(batch.release)
        if not batch.works and not self._release:
            return None
        if self._requests is None or time.monotonic() < self._not_before:
            self.counters.unasked += 1
            return None
        release, self._release = self._release, []
        self._pending = pending = _Pending(batch.step_id)
        request = draft_request(batch, release, self._incarnation, self._max_budget)
        for traceparent in self.traced(batch.step_id):
            request.traces.add(traceparent=traceparent)
        self._requests.put_nowait(request)
        await asyncio.wait({pending.answer}, timeout=self._patience.answer)
        self._pending = None
        if pending.answer.cancelled():
            return None  # the stream broke
        if not pending.answer.done():
            self._leave_alone(batch.step_id)
            return None
        self._penalty = self._patience.penalty
        self.counters.answered += 1
        return pending.answer.result()

    async def run(self) -> None:
        """Connects, checks that the drafter fits, reads answers; again and again until cancelled."""
        delay = self._patience.reconnect
        while True:
            before = self.counters.answered
            wait = await self._connect_once()
            if self.counters.answered > before:
                delay = self._patience.reconnect
            await asyncio.sleep(wait or delay)
            delay = min(2 * delay, self._patience.most_reconnect)

    async def _connect_once(self) -> float | None:
        """One connection, from Describe to its end. Seconds to wait; None: the usual back-off."""
        try:
            # A channel of its own each time: an old one would still sit in its back-off when the drafter is back.
            async with open_channel(self.address, self._tls) as channel:
                stub = drafter_pb2_grpc.DrafterServiceStub(channel)  # type: ignore[no-untyped-call]
                request = drafter_pb2.DrafterServiceDescribeRequest()
                described = described_from(await stub.Describe(request, timeout=DESCRIBE_TIMEOUT))
                check(described, self._target)
                self._max_budget = described.max_budget
                await self._stream(stub, described)
            self._note("the drafter ended its stream")
        except Disagreement as error:
            if self._trouble != error.message:
                log.error(
                    "the drafter does not fit; decoding goes on without it", address=self.address, why=error.message
                )
            self._trouble = error.message
            return self._patience.disagreement
        except grpc.aio.AioRpcError as error:
            self._note(f"{error.code().name}: {from_rpc_error(error).message}")
        except Exception as error:  # noqa: BLE001  whatever a drafter does, decoding goes on
            log.error("the drafter's connection failed", exception=error, address=self.address, **self._during())
        return None

    async def _stream(self, stub: drafter_pb2_grpc.DrafterServiceStub, described: Described) -> None:
        requests: asyncio.Queue[drafter_pb2.DraftRequest] = asyncio.Queue()
        call = stub.Draft()
        sender = asyncio.create_task(_send(call, requests))
        self._requests, self._release = requests, []  # a new stream has no state to release
        self._trouble = ""
        requests.put_nowait(draft_request(HELLO, (), self._incarnation, 0))
        self.counters.connected += 1
        log.info("the drafter is connected", address=self.address)
        self.arrived(described)
        try:
            async for response in call:
                self._heard(response)
        finally:
            self._requests = None
            if self._pending is not None:
                self._pending.answer.cancel()
            sender.cancel()
            call.cancel()  # an abandoned call is never collected (grpc/grpc#43462)

    def _heard(self, response: drafter_pb2.DraftResponse) -> None:
        if response.step_id == HELLO.step_id:
            return
        pending = self._pending
        if pending is None or pending.step_id != response.step_id or pending.answer.done():
            self.counters.late += 1
            return
        pending.answer.set_result(draft_answer(response))

    def _leave_alone(self, step_id: int) -> None:
        self._not_before = time.monotonic() + self._penalty
        log.warning("a step got no trees in time", step=step_id, pause=self._penalty)
        self._penalty = min(2 * self._penalty, self._patience.most_penalty)

    def _note(self, trouble: str) -> None:
        """Logs once an outage, not once an attempt."""
        if trouble != self._trouble:
            tell = log.warning if self.counters.connected else log.info  # at start the drafter is still loading
            tell("no drafter; decoding goes on without it", address=self.address, why=trouble, **self._during())
        self._trouble = trouble

    def _during(self) -> dict[str, Any]:
        """The step that waits for trees, if one does: for the log."""
        return {} if self._pending is None else {"step": self._pending.step_id}


async def ask_drafter(address: str, tls: Watched | None = None) -> Wanted:
    """What the drafter at `address` reads; nothing if it does not say so within LAYERS_TIMEOUT."""
    async with open_channel(address, tls) as channel:
        stub = drafter_pb2_grpc.DrafterServiceStub(channel)  # type: ignore[no-untyped-call]
        request = drafter_pb2.DrafterServiceDescribeRequest()
        end = time.monotonic() + LAYERS_TIMEOUT
        while time.monotonic() < end:
            try:
                answer = described_from(await stub.Describe(request, timeout=DESCRIBE_TIMEOUT))
                return Wanted(answer.features, answer.feature_layers, answer.card is not None)
            except grpc.aio.AioRpcError as error:
                log.debug("the drafter does not say what it reads", address=address, code=error.code().name)
                await asyncio.sleep(ASK_AGAIN)
    log.error("no drafter said what it reads; this process will decode without one", address=address)
    return Wanted("hidden", ())


async def _send(
    call: grpc.aio.StreamStreamCall[drafter_pb2.DraftRequest, drafter_pb2.DraftResponse],
    requests: asyncio.Queue[drafter_pb2.DraftRequest],
) -> None:
    """Writes in order. A call that ended says why to whoever reads it."""
    try:
        while True:
            await call.write(await requests.get())
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return
