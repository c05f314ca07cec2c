"""A collector's key: it travels with the spans, comes from the environment alone, and is told nowhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trace_collector import Collector, serve

ROOT = Path(__file__).resolve().parents[2]
KEY = "planted-collector-key"
SENDER = """
import sys
from hedgerow.rpc import trace_export, tracing
from hedgerow.rpc.logs import set_up_logging
set_up_logging("x", "debug", "json")
trace_export.start("x", trace_export.TracingConfig(otlp_endpoint=sys.argv[1] if len(sys.argv) > 1 else None))
tracing.end(tracing.begin("span"))
trace_export.stop()
"""


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    made = Collector(KEY)
    server, port = serve(made, "127.0.0.1:0")
    yield made, f"127.0.0.1:{port}"
    server.stop(0).wait()


def said(*arguments: str, **variables: str) -> str:
    """What a process that sends one span prints."""
    done = subprocess.run(
        [sys.executable, "-c", SENDER, *arguments],
        cwd=ROOT, env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_headers_of_the_environment_travel_with_the_spans(collector: tuple[Collector, str]) -> None:
    made, address = collector
    told = said(address, OTEL_EXPORTER_OTLP_HEADERS=f"x-key={KEY},x-tenant=a")
    assert [(each.get("x-key"), each.get("x-tenant")) for each in made.heard] == [(KEY, "a")]
    assert KEY not in told
    assert '"endpoint"' in told, "the log has where they go"


def test_a_key_that_is_refused_is_not_told(collector: tuple[Collector, str]) -> None:
    made, address = collector
    wrong = "planted-wrong-key"
    told = said(address, OTEL_EXPORTER_OTLP_HEADERS=f"x-key={wrong}")
    assert made.heard
    assert "traces are not taken" in told
    assert wrong not in told


def test_the_exporters_own_address_turns_nothing_on(collector: tuple[Collector, str]) -> None:
    """docs/tracing.md names HEDGEROW_OTLP_ENDPOINT alone: a pod that inherits the other must not begin to send."""
    made, address = collector
    said(OTEL_EXPORTER_OTLP_ENDPOINT=f"http://{address}", OTEL_EXPORTER_OTLP_HEADERS=f"x-key={KEY}")
    assert not made.heard
