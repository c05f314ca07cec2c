"""A real Jaeger for one test run, and its traces as trees."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hedgerow.cli.ports import free_ports
from tests.polling import eventually
from tests.system.tools import tool

CONFIG = """
service:
  extensions: [jaeger_storage, jaeger_query]
  pipelines: {{traces: {{receivers: [otlp], processors: [], exporters: [jaeger_storage_exporter]}}}}
  telemetry: {{metrics: {{level: none}}, logs: {{level: warn}}}}
extensions:
  jaeger_query:
    storage: {{traces: main}}
    http: {{endpoint: "127.0.0.1:{http}"}}
    grpc: {{endpoint: "127.0.0.1:{grpc}"}}
  jaeger_storage: {{backends: {{main: {{memory: {{max_traces: 200000}}}}}}}}
receivers: {{otlp: {{protocols: {{grpc: {{endpoint: "127.0.0.1:{otlp}"}}}}}}}}
exporters: {{jaeger_storage_exporter: {{trace_storage: main}}}}
"""
SERVICES = ("gateway", "verifier", "drafter", "kvstore", "caller")


@dataclass(frozen=True)
class Span:
    """As Jaeger has it; times in microseconds."""

    trace: str
    id: str
    parent: str  # "": a root
    links: tuple[tuple[str, str], ...]  # (trace, span)
    name: str
    service: str
    begin: int
    end: int
    tags: dict[str, Any]
    events: tuple[tuple[str, dict[str, Any]], ...]

    @property
    def failed(self) -> bool:
        """Whether it is marked so."""
        return bool(self.tags.get("error")) or self.tags.get("otel.status_code") == "ERROR"


class Trace:
    """The spans of one trace."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = sorted(spans, key=lambda span: span.begin)
        self.id = spans[0].trace

    def named(self, name: str) -> list[Span]:
        """In the order of their beginning."""
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> Span:
        """The only one of this name."""
        found = self.named(name)
        assert len(found) == 1, f"{len(found)} spans {name} in {self}"
        return found[0]

    def faults(self) -> list[str]:
        """What makes it no tree: a second root, an orphan, a child that is not within its parent (to a microsecond)."""
        by_id = {span.id: span for span in self.spans}
        roots = [span for span in self.spans if not span.parent]
        faults = [f"{len(by_id)} ids of {len(self.spans)} spans"] if len(by_id) != len(self.spans) else []
        faults += [f"{len(roots)} roots"] if len(roots) != 1 else []
        for span in self.spans:
            parent = by_id.get(span.parent)
            if span.parent and parent is None:
                faults.append(f"{span.service} {span.name} is an orphan")
            elif parent and not (parent.begin - 1 <= span.begin <= span.end <= parent.end + 1 or left(span, parent)):
                late = span.end - parent.end
                faults.append(f"{span.service} {span.name} ends {late} us after {parent.name}, or begins before")
        return faults

    def __str__(self) -> str:
        lines, known = [f"trace {self.id}"], {span.id for span in self.spans}
        first = self.spans[0].begin

        def show(span: Span, depth: int) -> None:
            times = f"{(span.begin - first) / 1e3:.1f}..{(span.end - first) / 1e3:.1f} ms"
            lines.append(f"{'  ' * depth}{span.service} {span.name} {times}{' FAILED' if span.failed else ''}")
            for child in self.spans:
                if child.parent == span.id:
                    show(child, depth + 1)

        for span in self.spans:
            if span.parent not in known:
                show(span, 1)
        return "\n".join(lines)


def left(span: Span, parent: Span) -> bool:
    """Whether a caller went away: what it asked for then ends a moment after it."""
    return parent.service == "caller" and span.tags.get("hedgerow.finish") != span.tags.get("hedgerow.outcome")


class Jaeger:
    """Its addresses, and what it has."""

    def __init__(self, otlp: int, http: int) -> None:
        self.endpoint = f"127.0.0.1:{otlp}"
        self._http = f"http://127.0.0.1:{http}"

    def ask(self, path: str, **query: object) -> Any:
        """The data of one answer."""
        url = f"{self._http}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]

    def traces(self, service: str = "gateway", limit: int = 10_000) -> list[Trace]:
        """All of a service, each once and whole."""
        now = int(time.time() * 1e6)
        found = self.ask(
            "/api/traces", service=f"hedgerow-{service}", limit=limit, start=now - 3_600_000_000, end=now + 60_000_000
        )
        return [Trace(spans_of(each)) for each in found]

    def trace(self, trace_id: str) -> Trace | None:
        """One by its id."""
        try:
            found = self.ask(f"/api/traces/{trace_id}")
        except urllib.error.HTTPError:
            return None
        return Trace(spans_of(found[0])) if found else None

    def of_session(self, session_id: str, spans: int = 1, name: str = "") -> Trace:
        """Polls for the gateway's trace of a session, until it has so many spans, or one of this name."""
        found: list[Trace] = []

        def there() -> bool:
            nonlocal found
            tags = json.dumps({"hedgerow.session.id": session_id})
            now = int(time.time() * 1e6)
            raw = self.ask(
                "/api/traces",
                service="hedgerow-gateway",
                tags=tags,
                limit=10,
                start=now - 3_600_000_000,
                end=now + 60_000_000,
            )
            found = [Trace(spans_of(each)) for each in raw]
            found = [each for each in found if len(each.spans) >= spans and (not name or each.named(name))]
            return bool(found)

        eventually(there, 20, f"a trace of session {session_id}")
        return max(found, key=lambda each: len(each.spans))


def spans_of(trace: dict[str, Any]) -> list[Span]:
    """Of a trace as the query API gives it."""
    services = {key: process["serviceName"].removeprefix("hedgerow-") for key, process in trace["processes"].items()}
    spans = []
    for each in trace["spans"]:
        parents = [ref for ref in each.get("references", ()) if ref["refType"] == "CHILD_OF"]
        links = [ref for ref in each.get("references", ()) if ref["refType"] != "CHILD_OF"]
        events = []
        for event in each.get("logs") or ():
            fields = {field["key"]: field["value"] for field in event["fields"]}
            events.append((str(fields.pop("event", "")), fields))
        spans.append(
            Span(
                each["traceID"], each["spanID"], parents[0]["spanID"] if parents else "",
                tuple((ref["traceID"], ref["spanID"]) for ref in links), each["operationName"],
                services[each["processID"]], each["startTime"], each["startTime"] + each["duration"],
                {tag["key"]: tag["value"] for tag in each.get("tags", ())}, tuple(events),
            )
        )  # fmt: skip
    return spans


@contextmanager
def jaeger(folder: Path) -> Iterator[Jaeger]:
    """Runs it on free ports, all in memory. Skips the test where there is none."""
    program = tool("jaeger")
    ports = free_ports(3)
    otlp, http, grpc = next(ports), next(ports), next(ports)
    config = folder / "jaeger.yaml"
    config.write_text(CONFIG.format(otlp=otlp, http=http, grpc=grpc))
    with (folder / "jaeger.log").open("w") as said:
        process = subprocess.Popen([program, "--config", str(config)], stdout=said, stderr=subprocess.STDOUT)
    made = Jaeger(otlp, http)
    hurry = pytest.MonkeyPatch()
    hurry.setenv("OTEL_BSP_SCHEDULE_DELAY", "500")  # services that are started meanwhile inherit it
    try:
        eventually(lambda: _answers(made), 30, f"jaeger: {(folder / 'jaeger.log').read_text()[-500:]}")
        yield made
    finally:
        hurry.undo()
        process.kill()
        process.wait()


def _answers(made: Jaeger) -> bool:
    try:
        made.ask("/api/services")
    except OSError:
        return False
    return True
