"""Channels over TLS whose certificates may change while they are open. The services use them too.

gRPC for Python makes a client's credentials once (grpc/grpc#41779). So a channel of ours is a line of gRPC channels: a
call that starts after the files changed goes over a new one, and an old one is closed when its last call has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from hedgerow.certificates import Watched

Options = Sequence[tuple[str, Any]]


def open_channel(address: str, options: Options, tls: Watched | None) -> grpc.aio.Channel:
    """A channel to any gRPC target; without `tls` a plain one. The caller closes it."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return RenewingChannel(address, options, tls)


class RenewingChannel(grpc.aio.Channel):
    """See the module. Belongs to the event loop that makes it."""

    def __init__(self, address: str, options: Options, tls: Watched) -> None:
        self._address, self._options, self._tls = address, options, tls
        self._retired: dict[_Line, None] = {}
        self._line = self._new()

    def line(self) -> _Line:
        """The one for the next call."""
        if self._tls.current()[0] != self._line.version:
            old, self._line = self._line, self._new()
            self._retired[old] = None
            old.retire(lambda: self._retired.pop(old, None))
        return self._line

    def _new(self) -> _Line:
        version, pem = self._tls.current()
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        channel = grpc.aio.secure_channel(self._address, credentials, options=self._options)
        return _Line(channel, version)

    async def close(self, grace: float | None = None) -> None:
        """See grpc.aio.Channel."""
        for line in (self._line, *self._retired):
            await line.channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """See grpc.aio.Channel."""
        return self.line().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """See grpc.aio.Channel."""
        await self.line().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """See grpc.aio.Channel."""
        await self.line().channel.channel_ready()

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Method(self, "unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Method(self, "unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Method(self, "stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        """See grpc.aio.Channel."""
        return _Method(self, "stream_stream", arguments, named)

    async def __aenter__(self) -> RenewingChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class _Line:
    """One gRPC channel, and how many of its calls have not ended."""

    def __init__(self, channel: grpc.aio.Channel, version: int) -> None:
        self.channel, self.version = channel, version
        self._calls = 0
        self._gone: Any = None
        self._closing: asyncio.Task[None] | None = None

    def began(self, call: Any) -> None:
        """A call that goes over it."""
        self._calls += 1
        call.add_done_callback(self._ended)

    def retire(self, gone: Any) -> None:
        """No more calls; `gone` is called when it is closed."""
        self._gone = gone
        self._close_if_unused()

    def _ended(self, call: Any) -> None:
        self._calls -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._gone is not None and not self._calls and self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        await self.channel.close(None)
        self._gone()


class _Method:
    """A multi-callable, made anew for each line."""

    def __init__(self, channel: RenewingChannel, kind: str, arguments: Sequence[Any], named: dict[str, Any]) -> None:
        self._channel, self._kind, self._arguments, self._named = channel, kind, arguments, named
        self._made: tuple[_Line, Any] | None = None

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        line = self._channel.line()
        if self._made is None or self._made[0] is not line:
            self._made = line, getattr(line.channel, self._kind)(*self._arguments, **self._named)
        call = self._made[1](*arguments, **named)
        line.began(call)
        return call
