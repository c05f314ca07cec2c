"""A request's spans are one tree, given out whole and only once, with every parent as long as its children."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from hedgerow.errors import Unavailable
from hedgerow.rpc import tracing
from services.gateway.messages import Append, StepStats, Timings, Update
from services.gateway.session import Options, Session
from services.gateway.spans import WORD, Spans
from services.gateway.types import Finish, Trace
from services.gateway.windows import OF_ONE_SIZE, Windows
from services.kvstore.records import Answer, Entry, Lease, State, Status
from services.kvstore.spans import appended
from tests.unit.gateway_peers import Bench, RecordingEngine, record, update

METHOD = "hedgerow.v1.GatewayService/Generate"
CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CALLER[:-1] + "0"
MS = 1_000_000


class Now:
    """Unix nanoseconds; every look is later."""

    def __init__(self) -> None:
        self.ns = 1_700_000_000 * 1000 * MS

    def __call__(self) -> int:
        self.ns += MS
        return self.ns


@pytest.fixture
def out(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(1.0)))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("hedgerow"))
    yield exporter
    provider.shutdown()


class Rig:
    def __init__(self, *others: RecordingEngine) -> None:
        self.now, self.commits = Now(), list[float]()
        self.spans = Spans(self.commits.append, self.now)
        self.bench = Bench(others=others, watcher=self.spans)

    def generate(self, caller: str = CALLER) -> tuple[Trace, Session]:
        """A call, and its session."""
        _, trace = self.spans.begin(METHOD, Trace(caller, ""))
        with self.spans.part(trace, "tokenize"):
            pass
        made = dataclasses.replace(record(), trace=trace)
        return trace, self.bench.begin(made, Options(trace=trace))

    def end(self, session: Session) -> None:
        """Its verifier says the last word."""
        done = update(session, [9], finish=Finish.LENGTH, timings=Timings(queue_ns=MS // 2))
        self.bench.step(done)
        while self.bench.store.sent:
            self.bench.acknowledge()


def by_name(out: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    check(out)
    return {span.name: span for span in out.get_finished_spans()}


def check(out: InMemorySpanExporter) -> None:
    """No orphan but the root, no child outside of its parent."""
    spans = {span.context.span_id: span for span in out.get_finished_spans() if span.context}
    assert len(spans) == len(out.get_finished_spans()), "each once"
    for span in spans.values():
        parent = spans.get(span.parent.span_id) if span.parent else None
        if parent is None:
            assert span.parent is None or span.name == METHOD, f"{span.name} is an orphan"
            continue
        assert parent.start_time is not None
        assert parent.end_time is not None
        assert span.start_time is not None
        assert span.end_time is not None
        assert parent.start_time <= span.start_time <= span.end_time <= parent.end_time, (span.name, parent.name)


def test_nothing_leaves_before_the_root_does_and_then_all_of_it(out: InMemorySpanExporter) -> None:
    """What a gateway that dies had given out would name parents that never come."""
    rig = Rig()
    trace, session = rig.generate()
    rig.bench.step(update(session, [1, 2]))
    rig.bench.acknowledge()
    rig.end(session)
    assert out.get_finished_spans() == ()
    rig.spans.ended(trace, None)
    spans = by_name(out)
    assert spans.keys() == {METHOD, "tokenize", "attempt", "queue", "prefill", "decode", "commit"}
    assert rig.spans.held == 0
    attempt = spans["attempt"]
    assert attempt.context is not None
    (start,) = rig.bench.engine.starts
    assert start.trace.traceparent.split("-")[2] == f"{attempt.context.span_id:016x}", "the verifier's leaf is below it"
    queue = spans["queue"]
    assert queue.end_time is not None
    assert queue.start_time is not None
    assert queue.end_time - queue.start_time == MS // 2, "as long as the verifier says"
    (event, *_) = spans["decode"].events
    assert event.name == "step"
    assert (event.attributes or {})["emitted"] == 2


def test_a_lost_verifier_ends_its_attempt_and_the_next_one_links_to_it(out: InMemorySpanExporter) -> None:
    other = RecordingEngine("other")
    rig = Rig(other)
    trace, session = rig.generate()
    rig.bench.step(update(session, [1]))
    rig.bench.engine.attached = False
    rig.bench.table.verifier_lost(rig.bench.engine, Unavailable("verifier", "it is gone"))
    rig.end(session)
    rig.spans.ended(trace, None)
    check(out)
    first, second = [span for span in out.get_finished_spans() if span.name == "attempt"]
    assert (first.status.is_ok, first.status.description, second.status.is_ok) == (False, "UNAVAILABLE", True)
    assert first.context is not None
    assert [link.context.span_id for link in second.links] == [first.context.span_id]
    (start,) = other.starts
    assert second.context is not None
    assert start.trace.traceparent.split("-")[2] == f"{second.context.span_id:016x}"


@pytest.mark.parametrize("says", [True, False])
def test_a_cancelled_session_waits_for_its_verifiers_last_word_but_not_for_ever(
    out: InMemorySpanExporter, says: bool
) -> None:
    rig = Rig()
    trace, session = rig.generate()
    rig.bench.step(update(session, [1]))
    last = Update(session.id, session.epoch, session.attempt, 1, (), Finish.CANCELLED)
    rig.bench.table.cancel(session)
    rig.bench.acknowledge()
    rig.bench.acknowledge()
    rig.spans.ended(trace, None)
    rig.spans.sweep()
    assert out.get_finished_spans() == ()
    if says:
        rig.bench.step(last)
    else:
        rig.now.ns += int(WORD * 1e9)
        rig.spans.sweep()
    spans = by_name(out)
    assert (spans[METHOD].attributes or {})["hedgerow.finish"] == "cancelled"
    root = spans[METHOD]
    assert root.end_time is not None
    assert root.start_time is not None
    assert root.end_time - root.start_time < 1000 * MS, "waiting makes no span longer"
    assert rig.spans.held == 0


def test_a_detached_session_keeps_its_callers_tree_open(out: InMemorySpanExporter) -> None:
    rig = Rig()
    trace, session = rig.generate()
    rig.spans.ended(trace, None)
    rig.bench.step(update(session, [1]))
    assert out.get_finished_spans() == ()
    rig.end(session)
    assert by_name(out).keys() >= {METHOD, "decode"}


def test_a_session_that_goes_on_for_nobodys_call_is_a_linked_trace_of_its_own(out: InMemorySpanExporter) -> None:
    """A call that followed another gateway's session has ended, and then this gateway takes the session over."""
    rig = Rig()
    _, trace = rig.spans.begin(METHOD, Trace(CALLER, ""))
    rig.spans.ended(trace, None)
    session = rig.bench.begin(dataclasses.replace(record(), trace=Trace(CALLER, "")), Options(trace=trace))
    rig.end(session)
    own = next(span for span in out.get_finished_spans() if span.name == "session")
    assert own.parent is None
    assert {f"{link.context.span_id:016x}" for link in own.links} == {
        trace.traceparent.split("-")[2],
        CALLER.split("-")[2],
    }


def test_a_call_that_only_reads_is_linked_to_the_one_that_runs(out: InMemorySpanExporter) -> None:
    rig = Rig()
    first, session = rig.generate()
    _, second = rig.spans.begin(METHOD, Trace(CALLER, ""))
    rig.spans.reads(second, session)
    rig.spans.reads(second, session)
    rig.spans.ended(second, None)
    (span,) = out.get_finished_spans()
    assert [f"{link.context.span_id:016x}" for link in span.links] == [first.traceparent.split("-")[2]]


@pytest.mark.parametrize("caller", ["", UNSAMPLED])
def test_what_nobody_takes_is_handed_on_and_kept_nowhere(caller: str) -> None:
    """Without an SDK, and with one that does not take the caller's trace."""
    rig = Rig()
    trace, session = rig.generate(caller)
    rig.end(session)
    rig.spans.ended(trace, None)
    assert (trace.traceparent, rig.spans.held) == (caller, 0)
    assert rig.bench.engine.starts[0].trace.traceparent == caller


def test_a_long_answer_is_a_bounded_number_of_events_with_nothing_lost() -> None:
    windows, steps = Windows(), 5000
    for n in range(steps):
        windows.add(n, StepStats(n, 8, 4, 2, 3, 1, 9), Timings(draft_ns=MS, verify_ns=2 * MS))
        windows.committed(MS)
    events = list(windows.events())
    assert len(events) < 10 * OF_ONE_SIZE + OF_ONE_SIZE
    assert [about["steps"] for _, about in events[:OF_ONE_SIZE]] == [1] * OF_ONE_SIZE
    total = {name: sum(about[name] for _, about in events) for name in ("steps", "emitted", "verify_ms", "commit_ms")}
    assert total == {"steps": steps, "emitted": 3 * steps, "verify_ms": 2 * steps, "commit_ms": steps}
    assert windows.total()["hedgerow.tree_nodes"] == 4 * steps


def test_a_long_answer_has_its_first_append_traced_and_a_share_of_the_others(out: InMemorySpanExporter) -> None:
    rig = Rig()
    trace, session = rig.generate()
    _, other = rig.generate(UNSAMPLED)

    def append(session: Session, offset: int) -> Append:
        return Append(session.id, 1, b"b" * 16, offset, [1], b"d" * 16, b"d" * 16)

    def asked(every: int) -> list[int]:
        """The messages, of two hundred, for which the store is asked for a span."""
        return [n for n in range(1, 201) if rig.spans.appended(every, n, [append(other, n), append(session, n - 1)])]

    assert asked(100) == [1, 100, 200]
    assert asked(0) == [1], "no share: the first one still says where the time to it went"
    assert rig.spans.appended(100, 100, [append(session, 5)]) == [trace.traceparent], "the request, which is the root"
    many = [append(session, 0)] * 1000
    assert len(rig.spans.appended(1, 1, many)) == 128, "no span has more links"
    rig.end(session)
    rig.spans.ended(trace, None)
    assert rig.spans.appended(1, 1, many) == ()


def test_the_stores_span_is_a_trace_of_its_own(out: InMemorySpanExporter) -> None:
    """Below the gateway's it would be an orphan whenever that one dies."""
    entry = Entry("s", Lease(1, b"o" * 16), b"b" * 16, 0, b"\0" * 12, b"", b"")
    answers = [Answer(Status.OK, State()), Answer(Status.FENCED, State())]
    appended([CALLER], [entry, entry], answers, 0.25)
    appended([CALLER], [entry], [Answer(Status.UNAVAILABLE, State())], 0.25)
    fine, away = out.get_finished_spans()
    assert (fine.name, fine.parent) == ("append", None)
    assert [f"{link.context.trace_id:032x}" for link in fine.links] == [CALLER.split("-")[1]]
    assert dict(fine.attributes or {}) == {
        "hedgerow.entries": 2, "hedgerow.tokens": 6, "hedgerow.answers.ok": 1, "hedgerow.answers.fenced": 1,
    }  # fmt: skip
    assert fine.start_time is not None
    assert fine.end_time is not None
    assert (fine.end_time - fine.start_time) == 250 * MS
    assert fine.status.is_ok or fine.status.is_unset
    assert not away.status.is_ok
