"""One way to run a service: bind, be healthy, say so, drain.

class KvStoreConfig(ServerConfig): ...

async def run(config: KvStoreConfig) -> None:
    health = Health(["hedgerow.v1.KvStoreService"], {"redis": store.check})
    await serve("kvstore", lambda server: add_KvStoreServiceServicer_to_server(servicer, server), config, health)
"""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import grpc.aio

from hedgerow.certificates import Watched
from hedgerow.rpc import ending, reflection, tls, trace_export, tracing
from hedgerow.rpc.admin import SERVICE as ADMIN_SERVICE
from hedgerow.rpc.admin import Admin
from hedgerow.rpc.channel import MESSAGE_LIMIT, MIB
from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.exposition import Exposition
from hedgerow.rpc.health import SERVICE as HEALTH_SERVICE
from hedgerow.rpc.health import Health
from hedgerow.rpc.interceptors import StatusInterceptor
from hedgerow.rpc.live import Live
from hedgerow.rpc.logs import FORMS, LEVELS, get_log, set_level
from hedgerow.rpc.tls import TlsConfig
from hedgerow.rpc.trace_export import TracingConfig
from hedgerow.rpc.trace_interceptor import TraceInterceptor
from hedgerow.v1.admin_pb2_grpc import add_AdminServiceServicer_to_server

FIRST_REMINDER, REMINDER = 1.0, 10.0  # seconds without readiness until the log says why
log = get_log(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerConfig(TlsConfig, TracingConfig):
    """What every service takes; a service's own configuration extends it."""

    listen: str = field(
        default="127.0.0.1:0", metadata={"address": True, "help": "address of the service; port 0 takes a free one"}
    )
    admin_listen: str = field(
        default="127.0.0.1:0",
        metadata={"address": True, "help": "address of health, status and reflection; port 0 takes a free one"},
    )
    grace: float = field(
        default=10.0,
        metadata={
            "min": 0,
            "max": 3600,
            "help": "seconds from SIGTERM to the end, at most; calls have two thirds of it, or all but 2",
        },
    )
    log_level: str = field(
        default="info", metadata={"choices": LEVELS, "live": True, "help": "least severe event that is logged"}
    )
    log_format: str = field(default="text", metadata={"choices": FORMS, "help": "lines of key=value, or of JSON"})
    message_limit: int = field(
        default=MESSAGE_LIMIT, metadata={"min": MIB, "max": 1024 * MIB, "help": "bytes of the largest message"}
    )
    max_concurrent_rpcs: int = field(
        default=4096, metadata={"min": 1, "max": 1_000_000, "help": "calls and streams open at once"}
    )
    metrics_address: str | None = field(
        default=None,
        metadata={
            "address": True,
            "help": "host:port at which GET /metrics answers Prometheus; HTTPS as the admin port; empty: nowhere",
        },
    )
    public_reflection: bool = field(default=False, metadata={"help": "reflection on the service's port too"})
    limits_file: Path | None = field(
        default=None,
        metadata={
            "help": "file of HEDGEROW_NAME=value lines, for variables that say so below; read again when it changes, "
            "and on SIGHUP; empty: none"
        },
    )


async def serve(
    name: str,
    register: Callable[[grpc.aio.Server], None],
    config: ServerConfig,
    health: Health,
    live: Live[Any] | None = None,
    interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
) -> None:
    """Run a service until SIGTERM or SIGINT; returns when it has drained.

    Prints `ready <name> <port> admin=<port>` on stdout at the first SERVING. From the signal on: NOT_SERVING,
    `health.draining` set, no new calls; those in flight are cancelled `ending.calls_until(config.grace)` seconds later,
    and after `config.grace` the process ends, whatever hangs. A second signal ends it at once. Raises ConfigError where
    a port cannot be bound, or a file for TLS or of limits is wrong. Metrics are served from the start to the end of the
    drain. `live`: what of the configuration may change, where the service itself follows it too. `interceptors` go
    before those that every service has, on its own port.
    """
    stopping = _catch_signals(config.grace)
    live = Live(config) if live is None else live
    trace_export.start(name, live.config)
    tracer = TraceInterceptor(owns=name == "gateway")
    public, admin = _new_server(config, *interceptors, tracer), _new_server(config)
    register(public)
    for server in (public, admin):
        server.add_generic_rpc_handlers((health.handler(),))
    names = (*health.services, HEALTH_SERVICE)
    add_AdminServiceServicer_to_server(Admin(name, health), admin)  # type: ignore[no-untyped-call]
    reflection.add_reflection(admin, (*names, ADMIN_SERVICE))
    reflection.add_channelz(admin)
    if config.public_reflection:
        reflection.add_reflection(public, names)
    files, peers = tls.own_files(config), tls.peer_files(config)  # what is wrong is said before anything loads
    if files is not None:
        tls.watch_expiry(files)
        live.reloads.follow("certificates", files)
    if peers is not None:
        live.reloads.follow("peer certificates", peers)
    inner = files if config.tls_admin else None
    port = _bind(public, "listen", config.listen, files, config)
    admin_port = _bind(admin, "admin_listen", config.admin_listen, inner, config)
    tracing.served_at(socket.gethostname(), port)
    metrics = Exposition()
    await metrics.start(config.metrics_address, tls.http_context(inner, config.tls_client_certs))
    await _start(public, admin)
    health.start()
    log.info("listening", name=name, port=port, admin=admin_port)
    announce = asyncio.create_task(_announce(f"ready {name} {port} admin={admin_port}", health))
    reloading = asyncio.create_task(_reload(live, health))
    try:
        await stopping.wait()
    finally:
        announce.cancel()
        reloading.cancel()
        await _drain(public, admin, config.grace, health)
        await metrics.stop()


async def _start(*servers: grpc.aio.Server) -> None:
    """Whoever cancels it waits: gRPC makes an error of its own of a start that is broken off, beside the cause."""
    starting = asyncio.gather(*(server.start() for server in servers))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await starting
        for server in servers:
            await server.stop(0)
        raise


def _catch_signals(grace: float) -> asyncio.Event:
    loop, stopping = asyncio.get_running_loop(), asyncio.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        # No handler of the loop's: the end of the grace, and a second signal, must count where the loop hangs.
        ending.at_once(ending.STOP)
        ending.within(grace)
        loop.call_soon_threadsafe(stopping.set)

    for each in ending.STOP:
        signal.signal(each, stop)
    return stopping


async def _reload(live: Live[Any], health: Health) -> None:
    """Follow the files that may change; say in the status which content of them is in force."""

    def common(config: ServerConfig) -> None:
        set_level(config.log_level)
        trace_export.set_ratio(config.trace_ratio)

    def told() -> None:
        live.apply()
        health.facts |= {what: str(state) for what, state in live.reloads.states.items()}

    common(live.config)
    live.on_change(common)
    told()
    live.reloads.export()
    await live.reloads.run(told)


async def _announce(line: str, health: Health) -> None:
    began, patience = time.monotonic(), FIRST_REMINDER
    while not (health.serving or health.draining.is_set()):
        try:
            await asyncio.wait_for(health.wait_serving(), patience)
        except TimeoutError:
            why = "; ".join(f"{what}: {why}" for what, why in health.troubles.items())
            log.info("not ready yet", seconds=round(time.monotonic() - began), why=why)
            patience = REMINDER
    if health.serving:
        print(line, flush=True)


async def _drain(public: grpc.aio.Server, admin: grpc.aio.Server, grace: float, health: Health) -> None:
    log.info("draining", grace=grace)
    health.drain()  # before anything closes, so that balancers and watchers know first
    cancelled = ending.calls_until(grace)
    patience = (grace + cancelled) / 2  # for handlers that ignore their cancellation
    try:
        await asyncio.wait_for(public.stop(cancelled), patience)
    except TimeoutError:
        log.warning("calls did not end when cancelled", waited=patience)
    await admin.stop(0)  # last: an operator may look at a drain that takes long
    await health.stop()
    log.info("stopped")


def _new_server(config: ServerConfig, *others: grpc.aio.ServerInterceptor[Any, Any]) -> grpc.aio.Server:
    return grpc.aio.server(
        interceptors=(*others, StatusInterceptor()),
        options=_options(config),
        maximum_concurrent_rpcs=config.max_concurrent_rpcs,
    )


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", config.message_limit),
        ("grpc.max_receive_message_length", config.message_limit),
        # Two processes on one port would share its connections silently; a taken port must fail.
        ("grpc.so_reuseport", 0),
        # Find clients that vanished without a FIN within 30 s.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.http2.ping_timeout_ms", 10_000),  # see channel.py
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # What clients may send: `grpc.http2.min_recv_ping_interval_without_data_ms`, often seen, does not exist in
        # gRPC Core and is silently ignored; this is its name. Without it long quiet calls die of "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        ("grpc.http2.max_ping_strikes", 0),
    ]


def _bind(server: grpc.aio.Server, field_name: str, address: str, files: Watched | None, config: ServerConfig) -> int:
    try:
        if files is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, tls.server_credentials(files, config.tls_client_certs))
    except RuntimeError as error:
        raise ConfigError(variable_of(field_name), repr(address), f"cannot listen there: {error}") from error
