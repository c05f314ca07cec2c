"""Spans cost nothing where nobody takes them, and are right where somebody does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hedgerow import errors
from hedgerow.rpc import tracing
from hedgerow.rpc.interceptors import StatusInterceptor
from hedgerow.rpc.trace_interceptor import TraceInterceptor

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_without_an_sdk_spans_are_nothing_and_carry_their_context_on() -> None:
    with tracing.span("test", attributes={"attribute": 1}) as span:
        tracing.event(span, "happened", n=1)
        assert tracing.traceparent(span) == ""
    below = tracing.begin("test", TRACEPARENT)
    assert tracing.traceparent(below).split("-")[1] == TRACEPARENT.split("-")[1]
    tracing.end(below, ValueError("x"))
    broken = tracing.begin("test", "not a traceparent", ["neither"])
    assert tracing.traceparent(broken) == ""


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("hedgerow"))
    yield exporter
    provider.shutdown()


def test_with_an_sdk_a_request_is_one_trace_with_links_events_and_failures(exported: InMemorySpanExporter) -> None:
    earlier = tracing.begin("earlier")
    link = tracing.traceparent(earlier)

    def requested() -> None:
        with tracing.span("request", TRACEPARENT, [link, ""], {"model": "m"}) as request:
            tracing.event(request, "attached", attempt=2)
            with tracing.span("inside", tracing.traceparent(request)):
                pass
            raise ValueError("x")

    with pytest.raises(ValueError, match="x"):
        requested()
    inside, outside = exported.get_finished_spans()
    assert (inside.name, outside.name) == ("inside", "request")
    assert inside.parent is not None
    assert outside.context is not None
    assert inside.parent.span_id == outside.context.span_id
    assert f"{outside.context.trace_id:032x}" == TRACEPARENT.split("-")[1]
    assert [each.context.span_id for each in outside.links] == [earlier.get_span_context().span_id]
    assert [(each.name, dict(each.attributes or {})) for each in outside.events] == [("attached", {"attempt": 2})]
    assert outside.status.status_code is trace.StatusCode.ERROR
    assert dict(outside.attributes or {}) == {"model": "m"}


@pytest.mark.parametrize("owns", [True, False])
async def test_a_call_with_one_answer_is_a_span_below_its_caller_or_linked_to_it(
    exported: InMemorySpanExporter, owns: bool
) -> None:
    """Of a service that may die before its caller's spans are out, the span is a trace of its own."""

    async def answer(request: bytes, context: object) -> bytes:
        if request == b"unknown":
            raise errors.SessionUnknown("s")
        if request == b"away":
            raise errors.Unavailable("redis", "it is gone")
        return request

    handlers = {"Ask": grpc.unary_unary_rpc_method_handler(answer)}
    server = grpc.aio.server(interceptors=(TraceInterceptor(owns=owns), StatusInterceptor()))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x.Y", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        ask = channel.unary_unary("/x.Y/Ask")
        assert await ask(b"untraced") == b"untraced"
        assert await ask(b"unsampled", metadata=(("traceparent", TRACEPARENT[:-1] + "0"),)) == b"unsampled"
        for request in (b"ok", b"unknown", b"away"):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await ask(request, metadata=(("traceparent", TRACEPARENT),))
    await server.stop(None)
    spans = exported.get_finished_spans()
    said = [((span.attributes or {})["rpc.response.status_code"], span.status.status_code.name) for span in spans]
    assert said == [("OK", "UNSET"), ("NOT_FOUND", "UNSET"), ("UNAVAILABLE", "ERROR")]
    for span in spans:
        assert (span.name, span.kind.name) == ("x.Y/Ask", "SERVER")
        caller = span.parent if owns else span.links[0].context
        assert caller is not None
        assert f"{caller.span_id:016x}" == TRACEPARENT.split("-")[2]
        assert (span.parent is None, len(span.links)) == (not owns, 0 if owns else 1)
