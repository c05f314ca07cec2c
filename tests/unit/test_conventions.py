"""What spans say is said in OpenTelemetry's published names, of the types that those have, or in our own."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv import _incubating, attributes
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, rpc_attributes

from hedgerow.rpc import tracing
from services.gateway.about import Told
from services.gateway.messages import End, Usage
from services.gateway.session import Session
from services.gateway.types import Finish, Generation, Sampling
from tests.unit.gateway_peers import record
from tests.unit.test_gateway_metrics import spans  # noqa: F401  a fixture

ROOT = Path(__file__).resolve().parents[2]
SPANS = ["hedgerow/rpc/tracing.py", "hedgerow/rpc/trace_interceptor.py", "hedgerow/rpc/trace_export.py"]
SPANS += [f"services/{path}" for path in ("gateway/about.py", "gateway/spans.py", "gateway/trees.py")]
SPANS += [
    f"services/{path}" for path in ("gateway/metrics.py", "verifier/spans.py", "drafter/spans.py", "kvstore/spans.py")
]
# Names that were published once and have another one now.
OLD = {"rpc.system", "rpc.service", "rpc.grpc.status_code", "gen_ai.system", "gen_ai.prompt", "gen_ai.completion"}


def published() -> set[str]:
    found = set()
    for package in (attributes, importlib.import_module(f"{_incubating.__name__}.attributes")):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            values = vars(importlib.import_module(module.name))
            found |= {value for name, value in values.items() if name.isupper() and isinstance(value, str)}
    return found


def said() -> dict[str, set[str]]:
    """Names of attributes by file."""
    name = re.compile(r'f?"((?:[a-z_]+\.)+[a-z_]+)(?:"|\.?\{)')
    return {path: set(name.findall((ROOT / path).read_text())) for path in SPANS}


@pytest.mark.parametrize("path", SPANS)
def test_a_name_is_published_or_begins_with_ours(path: str) -> None:
    known = published()
    assert {"rpc.system.name", "gen_ai.request.seed"} <= known
    for name in said()[path]:
        ours = name.startswith(("hedgerow.", "opentelemetry.", "grpc."))  # packages and options of channels too
        beginning = any(each.startswith(f"{name}.") for each in known)  # of a name that is made
        assert ours or name in known - OLD or beginning, f"{name} in {path}"


def test_the_names_that_the_conventions_ask_for_are_said(
    spans: InMemorySpanExporter,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a server's span for a call, and of a generation."""
    monkeypatch.setattr(tracing, "_SERVER", {})
    tracing.served_at("host", 50051)
    span = tracing.begin("x/Generate", kind="server", attributes=tracing.of_call("x/Generate"))
    told, sampling = Told(span, content=True), Sampling(temperature=1, top_k=4, seed=(1 << 63) - 1, max_tokens=9)
    session = Session(dataclasses.replace(record(), resolved=sampling), 1)
    told.asked(Generation("m", "text"))
    told.session(session)
    told.text("text")
    session.end = End(Finish.STOP, Usage())
    told.over("tool_calls", 3, 0.5, None)
    tracing.end(span)
    (made,) = spans.get_finished_spans()
    found = dict(made.attributes or {})
    kinds = {name: type(value) for name, value in found.items()}
    wanted = {
        rpc_attributes.RPC_SYSTEM_NAME: str, rpc_attributes.RPC_METHOD: str, "server.address": str, "server.port": int,
        rpc_attributes.RPC_RESPONSE_STATUS_CODE: str, gen_ai_attributes.GEN_AI_OPERATION_NAME: str,
        gen_ai_attributes.GEN_AI_PROVIDER_NAME: str, gen_ai_attributes.GEN_AI_REQUEST_SEED: int,
        gen_ai_attributes.GEN_AI_REQUEST_TEMPERATURE: float, gen_ai_attributes.GEN_AI_REQUEST_TOP_K: float,
        gen_ai_attributes.GEN_AI_REQUEST_MAX_TOKENS: int, gen_ai_attributes.GEN_AI_RESPONSE_ID: str,
        gen_ai_attributes.GEN_AI_RESPONSE_FINISH_REASONS: tuple, gen_ai_attributes.GEN_AI_USAGE_INPUT_TOKENS: int,
        gen_ai_attributes.GEN_AI_USAGE_OUTPUT_TOKENS: int, gen_ai_attributes.GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: float,
    }  # fmt: skip
    assert {name: kinds.get(name) for name in wanted} == wanted
    assert found["gen_ai.response.finish_reasons"] == ("tool_calls",)
    assert '"finish_reason": "tool_calls"' in str(found["gen_ai.output.messages"])
    assert found["hedgerow.seed"] == str((1 << 63) - 1)
