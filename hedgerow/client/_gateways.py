"""The gateways that a client may ask: one channel each, opened when first used."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

import grpc.aio
from google.protobuf.message import Message

from hedgerow.certificates import Tls, Watched, hint
from hedgerow.client import _trace
from hedgerow.client._channel import open_channel
from hedgerow.client._fields import MESSAGE_LIMIT, check_size
from hedgerow.client._retry import Patience, Retry
from hedgerow.client._status import decode, never_sent
from hedgerow.errors import Cancelled, DeadlineExceeded, HedgerowError, InvalidRequest, Unavailable
from hedgerow.v1.gateway_pb2_grpc import GatewayServiceStub

OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    # A gateway that hangs, or a cut cable, is found after the sum of the two: then a stream goes on elsewhere.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),  # what ends the call in fact: the one above alone waits for ever
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name this is how long a connection attempt may take.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A gateway that comes back under its name may have another address; by default that is asked twice a minute.
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
    # Two clients of one process must not share a connection and its flow control.
    ("grpc.use_local_subchannel_pool", 1),
    # Whether to try again is decided above: a retry of the library's own would repeat a call with its outcome unknown.
    ("grpc.enable_retries", 0),
)
TENANT_KEY, TENANT_BYTES = "hedgerow-tenant", 128
API_KEY, KEY_BYTES = "authorization", 4096
AWAY = 5.0
"""Seconds for which an address that did not answer is asked last."""
LAST_CALLS = 2.0
"""Seconds that cancels in the background may take when the client is closed."""
CLOSED = "the client is closed"


class Leaving(Protocol):
    """An open stream, as far as its client must know it."""

    def leave_soon(self, why: Cancelled | None = None) -> object:
        """Ends it, in the background; who reads it gets `why`."""


class Gateways:
    """Channels, calls that are one answer, and what still runs when the client is closed."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        retry: Retry,
        tenant: str,
        tls: bool | Tls | None = None,
        api_key: str = "",
    ) -> None:
        self.addresses, self.retry, self.tenant = _addresses(addresses), retry, check_tenant(tenant)
        if not isinstance(retry, Retry):
            raise InvalidRequest("retry", retry, "a Retry")
        self._key = ((API_KEY, f"Bearer {check_key(api_key)}"),) if api_key else ()
        self._tls = _watched(tls)
        self.closing = self._closed = False
        self.streams: dict[Leaving, None] = {}
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._away: dict[str, float] = {}
        self._turn = random.randrange(len(self.addresses))  # clients that start together spread over the gateways
        self._background: dict[asyncio.Task[None], None] = {}

    def next(self, after: str = "") -> str:
        """The address to ask: in turn for new calls, the one behind `after` for one that failed there.

        Those that did not answer lately come last.
        """
        count = len(self.addresses)
        first = self.addresses.index(after) + 1 if after in self.addresses else self._turn
        if not after:
            self._turn = (self._turn + 1) % count
        turn = [self.addresses[(first + i) % count] for i in range(count)]
        now = asyncio.get_running_loop().time()
        return min(turn, key=lambda address: self._away.get(address, 0.0) > now)

    def failed(self, address: str, error: HedgerowError) -> None:
        """Remembers an address where nobody answered."""
        if isinstance(error, Unavailable) and "reason" not in error.metadata:
            self._away[address] = asyncio.get_running_loop().time() + AWAY

    def check_open(self) -> None:
        """Raises Cancelled once the client is being closed."""
        if self.closing:
            raise Cancelled(CLOSED)

    def stub(self, address: str) -> Any:
        """Calls to `address`. Raises Cancelled once the client is closed."""
        return GatewayServiceStub(self.channel(address))  # type: ignore[no-untyped-call]

    def channel(self, address: str) -> grpc.aio.Channel:
        """The channel to `address`. Raises Cancelled once the client is closed."""
        if self._closed:
            raise Cancelled(CLOSED)
        if address not in self._channels:
            self._channels[address] = open_channel(address, OPTIONS, self._tls)
        return self._channels[address]

    def decode(self, error: grpc.aio.AioRpcError, address: str, within: float | None = None) -> HedgerowError:
        """As `decode`; where TLS failed, in words that name the files."""
        told = decode(error, address, within)
        meaning = hint(told.message) if never_sent(told) else None
        if meaning is None:
            return told
        files = "this client uses no TLS"
        if self._tls is not None:
            tls = self._tls.tls
            files = f"tls.ca: {tls.ca or 'the usual ones'}, tls.cert: {tls.cert or 'none'}"
        clear = Unavailable(f"gateway at {address}", f"{meaning.text} ({files}): {told.message}", 0.0)
        clear.metadata |= told.metadata | {"tls": meaning.text}
        return clear

    def metadata(
        self, tenant: str = "", trace: tuple[tuple[str, str], ...] | None = None
    ) -> tuple[tuple[str, str], ...]:
        """What goes with every call; `tenant` in place of the client's, `trace` in place of this task's context."""
        named = tenant or self.tenant
        return (*(((TENANT_KEY, named),) if named else ()), *self._key, *(_trace.context() if trace is None else trace))

    async def ask(self, method: str, request: Message, within: float, *, tenant: str = "", first: str = "") -> Any:
        """One answer `within` seconds, from `first` or whoever's turn it is."""
        check_size(request)
        clock = asyncio.get_running_loop().time
        deadline, patience = clock() + within, Patience(self.retry)
        address, others = first or self.next(), len(self.addresses) - 1
        while True:
            # A gateway that hangs must leave time for another one.
            left = deadline - clock()
            try:
                return await self._once(method, request, address, left / 2 if others else left, tenant)
            except HedgerowError as error:
                if isinstance(error, DeadlineExceeded) and others and clock() < deadline - left / 4:
                    error = Unavailable(f"gateway at {address}", f"no answer within {left / 2:.3g} s", 0.0)
                self.failed(address, error)
                delay = patience.delay(error, clock(), begun=False, others=others)
                if delay is None or clock() + delay >= deadline:
                    raise error from None
            await asyncio.sleep(delay)
            address = self.next(address)

    async def ask_this(self, method: str, request: Message, address: str, within: float) -> Any:
        """One answer of one gateway, asked once."""
        return await self._once(method, request, address, within, "")

    async def _once(self, method: str, request: Message, address: str, within: float, tenant: str) -> Any:
        task = asyncio.current_task()
        cancels = task.cancelling() if task else 0
        try:
            return await getattr(self.stub(address), method)(request, timeout=within, metadata=self.metadata(tenant))
        except grpc.aio.AioRpcError as failed:
            raise self.decode(failed, address, within) from None
        except asyncio.CancelledError:
            if self._closed and (task is None or task.cancelling() == cancels):  # it was the call, not the caller
                raise Cancelled(CLOSED) from None
            raise

    def later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """`work` in the background; `aclose` waits for it, for a while."""
        task = asyncio.get_running_loop().create_task(work)
        self._background[task] = None
        task.add_done_callback(lambda done: self._background.pop(done, None))
        return task

    async def aclose(self) -> None:
        """End open streams and their sessions, then close the channels."""
        self.closing = True
        for stream in list(self.streams):
            stream.leave_soon(Cancelled(CLOSED))
        try:
            if self._background:
                await asyncio.wait(list(self._background), timeout=LAST_CALLS)
        finally:
            self._closed = True
            for task in list(self._background):
                task.cancel()
            while self._channels:
                await self._channels.popitem()[1].close(None)


def check_tenant(tenant: object) -> str:
    """What metadata can carry. Raises InvalidRequest."""
    if not isinstance(tenant, str) or len(tenant) > TENANT_BYTES or any(not " " < c <= "~" for c in tenant):
        raise InvalidRequest(
            "tenant", tenant, f"printable ASCII text without spaces, at most {TENANT_BYTES} characters"
        )
    return tenant


def check_key(key: object) -> str:
    """What metadata can carry; never shown. Raises InvalidRequest."""
    if not isinstance(key, str) or len(key) > KEY_BYTES or any(not " " < c <= "~" for c in key):
        shown = f"{len(key)} characters" if isinstance(key, str) else type(key).__name__
        limit = f"printable ASCII text without spaces, at most {KEY_BYTES} characters"
        raise InvalidRequest("api_key", shown, limit)
    return key


def _watched(tls: object) -> Watched | None:
    """Raises InvalidRequest with the field and the file."""
    if tls is None or tls is False:
        return None
    if tls is not True and not isinstance(tls, Tls):
        raise InvalidRequest("tls", tls, "a Tls, True or False")
    try:
        return Watched(Tls() if tls is True else tls)
    except InvalidRequest as why:
        raise InvalidRequest(f"tls.{why.field}", why.value, why.limit) from None


def _addresses(given: object) -> tuple[str, ...]:
    """A list, or a text with commas. gRPC would find out at the first call, and say it in words of its own."""
    parts = given.split(",") if isinstance(given, str) else given
    if isinstance(parts, list | tuple) and parts and all(map(_is_address, parts)):
        return tuple(dict.fromkeys(part.strip() for part in parts))
    raise InvalidRequest("address", given, "HOST:PORT or another gRPC target, or several: a list, or with commas")


def _is_address(part: object) -> bool:
    return isinstance(part, str) and bool(part.strip()) and part.isprintable()
