"""500 mixed requests, a fifth of them cancelled, while verifiers are killed: every one a whole tree, and no orphan."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer

from hedgerow.cli.child import Backoff
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient
from hedgerow.errors import HedgerowError
from tests.polling import eventually, soon
from tests.stack import ROOT, Models, gateway_holds
from tests.system.jaeger import Jaeger, jaeger

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
REQUESTS, AT_ONCE, KILL_EVERY = 500, 10, 20
GENERATE, RESUME = "hedgerow.v1.GatewayService/Generate", "hedgerow.v1.GatewayService/Resume"
SERVICES = ("gateway", "verifier", "drafter", "kvstore")


async def test_no_span_is_an_orphan_whatever_ends_requests_and_verifiers(tiny: Models, tmp_path: Path) -> None:
    with jaeger(tmp_path) as collector:
        settings = {name: {"OTLP_ENDPOINT": collector.endpoint, "TRACE_STEPS": "0.02"} for name in SERVICES}
        config = StackConfig(
            ROOT, tiny.target, tmp_path / "data", drafter=tiny.drafter, verifiers=2, settings=settings,
            backoff=Backoff(0.1, 0.5, 3.0),
        )  # fmt: skip
        with Stack(config) as stack, caller(collector) as tracer:
            asked, kills = await mixed(stack, tracer)
            try:
                eventually(lambda: not missing(collector, asked), 30)
            except AssertionError as late:
                numbers = {trace_id: n for n, trace_id in enumerate(asked)}
                lost = [(numbers[trace_id], kind) for trace_id, kind in missing(collector, asked).items()]
                said = [line for line in stack.logs("gateway") if "trace" in line], gateway_holds(stack)
                said += tuple(str(collector.trace(trace_id)) for trace_id in missing(collector, asked))[:3]
                raise AssertionError(f"requests without a trace: {lost}; the gateway said {said}") from late
        # the stack has ended: its services have given out their last spans
        kinds = Counter(asked.values())
        assert sum(kinds.values()) == REQUESTS
        assert kinds["cancelled"] + kinds["left"] >= REQUESTS // 6
        assert kinds["late"] >= REQUESTS // 20
        assert kills == REQUESTS // KILL_EVERY
        checked, faults = Counter[str](), list[str]()
        for service in (*SERVICES, "caller"):
            for each in collector.traces(service):
                checked[service] += 1
                faults += [f"{fault} in {each}" for fault in each.faults()]
        assert not faults, f"{len(faults)} of {checked}:\n" + "\n".join(faults[:5])
        found = [each for each in collector.traces("caller") if each.named(GENERATE)]
        calls = [span for each in found for span in each.spans if span.name in (GENERATE, RESUME)]
        outcomes = Counter(span.tags["hedgerow.outcome"] for span in calls)
        attempts = [len(each.named("attempt")) for each in found]
        assert max(attempts) > 1, "some went on elsewhere"
        print(f"{kinds}; {kills} kills; outcomes {outcomes}; {sum(attempts)} attempts; traces checked {checked}")


@contextmanager
def caller(collector: Jaeger) -> Iterator[Tracer]:
    """Spans of whoever asks: the roots."""
    provider = TracerProvider(resource=Resource({"service.name": "hedgerow-caller"}))
    exporter = OTLPSpanExporter(endpoint=collector.endpoint, insecure=True)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=500))
    yield provider.get_tracer("caller")
    provider.shutdown()


def missing(collector: Jaeger, asked: dict[str, str]) -> dict[str, str]:
    """Requests without a trace of the gateway; one whose deadline is over at once may have reached none."""
    there = {each.id for each in collector.traces() if each.named(GENERATE)}
    return {trace_id: kind for trace_id, kind in asked.items() if trace_id not in there and kind != "late"}


async def mixed(stack: Stack, tracer: Tracer) -> tuple[dict[str, str], int]:
    """What each request was, by its trace, and how often a verifier was killed."""
    choose, asked, kills = random.Random(5), dict[str, str](), 0
    waiting = iter(range(REQUESTS))
    async with AsyncClient(stack.address("gateway")) as client:

        async def worker() -> None:
            nonlocal kills
            for n in waiting:
                kind = choose.choices(("whole", "cancelled", "left", "late"), (72, 12, 8, 8))[0]
                if n % KILL_EVERY == KILL_EVERY - 1:
                    await soon(lambda: up(stack), 60, "a verifier")
                    await asyncio.to_thread(stack.kill, choose.choice(up(stack)))
                    kills += 1
                with tracer.start_as_current_span(kind) as span:
                    asked[f"{span.get_span_context().trace_id:032x}"] = kind
                    await request(client, kind, n, choose.randint(1, 120))
                    await asyncio.sleep(0.05)  # what the client tells in the background is within its span

        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
    return asked, kills


def up(stack: Stack) -> list[str]:
    """Verifiers that serve."""
    return [name for name in stack.names("verifier") if stack._children[name].ready]


async def request(client: AsyncClient, kind: str, seed: int, tokens: int) -> None:
    deadline = 0.3 if kind == "late" else None
    tokens = 3000 if kind == "late" else tokens
    prompt = [1 + seed % 200, *range(2, 2 + seed % 60)]
    stream = client.generate(
        prompt, max_tokens=tokens, ignore_eos=True, seed=seed, temperature=seed % 2, budget=seed % 9,
        detach=kind != "left", deadline=deadline,
    )  # fmt: skip
    try:
        async for _ in stream:
            if kind in ("cancelled", "left"):
                await stream.aclose()
                return
    except HedgerowError:
        pass  # a deadline may be over before there is a session
