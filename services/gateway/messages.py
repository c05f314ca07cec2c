"""What travels between a session, its verifier and its store. Plain data: protobuf stays in convert.py and peers.py.

Field names, units and limits are those of protos/hedgerow/v1, where each is explained.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hedgerow.errors import HedgerowError
from services.gateway.types import Finish, Mode, Record, Trace

ENTRY_TOKENS = 16_384  # most tokens of one entry of an append
ENTRY_VIEW = 1 << 19  # bytes of statistics that entries are joined up to, exceeded by no step alone


class AppendStatus(enum.IntEnum):
    """How an append ended; the numbers are those of hedgerow.v1.AppendStatus."""

    UNSPECIFIED = 0
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


class Usage(NamedTuple):
    """What a session cost."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


class StepStats(NamedTuple):
    """One step of one sequence."""

    step_id: int
    budget: int
    tree_nodes: int
    accepted: int
    emitted: int
    batch_sequences: int
    batch_rows: int
    tree_parents: Sequence[int] = ()
    tree_tokens: Sequence[int] = ()


class Timings(NamedTuple):
    """Where the time of a step or a session went, in nanoseconds."""

    queue_ns: int = 0
    prefill_ns: int = 0
    draft_ns: int = 0
    verify_ns: int = 0
    accept_ns: int = 0
    commit_ns: int = 0
    total_ns: int = 0
    step_end_unix_ns: int = 0


@dataclass
class Note:
    """Statistics of one step, for readers who asked. `end` is the offset after the step's tokens, at least one.
    `commit_ns` is not known before the store has answered, and never from what is read there.
    """

    end: int
    stats: StepStats
    timings: Timings
    commit_ns: int = 0

    @property
    def size(self) -> int:
        """An upper bound on its bytes in an append."""
        return 192 + 10 * len(self.stats.tree_tokens)


class Start(NamedTuple):
    """One attachment of a session to a verifier."""

    record: Record
    epoch: int
    attempt: int
    committed: Sequence[int]
    digest: bytes  # at the end of `committed`
    priority: int
    deadline_ms: int  # from now; 0: none
    trace: Trace
    return_trees: bool


class Chunk(NamedTuple):
    """Steps of a verifier that computed a prompt, or committed output again."""

    steps: int
    prompt_rows: int
    replayed_rows: int
    took_ns: int
    end_unix_ns: int


class Update(NamedTuple):
    """What a step of the verifier did for one session."""

    session_id: str
    epoch: int
    attempt: int
    offset: int
    tokens: Sequence[int]
    finish: Finish = Finish.NONE
    matched_stop: str = ""
    matched_token: int | None = None
    usage: Usage | None = None
    stats: StepStats | None = None
    timings: Timings | None = None  # of the session, with the last update
    error: HedgerowError | None = None
    chunks: Sequence[Chunk] = ()  # with the timings
    cached_prompt_tokens: int = 0  # with the timings


class End(NamedTuple):
    """How a session ended."""

    reason: Finish
    usage: Usage
    matched_stop: str = ""
    matched_token: int | None = None


class Append(NamedTuple):
    """One session's part of a step's append."""

    session_id: str
    epoch: int
    birth: bytes
    offset: int
    tokens: Sequence[int]
    before: bytes
    after: bytes
    end: End | None = None
    notes: Sequence[Note] = ()
    best_effort_from: int | None = None
    spent: Usage | None = None
    """What the session has cost with these tokens."""

    def joined(self, later: Append) -> Append:
        """This and the next append of the same session as one."""
        assert (later.session_id, later.offset) == (self.session_id, self.offset + len(self.tokens))
        return self._replace(
            tokens=(*self.tokens, *later.tokens),
            after=later.after,
            end=later.end,
            notes=(*self.notes, *later.notes),
            best_effort_from=later.best_effort_from,
            spent=None if later.end else later.spent or self.spent,
        )


class State(NamedTuple):
    """What the store holds of a session. `usage` of one that runs is known where it was read or a lease granted."""

    epoch: int = 0
    owner: bytes = b""
    length: int = 0
    digest: bytes = b""
    finish: Finish = Finish.NONE
    usage: Usage = Usage()
    cancel_marked: bool = False
    matched_stop: str = ""
    matched_token: int | None = None
    best_effort_from: int | None = None


class Appended(NamedTuple):
    """The store's answer to one Append."""

    session_id: str
    status: AppendStatus
    state: State


class Created(NamedTuple):
    """The store's answer to a new session: its first epoch, or what is there already."""

    epoch: int
    existing: State | None = None


class Stored(NamedTuple):
    """A session as the store has it."""

    record: Record
    state: State
    tokens: Sequence[int]
    notes: Sequence[Note] = ()
    """Of the steps that end with one of the tokens."""


class Granted(NamedTuple):
    """A lease of this gateway, and the session that it covers."""

    epoch: int
    state: State


class Expired(NamedTuple):
    """A running session that nobody drives."""

    session_id: str
    state: State
    detach: bool
    deadline_unix_ms: int


class Listed(NamedTuple):
    """A session of a tenant's list; times in Unix milliseconds. `owner_lives`: the gateway that has its lease does."""

    session_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    created_unix_ms: int
    deadline_unix_ms: int
    detach: bool
    mode: Mode
    state: State
    owner_lives: bool


class ExpiredPage(NamedTuple):
    """Some of those sessions; `cursor` is for the next page, empty where there is none."""

    sessions: Sequence[Expired]
    cursor: str


class Growth(NamedTuple):
    """Committed tokens of a session that is followed; `state` with the last of them, which is its end."""

    offset: int
    tokens: Sequence[int]
    digest: bytes  # after them
    state: State | None
    notes: Sequence[Note] = ()
