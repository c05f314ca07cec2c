"""Spans: the one place that knows OpenTelemetry's API. Where they go is decided in `trace_export`.

    with tracing.span("tokenize", parent=request.trace.traceparent): ...

A parent and a link are traceparents (W3C), "" for none, so that who holds one needs nothing of OpenTelemetry. Without
an SDK a span costs under a microsecond and carries a caller's context on.

Who owns a tree ends it: a span whose owner dies is lost to all that name it as their parent. So the gateway owns every
span that others are below, and gives out all spans of a request at its end; other processes' spans are leaves, told
after the fact with `told`, or in traces of their own that are linked to the requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Span = trace.Span
Attribute = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Attribute]
KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
FAULTS = {"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"}
"""gRPC codes that are a server's fault, as the conventions have it; the others are its client's."""

_SERVER: dict[str, Attribute] = {}
_TRACER = trace.get_tracer("hedgerow")  # a proxy: an SDK that is set up later is used from then on
_FORMAT = TraceContextTextMapPropagator()


def served_at(address: str, port: int) -> None:
    """Where this process takes calls: its spans of them say so."""
    _SERVER.update({"server.address": address, "server.port": port})


def of_call(method: str) -> dict[str, Attribute]:
    """Attributes of a span for a call that is served here; `method` as package.Service/Method."""
    return {"rpc.system.name": "grpc", "rpc.method": method, **_SERVER}


def begin(
    name: str,
    parent: str = "",
    links: Sequence[str] = (),
    *,
    state: str = "",
    kind: str = "internal",
    start_ns: int | None = None,
    attributes: Attributes | None = None,
) -> Span:
    """A span that `end` ends, for what does not fit a `with`: a request that outlives calls and owners.

    `parent` is what caused it, with its tracestate `state`; `links` are what it has to do with besides. `start_ns` in
    Unix time.
    """
    context = _context(parent, state) if parent else None
    return _TRACER.start_span(name, context, KINDS[kind], dict(attributes or {}), _links(links), start_ns)


def end(
    span: Span,
    error: BaseException | str | None = None,
    attributes: Attributes | None = None,
    end_ns: int | None = None,
) -> None:
    """Ends a span, as failed where there is an `error`: of an exception only its kind is told."""
    if attributes:
        span.set_attributes(dict(attributes))
    if error is not None:
        span.set_status(Status(StatusCode.ERROR, error if isinstance(error, str) else type(error).__name__))
    span.end(end_ns)


def told(
    name: str,
    times: tuple[int, int],
    parent: str = "",
    links: Sequence[str] = (),
    *,
    kind: str = "internal",
    error: str | None = None,
    attributes: Attributes | None = None,
) -> str:
    """A span after the fact, from its begin and end in Unix nanoseconds; its traceparent."""
    opened = begin(name, parent, links, kind=kind, start_ns=times[0])
    made = traceparent(opened)
    end(opened, error, attributes, max(times))
    return made


@contextmanager
def span(
    name: str, parent: str = "", links: Sequence[str] = (), attributes: Attributes | None = None
) -> Iterator[Span]:
    """A span around a block; an exception marks it as failed and goes on."""
    opened = begin(name, parent, links, attributes=attributes)
    try:
        yield opened
    except BaseException as error:
        end(opened, error)
        raise
    else:
        end(opened)


def event(span: Span, name: str, at_ns: int | None = None, **attributes: Attribute) -> None:
    """Something that happened within a span: an attach, a fail-over, a first token. Never one a step."""
    if span.is_recording():
        span.add_event(name, attributes, at_ns)


def link(span: Span, to: str) -> None:
    """Has to do with another span, known only now."""
    for each in _links([to]):
        span.add_link(each.context)


def traceparent(span: Span) -> str:
    """What goes into a message, so that the receiver's spans belong to this one; "" where there is no trace."""
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def is_sampled(traceparent: str) -> bool:
    """Whether spans of this trace are taken by somebody: its flags say so."""
    return traceparent[-2:-1] in "0123456789abcdef" and traceparent[-1:] in tuple("13579bdf")


def trace_id(traceparent: str) -> str:
    """For logs; "" where there is none."""
    return traceparent[3:35]


def _links(traceparents: Sequence[str]) -> list[trace.Link]:
    contexts = [trace.get_current_span(_context(each)).get_span_context() for each in traceparents]
    return [trace.Link(each) for each in contexts if each.is_valid]


@lru_cache(1024)  # the spans of a request have few parents
def _context(parent: str, state: str = "") -> Context:
    return _FORMAT.extract({"traceparent": parent, "tracestate": state} if state else {"traceparent": parent})
