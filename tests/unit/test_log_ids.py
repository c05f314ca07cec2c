"""Lines of the log that are about a step or a session say which, and of which trace."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import grpc.aio
import pytest

from hedgerow.engine.config import EngineConfig
from hedgerow.engine.step import NoDrafter
from hedgerow.engine.types import DraftBatch, Sampling, Start
from hedgerow.engine.verifier import VerifierEngine
from hedgerow.errors import Internal, Unavailable
from hedgerow.rpc.interceptors import guarded
from hedgerow.rpc.logs import bind, get_log, set_up_logging
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import drafter_pb2, verifier_pb2
from hedgerow.v1 import kvstore_pb2 as kv
from services.drafter.convert import Limits
from services.drafter.servicer import DrafterServicer, Loaded
from services.gateway.session import Options
from services.gateway.types import Trace
from services.verifier.convert import draft_request, start_from
from services.verifier.loop import StepLoop
from services.verifier.servicer import VerifierServicer
from tests.stack import Models
from tests.unit.gateway_peers import Bench, RecordingEngine, record, update
from tests.unit.test_step_loop import FailingModel

TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE}-b7ad6b7169203331-01"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """Listens when it is called first; then gives the lines since, as objects by their event."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def lines() -> dict[str, dict[str, Any]]:
        set_up_logging("x", "debug", "json")
        found = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        return {line["event"]: line for line in found}

    yield lines
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def about(line: dict[str, Any]) -> dict[str, Any]:
    return {name: line[name] for name in ("session", "trace", "step") if name in line}


def start(session: str, tokens: int = 5, **more: Any) -> Start:
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    return dataclasses.replace(Start(session, 1, 1, [1, 2, 3], sampling, trace=TRACE), **more)


def engine(tiny: Models, steps: int = 1 << 30) -> VerifierEngine:
    model = cast(FailingModel, FailingModel.load(tiny.target, ()))
    model.left = steps
    return VerifierEngine(model, EngineConfig(default_budget=0), [b"x"] * model.config.vocab_size, frozenset())


async def test_a_step_that_fails_names_itself_its_sessions_and_their_traces(tiny: Models, told: Any) -> None:
    told()
    made, servicer = engine(tiny, steps=2), VerifierServicer(4, 1.0)
    made.start(start("one", tokens=50))
    with pytest.raises(Internal):
        await StepLoop(made, NoDrafter(), servicer.deliver).run()
    get_log("after").info("after the loop")
    lines = told()
    failed = lines["a step failed: every running sequence ends with an error"]
    assert (failed["step"], failed["sessions"]) == (3, ["one"])
    assert about(lines["a sequence failed"]) == {"session": "one", "trace": TRACE, "step": 3}
    assert "step" in lines["after the loop"], "what this task says next is about that step: why the process ends"


async def test_a_sequences_end_and_a_text_that_differs_are_told_with_all_three(tiny: Models, told: Any) -> None:
    told()
    made, servicer = engine(tiny), VerifierServicer(4, 1.0)
    made.start(start("one", tokens=9))
    for _ in range(3):
        plan = made.plan()
        assert plan is not None
        servicer.deliver(made.verify(plan, None))
    made.start(start("one", attempt=2, prompt=[3, 2, 1]))
    while (plan := made.plan()) is not None:
        servicer.deliver(made.verify(plan, None))
    lines = told()
    differs = lines["attached with another text than it has here: computed again"]
    assert about(differs) == {"session": "one", "trace": TRACE, "step": 4}
    assert about(lines["a sequence ended"]) == {"session": "one", "trace": TRACE, "step": 8}


def test_a_start_carries_its_traces_id_and_nothing_more() -> None:
    message = verifier_pb2.StartSequence(session_id="s", epoch=1, attempt=1, prompt=[1])
    assert start_from(message, b"", 8).named == {"session": "s"}
    message.trace.CopyFrom(common.TraceContext(traceparent=TRACEPARENT))
    assert start_from(message, b"", 8).named == {"session": "s", "trace": TRACE}


def test_a_gateways_lines_have_the_last_step_of_the_session(told: Any) -> None:
    told()
    other = RecordingEngine("other")
    bench = Bench(others=[other])
    made = dataclasses.replace(record(), trace=Trace("00-" + 32 * "1" + "-" + 16 * "1" + "-01", ""))
    session = bench.begin(made, Options(trace=Trace(TRACEPARENT, "")))
    step = update(session, [1, 2])
    assert step.stats is not None
    bench.step(step._replace(stats=step.stats._replace(step_id=41)))
    named = {"session": session.id, "trace": TRACE, "step": 41}
    bench.table.verifier_lost(bench.engine, Unavailable("verifier", "it is gone"))
    lost = told()["a session lost its verifier"]
    assert (about(lost), lost["verifier"]) == (named, bench.engine.address)
    bench.step(update(session, [1, 3], offset=0))
    changed = told()["a verifier changed a token"]
    assert (about(changed), changed["level"], changed["verifier"]) == (named, "error", bench.engine.address)


def test_a_session_of_no_trace_and_no_step_says_neither() -> None:
    session = Bench().begin()
    assert session.named == session.record.named == {"session": session.id}


class Call:
    """As much of a call as a guarded handler asks of it."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return (("traceparent", TRACEPARENT),)

    async def abort(self, *args: object) -> None:
        raise grpc.aio.AbortError

    async def write(self, message: object) -> None: ...


@pytest.mark.parametrize(
    "request_",
    [kv.MarkCancelRequest(session_id="s-1"), kv.CreateSessionRequest(record=kv.SessionRecord(session_id="s-1"))],
)
async def test_a_handler_that_fails_is_told_with_the_callers_trace_and_the_requests_session(
    request_: Any, told: Any
) -> None:
    told()

    async def fails(request: object, context: object) -> None:
        raise KeyError("x")

    handler = guarded("x/Y", grpc.unary_unary_rpc_method_handler(fails))
    with pytest.raises(grpc.aio.AbortError):
        await asyncio.create_task(cast(Any, handler.unary_unary)(request_, Call()))
    assert about(told()["a handler failed"]) == {"session": "s-1", "trace": TRACE}


async def test_a_name_without_end_is_cut(told: Any) -> None:
    told()

    async def fails(request: object, context: object) -> None:
        raise KeyError("x")

    handler = guarded("x/Y", grpc.unary_unary_rpc_method_handler(fails))
    with pytest.raises(grpc.aio.AbortError):
        await asyncio.create_task(cast(Any, handler.unary_unary)(kv.MarkCancelRequest(session_id="s" * 5000), Call()))
    assert told()["a handler failed"]["session"] == "s" * 128


async def test_a_draft_that_fails_names_the_verifiers_step(told: Any) -> None:
    told()

    class Broken:
        def draft(self, batch: DraftBatch) -> None:
            raise RuntimeError("no memory")

        def drop_all(self) -> None: ...

    async def requests() -> AsyncIterator[drafter_pb2.DraftRequest]:
        yield draft_request(DraftBatch(77, ()), (), b"v" * 16, 0)

    servicer = DrafterServicer(asyncio.Event(), 1)
    limits = Limits(vocab_size=9, feature_width=4, max_budget=1, max_sequences=1)
    servicer.loaded = Loaded(drafter_pb2.DrafterServiceDescribeResponse(), limits, cast(Any, Broken))
    handler = guarded("x/Draft", grpc.stream_stream_rpc_method_handler(servicer.Draft))
    with pytest.raises(grpc.aio.AbortError):
        await asyncio.create_task(cast(Any, handler.stream_stream)(requests(), Call()))
    assert told()["a handler failed"]["step"] == 77


def calls_of_log() -> Iterator[tuple[str, set[str], ast.Call]]:
    for path in [*ROOT.glob("services/**/*.py"), *ROOT.glob("hedgerow/engine/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "log"
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                names = {keyword.arg or ast.unparse(keyword.value) for keyword in node.keywords}
                yield str(node.args[0].value), names, node


KNOWN_BY_ID = {  # where no more than the id of a session is at hand
    "an end stays unrecorded: too many wait",
    "an end was not recorded",
    "a cancel is left to the owner",
    "no gateway runs it: ended",
    "a session was not cancelled",
    "a lost session is written again",
    "append refused",
}


def test_who_names_a_session_names_its_trace_where_it_is_known() -> None:
    lines = list(calls_of_log())
    assert len(lines) > 40
    alone = {event for event, names, _ in lines if "session" in names and "trace" not in names}
    assert alone == KNOWN_BY_ID, "say **session.named, **record.named or **start.named"


def test_nothing_stays_bound_outside_of_its_task(told: Any) -> None:
    told()

    async def task() -> None:
        bind(step=5)

    asyncio.run(task())
    get_log("x").info("later")
    assert "step" not in told()["later"]
