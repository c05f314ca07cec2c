"""Protobuf to plain data and back, no I/O: clients and verifiers here, the store in convert_store.py."""

from __future__ import annotations

import enum
from typing import Any

from hedgerow import errors
from hedgerow.errors import HedgerowError
from hedgerow.rpc.status import KIND_OF_REASON
from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import gateway_pb2 as public
from hedgerow.v1 import verifier_pb2 as engine
from services.gateway import deltas, stream, types
from services.gateway import messages as m
from services.gateway.fields import known, optional, row
from services.gateway.outgoing import Told
from services.gateway.position import Position
from services.gateway.session import Session

SCALARS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "ignore_eos", "n", "logprobs", "top_logprobs", "sample_index",
)  # fmt: skip
LISTS = ("stop", "stop_token_ids", "bad_words")

# ---- from clients


def generation(r: public.GenerateRequest) -> types.Generation:
    """What a client asks for."""
    return types.Generation(
        r.model,
        prompt(r),
        sampling(r.sampling),
        types.Speculation(optional(r.speculation, "budget"), optional(r.speculation, "topk_cap")),
        _mode(int(r.mode)),
        r.idempotency_key, r.priority, r.tenant, r.deadline_ms,
        types.Trace(r.trace.traceparent, r.trace.tracestate),
        r.detach, r.return_steps or r.return_trees, r.return_trees,
    )  # fmt: skip


def position(r: public.ResumeRequest) -> Position:
    """What a client has."""
    return Position(r.token_offset, r.digest, None if r.token_offset and not r.text_offset else r.text_offset)


def prompt(r: public.GenerateRequest | public.TokenizeRequest) -> types.Prompt | None:
    """The prompt in whichever form it came; None: in none."""
    kind = r.WhichOneof("prompt")
    if kind == "text":
        return r.text
    if kind == "token_ids" and isinstance(r, public.GenerateRequest):
        return tuple(r.token_ids.ids)
    return _chat(r.chat) if kind == "chat" else None


def sampling(p: common.SamplingParams) -> types.Sampling:
    """Sampling parameters; what is unset stays None."""
    given: dict[str, Any] = {name: getattr(p, name) for name in SCALARS if p.HasField(name)}
    given |= {name: tuple(getattr(p, name)) for name in LISTS}
    grammar = p.grammar.WhichOneof("form") or "" if p.HasField("grammar") else ""
    return types.Sampling(**given, logit_bias=dict(p.logit_bias), grammar=grammar)


def _mode(number: int) -> types.Mode:
    try:
        return types.Mode(number)
    except ValueError:
        raise errors.InvalidRequest("mode", number, "one of EXACT, BEST_EFFORT") from None


def _chat(c: public.ChatPrompt) -> types.Chat:
    messages = tuple(
        types.Message(
            message.role, message.content, message.name, message.reasoning_content,
            tuple(types.ToolCall(call.id, call.name, call.arguments) for call in message.tool_calls),
            message.tool_call_id,
        )
        for message in c.messages
    )  # fmt: skip
    return types.Chat(messages, c.tools_json, optional(c, "thinking"), optional(c, "preserve_thinking"))


# ---- to clients


def event(e: stream.Event, *, with_steps: bool) -> public.SessionEvent:
    """One event of a client's stream."""
    if isinstance(e, stream.Chunk):
        chunk = public.TokenChunk(
            token_offset=e.token_offset, text_offset=e.text_offset, tokens=e.tokens, text=e.text, digest=e.digest
        )
        chunk.deltas.extend(map(delta, e.deltas))
        if with_steps and e.notes:
            chunk.steps.extend(common.StepStats(**note.stats._asdict()) for note in e.notes)
            last = e.notes[-1]
            chunk.timings.CopyFrom(timings_pb(last.timings._replace(commit_ns=last.commit_ns)))
        return public.SessionEvent(chunk=chunk)
    if isinstance(e, stream.Started):
        return public.SessionEvent(started=_started(e))
    finished = public.SessionFinished(
        reason=number(e.end.reason), matched_stop=e.end.matched_stop, matched_token=e.end.matched_token,
        usage=usage_pb(e.end.usage), timings=timings_pb(e.timings) if e.timings else None,
        token_offset=e.token_offset, text_offset=e.text_offset, digest=e.digest, mode=number(e.mode),
    )  # fmt: skip
    return public.SessionEvent(finished=finished)


def delta(d: deltas.Delta) -> public.AnswerDelta:
    """More of one part of an answer."""
    if isinstance(d, deltas.Call):
        call = public.ToolCallDelta(
            index=d.index, id=d.id, name=d.name, arguments=d.arguments, complete=d.complete, malformed=d.malformed
        )
        return public.AnswerDelta(tool_call=call)
    if isinstance(d, deltas.Reasoning):
        return public.AnswerDelta(reasoning=d.text)
    return public.AnswerDelta(content=d.text)


def _started(e: stream.Started) -> public.SessionStarted:
    r = e.record
    return public.SessionStarted(
        session_id=r.session_id, model=r.model, prompt_tokens=len(r.prompt), sampling=sampling_pb(r.resolved),
        fingerprint=fingerprint_pb(r.fingerprint), mode=number(r.mode), digest=e.digest,
    )  # fmt: skip


def session(s: m.Stored) -> public.GetSessionResponse:
    """What is recorded of a session."""
    return public.GetSessionResponse(
        session_id=s.record.session_id, model=s.record.model, prompt_tokens=len(s.record.prompt),
        token_count=s.state.length, finish_reason=number(s.state.finish),
        usage=usage_pb(s.state.usage) if s.state.finish else None,
        digest=s.state.digest, sampling=sampling_pb(s.record.resolved),
        mode=number(s.record.mode if s.state.best_effort_from is None else types.Mode.BEST_EFFORT),
        fingerprint=fingerprint_pb(s.record.fingerprint),
    )  # fmt: skip


def running(s: Session) -> public.RunningSession:
    """One session of a list."""
    record = s.record
    return public.RunningSession(
        session_id=s.id, model=record.model, prompt_tokens=len(record.prompt), token_count=s.acked,
        max_tokens=record.resolved.max_tokens or 0, created_unix_ms=record.created_unix_ms,
        deadline_unix_ms=record.deadline_unix_ms, readers=len(s.readers), detach=record.detach,
        mode=number(record.mode if s.best_effort_from is None else types.Mode.BEST_EFFORT),
        uncommitted_tokens=len(s.tokens) - s.acked,
    )  # fmt: skip


def listed(s: m.Listed) -> public.StoredSession:
    """One session of a list that the store keeps."""
    state = s.state
    owner = "" if state.owner == bytes(len(state.owner)) else state.owner.hex()
    if state.finish:
        status = public.SESSION_STATUS_ENDED
    elif s.owner_lives:
        status = public.SESSION_STATUS_RUNNING
    else:
        status = public.SESSION_STATUS_ORPHANED if owner else public.SESSION_STATUS_PAUSED
    return public.StoredSession(
        session_id=s.session_id, model=s.model, prompt_tokens=s.prompt_tokens, token_count=state.length,
        max_tokens=s.max_tokens, created_unix_ms=s.created_unix_ms, deadline_unix_ms=s.deadline_unix_ms,
        detach=s.detach, mode=number(s.mode if state.best_effort_from is None else types.Mode.BEST_EFFORT),
        status=status, finish_reason=number(state.finish), owner=owner,
    )  # fmt: skip


def model(described: types.Model, *, ready: bool) -> public.Model:
    """One model of the list."""
    return public.Model(
        name=described.name, context_length=described.context_length, vocab_size=described.vocab_size,
        fingerprint=fingerprint_pb(described.fingerprint), ready=ready, default_budget=described.default_budget,
    )  # fmt: skip


def sampling_pb(s: types.Sampling) -> common.SamplingParams:
    """Sampling parameters; None stays unset."""
    scalars = {name: value for name in SCALARS if (value := getattr(s, name)) is not None}
    return common.SamplingParams(
        **scalars, **{name: getattr(s, name) for name in LISTS}, logit_bias=s.logit_bias or None
    )


def fingerprint_pb(f: types.Fingerprint) -> common.Fingerprint:
    """Field by field."""
    return common.Fingerprint(**f._asdict())


def usage_pb(u: m.Usage) -> common.Usage:
    """Field by field."""
    return common.Usage(**u._asdict())


# ---- verifier


def described(d: engine.DescribeResponse) -> types.Model:
    """What a verifier serves."""
    return types.Model(
        d.model, row(types.Fingerprint, d.fingerprint), d.vocab_size, d.context_length, d.max_budget,
        d.default_budget, frozenset(d.eos_token_ids), sampling(d.default_sampling),
    )  # fmt: skip


def attach(t: Told) -> engine.AttachRequest:
    """One message."""
    cancels = [engine.CancelSequence(session_id=c.session_id, epoch=c.epoch, attempt=c.attempt) for c in t.cancels]
    committed = [engine.CommittedOffset(**c._asdict()) for c in t.committed]
    return engine.AttachRequest(start=map(_start, t.starts), cancel=cancels, committed=committed)


def _start(s: m.Start) -> engine.StartSequence:
    return engine.StartSequence(
        session_id=s.record.session_id, epoch=s.epoch, attempt=s.attempt, prompt=s.record.prompt,
        committed=s.committed, digest=s.digest, sampling=sampling_pb(s.record.resolved),
        speculation=speculation_pb(s.record.speculation), priority=s.priority, tenant=s.record.tenant,
        deadline_ms=s.deadline_ms, trace=common.TraceContext(**vars(s.trace)), return_trees=s.return_trees,
        mode=number(s.record.mode),
    )  # fmt: skip


def step(message: engine.AttachResponse) -> tuple[list[m.Update], m.Timings]:
    """The updates of one step, and where its time went."""
    updates = [
        m.Update(
            u.session_id, u.epoch, u.attempt, u.offset, u.tokens[:],
            types.Finish.ERROR if u.HasField("error") else known(types.Finish, u.finish_reason), u.matched_stop,
            optional(u, "matched_token"), row(m.Usage, u.usage) if u.HasField("usage") else None,
            stats(u.stats) if u.HasField("stats") else None,
            row(m.Timings, u.timings) if u.HasField("timings") else None,
            sequence_error(u.error) if u.HasField("error") else None, [row(m.Chunk, chunk) for chunk in u.chunks],
            u.cached_prompt_tokens,
        )
        for u in message.updates
    ]  # fmt: skip
    return updates, row(m.Timings, message.timings)


def stats(s: common.StepStats) -> m.StepStats:
    """Copied: the message's memory is not kept alive by what one session keeps of it."""
    return m.StepStats(
        s.step_id, s.budget, s.tree_nodes, s.accepted, s.emitted, s.batch_sequences, s.batch_rows,
        s.tree_parents[:], s.tree_tokens[:],
    )  # fmt: skip


def sequence_error(e: engine.SequenceError) -> HedgerowError:
    """What the verifier says, as an error of ours."""
    kind = KIND_OF_REASON.get(e.reason, errors.Internal)
    error = kind.__new__(kind)  # the classes' own constructors make up messages; this one came over the wire
    HedgerowError.__init__(error, e.message, metadata=e.metadata, retry_after=e.retry_after_ms / 1000 or None)
    if isinstance(error, errors.InvalidRequest):
        error.field, error.value, error.limit = (e.metadata.get(name, "") for name in ("field", "value", "limit"))
    return error


# ---- parts


def number(value: enum.IntEnum) -> Any:
    """An enum's number, in the type that the generated code wants."""
    return int(value)


def speculation_pb(s: types.Speculation) -> common.SpeculationParams:
    """Field by field; None stays unset."""
    return common.SpeculationParams(budget=s.budget, topk_cap=s.topk_cap)


def timings_pb(t: m.Timings) -> common.Timings:
    """Field by field."""
    return common.Timings(**t._asdict())
