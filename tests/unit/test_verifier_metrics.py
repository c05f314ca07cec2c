"""An attachment is one span, however it ends, and none is kept of those that have ended."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from hedgerow.engine.types import Finish, SequenceTimings, StepResult, StepTimings, Update, UsageCount
from hedgerow.errors import Fenced
from hedgerow.rpc import tracing
from services.verifier.metrics import StepMetrics

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("hedgerow"))
    yield exporter
    provider.shutdown()


def step(*updates: Update) -> StepResult:
    return StepResult(1, updates, StepTimings(1, 2, 3, 4, 5))


def update(attempt: int, finish: Finish, error: Exception | None = None) -> Update:
    timings = SequenceTimings(queue_ns=2_000_000, total_ns=5_000_000)
    return Update(b"", "s", 1, attempt, 0, (1,), finish, usage=UsageCount(3, 7), timings=timings, error=error)


def test_attachments_of_one_session_are_spans_of_its_request(spans: InMemorySpanExporter) -> None:
    metrics = StepMetrics()
    for attempt in (1, 2, 2):
        metrics.attachments.begin("s", 1, attempt, TRACEPARENT)
    metrics.count(step(update(1, Finish.ERROR, Fenced("s", 1, 1)), update(2, Finish.NONE)))
    metrics.count(step(update(2, Finish.STOP), update(3, Finish.STOP)))
    assert len(metrics.attachments) == 0
    first, second = spans.get_finished_spans()
    for span, attempt in ((first, 1), (second, 2)):
        assert span.parent is not None
        assert f"{span.parent.trace_id:032x}" == TRACEPARENT.split("-")[1]
        assert (span.attributes or {})["hedgerow.attempt"] == attempt
    assert first.status.status_code is StatusCode.ERROR
    said = dict(second.attributes or {})
    assert (said["hedgerow.finish"], said["gen_ai.usage.output_tokens"]) == ("stop", 7)
    assert (said["hedgerow.queue_ms"], said["hedgerow.total_ms"]) == (2.0, 5.0)


def test_without_an_sdk_an_attachment_leaves_nothing() -> None:
    metrics = StepMetrics()
    metrics.attachments.begin("s", 1, 1, "")
    metrics.count(step(update(1, Finish.LENGTH)))
    assert len(metrics.attachments) == 0
