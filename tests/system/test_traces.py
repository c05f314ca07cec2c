"""Traces as a real Jaeger has them: one tree a request, whole, however the request ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient
from hedgerow.errors import InvalidRequest, Unauthenticated
from tests.polling import eventually
from tests.stack import ROOT, Models, another_gateway
from tests.system.jaeger import Jaeger, Span, Trace, jaeger

pytestmark = [pytest.mark.system, pytest.mark.timeout(400)]
GENERATE, RESUME = "hedgerow.v1.GatewayService/Generate", "hedgerow.v1.GatewayService/Resume"
PROMPT = "def planted_in_a_prompt(values):"
KEY = "planted-api-key-0123456789"
LONG = {"max_tokens": 3000, "ignore_eos": True, "seed": 1}


@pytest.fixture(scope="module")
def collector(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jaeger]:
    with jaeger(tmp_path_factory.mktemp("jaeger")) as made:
        yield made


@pytest.fixture(scope="module")
def traced(collector: Jaeger, models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two gateways, two verifiers, a drafter, a kvstore; every tenth step has spans."""
    settings = {
        name: {"OTLP_ENDPOINT": collector.endpoint, "TRACE_STEPS": "0.1"}
        for name in ("gateway", "verifier", "drafter", "kvstore")
    }
    data = tmp_path_factory.mktemp("data")
    config = StackConfig(
        ROOT, models.target, data, drafter=models.drafter, gateways=2, verifiers=2, budget=8, settings=settings
    )
    with Stack(config) as running:
        yield running


@pytest.fixture(scope="module")
def caller(collector: Jaeger) -> Iterator[trace.Tracer]:
    """Traces of a program that calls Hedgerow and uses OpenTelemetry itself."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    provider = TracerProvider(resource=Resource({"service.name": "hedgerow-caller"}))
    exporter = OTLPSpanExporter(endpoint=collector.endpoint, insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=100))
    yield provider.get_tracer("caller")
    provider.shutdown()


def check(found: Trace) -> None:
    faults = found.faults()
    assert not faults, f"{faults} in {found}"


def attributes(span: Span, **wanted: object) -> None:
    found = {name: span.tags.get(name.replace("__", ".")) for name in wanted}
    assert found == wanted, span.tags


async def test_a_request_is_one_tree_from_its_caller_to_the_verifier(
    traced: Stack, collector: Jaeger, caller: trace.Tracer
) -> None:
    async with AsyncClient(traced.address("gateway")) as client:
        with caller.start_as_current_span("ask"):
            result = await client.generate(PROMPT, max_tokens=200, ignore_eos=True, seed=7, temperature=0.5).result()
    found = collector.of_session(result.session_id, name="attachment")
    eventually(lambda: (collector.trace(found.id) or found).named("ask"), 20, "the caller's span")
    found = collector.trace(found.id) or found
    check(found)
    assert {span.service for span in found.spans} == {"caller", "gateway", "verifier"}
    root, attempt, leaf = found.one(GENERATE), found.one("attempt"), found.one("attachment")
    by_id = {span.id: span.name for span in found.spans}
    parents = {span.name: by_id.get(span.parent, "") for span in found.spans}
    assert parents == {
        "ask": "", GENERATE: "ask", "tokenize": GENERATE, "create session": GENERATE, "attempt": GENERATE,
        "queue": "attempt", "prefill": "attempt", "decode": "attempt", "attachment": "attempt", "commit": GENERATE,
        "stream": GENERATE, "detokenize": "stream",
    }, str(found)  # fmt: skip
    attributes(
        root, span__kind="server", rpc__system__name="grpc", rpc__method=GENERATE, rpc__response__status_code="OK",
        gen_ai__operation__name="text_completion", gen_ai__provider__name="hedgerow",
        gen_ai__request__max_tokens=200, gen_ai__request__temperature=0.5, gen_ai__request__seed=7, hedgerow__seed="7",
        gen_ai__response__id=result.session_id, gen_ai__response__finish_reasons='["length"]',
        gen_ai__usage__output_tokens=200, hedgerow__outcome="length", hedgerow__attempts=1,
    )  # fmt: skip
    assert root.tags["server.port"] == int(traced.address("gateway").rpartition(":")[2])
    assert root.tags["gen_ai.usage.input_tokens"] == len(await tokens_of(traced, PROMPT))
    assert 0 < root.tags["gen_ai.response.time_to_first_chunk"] < (root.end - root.begin) / 1e6
    attributes(attempt, hedgerow__epoch=1, hedgerow__attempt=1, hedgerow__session__id=result.session_id)
    attributes(leaf, hedgerow__finish="length", gen_ai__usage__output_tokens=200)
    assert not any(span.failed for span in found.spans)
    decode = found.one("decode")
    steps = [fields for name, fields in decode.events if name in ("step", "steps")]
    assert 0 < len(steps) <= 64
    assert sum(fields["emitted"] for fields in steps) == decode.tags["hedgerow.emitted"] == 200
    assert {"tree_nodes", "accepted", "draft_ms", "verify_ms", "accept_ms", "commit_ms"} <= steps[0].keys()
    assert sum(fields["verify_ms"] for fields in steps) > 0
    assert found.one("commit").tags["hedgerow.appends"] > 0
    chunks = [fields for name, fields in found.one("prefill").events if name == "chunk"]
    assert sum(fields["prompt_rows"] for fields in chunks) == root.tags["gen_ai.usage.input_tokens"]
    assert all(fields["ms"] > 0 for fields in chunks)
    text = found.one("detokenize")
    assert 0 < text.tags["hedgerow.ms"] <= (text.end - text.begin) / 1e3
    assert 0 < text.tags["hedgerow.pieces"] <= 200
    assert PROMPT not in str([span.tags for span in found.spans]), "content is told only where that is wanted"


async def test_steps_drafts_and_store_calls_are_linked_to_the_requests_in_them(
    traced: Stack, collector: Jaeger
) -> None:
    async with AsyncClient(traced.address("gateway")) as client:
        streams = [client.generate([1, 2, n], max_tokens=400, ignore_eos=True) for n in range(3)]
        results = await asyncio.gather(*(stream.result() for stream in streams))
    roots = {collector.of_session(result.session_id, name="attachment").id for result in results}

    def linked(service: str, name: str) -> set[str]:
        found = [each for each in collector.traces(service) if each.named(name)]
        for each in found:
            check(each)
        return {to for each in found for span in each.named(name) for to, _ in span.links}

    for service, name in (("verifier", "step"), ("drafter", "draft"), ("kvstore", "append")):
        eventually(lambda s=service, n=name: roots & linked(s, n), 20, f"{name} spans")  # type: ignore[misc]
    eventually(lambda: roots <= linked("kvstore", "hedgerow.v1.KvStoreService/CreateSession"), 20, "store spans")
    asked = [each for each in collector.traces("kvstore") if each.named("append")]
    assert all(len(each.spans) == 1 for each in asked), "a leaf of nobody's"
    appends = [root for each in asked for root, _ in each.one("append").links if root in roots]
    assert roots == set(appends)
    assert len(appends) <= 3 * 60, "a tenth of the messages, which are some hundred a session"
    step = next(each for each in collector.traces("verifier") if each.named("step"))
    assert {span.name for span in step.spans} == {"step", "draft", "verify", "accept"}
    assert step.one("step").tags["hedgerow.sequences"] >= 1


async def test_content_is_told_where_it_is_wanted_and_keys_never(
    traced: Stack, collector: Jaeger, models: Models, tmp_path: Path
) -> None:
    (keys := tmp_path / "keys").write_text(f"acme {KEY}\n")
    settings = {"otlp_endpoint": collector.endpoint, "trace_content": "true", "api_keys_file": keys}
    with another_gateway(traced, models, **settings) as address:
        async with AsyncClient(address, api_key=KEY) as client, AsyncClient(address, api_key=KEY[:-1]) as stranger:
            result = await client.generate(PROMPT, max_tokens=20, ignore_eos=True, seed=7).result()
            with pytest.raises(Unauthenticated):
                await stranger.generate(PROMPT, max_tokens=20).result()
        found = collector.of_session(result.session_id, name="attachment")
    check(found)
    root = found.one(GENERATE)
    assert PROMPT in root.tags["gen_ai.input.messages"]
    assert result.text[:10] in json.loads(root.tags["gen_ai.output.messages"])[0]["parts"][0]["content"]
    for service in ("gateway", "verifier", "drafter", "kvstore"):
        for each in collector.traces(service):
            assert KEY[:-1] not in str(each.spans), f"an API key is in {each}"


async def test_a_cancelled_request_has_ended_and_its_leaf_is_within_it(traced: Stack, collector: Jaeger) -> None:
    async with AsyncClient(traced.address("gateway")) as client:
        stream = client.generate([1, 2, 3], **LONG)
        async for _ in stream:
            session_id = stream.position.session_id
            break
        await client.cancel(session_id)
        assert (await stream.result()).finish_reason == "cancelled"
        left = client.generate([1, 2, 4], detach=False, **LONG)
        async for _ in left:
            break
        await left.aclose()
        left_id = left.position.session_id
    found = collector.of_session(session_id, name="attachment")
    check(found)
    attributes(found.one(GENERATE), hedgerow__finish="cancelled", hedgerow__outcome="cancelled")
    attributes(found.one("attachment"), hedgerow__finish="cancelled")
    assert not found.one(GENERATE).failed, "what the client wants is no failure"
    gone = collector.of_session(left_id, name="attachment")
    check(gone)
    attributes(gone.one(GENERATE), hedgerow__finish="cancelled")


async def test_a_deadline_marks_the_request_as_failed(traced: Stack, collector: Jaeger) -> None:
    async with AsyncClient(traced.address("gateway")) as client:
        stream = client.generate([1, 2, 5], deadline=0.7, **LONG)
        assert (await stream.result()).finish_reason == "deadline"
    found = collector.of_session(stream.position.session_id, name="attachment")
    check(found)
    root = found.one(GENERATE)
    assert root.failed, root.tags
    attributes(root, hedgerow__finish="deadline", error__type="DEADLINE")


async def test_a_refused_request_has_a_span_that_says_why(
    traced: Stack, collector: Jaeger, caller: trace.Tracer
) -> None:
    async with AsyncClient(traced.address("gateway")) as client:
        with caller.start_as_current_span("refused") as asked:
            refused = client.generate("x", max_tokens=1 << 23)
        with pytest.raises(InvalidRequest):
            await refused.result()
    trace_id = f"{asked.get_span_context().trace_id:032x}"
    eventually(lambda: (found := collector.trace(trace_id)) and found.named(GENERATE), 20, "the refused request")
    found = collector.trace(trace_id)
    assert found is not None
    assert found.one(GENERATE).tags["hedgerow.outcome"] == "invalid_request"
    assert not found.named("attempt")
    attributes(found.one(GENERATE), rpc__response__status_code="INVALID_ARGUMENT", error__type="INVALID_REQUEST")


async def test_a_failover_is_in_the_same_tree_and_the_attempts_are_linked(traced: Stack, collector: Jaeger) -> None:
    async with AsyncClient(traced.address("gateway")) as client:
        stream, count = client.generate([1, 2, 6], **LONG), 0
        async for chunk in stream:
            if not count:
                kill(traced, running_verifier(traced))
            count += len(chunk.tokens)
    assert count == 3000
    found = collector.of_session(stream.position.session_id, name="attachment")
    check(found)
    root = found.one(GENERATE)
    first, second, *more = found.named("attempt")
    assert not more, str(found)
    assert first.failed
    assert not second.failed
    assert first.tags["hedgerow.verifier"] != second.tags["hedgerow.verifier"]
    assert second.links == ((found.id, first.id),)
    assert [name for name, _ in root.events].count("verifier lost") == 1
    leaf = found.one("attachment")
    assert leaf.parent == second.id, "a dead process loses its leaves and nothing else"
    attributes(root, hedgerow__outcome="length", hedgerow__attempts=2)
    for name in traced.names("verifier"):
        traced.wait_ready(name)


async def test_a_session_resumed_on_another_gateway_is_in_its_callers_tree(
    traced: Stack, collector: Jaeger, caller: trace.Tracer
) -> None:
    """The first gateway is killed in mid-stream: its spans are lost, and nothing that is left names them as parents."""
    first, second = traced.names("gateway")
    async with AsyncClient([traced.address(first)]) as one, AsyncClient([traced.address(second)]) as two:
        with caller.start_as_current_span("ask") as asked:
            stream = one.generate([1, 2, 7], **LONG)
            async for _ in stream:
                break
            at = stream.position
            kill(traced, first)
            result = await two.resume(*at).result()
            trace_id = f"{asked.get_span_context().trace_id:032x}"
        await stream.aclose()
    assert result.finish_reason.lower() == "length"
    eventually(lambda: (t := collector.trace(trace_id)) and t.named(RESUME) and t.named("attachment"), 20, "the tree")
    found = collector.trace(trace_id)
    assert found is not None
    check(found)
    resumed = found.one(RESUME)
    assert not found.named(GENERATE), "it died with its gateway"
    assert [to for to, _ in resumed.links] == [found.id], "a link to the request that made the session"
    assert found.one("attempt").parent == resumed.id
    attributes(found.one("attempt"), hedgerow__epoch=2)
    traced.wait_ready(first)


async def tokens_of(stack: Stack, text: str) -> list[int]:
    async with AsyncClient(stack.address("gateway")) as client:
        return list(await client.tokenize(text))


def running_verifier(stack: Stack) -> str:
    from tests.stack import verifier_load

    for name in stack.names("verifier"):
        with grpc.insecure_channel(stack.address(name)) as channel:
            from hedgerow.v1 import verifier_pb2, verifier_pb2_grpc

            stub = verifier_pb2_grpc.VerifierServiceStub(channel)
            if stub.GetLoad(verifier_pb2.GetLoadRequest(), timeout=10).running:
                return name
    raise AssertionError(f"nothing runs: {verifier_load(stack)}")


def kill(stack: Stack, name: str) -> None:
    os.kill(stack.pid(name), signal.SIGKILL)
