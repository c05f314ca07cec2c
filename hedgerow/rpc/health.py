"""Health that tells the truth: grpc.health.v1 with Check, a Watch that streams changes, and List.

The process is SERVING while it has started, nobody reports a trouble, and it is not draining. Troubles come from
checks that are polled, and from `report`, for whoever notices first. The overall service "" and every named service
share one status, because a process serves one thing. The name "live" is SERVING whenever it can be answered and nothing
hangs (`alive`): what restarts a process that hangs must not end one that loads a model, waits for a peer or drains.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from hedgerow.errors import Unavailable
from hedgerow.rpc import health_list
from hedgerow.rpc.logs import get_log

SERVICE = "grpc.health.v1.Health"
STARTING = "starting"
LIVE = "live"  # a name for liveness probes
log = get_log(__name__)

Check = Callable[[], Awaitable[str | None]]
"""None while all is well, else one sentence that says what is missing. An exception counts as its text."""


class Health:
    """The health of one process, and its gRPC service.

    `services` are the full names of the process's gRPC services. Each of `checks` is polled every `interval` seconds,
    ten times as often until the first SERVING, and may take `timeout` seconds.
    """

    def __init__(
        self,
        services: Sequence[str],
        checks: Mapping[str, Check] | None = None,
        *,
        interval: float = 1.0,
        timeout: float = 5.0,
    ) -> None:
        self.services = tuple(services)
        self.checks = dict(checks or {})
        self.interval, self.timeout = interval, timeout
        self.facts: dict[str, str] = {}
        """What the process is, for its operator: models, peers; nothing secret."""
        self.alive: Callable[[], bool] = lambda: True
        """False where the process must be ended to be well again, though it may answer."""
        self.draining = asyncio.Event()
        """Set from SIGTERM on. Whoever holds a stream open for long watches it and ends the stream."""
        self._troubles: dict[str, str] = {STARTING: "the process is starting"}
        self._troubles.update(dict.fromkeys(self.checks, "not checked yet"))
        self._has_served = False
        self._watchers: set[asyncio.Event] = set()
        self._pollers: list[asyncio.Task[None]] = []

    @property
    def troubles(self) -> Mapping[str, str]:
        """What keeps the process from SERVING, by name. Empty: nothing does."""
        return dict(self._troubles)

    @property
    def serving(self) -> bool:
        """Whether Check answers SERVING."""
        return not self._troubles and not self.draining.is_set()

    def report(self, what: str, why: str | None) -> None:
        """`what` is in trouble because of `why`; None: it is well again."""
        before = self._troubles.get(what)
        if why is None:
            self._troubles.pop(what, None)
        else:
            self._troubles[what] = why
        if before != why:
            # Until the first SERVING it is no news: `serve` says what the start waits for.
            say = log.info if self._has_served else log.debug
            say("health changed", what=what, why=why or "well", serving=self.serving)
            self._has_served |= self.serving
            self._changed()

    def start(self) -> None:
        """Start polling. SERVING follows as soon as every check is well."""
        self._pollers = [asyncio.create_task(self._poll(name, check)) for name, check in self.checks.items()]
        self.report(STARTING, None)

    def drain(self) -> None:
        """NOT_SERVING from here on; watchers are told, then their streams end."""
        self.draining.set()
        self._changed()

    async def stop(self) -> None:
        """Stop polling."""
        for poller in self._pollers:
            poller.cancel()
        await asyncio.gather(*self._pollers, return_exceptions=True)

    @contextlib.contextmanager
    def watching(self, changed: asyncio.Event) -> Iterator[None]:
        """`changed` is set at each change of the health, within the block."""
        self._watchers.add(changed)
        try:
            yield
        finally:
            self._watchers.discard(changed)

    async def wait_serving(self) -> None:
        """Return once the process is SERVING, or draining."""
        changed = asyncio.Event()
        with self.watching(changed):
            while not self.serving and not self.draining.is_set():
                await changed.wait()
                changed.clear()

    def handler(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The gRPC service, for `Server.add_generic_rpc_handlers`."""
        request, answer = health_pb2.HealthCheckRequest.FromString, health_pb2.HealthCheckResponse.SerializeToString
        methods = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, request, answer),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, request, answer),
            "List": grpc.unary_unary_rpc_method_handler(
                self._list, health_list.Request.FromString, health_list.Response.SerializeToString
            ),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in ("", LIVE, *self.services):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def _watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        changed, last = asyncio.Event(), None
        with self.watching(changed):
            while True:
                status = self._status(request.service)
                if status != last:
                    yield health_pb2.HealthCheckResponse(status=status)
                    last = status
                if self.draining.is_set():  # an open Watch would hold the drain until its grace is over
                    raise Unavailable("server", "it is draining")
                await changed.wait()
                changed.clear()

    async def _list(self, request: object, context: Context) -> Any:
        response = health_list.Response()
        for name in ("", *self.services):
            response.statuses[name].status = self._status(name)
        return response

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service != LIVE and service not in ("", *self.services):
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        well = self.alive() if service == LIVE else self.serving
        return health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING

    async def _poll(self, name: str, check: Check) -> None:
        while True:
            began = time.monotonic()
            try:
                self.report(name, await asyncio.wait_for(check(), self.timeout))
            except TimeoutError:
                self.report(name, f"no answer within {self.timeout:g} s")
            except Exception as error:  # noqa: BLE001  a check that fails, however, is a process that is not well
                self.report(name, f"{type(error).__name__}: {error}")
            interval = self.interval if self.serving else self.interval / 10
            await asyncio.sleep(max(0.0, interval - (time.monotonic() - began)))

    def _changed(self) -> None:
        for watcher in self._watchers:
            watcher.set()


Context = grpc.aio.ServicerContext[object, object]
