"""Protobuf to the client's types and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message as ProtobufMessage

from hedgerow.client._types import (
    Chunk,
    Event,
    Finished,
    FinishReason,
    Message,
    Model,
    Options,
    Sampling,
    Session,
    Started,
    Step,
    Timings,
    ToolCall,
    Usage,
)  # fmt: skip
from hedgerow.errors import InvalidRequest
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import gateway_pb2 as pb

REASONS = {
    common.FINISH_REASON_UNSPECIFIED: FinishReason.RUNNING, common.FINISH_REASON_STOP: FinishReason.STOP,
    common.FINISH_REASON_LENGTH: FinishReason.LENGTH, common.FINISH_REASON_TOOL_CALLS: FinishReason.TOOL_CALLS,
    common.FINISH_REASON_DEADLINE: FinishReason.DEADLINE, common.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    common.FINISH_REASON_ERROR: FinishReason.ERROR,
}  # fmt: skip
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids",
    "logit_bias",
)  # fmt: skip
SPECULATION = ("budget", "topk_cap")
ENVELOPE = ("model", "priority", "tenant", "idempotency_key", "return_steps", "return_trees")
OTHERS = ("stop", "deadline", "timeout")
Row = TypeVar("Row")
Built = TypeVar("Built", bound=ProtobufMessage)

Messages = Iterable[Message | Mapping[str, Any]]


def request(options: Options) -> pb.GenerateRequest:
    """A request without its prompt. Raises InvalidRequest for an option that does not exist or does not fit."""
    given: dict[str, Any] = dict(options)
    known = (*SAMPLING, *SPECULATION, *ENVELOPE, *OTHERS)
    for name in given:
        if name not in known:
            raise InvalidRequest(name, given[name], f"an option: {', '.join(sorted(known))}")
    stop = given.get("stop", ())
    sampling = _build(common.SamplingParams, given, SAMPLING, stop=[stop] if isinstance(stop, str) else stop)
    speculation = _build(common.SpeculationParams, given, SPECULATION)
    deadline = max(1, int(given["deadline"] * 1000)) if "deadline" in given else 0
    return _build(pb.GenerateRequest, given, ENVELOPE, sampling=sampling, speculation=speculation, deadline_ms=deadline)


def chat(messages: Messages, thinking: bool | None, preserve_thinking: bool | None) -> pb.ChatPrompt:
    """A conversation; messages may be mappings with the same keys. Raises InvalidRequest."""
    converted = [_message(i, message) for i, message in enumerate(messages)]
    prompt = pb.ChatPrompt(messages=converted)
    if thinking is not None:
        prompt.thinking = thinking
    if preserve_thinking is not None:
        prompt.preserve_thinking = preserve_thinking
    return prompt


def event(e: pb.SessionEvent) -> Event:
    """One event of a stream."""
    kind = e.WhichOneof("kind")
    if kind == "chunk":
        return _chunk(e.chunk)
    if kind == "started":
        s = e.started
        return Started(
            s.session_id, s.model, s.prompt_tokens, sampling(s.sampling), s.fingerprint.digest, _exact(s.mode), s.digest
        )
    f = e.finished
    return Finished(
        REASONS[f.reason], _row(Usage, f.usage), f.token_offset, f.text_offset, f.digest, _exact(f.mode),
        f.matched_stop, f.matched_token if f.HasField("matched_token") else None,
        _row(Timings, f.timings) if f.HasField("timings") else None,
    )  # fmt: skip


def model(m: pb.Model) -> Model:
    """One model of the list."""
    return Model(m.name, m.context_length, m.vocab_size, m.fingerprint.digest, m.ready, m.default_budget)


def session(s: pb.GetSessionResponse) -> Session:
    """What is recorded of a session."""
    return Session(
        s.session_id, s.model, s.prompt_tokens, s.token_count, REASONS[s.finish_reason], _row(Usage, s.usage), s.digest,
        sampling(s.sampling), _exact(s.mode), s.fingerprint.digest,
    )  # fmt: skip


def sampling(p: common.SamplingParams) -> Sampling:
    """Parameters as resolved."""
    return Sampling(
        p.temperature, p.top_k, p.top_p, p.min_p, p.seed, p.max_tokens, p.min_tokens, p.ignore_eos, tuple(p.stop),
        tuple(p.stop_token_ids), dict(p.logit_bias),
    )  # fmt: skip


def _chunk(c: pb.TokenChunk) -> Chunk:
    steps = [
        Step(
            s.step_id, s.budget, s.tree_nodes, s.accepted, s.emitted, s.batch_sequences, s.batch_rows,
            tuple(s.tree_parents), tuple(s.tree_tokens),
        )
        for s in c.steps
    ]  # fmt: skip
    timings = _row(Timings, c.timings) if c.HasField("timings") else None
    return Chunk(c.token_offset, c.text_offset, tuple(c.tokens), c.text, c.digest, tuple(steps), timings)


def _message(i: int, given: Message | Mapping[str, Any]) -> pb.ChatMessage:
    try:
        m = given if isinstance(given, Message) else Message(**given)
        calls = [c if isinstance(c, ToolCall) else ToolCall(**c) for c in m.tool_calls]
        return pb.ChatMessage(
            role=m.role, content=m.content, name=m.name, reasoning_content=m.reasoning_content,
            tool_calls=[pb.ToolCall(id=c.id, name=c.name, arguments=c.arguments) for c in calls],
            tool_call_id=m.tool_call_id,
        )  # fmt: skip
    except TypeError as error:
        raise InvalidRequest(f"messages[{i}]", given, f"a message ({error})") from None


def _build(kind: type[Built], given: Mapping[str, Any], names: Sequence[str], **more: Any) -> Built:
    """A message of those `names` that are given. A value that its field cannot hold is the caller's mistake."""
    message = kind(**more)
    for name in names:
        value = given.get(name)
        if value is None:
            continue
        try:
            message.MergeFrom(kind(**{name: value}))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(name, value, str(error)) from None
    return message


def _row(kind: type[Row], message: Any) -> Row:
    """A dataclass whose fields are named as the message's."""
    return kind(**{name: getattr(message, name) for name in kind.__dataclass_fields__})  # type: ignore[attr-defined]


def _exact(mode: int) -> bool:
    return mode != common.EXECUTION_MODE_BEST_EFFORT
