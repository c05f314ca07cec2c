"""Each call of a client is counted once, by how it ended, and is one span from its first word to its last."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hedgerow import errors
from hedgerow.rpc import telemetry, tracing
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import gateway_pb2 as pb
from services.gateway.messages import End, Usage
from services.gateway.metrics import COUNTED, LEFT, OUTCOMES, Calls, watch_sessions
from services.gateway.ports import Counts
from services.gateway.quotas import Quotas
from services.gateway.servicer import GatewayServicer
from services.gateway.session import Session
from services.gateway.stream import Chunk, Finished, Started
from services.gateway.types import Chat, Finish, Generation, Message, Mode, Sampling, Trace
from tests.unit.gateway_peers import record

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def calls(method: str, outcome: str) -> float:
    return telemetry.value("hedgerow_gateway_calls_total", method=method, outcome=outcome)


def session(attempt: int = 1) -> Session:
    made = Session(record(), 1)
    made.attempt = attempt
    return made


def chunk(*tokens: int) -> Chunk:
    return Chunk(0, 0, tokens, "", b"", ())


FINISHED = Finished(End(Finish.STOP, Usage()), None, 3, 0, b"", Mode.EXACT)


def one_call(*events: Started | Chunk | Finished, error: BaseException | None = None, method: str = "generate") -> None:
    with Calls().call(method, Trace(TRACEPARENT, "x=y")) as call:
        for event in events:
            call.sent(event, session())
        if error is not None:
            raise error


def test_a_call_counts_once_with_its_tokens_and_its_finish() -> None:
    before, tokens = calls("generate", "stop"), telemetry.value("hedgerow_gateway_tokens_total", method="generate")
    first = telemetry.value("hedgerow_gateway_first_token_seconds_count", method="generate")
    one_call(Started(record(), b""), chunk(1, 2), chunk(3), FINISHED)
    assert calls("generate", "stop") == before + 1
    assert telemetry.value("hedgerow_gateway_tokens_total", method="generate") == tokens + 3
    assert telemetry.value("hedgerow_gateway_first_token_seconds_count", method="generate") == first + 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (errors.LostSuffix("x"), "lost_suffix"),
        (errors.Fenced("s", 1, 2), "fenced"),
        (errors.SessionExpired("s"), "session_expired"),
        (ValueError("x"), "internal"),
        (asyncio.CancelledError(), LEFT),
        (GeneratorExit(), LEFT),
    ],
)
def test_a_call_that_fails_counts_by_the_reason_and_one_that_is_left_as_left(
    error: BaseException, outcome: str
) -> None:
    before = calls("resume", outcome)
    with pytest.raises(type(error)):
        one_call(chunk(1), error=error, method="resume")
    assert calls("resume", outcome) == before + 1


def test_every_reason_of_the_taxonomy_is_an_outcome_and_nothing_else_can_be() -> None:
    assert {"unavailable", "session_unknown", "invariant_violation", "deadline", "left"} <= set(OUTCOMES)
    assert len(OUTCOMES) == len(set(OUTCOMES)) < 60


def test_without_an_sdk_the_clients_trace_goes_on_as_it_came() -> None:
    with Calls().call("generate", Trace(TRACEPARENT, "x=y")) as call:
        assert call.trace == Trace(TRACEPARENT, "x=y")
    with Calls().call("generate") as call:
        assert call.trace == Trace("", "")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_TRACER", provider.get_tracer("hedgerow"))
    yield exporter
    provider.shutdown()


def test_a_call_is_one_span_with_its_attachments_and_its_end(spans: InMemorySpanExporter) -> None:
    running = session()
    with Calls().call("generate", Trace(TRACEPARENT)) as call:
        assert call.trace.traceparent.split("-")[1] == TRACEPARENT.split("-")[1]
        assert call.trace.traceparent != TRACEPARENT, "the verifier's spans are below this one"
        call.sent(Started(record(), b""), running)
        call.sent(chunk(1), running)
        running.attempt = 2  # its verifier died
        call.sent(chunk(2), running)
        call.sent(FINISHED, running)
    (span,) = spans.get_finished_spans()
    assert isinstance(span, ReadableSpan)
    assert span.name == "hedgerow.v1.GatewayService/Generate"
    assert [event.name for event in span.events] == ["attached", "first tokens", "attached again"]
    said = dict(span.attributes or {})
    assert (said["hedgerow.outcome"], said["gen_ai.usage.output_tokens"]) == ("stop", 2)
    assert (said["rpc.response.status_code"], said["gen_ai.response.id"]) == ("OK", running.id)


@pytest.mark.parametrize("content", [False, True])
def test_prompt_answer_and_stops_are_in_the_span_only_where_that_is_wanted(
    spans: InMemorySpanExporter, *, content: bool
) -> None:
    said = Message("user", "planted question"), Message("assistant", "planted reply")
    running, calls = session(), Calls(content=content)
    with calls.call("generate", Trace(TRACEPARENT)) as call:
        call.asked(Generation("m", Chat(said), Sampling(stop=("planted stop",))))
        call.sent(Started(record(), b""), running)
        call.sent(chunk(1)._replace(text="planted answer"), running)
        call.sent(FINISHED, running)
    (span,) = spans.get_finished_spans()
    found = {name: value for name, value in (span.attributes or {}).items() if "messages" in name or "stop_" in name}
    if not content:
        assert found == {}
        assert "planted" not in str(span.to_json())
        return
    asked = json.loads(str(found["gen_ai.input.messages"]))
    assert [(each["role"], each["parts"][0]["content"]) for each in asked] == [
        (each.role, each.content) for each in said
    ]
    assert found["gen_ai.request.stop_sequences"] == ("planted stop",)
    (answer,) = json.loads(str(found["gen_ai.output.messages"]))
    assert (answer["role"], answer["parts"][0]["content"]) == ("assistant", "planted answer")


def test_what_sessions_count_is_exported_as_it_is() -> None:
    counts, held = Counts(), {"sessions": 3}
    watch_sessions(counts, lambda: held, lambda: 4)
    counts.failed_over, held["sessions"] = 2, 1
    assert telemetry.value("hedgerow_gateway_failed_over_total") == 2
    assert telemetry.value("hedgerow_gateway_held", what="sessions") == 1
    assert COUNTED.keys() == vars(counts).keys(), "every number has its line of help"


class NoVerifier:
    """A gateway that cannot even say how long a prompt may be."""

    quotas = Quotas(lambda tenant: 0)

    async def resume(self, *about: object, **named: object) -> None:
        raise errors.InvalidRequest("session_id", "200 bytes", "at most 128 bytes")

    @property
    def context_length(self) -> int:
        raise errors.Unavailable("verifier", "no stream to one that takes sessions is open")


class NoContext:
    """A call without metadata."""

    def invocation_metadata(self) -> None:
        return None


@pytest.mark.parametrize(("method", "outcome"), [("generate", "unavailable"), ("resume", "invalid_request")])
async def test_what_is_refused_at_once_is_counted_and_has_a_span(
    spans: InMemorySpanExporter, method: str, outcome: str
) -> None:
    """Calls without any verifier were in no counter and in no trace."""
    before = calls(method, outcome)
    servicer = GatewayServicer(NoVerifier())  # type: ignore[arg-type]
    named = common.TraceContext(traceparent=TRACEPARENT)
    answers: Any = servicer.Generate(pb.GenerateRequest(text="x", trace=named), NoContext())  # type: ignore[arg-type]
    if method == "resume":
        answers = servicer.Resume(pb.ResumeRequest(session_id="s"), NoContext())  # type: ignore[arg-type]
    with pytest.raises(errors.HedgerowError):
        await anext(answers)
    assert calls(method, outcome) == before + 1
    (span,) = spans.get_finished_spans()
    assert (span.attributes or {})["hedgerow.outcome"] == outcome
    if method == "generate":
        assert span.parent is not None
        assert f"{span.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
