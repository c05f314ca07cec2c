"""Protobuf to the client's types and back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Set
from typing import Any, TypeVar

from hedgerow.client._conversation import delta
from hedgerow.client._fields import fill, seconds
from hedgerow.client._types import (
    Chunk,
    Event,
    Finished,
    FinishReason,
    Model,
    Options,
    Running,
    Sampling,
    Session,
    SessionStatus,
    Started,
    Step,
    Stored,
    Timings,
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
STATUSES: Mapping[int, SessionStatus] = {
    pb.SESSION_STATUS_RUNNING: SessionStatus.RUNNING, pb.SESSION_STATUS_PAUSED: SessionStatus.PAUSED,
    pb.SESSION_STATUS_ORPHANED: SessionStatus.ORPHANED, pb.SESSION_STATUS_ENDED: SessionStatus.ENDED,
}  # fmt: skip
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop",
    "stop_token_ids", "logit_bias",
)  # fmt: skip
SPECULATION = ("budget", "topk_cap")
ENVELOPE = ("model", "priority", "tenant", "idempotency_key", "return_steps", "return_trees", "detach")
KNOWN = (*SAMPLING, *SPECULATION, *ENVELOPE, "deadline", "timeout", "leave_running")
DIGEST_BYTES = 16
Row = TypeVar("Row")


def request(options: Options) -> pb.GenerateRequest:
    """A request without its prompt. Raises InvalidRequest for an option that does not exist or does not fit."""
    given: dict[str, Any] = dict(options)
    for name in given:
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, 1)
            hint = f"did you mean {near[0]}?" if near else f"one of {', '.join(sorted(KNOWN))}"
            raise InvalidRequest(name, given[name], f"no option of this name; {hint}")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    asked = pb.GenerateRequest(detach=given.get("detach") is None)
    for message, names in ((asked.sampling, SAMPLING), (asked.speculation, SPECULATION), (asked, ENVELOPE)):
        for name in names:
            fill(message, name, given.get(name))
    if (deadline := seconds("deadline", given.get("deadline"))) is not None:
        asked.deadline_ms = max(1, int(deadline * 1000))
    seconds("timeout", given.get("timeout"))
    return asked


def set_prompt(asked: pb.GenerateRequest, prompt: object) -> None:
    """A text, or token ids taken as they are. Raises InvalidRequest."""
    if isinstance(prompt, str):
        fill(asked, "text", prompt, "prompt")
        return
    if isinstance(prompt, bytes | bytearray | Mapping | Set) or not isinstance(prompt, Iterable):
        raise InvalidRequest("prompt", prompt, "a text, or a sequence of token ids")
    ids = common.TokenIds()
    fill(ids, "ids", list(prompt), "prompt")
    asked.token_ids.CopyFrom(ids)


def resume(session_id: str, token_offset: int, digest: bytes, text_offset: int, detach: bool) -> pb.ResumeRequest:
    """Where to go on. Raises InvalidRequest."""
    asked = pb.ResumeRequest()
    given = {"session_id": session_id, "token_offset": token_offset, "text_offset": text_offset, "detach": detach}
    for name, value in given.items():
        if value is None:
            raise InvalidRequest(name, value, "given")
        fill(asked, name, value)
    if not session_id:
        raise InvalidRequest("session_id", session_id, "the id of a session")
    if not isinstance(digest, bytes) or len(digest) not in (0, DIGEST_BYTES):
        raise InvalidRequest("digest", digest, f"{DIGEST_BYTES} bytes, or none")
    asked.digest = digest
    return asked


def event(e: pb.SessionEvent) -> Event | None:
    """One event of a stream; None: of a kind that is newer than this client, which holds no tokens for it."""
    kind = e.WhichOneof("kind")
    if kind is None:
        return None
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


def running(s: pb.RunningSession, gateway: str) -> Running:
    """A session of a list."""
    return Running(
        s.session_id, s.model, s.prompt_tokens, s.token_count, s.max_tokens, s.created_unix_ms, s.deadline_unix_ms,
        s.readers, s.uncommitted_tokens, s.detach, _exact(s.mode), gateway,
    )  # fmt: skip


def stored(s: pb.StoredSession, tenant: str) -> Stored:
    """A session of a list that the store keeps."""
    return Stored(
        s.session_id, tenant, s.model, STATUSES[s.status], s.prompt_tokens, s.token_count, s.max_tokens,
        s.created_unix_ms, s.deadline_unix_ms, s.detach, _exact(s.mode), REASONS[s.finish_reason], s.owner,
    )  # fmt: skip


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
    deltas = tuple(known for each in c.deltas if (known := delta(each)) is not None)
    return Chunk(c.token_offset, c.text_offset, tuple(c.tokens), c.text, c.digest, tuple(steps), timings, deltas)


def _row(kind: type[Row], message: Any) -> Row:
    """A dataclass whose fields are named as the message's."""
    return kind(**{name: getattr(message, name) for name in kind.__dataclass_fields__})  # type: ignore[attr-defined]


def _exact(mode: int) -> bool:
    return mode != common.EXECUTION_MODE_BEST_EFFORT
