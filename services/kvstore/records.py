"""The nouns of the store. Plain data: no protobuf and no Redis here."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

MARK_BYTES = 16
"""Bytes of a digest, of a birth mark and of an owner's incarnation."""
NOBODY = bytes(MARK_BYTES)
"""The owner of a session whose lease was given up."""
FAILED = 6
"""The finish reason ERROR, as scripts/session.lua has it."""


class Status(enum.IntEnum):
    """What a script answered. Numbers below 100 are those of hedgerow.v1.AppendStatus."""

    OK = 1
    FENCED = 2
    GAP = 3
    DIGEST_MISMATCH = 4
    CONFLICT = 5
    FINISHED = 6
    NOT_FOUND = 7
    GONE = 8
    FORGOTTEN = 9
    UNAVAILABLE = 10
    EXISTS = 101
    EXPIRED = 102
    DELETED = 103
    UNKNOWN = 104
    RACED = 105


class Lease(NamedTuple):
    """Who may change a session."""

    epoch: int
    owner: bytes


class State(NamedTuple):
    """The part of a session that changes; `usage` is opaque here. From `best_effort_from` on tokens are not exact."""

    epoch: int = 0
    owner: bytes = b""
    length: int = 0
    digest: bytes = b""
    finish: int = 0
    usage: bytes = b""
    cancelled: bool = False
    matched_stop: str = ""
    matched_token: int | None = None
    best_effort_from: int | None = None


class Entry(NamedTuple):
    """One session's append. `tokens` are uint32 little-endian; `usage`, `spent` and `view` are opaque here.

    `digests` are the digests after each token, joined, or empty. An entry without tokens and without a finish
    renews the session's lifetime.
    """

    session_id: str
    lease: Lease
    birth: bytes
    offset: int
    tokens: bytes
    before: bytes
    after: bytes
    finish: int = 0
    usage: bytes = b""
    matched_stop: str = ""
    matched_token: int | None = None
    view: bytes = b""
    digests: bytes = b""
    best_effort_from: int | None = None
    spent: bytes = b""


class Answer(NamedTuple):
    """What became of a call, and what is stored now."""

    status: Status
    state: State


class NewSession(NamedTuple):
    """A session to be created; `record` is opaque here, times are in milliseconds, `deadline` in Unix time.

    `epoch` is the lease's: above 1 where an owner writes again what a store has lost.
    """

    session_id: str
    record: bytes
    birth: bytes
    owner: bytes
    digest: bytes
    ttl: int
    detach: bool = False
    deadline: int = 0
    best_effort: bool = False
    epoch: int = 1
    tenant: str = ""
    summary: bytes = b""
    """What a list tells of it, opaque here. Empty: no list has it."""
    replaces: bytes = b""
    """Birth mark of a session that ended with an error before its first token, and gives way to this one."""


class Listed(NamedTuple):
    """A session of a tenant's list; `summary` is opaque here."""

    summary: bytes
    state: State
    owner_lives: bool


class Abandoned(NamedTuple):
    """A running session that nobody drives. `record`: where `detach` and `deadline` are to be read; empty: here."""

    session_id: str
    state: State
    detach: bool
    deadline: int
    record: bytes = b""


class Chunk(NamedTuple):
    """Committed tokens (uint32 little-endian) from `offset` on, and the digest after them. `view` is opaque here, and
    may be of tokens before `offset` as well.
    """

    offset: int
    tokens: bytes
    digest: bytes
    view: bytes = b""

    @property
    def end(self) -> int:
        """The offset after the last token."""
        return self.offset + len(self.tokens) // 4


class Session(NamedTuple):
    """A session as it was at one moment; `chunks` are contiguous and start at the offset that was asked for."""

    record: bytes
    state: State
    chunks: Sequence[Chunk]


class Holder(NamedTuple):
    """A verifier that holds the first `blocks` blocks of a prompt."""

    verifier: str
    blocks: int
