"""An attachment is one span, however it ends, and none is kept of those that have ended."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from hedgerow.engine.tree import Why
from hedgerow.engine.types import (
    EngineLoad,
    Finish,
    SequenceTimings,
    StepResult,
    StepStats,
    StepTimings,
    Update,
    UsageCount,
)
from hedgerow.errors import Fenced
from hedgerow.rpc import telemetry, tracing
from services.verifier.metrics import StepMetrics, watch_engine
from services.verifier.spans import Attachments

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


def test_a_first_token_beside_a_line_does_not_stand_for_the_step(spans: InMemorySpanExporter) -> None:
    metrics = StepMetrics(Attachments(1.0))
    metrics.attachments.begin("s", 1, 1, TRACEPARENT)
    stats = [StepStats(1, 0, 0, 0, 1, batch_sequences=1, batch_rows=30), StepStats(1, 7, 7, 2, 3, 8, 64)]
    metrics.count(step(*(replace(update(1, Finish.NONE), stats=each) for each in stats)))
    (whole,) = [span for span in spans.get_finished_spans() if span.name == "step"]
    said = dict(whole.attributes or {})
    assert (said["hedgerow.sequences"], said["hedgerow.rows"], said["hedgerow.tree_nodes"]) == (8, 64, 7)


def test_without_an_sdk_an_attachment_leaves_nothing() -> None:
    metrics = StepMetrics()
    metrics.attachments.begin("s", 1, 1, "")
    metrics.count(step(update(1, Finish.LENGTH)))
    assert len(metrics.attachments) == 0


def test_what_its_gateway_left_behind_is_a_linked_trace_of_its_own(spans: InMemorySpanExporter) -> None:
    """The gateway may have died with its spans: a leaf that names one of them would be an orphan."""
    metrics = StepMetrics()
    metrics.attachments.begin("s", 1, 1, TRACEPARENT)
    metrics.attachments.left([("s", 1, 1), ("unknown", 1, 1)])
    metrics.count(step(update(1, Finish.CANCELLED)))
    (span,) = spans.get_finished_spans()
    assert span.parent is None
    assert [f"{link.context.span_id:016x}" for link in span.links] == [TRACEPARENT.split("-")[2]]


def test_of_the_steps_with_traced_requests_a_share_has_spans_with_links(spans: InMemorySpanExporter) -> None:
    metrics = StepMetrics(Attachments(share=0.25))
    timings = StepTimings(1_000, 2_000, 3_000, 7_000, 1_700_000_000_000_000_000)
    for step_id in range(8):
        metrics.count(StepResult(step_id, (), timings))
    assert not spans.get_finished_spans(), "nothing in them was traced"
    metrics.attachments.begin("s", 1, 1, TRACEPARENT)
    metrics.attachments.begin("t", 1, 1, TRACEPARENT[:-1] + "0")
    for step_id in range(8):
        metrics.count(StepResult(step_id, (), timings))
    made = spans.get_finished_spans()
    assert sorted(span.name for span in made) == sorted(["draft", "verify", "accept", "step"] * 2)
    steps = [span for span in made if span.name == "step"]
    assert [(span.attributes or {})["hedgerow.step_id"] for span in steps] == [0, 4]
    assert all(
        [f"{link.context.trace_id:032x}" for link in span.links] == [TRACEPARENT.split("-")[1]] for span in steps
    )
    verify = next(span for span in made if span.name == "verify")
    assert verify.start_time is not None
    assert verify.end_time is not None
    assert verify.end_time - verify.start_time == 2_000
    assert metrics.attachments.traced(3) == ()


def test_every_reason_to_refuse_a_tree_is_a_series_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A series that begins at 1 has no increase: the first refusal of a kind would be no alert."""
    monkeypatch.setattr(telemetry._watched, "reads", {})
    load = EngineLoad(*(0,) * 8, {}, *(0,) * 5)
    watch_engine(lambda: load)

    def refused(why: str) -> float | None:
        return telemetry.REGISTRY.get_sample_value("hedgerow_verifier_refused_trees_total", {"reason": why})

    assert {why: refused(why) for why in get_args(Why)} == dict.fromkeys(get_args(Why), 0.0)
    load = load._replace(refused_trees={"too_deep": 2})
    assert (refused("too_deep"), refused("own_parent")) == (2.0, 0.0)
