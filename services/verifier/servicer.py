"""VerifierService: convert, one engine call, convert."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from hedgerow.engine.types import EngineLoad, Finish, Start, StepResult, Update
from hedgerow.engine.verifier import NAMED
from hedgerow.errors import Fenced, HedgerowError, InvalidRequest, Unavailable
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.streams import FIRST_MESSAGE, silent
from hedgerow.rpc.tracing import trace_id
from hedgerow.v1 import verifier_pb2, verifier_pb2_grpc
from services.verifier.convert import load_to, refusal, response_to, start_from
from services.verifier.metrics import StepMetrics
from services.verifier.spans import Attachments
from services.verifier.streams import GatewayStream, GatewayStreams, Outgoing, Pair

INCARNATION_BYTES = 16
# A gateway whose write meets the end of its stream loses what it has not read (grpc.aio drops it with the call); so the
# stream stays open for as long as the acknowledgement of its last tokens takes.
LINGER = 1.0
MOST_NAME = 128  # characters of a name, in the log
LOADING = "its weights are being loaded"
log = get_log(__name__)


class Engine(Protocol):
    """The part of VerifierEngine that streams use; callable while a step runs."""

    def start(self, start: Start) -> None:
        """Queues a sequence."""

    def cancel(self, session_id: str, epoch: int, attempt: int) -> None:
        """Ends a sequence."""

    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None:
        """Notes a committed offset."""

    def holds(self, session_id: str) -> bool:
        """Whether the session is queued or held."""

    def load(self) -> EngineLoad:
        """What it has to do."""


@dataclass(frozen=True)
class Loaded:
    """The group, once its weights are there.

    `wake` tells the step loop that there may be work; `trouble` says what is wrong with it, None while nothing is.
    `max_budget` is the operator's limit; the engine's own is 0 without a drafter's layers.
    """

    description: verifier_pb2.DescribeResponse
    engine: Engine
    wake: Callable[[], None]
    trouble: Callable[[], str | None]
    max_budget: int


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves Unavailable until `loaded` is set. Everything runs in one event loop; steps run beside it.

    A gateway whose stream breaks has `orphan_seconds` to attach its sequences here under a higher attempt; those that
    are left are cancelled. One that does not say who it is within `first_within` seconds has no stream any more.
    """

    def __init__(
        self,
        outgoing_limit: int,
        orphan_seconds: float,
        first_within: float = FIRST_MESSAGE,
        attachments: Attachments | None = None,
    ) -> None:
        self.loaded: Loaded | None = None
        self.draining = False
        self.messages_sent = 0
        self._streams = GatewayStreams(outgoing_limit)
        self._orphan_seconds, self._first_within = orphan_seconds, first_within
        self._orphans: set[asyncio.Task[None]] = set()
        self._metrics = StepMetrics(attachments)
        self._settled = asyncio.Event()

    def count_experts(self, experts: Callable[[], float | None]) -> None:
        """From now on steps' experts are counted, where the model knows them: of the last step, None otherwise."""
        self._metrics.experts = experts

    async def Describe(self, request: verifier_pb2.DescribeRequest, context: Context) -> verifier_pb2.DescribeResponse:
        """What this group is. Raises Unavailable until the weights are loaded."""
        return self._require().description

    async def Attach(
        self, request_iterator: AsyncIterator[verifier_pb2.AttachRequest], context: Context
    ) -> AsyncIterator[verifier_pb2.AttachResponse]:
        """Sends the hello with the incarnation at once, then one message a step that has updates for this gateway."""
        loaded = self._require()
        stream = self._streams.open()
        # Not cancelled at the end: gRPC's core still owns the memory of a read; it ends with the call.
        reading = asyncio.ensure_future(self._read(loaded, stream, request_iterator))
        asyncio.get_running_loop().call_later(self._first_within, self._expect, stream)
        try:
            yield verifier_pb2.AttachResponse(incarnation=loaded.description.incarnation)
            while (message := await stream.receive()) is not None:
                yield response_to(message.step_id, message.updates, message.timings)
                self.messages_sent += 1
        finally:
            del reading
            self._close(loaded, stream)

    async def GetLoad(self, request: verifier_pb2.GetLoadRequest, context: Context) -> verifier_pb2.GetLoadResponse:
        """What routing needs to know."""
        loaded = self._require()
        load = loaded.engine.load()
        held = load.held_sequences + len(self._orphans) + sum(len(stream) for stream in self._streams)
        return load_to(load, held, self.messages_sent, self.draining)

    async def Drain(self, request: verifier_pb2.DrainRequest, context: Context) -> verifier_pb2.DrainResponse:
        """Takes no new sequences; returns when the running ones have ended or the time is over."""
        self.drain()
        loaded = self._require()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.timeout_ms / 1000):
                while loaded.engine.load().held_sequences:
                    self._settled.clear()
                    await self._settled.wait()
        return verifier_pb2.DrainResponse(running=loaded.engine.load().held_sequences)

    async def check(self) -> str | None:
        """For health."""
        return LOADING if self.loaded is None else self.loaded.trouble()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds this service to `server`."""
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    def deliver(self, result: StepResult) -> None:
        """Queues a step's updates, one message a gateway."""
        self._metrics.count(result)
        for update in result.updates:
            if update.finish is not Finish.NONE:
                tell_end(result.step_id, update)
        self._streams.deliver(result.step_id, result.updates, result.timings)
        if any(update.finish is not Finish.NONE for update in result.updates):
            self._settled.set()
            if self.draining:
                asyncio.get_running_loop().call_later(LINGER, self._end_idle_streams)

    def drain(self) -> None:
        """No new sessions from here on; those that are here may be attached again. Streams end once theirs have."""
        self.draining = True
        self._end_idle_streams()

    def leave(self) -> None:
        """The grace is over: streams end, so that their gateways go on elsewhere with what still runs."""
        for stream in self._streams:
            stream.end(Unavailable("the verifier", "it is draining"))

    def fail(self, error: HedgerowError) -> None:
        """Ends every sequence and stream with `error`: the engine does not go on."""
        for stream in self._streams:
            updates = [_failure(session_id, pair, error) for session_id, pair in stream.live.items()]
            stream.send(Outgoing(0, updates))
            stream.end(error)

    async def flushed(self, seconds: float) -> None:
        """Returns once no message waits in a queue, or after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for stream in self._streams:
                    await stream.empty()

    async def _read(
        self, loaded: Loaded, stream: GatewayStream, requests: AsyncIterator[verifier_pb2.AttachRequest]
    ) -> None:
        """Takes a gateway's messages until it half-closes, breaks the rules or breaks off; then the stream ends."""
        error: HedgerowError | None = None
        try:
            async for request in requests:
                self._take(loaded, stream, request)
                loaded.wake()
        except HedgerowError as refused:
            error = refused
        except Exception as broken:  # noqa: BLE001  whatever a broken call raises, its sequences must be let go
            if not stream.ended:
                log.info("a gateway's stream broke", gateway=stream.gateway.hex(), why=type(broken).__name__)
        stream.end(error)

    def _expect(self, stream: GatewayStream) -> None:
        if not stream.gateway:
            stream.end(silent(self._first_within))

    def _take(self, loaded: Loaded, stream: GatewayStream, request: verifier_pb2.AttachRequest) -> None:
        if not stream.gateway:
            if len(request.gateway) != INCARNATION_BYTES:
                raise InvalidRequest("gateway", request.gateway, f"{INCARNATION_BYTES} bytes in the first message")
            stream.gateway = request.gateway
            log.info("a gateway attached", gateway=stream.gateway.hex())
        for commit in request.committed:
            loaded.engine.committed(commit.session_id, commit.epoch, commit.attempt, commit.offset)
        refused = [self._cancel(loaded, cancel) for cancel in request.cancel]
        if not stream.closed:  # else they would run for nobody, and nobody would end them
            refused += [self._start(loaded, stream, start) for start in request.start]
        if updates := [update for update in refused if update is not None]:
            stream.send(Outgoing(0, updates))

    def _start(self, loaded: Loaded, stream: GatewayStream, message: verifier_pb2.StartSequence) -> Update | None:
        try:
            if self.draining and not loaded.engine.holds(message.session_id):
                raise Unavailable("the verifier", "it is draining")
            loaded.engine.start(start_from(message, stream.key, loaded.max_budget))
        except HedgerowError as error:
            named = {"session": message.session_id[:MOST_NAME], "trace": trace_id(message.trace.traceparent)}
            log.info("a start is refused", **named, epoch=message.epoch, attempt=message.attempt, why=error.reason)
            return refusal(message, error)
        stream.live[message.session_id] = pair = (message.epoch, message.attempt)
        self._metrics.attachments.begin(message.session_id, *pair, message.trace.traceparent)
        return None

    def _cancel(self, loaded: Loaded, message: verifier_pb2.CancelSequence) -> Update | None:
        try:
            loaded.engine.cancel(message.session_id, message.epoch, message.attempt)
        except Fenced as error:
            return _failure(message.session_id, (message.epoch, message.attempt), error)
        return None

    def _close(self, loaded: Loaded, stream: GatewayStream) -> None:
        stream.end()
        stream.clear()
        self._metrics.attachments.left((session_id, *pair) for session_id, pair in stream.live.items())
        if not stream.live:
            self._streams.forget(stream)
            return
        orphans = asyncio.create_task(self._let_go(loaded, stream))
        self._orphans.add(orphans)
        orphans.add_done_callback(self._orphans.discard)

    async def _let_go(self, loaded: Loaded, stream: GatewayStream) -> None:
        """Cancels what the gateway left behind, unless somebody attached it under a higher pair."""
        await asyncio.sleep(self._orphan_seconds)
        self._streams.forget(stream)
        for session_id, (epoch, attempt) in stream.live.items():
            with contextlib.suppress(Fenced):
                loaded.engine.cancel(session_id, epoch, attempt)
        named = list(stream.live)[:NAMED]
        log.info(
            "cancelled the sequences of a gateway that left",
            gateway=stream.gateway.hex(), count=len(stream.live), sessions=named,
        )  # fmt: skip
        loaded.wake()

    def _end_idle_streams(self) -> None:
        for stream in self._streams:
            if not stream.live:
                stream.end()

    def _require(self) -> Loaded:
        if self.loaded is None:
            raise Unavailable("verifier", LOADING)
        return self.loaded


def tell_end(step: int, update: Update) -> None:
    """The log's line about a sequence that ended in a step."""
    named = {"session": update.session_id, "trace": update.trace, "step": step, "attempt": update.attempt}
    if update.finish is Finish.ERROR:
        log.info("a sequence failed", **named, why=getattr(update.error, "reason", type(update.error).__name__))
    else:
        log.debug("a sequence ended", **named, finish=update.finish.name.lower())


def _failure(session_id: str, pair: Pair, error: HedgerowError) -> Update:
    return Update(b"", session_id, *pair, offset=0, tokens=(), finish=Finish.ERROR, error=error)


Context = grpc.aio.ServicerContext[Any, Any]
