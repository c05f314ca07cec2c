"""DrafterService: one message a step in each direction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from hedgerow.engine.types import DraftAnswer, DraftBatch
from hedgerow.errors import InvalidRequest, Overloaded, Unavailable
from hedgerow.rpc.logs import bind, get_log
from hedgerow.rpc.streams import FIRST_MESSAGE, until
from hedgerow.v1 import drafter_pb2, drafter_pb2_grpc
from services.drafter import spans
from services.drafter.convert import INCARNATION_BYTES, Limits, batch_from, response_from
from services.drafter.metrics import DraftMetrics

log = get_log(__name__)


class Engine(Protocol):
    """What a stream drafts with; its state is that stream's alone."""

    def draft(self, batch: DraftBatch) -> DraftAnswer:
        """The trees of one step."""

    def drop_all(self) -> None:
        """Forgets every sequence."""


@dataclass(frozen=True)
class Loaded:
    """The drafter, once its weights are there."""

    description: drafter_pb2.DrafterServiceDescribeResponse
    limits: Limits
    new_engine: Callable[[], Engine]


class DrafterServicer(drafter_pb2_grpc.DrafterServiceServicer):
    """Serves Unavailable until `loaded` is set.

    A stream belongs to one verifier incarnation and has an engine of its own, so that sequence numbers of two verifiers
    never meet and one's mistakes end with its stream. Drafts run in the event loop: one takes a few milliseconds, and a
    verifier waits for it; a thread of its own would cost each step two hand-overs more.

    `max_streams` counts streams that have sent a sound message. One that says nothing has no engine, takes nobody's
    place, and ends after `first_within` seconds.
    """

    def __init__(self, draining: asyncio.Event, max_streams: int, first_within: float = FIRST_MESSAGE) -> None:
        self.loaded: Loaded | None = None
        self._draining, self._max_streams, self._first_within = draining, max_streams, first_within
        self._streams = 0
        self._metrics = DraftMetrics()

    async def Describe(
        self, request: drafter_pb2.DrafterServiceDescribeRequest, context: Context
    ) -> drafter_pb2.DrafterServiceDescribeResponse:
        """What this drafter is. Raises Unavailable until the weights are loaded."""
        return self._require().description

    async def Draft(
        self, request_iterator: AsyncIterator[drafter_pb2.DraftRequest], context: Context
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        """Answers each request in turn; a malformed one ends this stream with InvalidRequest and nothing else."""
        loaded, engine, verifier = self._require(), None, b""
        try:
            async with aclosing(until(self._draining, request_iterator, self._first_within)) as requests:
                async for request in requests:
                    bind(step=request.step_id)
                    verifier = _same_verifier(verifier, request.verifier)
                    batch = batch_from(request, loaded.limits)
                    engine = self._enter(loaded) if engine is None else engine
                    answer = engine.draft(batch)
                    self._metrics.count(answer)
                    if request.traces:
                        spans.drafted(answer, [each.traceparent for each in request.traces])
                    yield response_from(answer)
        finally:
            if engine is not None:
                self._leave(engine, verifier)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds this service to `server`."""
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    def _enter(self, loaded: Loaded) -> Engine:
        if self._streams >= self._max_streams:
            raise Overloaded("drafter streams", self._streams, self._max_streams, retry_after=1.0)
        engine = loaded.new_engine()
        self._streams += 1
        self._metrics.verifiers(self._streams)
        return engine

    def _leave(self, engine: Engine, verifier: bytes) -> None:
        self._streams -= 1
        self._metrics.verifiers(self._streams)
        engine.drop_all()
        log.info("a verifier left", verifier=verifier.hex(), streams=self._streams)

    def _require(self) -> Loaded:
        if self.loaded is None:
            raise Unavailable("drafter", "its weights are being loaded")
        return self.loaded


def _same_verifier(known: bytes, named: bytes) -> bytes:
    if not known and len(named) != INCARNATION_BYTES:
        raise InvalidRequest("verifier", named, f"{INCARNATION_BYTES} bytes in the first message")
    if known and named and named != known:
        raise InvalidRequest("verifier", named, "one stream is one verifier's")
    return known or named


Context = grpc.aio.ServicerContext[Any, Any]
