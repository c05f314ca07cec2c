"""How a prompt was computed, chunk by chunk, from the engine over the wire to the request's span."""

from __future__ import annotations

from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from bench.drive import Job
from hedgerow.engine.chunks import MOST, Chunks
from hedgerow.engine.types import PrefillChunk, Sampling, StepTimings, Update
from hedgerow.engine.verifier import VerifierEngine
from services.gateway.convert import step
from services.gateway.messages import Chunk, Timings
from services.gateway.types import Finish
from services.verifier.convert import response_to
from tests.engine_rig import Rig as EngineRig
from tests.engine_rig import prompt
from tests.unit.gateway_peers import update
from tests.unit.test_gateway_spans import MS, Rig, by_name, out  # noqa: F401  a fixture


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> EngineRig:
    return EngineRig(tmp_path_factory.mktemp("tiny"))


def job(length: int, tokens: int) -> Job:
    return Job("s", prompt(length), Sampling(max_tokens=tokens, ignore_eos=True))


def run(engine: VerifierEngine) -> list[tuple[list[Update], StepTimings]]:
    done = []
    while engine.has_work():
        plan = engine.plan()
        assert plan is not None
        result = engine.verify(plan, None)
        done.append((list(result.updates), result.timings))
    return done


def test_every_step_of_a_prompt_is_a_chunk_with_its_rows_and_its_time(rig: EngineRig) -> None:
    engine = rig.engine(max_sequences=1, prefill_rows=16)
    engine.start(job(40, 4).start())
    steps = run(engine)
    first = next(each for updates, _ in steps for each in updates)
    assert [(c.steps, c.prompt_rows, c.replayed_rows) for c in first.chunks] == [(1, 16, 0), (1, 16, 0), (1, 8, 0)]
    assert [(c.took_ns, c.end_unix_ns) for c in first.chunks] == [
        (timings.total_ns, timings.step_end_unix_ns) for _, timings in steps[:3]
    ]
    between = [each for updates, _ in steps for each in updates if each.offset and not each.finish]
    assert between
    assert not any(each.chunks for each in between), "only where the timings are told too"


def test_committed_output_is_replayed_in_chunks_of_its_own(rig: EngineRig) -> None:
    engine = rig.engine(max_sequences=1, prefill_rows=16)
    start = job(20, 30).start()
    engine.start(start)
    tokens = [token for updates, _ in run(engine) for each in updates for token in each.tokens]
    again = rig.engine(max_sequences=1, prefill_rows=16)
    again.start(replace(start, committed=tuple(tokens[:25]), attempt=2))
    first = next(each for updates, _ in run(again) for each in updates if each.tokens)
    assert sum(c.prompt_rows for c in first.chunks) == 20
    assert sum(c.replayed_rows for c in first.chunks) == 24, "all but the anchor, whose row draws the next token"


def test_the_longest_prompt_is_a_bounded_number_of_chunks_and_nothing_is_lost() -> None:
    chunks, steps = Chunks(), 5000
    for n in range(steps):
        chunks.add(PrefillChunk(1, 7, 2, MS, n))
        assert len(chunks.seen) <= MOST
    assert len(chunks.seen) > MOST // 2, "as fine as the bound allows"
    sums = [sum(each) for each in zip(*chunks.seen, strict=True)]
    assert sums[:4] == [steps, 7 * steps, 2 * steps, steps * MS]
    ends = [each.end_unix_ns for each in chunks.seen]
    assert ends == sorted(ends)
    assert ends[-1] == steps - 1


def test_chunks_travel_with_their_update() -> None:
    chunks = [PrefillChunk(1, 16, 0, 5, 100), PrefillChunk(2, 0, 24, 7, 200)]
    told = Update(b"", "s", 1, 1, 0, (3,), chunks=chunks, cached_prompt_tokens=128)
    (there,), _ = step(response_to(7, [told], StepTimings(0, 0, 0, 0, 0)))
    assert there.chunks == [Chunk(*chunk) for chunk in chunks]
    assert there.cached_prompt_tokens == 128


def test_what_was_not_computed_is_told_with_the_first_tokens_and_the_last(rig: EngineRig) -> None:
    engine = rig.engine(prefill_rows=16)
    for name in ("first", "second"):
        engine.start(replace(job(140, 4).start(), session_id=name))
        told = [each for updates, _ in run(engine) for each in updates]
    assert [each.cached_prompt_tokens for each in told] == [128, 0, 0, 128]
    assert told[-1].usage is not None
    assert told[-1].usage.cached_prompt_tokens == 128
    assert sum(chunk.prompt_rows for chunk in told[-1].chunks) == 12


def test_a_requests_prefill_span_has_its_chunks_as_events(out: InMemorySpanExporter) -> None:  # noqa: F811
    """Their clock is another machine's: only what lies between them counts."""
    rig, day = Rig(), 86_400_000 * MS
    trace, session = rig.generate()
    rig.now.ns += 100 * MS
    chunks = [Chunk(1, 512, 0, 30 * MS, day + 40 * MS), Chunk(1, 88, 0, 9 * MS, day + 50 * MS)]
    rig.bench.step(update(session, [1], timings=Timings(queue_ns=MS), chunks=chunks, cached_prompt_tokens=128))
    rig.bench.acknowledge()
    rig.end(session)
    rig.spans.ended(trace, None)
    prefill = by_name(out)["prefill"]
    assert prefill.end_time is not None
    assert dict(prefill.attributes or {}) == {"hedgerow.cached_prompt_tokens": 128}
    events = [
        (event.name, prefill.end_time - event.timestamp, dict(event.attributes or {})) for event in prefill.events
    ]
    assert events == [
        ("chunk", 10 * MS, {"steps": 1, "prompt_rows": 512, "replayed_rows": 0, "ms": 30.0}),
        ("chunk", 0, {"steps": 1, "prompt_rows": 88, "replayed_rows": 0, "ms": 9.0}),
    ]


def test_a_chunk_that_does_not_fit_its_span_is_left_out(out: InMemorySpanExporter) -> None:  # noqa: F811
    """A peer says what it likes, and a span's events lie within it."""
    rig = Rig()
    trace, session = rig.generate()
    strange = [Chunk(1, 1, 0, 1, 0), Chunk(1, 2, 0, 1, 1 << 63), Chunk(1, 3, 0, 1, 1 << 62)]
    rig.bench.step(update(session, [1], finish=Finish.LENGTH, timings=Timings(queue_ns=1), chunks=strange))
    rig.bench.acknowledge()
    rig.spans.ended(trace, None)
    assert [(event.attributes or {})["prompt_rows"] for event in by_name(out)["prefill"].events] == [3]
