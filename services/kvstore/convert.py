"""Protobuf <-> the store's nouns; every limit on what callers send is checked here."""

from __future__ import annotations

import array
import re
import sys
from collections.abc import Sequence
from typing import TypeVar, cast

from hedgerow.errors import InvalidRequest
from hedgerow.v1 import common_pb2, kvstore_pb2
from services.kvstore import convert_view
from services.kvstore.config import DAY, KvStoreConfig
from services.kvstore.records import (
    MARK_BYTES,
    NOBODY,
    Abandoned,
    Answer,
    Entry,
    Lease,
    NewSession,
    Session,
    State,
    Status,
)
from services.kvstore.tail import Growth

# Redis's scripts count in doubles.
MOST_EPOCH = 2**53 - 2
MOST_OFFSET = 2**31 - 1
MOST_STOP_BYTES = 256
MOST_EXPIRED = 1024
"""Sessions that one ListExpired tells."""
MOST_LISTED, USUALLY_LISTED = 1000, 100
"""Sessions that one ListSessions tells."""
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")  # no braces: they would end the hash tag
_FINISHES = frozenset(common_pb2.FinishReason.values())
T = TypeVar("T")
_LITTLE = sys.byteorder == "little"


def session_id(value: str, field: str = "session_id") -> str:
    """The id, where it is one."""
    return _checked(field, value, _ID.fullmatch(value) is not None, "1 to 128 of A-Z a-z 0-9 _ . : -")


def mark(field: str, value: bytes) -> bytes:
    """A digest, birth mark or incarnation."""
    return _checked(field, value, len(value) == MARK_BYTES, f"exactly {MARK_BYTES} bytes")


def optional_mark(field: str, value: bytes) -> bytes:
    """As `mark`, or empty."""
    return mark(field, value) if value else value


def owner(field: str, value: bytes) -> bytes:
    """An incarnation; not nobody's."""
    return _checked(field, mark(field, value), value != NOBODY, "not all zero: that is nobody")


def lease(value: common_pb2.Lease, field: str = "lease") -> Lease:
    """A lease that names an owner."""
    epoch = _ranged(f"{field}.epoch", value.epoch, 1, MOST_EPOCH)
    return Lease(epoch, owner(f"{field}.owner", value.owner))


def epoch_floor(value: int) -> int:
    """An epoch below which no lease is granted."""
    return _ranged("epoch_floor", value, 0, MOST_EPOCH)


def offset(field: str, value: int) -> int:
    """A number of committed tokens."""
    return _ranged(field, value, 0, MOST_OFFSET)


def owner_ttl(value: int) -> int:
    """Milliseconds that an owner lives on; 0 is the store's default."""
    return _ranged("ttl_ms", value, 100, 600_000) if value else 0


def finish_reason(value: int, *, required: bool, field: str = "finish_reason") -> int:
    """A finish reason of this version."""
    known = value in _FINISHES and not (required and value == 0)
    return _checked(field, value, known, "a known reason" if required else "a known reason or none")


def new_session(request: kvstore_pb2.CreateSessionRequest, config: KvStoreConfig) -> NewSession:
    """What CreateSession writes."""
    record = request.record
    _ranged("record.prompt", len(record.prompt), 1, config.max_prompt, "tokens")
    ttl = _ranged("ttl_ms", request.ttl_ms, 1000, 365 * DAY) if request.ttl_ms else config.session_ttl_ms
    return NewSession(
        session_id(record.session_id, "record.session_id"),
        record.SerializeToString(),
        mark("record.birth", record.birth),
        owner("owner", request.owner),
        mark("digest", request.digest),
        ttl,
        record.detach,
        _ranged("record.deadline_unix_ms", record.deadline_unix_ms, 0, MOST_EPOCH),
        record.mode == common_pb2.EXECUTION_MODE_BEST_EFFORT,
        tenant=record.tenant,
        summary=_summary(record),
        replaces=optional_mark("replaces", request.replaces),
    )


def lost_session(request: kvstore_pb2.AcquireLeaseRequest, config: KvStoreConfig) -> NewSession | None:
    """What AcquireLease writes where the store has lost the session; None: the caller has no record."""
    if not request.HasField("record"):
        _checked("digest", request.digest, not request.digest, "only with a record")
        return None
    record = request.record
    _checked("record.session_id", record.session_id, record.session_id == request.session_id, "equal to session_id")
    _checked("record.birth", record.birth, request.birth in (b"", record.birth), "equal to birth")
    create, owned = kvstore_pb2.CreateSessionRequest, request.owner
    creation = create(record=record, owner=owned, digest=request.digest, ttl_ms=request.ttl_ms)
    return new_session(creation, config)._replace(epoch=epoch_floor(request.epoch_floor) + 1)


def expired_limit(value: int) -> int:
    """How many sessions ListExpired may tell; 0 is the store's limit."""
    return _ranged("limit", value, 0, MOST_EXPIRED) or MOST_EXPIRED


def listing_limit(value: int) -> int:
    """How many sessions ListSessions may tell; 0 is the usual number."""
    return _ranged("limit", value, 0, MOST_LISTED) or USUALLY_LISTED


def entries(request: kvstore_pb2.AppendRequest, config: KvStoreConfig) -> list[Entry]:
    """The entries of one message, each session once."""
    _ranged("entries", len(request.entries), 0, config.max_entries, "entries")
    found: dict[str, Entry] = {}
    for i, wire in enumerate(request.entries):
        try:
            entry = _entry(wire, config)
        except InvalidRequest as error:
            raise InvalidRequest(f"entries[{i}].{error.field}", error.value, error.limit) from None
        if entry.session_id in found:
            raise InvalidRequest(f"entries[{i}].session_id", entry.session_id, "one entry a session in a message")
        found[entry.session_id] = entry
    return list(found.values())


def append_response(batch_id: int, entries: Sequence[Entry], answers: Sequence[Answer]) -> kvstore_pb2.AppendResponse:
    """The answers in the entries' order."""
    response = kvstore_pb2.AppendResponse(batch_id=batch_id)
    for entry, answer in zip(entries, answers, strict=True):
        response.results.add(session_id=entry.session_id, status=int(answer.status), state=state(answer.state))
    return response


def create_response(answer: Answer) -> kvstore_pb2.CreateSessionResponse:
    """The first lease, or what is there."""
    if answer.status == Status.OK:
        return kvstore_pb2.CreateSessionResponse(created=True, lease=lease_of(answer.state))
    return kvstore_pb2.CreateSessionResponse(created=False, existing=state(answer.state))


def expired_response(found: Sequence[Abandoned], cursor: str) -> kvstore_pb2.ListExpiredResponse:
    """Sessions without a living owner."""
    response = kvstore_pb2.ListExpiredResponse(cursor=cursor)
    for each in found:
        record = kvstore_pb2.SessionRecord.FromString(each.record)  # empty, but of sessions from before
        response.sessions.add(
            session_id=each.session_id,
            state=state(each.state),
            detach=each.detach or record.detach,
            deadline_unix_ms=each.deadline or record.deadline_unix_ms,
        )
    return response


def session_response(session: Session, *, state_only: bool) -> kvstore_pb2.KvStoreServiceGetSessionResponse:
    """A session as it is read; `state_only` leaves prompt and tokens out."""
    record = kvstore_pb2.SessionRecord.FromString(session.record)
    if state_only:
        del record.prompt[:]
    tokens = unpack_tokens(b"".join(chunk.tokens for chunk in session.chunks))
    steps, more = convert_view.session_steps(session)
    return kvstore_pb2.KvStoreServiceGetSessionResponse(
        record=record, state=state(session.state), tokens=tokens, steps=steps, more_steps_from=more
    )


def tail_response(growth: Growth) -> kvstore_pb2.TailResponse:
    """Tokens as they came, and the state with the last."""
    chunk, steps = growth.chunk, convert_view.steps(growth.parts)
    final = state(growth.final) if growth.final is not None else None
    return kvstore_pb2.TailResponse(
        offset=chunk.offset, tokens=unpack_tokens(chunk.tokens), digest=chunk.digest, state=final, steps=steps
    )


def lease_of(value: State) -> common_pb2.Lease:
    """The lease that a state names."""
    return common_pb2.Lease(epoch=value.epoch, owner=value.owner)


def state(value: State) -> kvstore_pb2.SessionState:
    """A state on the wire."""
    return kvstore_pb2.SessionState(
        epoch=value.epoch,
        owner=value.owner,
        length=value.length,
        digest=value.digest,
        finish_reason=cast("common_pb2.FinishReason", value.finish),
        usage=common_pb2.Usage.FromString(value.usage) if value.usage else None,
        cancel_marked=value.cancelled,
        matched_stop=value.matched_stop,
        matched_token=value.matched_token,
        best_effort_from=value.best_effort_from,
    )


def verifier(value: str) -> str:
    """A verifier's address."""
    return _checked("verifier", value, 1 <= len(value) <= 256, "1 to 256 characters")


def prefix_ttl(value: int) -> int:
    """Milliseconds that a hint lives."""
    return _ranged("ttl_ms", value, 1, DAY)


def blocks(values: Sequence[bytes], config: KvStoreConfig) -> list[bytes]:
    """Hashes of prefix blocks."""
    _ranged("block_hashes", len(values), 0, config.max_blocks, "blocks")
    return [mark(f"block_hashes[{i}]", value) for i, value in enumerate(values)]


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """uint32 little-endian."""
    packed = array.array("I", tokens)
    if not _LITTLE:
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> array.array[int]:
    """The inverse of `pack_tokens`."""
    tokens = array.array("I", packed)
    if not _LITTLE:
        tokens.byteswap()
    return tokens


def _summary(r: kvstore_pb2.SessionRecord) -> bytes:
    """The same bytes for the same record: they are the session's place in a list."""
    summary = kvstore_pb2.SessionSummary(
        session_id=r.session_id, model=r.model, prompt_tokens=len(r.prompt), max_tokens=r.resolved.max_tokens,
        created_unix_ms=r.created_unix_ms, deadline_unix_ms=r.deadline_unix_ms, detach=r.detach, mode=r.mode,
    )  # fmt: skip
    return summary.SerializeToString(deterministic=True)


def _entry(wire: kvstore_pb2.AppendEntry, config: KvStoreConfig) -> Entry:
    count = _ranged("tokens", len(wire.tokens), 0, config.max_tokens, "tokens")
    finish = finish_reason(wire.finish_reason, required=False)
    before, after = mark("digest_before", wire.digest_before), mark("digest_after", wire.digest_after)
    _checked("digest_after", after, count > 0 or after == before, "equal to digest_before without tokens")
    _checked("usage", "set", finish != 0 or not wire.HasField("usage"), "only with a finish_reason")
    _checked("spent", "set", finish == 0 or not wire.HasField("spent"), "only without a finish_reason")
    _ranged("matched_stop", len(wire.matched_stop.encode()), 0, MOST_STOP_BYTES, "bytes")
    view = convert_view.packed(wire)
    _ranged("logprobs and committed_steps", len(view), 0, config.max_view_bytes, "bytes")
    return Entry(
        session_id(wire.session_id),
        lease(wire.lease),
        mark("birth", wire.birth),
        _ranged("offset", wire.offset, 0, MOST_OFFSET - count),
        pack_tokens(wire.tokens),
        before,
        after,
        finish,
        wire.usage.SerializeToString() if wire.HasField("usage") else b"",
        wire.matched_stop,
        wire.matched_token if wire.HasField("matched_token") else None,
        view,
        _token_digests(wire, after),
        offset("best_effort_from", wire.best_effort_from) if wire.HasField("best_effort_from") else None,
        wire.spent.SerializeToString() if wire.HasField("spent") else b"",
    )


def _token_digests(wire: kvstore_pb2.AppendEntry, after: bytes) -> bytes:
    digests = wire.token_digests
    if not digests:
        return b""
    _checked("token_digests", len(digests), len(digests) == len(wire.tokens), f"none or {len(wire.tokens)}, as tokens")
    for i, digest in enumerate(digests):
        mark(f"token_digests[{i}]", digest)
    _checked("digest_after", after, digests[-1] == after, "the last of token_digests")
    return b"".join(digests)


def _checked(field: str, value: T, allowed: bool, limit: str) -> T:
    if not allowed:
        raise InvalidRequest(field, value, limit)
    return value


def _ranged(field: str, value: int, low: int, high: int, unit: str = "") -> int:
    if not low <= value <= high:
        raise InvalidRequest(field, value, f"in [{low}, {high}]{' ' + unit if unit else ''}")
    return value
