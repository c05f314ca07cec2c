"""Where spans go: to an OpenTelemetry collector or Jaeger, over OTLP/gRPC, where one is configured.

Serving never waits for it: spans are queued, a thread sends them, what does not fit into the queue is dropped and
counted, and a collector that is away is logged once.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import hedgerow
from hedgerow.rpc import telemetry
from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.logs import get_log

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

# Spans that wait at most, and that travel together; others they wait for as long as OTEL_BSP_SCHEDULE_DELAY says, five
# seconds where it says nothing: each message costs a service 1.4 ms of processor time, whatever is in it.
QUEUE, BATCH = 8192, 512
SEND = 5.0  # seconds that one batch may take, retries included
LAST = 2.0  # seconds that the last spans have when the process ends
EVENTS, LINKS = 128, 128  # of one span
MOST_CONTENT = 1 << 16  # characters of one attribute
METRIC = "hedgerow_tracing_spans"
log = get_log(__name__)


@dataclass(frozen=True, kw_only=True)
class TracingConfig:
    """What every service takes about its spans."""

    otlp_endpoint: str | None = field(
        default=None,
        metadata={
            "help": "where spans go by OTLP/gRPC: host:port, or https://host:port with the system's certificates; "
            "empty: nowhere"
        },
    )
    trace_ratio: float = field(
        default=1.0,
        metadata={
            "min": 0.0,
            "max": 1.0,
            "live": True,
            "help": "share of requests that are traced, where the caller does not decide",
        },
    )
    trace_steps: float = field(
        default=0.01, metadata={"min": 0.0, "max": 1.0, "help": "share of whole steps and appends that have spans too"}
    )
    trace_content: bool = field(
        default=False, metadata={"help": "prompts and answers in spans: for whoever may read the traces, to read"}
    )


_provider: TracerProvider | None = None
_ratio = 1.0


def start(service: str, config: TracingConfig) -> None:
    """Sends this process's spans from now on. Raises ConfigError where the packages are missing or the address is none.

    To be called once, after every fork.
    """
    global _provider
    if config.otlp_endpoint is None:
        return
    address, secure = _parsed(config.otlp_endpoint)
    try:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBased
    except ImportError as missing:
        raise _not_installed(config.otlp_endpoint, missing) from missing
    set_ratio(config.trace_ratio)
    sender = _sender(config.otlp_endpoint, address, secure=secure)
    # Each would tell of every span that is dropped and every batch that fails.
    for noisy in ("opentelemetry.sdk._shared_internal", "opentelemetry.exporter.otlp.proto.grpc.exporter"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    limits = SpanLimits(max_events=EVENTS, max_links=LINKS, max_attribute_length=MOST_CONTENT)
    _provider = TracerProvider(
        sampler=ParentBased(_share()),
        resource=Resource.create(_resource(service)),
        span_limits=limits,
        shutdown_on_exit=False,
    )
    _provider.add_span_processor(BatchSpanProcessor(sender, max_queue_size=QUEUE, max_export_batch_size=BATCH))
    trace.set_tracer_provider(_provider)
    telemetry.watch(METRIC, "Spans, by what became of them.", sender.counts, "outcome")
    log.info("traces", endpoint=address, ratio=config.trace_ratio, content=config.trace_content)


def set_ratio(ratio: float) -> None:
    """The share of requests that are traced from now on, where the caller does not decide."""
    global _ratio
    _ratio = ratio


def stop() -> None:
    """Sends what is left, for LAST seconds at most: the process ends."""
    if _provider is not None:
        last = threading.Thread(target=_provider.shutdown, name="last spans", daemon=True)
        last.start()
        last.join(LAST)


def _share() -> Any:
    from opentelemetry.sdk.trace.sampling import Sampler, SamplingResult, TraceIdRatioBased

    class Share(Sampler):
        """The ratio of the moment."""

        def should_sample(self, *about: Any, **named: Any) -> SamplingResult:
            return TraceIdRatioBased(_ratio).should_sample(*about, **named)

        def get_description(self) -> str:
            return f"TraceIdRatioBased{{{_ratio}}}"

    return Share()


def _sender(given: str, address: str, *, secure: bool) -> Any:
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    except ImportError as missing:
        raise _not_installed(given, missing) from missing

    class Sender(SpanExporter):
        """Counts, and tells of an outage once."""

        def __init__(self) -> None:
            # Peers are named by the operator: no proxy of the environment.
            options: Any = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
            self._inner = OTLPSpanExporter(endpoint=address, insecure=not secure, timeout=SEND, channel_options=options)
            self._away = False
            self._sent = self._failed = 0

        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            try:
                result = self._inner.export(spans)
            except Exception as error:  # noqa: BLE001  whatever it is, serving must not see it
                result = SpanExportResult.FAILURE
                log.debug("spans were not sent", why=type(error).__name__)
            ok = result is SpanExportResult.SUCCESS
            self._sent, self._failed = self._sent + ok * len(spans), self._failed + (not ok) * len(spans)
            if ok == self._away:
                self._away = not ok
                if ok:
                    log.info("traces are taken again", endpoint=address)
                else:
                    log.warning("traces are not taken; serving goes on without them", endpoint=address)
            return result

        def shutdown(self) -> None:
            self._inner.shutdown()

        def counts(self) -> Mapping[str, float]:
            return {"sent": self._sent, "failed": self._failed}

    return Sender()


def _parsed(given: str) -> tuple[str, bool]:
    scheme, _, rest = given.rpartition("://")
    host, _, port = rest.rstrip("/").rpartition(":")
    if scheme not in ("", "http", "https") or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(variable_of("otlp_endpoint"), repr(given), "must be host:port or http(s)://host:port")
    return f"{host}:{port}", scheme == "https"


def _not_installed(given: str, missing: ImportError) -> ConfigError:
    limit = f"the packages of the extra `tracing` are needed ({missing})"
    return ConfigError(variable_of("otlp_endpoint"), repr(given), limit)


def _resource(service: str) -> dict[str, str | int]:
    host = socket.gethostname()
    return {
        "service.name": f"hedgerow-{service}",
        "service.namespace": "hedgerow",
        "service.version": hedgerow.__version__,
        "service.instance.id": f"{host}:{os.getpid()}",
        "host.name": host,
        "process.pid": os.getpid(),
    }
