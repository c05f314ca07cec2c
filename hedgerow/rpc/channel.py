"""Channels between services: keep-alive that works, bounded messages, quick reconnects."""

from __future__ import annotations

import grpc.aio

from hedgerow.certificates import Watched
from hedgerow.client import _channel

MIB = 1 << 20
MESSAGE_LIMIT = 64 * MIB


def open_channel(
    address: str,
    tls: Watched | None = None,
    *,
    message_limit: int = MESSAGE_LIMIT,
    keepalive: float = 10.0,
    keepalive_timeout: float = 5.0,
    max_backoff: float = 1.0,
) -> grpc.aio.Channel:
    """A channel to `address` ("host:port", "unix:path" or any gRPC target), plain without `tls`. The caller closes it.

    `message_limit` in bytes, both ways; `keepalive`, `keepalive_timeout` and `max_backoff` in seconds. A peer that
    does not answer a ping (half-open TCP, stopped process) breaks the calls in flight with UNAVAILABLE after
    `keepalive + keepalive_timeout`.
    """
    return _channel.open_channel(address, _options(message_limit, keepalive, keepalive_timeout, max_backoff), tls)


def _options(limit: int, keepalive: float, timeout: float, max_backoff: float) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", limit),
        ("grpc.max_receive_message_length", limit),
        ("grpc.keepalive_time_ms", int(keepalive * 1000)),
        ("grpc.keepalive_timeout_ms", int(timeout * 1000)),
        # What ends the call in fact: with the keep-alive timeout alone gRPC Core 1.84 waits for ever.
        ("grpc.http2.ping_timeout_ms", int(timeout * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name this is how long a connection attempt may take: with 100 ms, attempts fail on a busy machine.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        ("grpc.max_reconnect_backoff_ms", int(max_backoff * 1000)),
        # A pod that comes back has its old name and another address. By default a name is looked up twice a minute at
        # most: a verifier's restart took 29 s where 8 are its loading.
        ("grpc.dns_min_time_between_resolutions_ms", int(max_backoff * 1000)),
        # One connection a channel: two channels to one server must not share a subchannel and its flow control.
        ("grpc.use_local_subchannel_pool", 1),
        # A retry below us could repeat a call that is not idempotent, and none can help a stream that started.
        ("grpc.enable_retries", 0),
        # Peers are named by the operator; http_proxy in the environment must not reroute them.
        ("grpc.enable_http_proxy", 0),
    ]
