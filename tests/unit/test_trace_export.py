"""Sending spans can fail in every way, and serving does not notice: it is bounded, told once, and counted."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from hedgerow.client import _trace
from hedgerow.rpc import trace_export
from hedgerow.rpc.config import ConfigError, from_env
from hedgerow.rpc.trace_export import TracingConfig

ROOT = Path(__file__).resolve().parents[2]

# A process of its own: a provider is set once a process. The collector's address refuses connections.
AWAY = """
import sys, time
from hedgerow.cli.ports import free_ports
from hedgerow.rpc import telemetry, trace_export, tracing
from hedgerow.rpc.logs import set_up_logging
set_up_logging("x", "info", "json")
trace_export.SEND, trace_export.LAST = 0.3, 0.5
trace_export.start("x", trace_export.TracingConfig(otlp_endpoint=f"127.0.0.1:{next(free_ports(1))}"))
begun = time.monotonic()
for n in range(3 * trace_export.QUEUE):
    tracing.end(tracing.begin("span"))
print("spans", time.monotonic() - begun)
end = time.monotonic() + 20
while telemetry.value("hedgerow_tracing_spans_total", outcome="failed") < 1000 and time.monotonic() < end:
    time.sleep(0.05)
print("failed", telemetry.value("hedgerow_tracing_spans_total", outcome="failed"))
begun = time.monotonic()
trace_export.stop()
print("stop", time.monotonic() - begun)
"""


def test_a_collector_that_is_away_is_told_once_and_costs_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", AWAY], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    said = dict(line.split() for line in done.stdout.splitlines())
    assert float(said["failed"]) >= 1000
    assert float(said["stop"]) < 2.0, "the process ends in time"
    assert float(said["spans"]) < 15.0, "what does not fit into the queue is dropped, not waited for"
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert [line for line in lines if "traces are not taken" in line] == lines[1:], done.stderr
    assert '"event": "traces"' in lines[0]


@pytest.mark.parametrize("given", ["nowhere", "http://", "ftp://host:1", "host:port", "host:0", "host:70000", ":4317"])
def test_an_endpoint_that_is_none_stops_the_start_with_its_variable(given: str) -> None:
    with pytest.raises(ConfigError) as refused:
        trace_export.start("x", TracingConfig(otlp_endpoint=given))
    assert refused.value.variable == "HEDGEROW_OTLP_ENDPOINT"


def test_without_the_packages_an_endpoint_is_refused_by_the_extras_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match="extra `tracing`"):
        trace_export.start("x", TracingConfig(otlp_endpoint="127.0.0.1:4317"))


@pytest.mark.parametrize(("name", "value"), [("TRACE_RATIO", "1.5"), ("TRACE_STEPS", "-1"), ("TRACE_CONTENT", "some")])
def test_a_share_is_from_0_to_1(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        from_env(TracingConfig, {f"HEDGEROW_{name}": value})


def test_the_client_needs_nothing_of_opentelemetry() -> None:
    code = (
        "import sys, hedgerow.client._trace as t; "
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]; assert t.context() == ()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=30)


def test_the_client_hands_on_the_context_of_its_caller() -> None:
    from opentelemetry import trace
    from opentelemetry.trace.span import TraceState

    assert _trace.context() == ()
    here = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    with trace.use_span(trace.NonRecordingSpan(here)):
        assert _trace.context() == (("traceparent", f"00-{0xABC:032x}-{0xDEF:016x}-01"),)
    state = TraceState([("vendor", "x")])
    told = trace.SpanContext(1, 2, is_remote=True, trace_flags=trace.TraceFlags(0), trace_state=state)
    with trace.use_span(trace.NonRecordingSpan(told)):
        assert _trace.context()[1:] == (("tracestate", "vendor=x"),)
        assert _trace.context()[0][1].endswith("-00")


def test_logs_and_traces_share_the_traces_id() -> None:
    from hedgerow.rpc import tracing

    assert tracing.trace_id("") == ""
    assert tracing.trace_id(f"00-{0xABC:032x}-{0xDEF:016x}-01") == f"{0xABC:032x}"
    for given, taken in (
        ("", False),
        ("00-a-b-00", False),
        ("00-a-b-01", True),
        ("00-a-b-ff", True),
        ("00-a-b-x1", False),
    ):
        assert tracing.is_sampled(given) is taken, given
    begun = time.thread_time()
    for _ in range(1000):
        tracing.is_sampled("00-a-b-01")
    assert time.thread_time() - begun < 0.1
