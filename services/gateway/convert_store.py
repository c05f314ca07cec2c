"""The store's protobuf to plain data and back, no I/O. See convert.py."""

from __future__ import annotations

from collections.abc import Iterable

from hedgerow.v1 import common_pb2 as common
from hedgerow.v1 import kvstore_pb2 as kv
from services.gateway import messages as m
from services.gateway import types
from services.gateway.convert import (
    fingerprint_pb,
    number,
    sampling,
    sampling_pb,
    speculation_pb,
    stats,
    timings_pb,
    usage_pb,
)
from services.gateway.fields import known, optional, row


def record_pb(r: types.Record) -> kv.SessionRecord:
    """What the store keeps for good."""
    return kv.SessionRecord(
        session_id=r.session_id, birth=r.birth, model=r.model, tenant=r.tenant, prompt=r.prompt,
        requested=sampling_pb(r.requested), resolved=sampling_pb(r.resolved),
        fingerprint=fingerprint_pb(r.fingerprint), mode=number(r.mode), created_unix_ms=r.created_unix_ms,
        speculation=speculation_pb(r.speculation), detach=r.detach, deadline_unix_ms=r.deadline_unix_ms,
        priority=r.priority, return_steps=r.return_steps, return_trees=r.return_trees,
        trace=common.TraceContext(**vars(r.trace)) if r.trace.traceparent else None,
    )  # fmt: skip


def stored(r: kv.KvStoreServiceGetSessionResponse) -> m.Stored:
    """A session as the store has it."""
    p = r.record
    record = types.Record(
        p.session_id, p.birth, p.model, p.tenant, tuple(p.prompt), sampling(p.requested), sampling(p.resolved),
        types.Speculation(optional(p.speculation, "budget"), optional(p.speculation, "topk_cap")),
        row(types.Fingerprint, p.fingerprint), known(types.Mode, p.mode), p.created_unix_ms, p.detach,
        p.deadline_unix_ms, p.priority, p.return_steps, p.return_trees,
        types.Trace(p.trace.traceparent, p.trace.tracestate),
    )  # fmt: skip
    return m.Stored(record, state(r.state), r.tokens[:], notes(r.steps))


def granted(r: kv.AcquireLeaseResponse) -> m.Granted:
    """A lease."""
    return m.Granted(r.lease.epoch, state(r.state))


def expired(r: kv.ListExpiredResponse) -> m.ExpiredPage:
    """Sessions without a living owner."""
    found = [m.Expired(s.session_id, state(s.state), s.detach, s.deadline_unix_ms) for s in r.sessions]
    return m.ExpiredPage(found, r.cursor)


def listed(r: kv.KvStoreServiceListSessionsResponse) -> tuple[list[m.Listed], str]:
    """Some of a tenant's sessions, and where to look on."""
    found = [
        m.Listed(
            s.session_id, s.model, s.prompt_tokens, s.max_tokens, s.created_unix_ms, s.deadline_unix_ms, s.detach,
            known(types.Mode, s.mode), state(each.state), each.owner_lives,
        )
        for each in r.sessions
        for s in [each.summary]
    ]  # fmt: skip
    return found, r.cursor


def growth(r: kv.TailResponse) -> m.Growth:
    """Committed tokens as they come."""
    return m.Growth(r.offset, r.tokens[:], r.digest, state(r.state) if r.HasField("state") else None, notes(r.steps))


def notes(steps: Iterable[kv.CommittedStep]) -> list[m.Note]:
    """Statistics of steps."""
    return [m.Note(s.end, stats(s.stats), row(m.Timings, s.timings), s.timings.commit_ns) for s in steps]


def created(r: kv.CreateSessionResponse) -> m.Created:
    """The first lease, or what is there."""
    return m.Created(r.lease.epoch, None if r.created else state(r.existing))


def append(batch_id: int, entries: Iterable[m.Append], owner: bytes, traced: Iterable[str] = ()) -> kv.AppendRequest:
    """One message for all of `entries`; `traced` are the traceparents of requests in it."""
    message = kv.AppendRequest(batch_id=batch_id, entries=[_entry(entry, owner) for entry in entries])
    message.traces.extend(common.TraceContext(traceparent=each) for each in traced)
    return message


def _entry(e: m.Append, owner: bytes) -> kv.AppendEntry:
    entry = kv.AppendEntry(
        session_id=e.session_id, lease=common.Lease(epoch=e.epoch, owner=owner), birth=e.birth, offset=e.offset,
        tokens=e.tokens, digest_before=e.before, digest_after=e.after,
    )  # fmt: skip
    for note in e.notes:
        timings = timings_pb(note.timings._replace(commit_ns=note.commit_ns))
        entry.committed_steps.add(stats=common.StepStats(**note.stats._asdict()), end=note.end, timings=timings)
    if e.spent is not None:
        entry.spent.CopyFrom(usage_pb(e.spent))
    if e.best_effort_from is not None:
        entry.best_effort_from = e.best_effort_from
    if e.end:
        entry.finish_reason = number(e.end.reason)
        entry.usage.CopyFrom(usage_pb(e.end.usage))
        entry.matched_stop = e.end.matched_stop
        if e.end.matched_token is not None:
            entry.matched_token = e.end.matched_token
    return entry


def appended(r: kv.AppendResponse) -> list[m.Appended]:
    """The answers of one message."""
    return [m.Appended(a.session_id, known(m.AppendStatus, a.status), state(a.state)) for a in r.results]


def state(s: kv.SessionState) -> m.State:
    """What the store holds of a session."""
    usage = row(m.Usage, s.usage) if s.HasField("usage") else m.Usage()
    return m.State(
        s.epoch, s.owner, s.length, s.digest, known(types.Finish, s.finish_reason), usage, s.cancel_marked,
        s.matched_stop, optional(s, "matched_token"), optional(s, "best_effort_from"),
    )  # fmt: skip
