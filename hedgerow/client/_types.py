"""What a client gives and gets. Plain frozen data, named as in the protos."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypedDict

from hedgerow.client._chat import Answer, Delta


class FinishReason(enum.StrEnum):
    """Why a session ended; equal to its name as text, `finish_reason == "stop"`."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    ERROR = "error"
    RUNNING = "running"


class Options(TypedDict, total=False):
    """Keyword arguments of `generate`, `complete` and `chat`. What is left out, or None, takes the model's default.

    `timeout` bounds the whole call, in seconds, resumes included, and raises DeadlineExceeded; after `deadline` seconds
    generation ends with what there is and the finish reason "deadline". `idempotency_key` is made up when none is
    given. `detach=False` lets the gateway end the session when it loses its client. `leave_running=True`: leaving the
    stream does not cancel the session.
    """

    model: str
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    ignore_eos: bool
    budget: int
    topk_cap: int
    priority: int
    tenant: str
    deadline: float
    timeout: float
    idempotency_key: str
    return_steps: bool
    return_trees: bool
    detach: bool
    leave_running: bool


class Position(NamedTuple):
    """How far a stream has come: what `resume` takes, `client.resume(*position)`.

    `digest` is that of the first `token_offset` tokens (16 bytes, empty where none came), `text_offset` in UTF-8 bytes.
    """

    session_id: str
    token_offset: int = 0
    digest: bytes = b""
    text_offset: int = 0


@dataclass(frozen=True)
class Sampling:
    """The parameters of a session as the server resolved them."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Step:
    """One verification step. `tree_parents` and `tree_tokens` are there when `return_trees` asked for them."""

    step_id: int
    budget: int
    tree_nodes: int
    accepted: int
    emitted: int
    batch_sequences: int
    batch_rows: int
    tree_parents: Sequence[int] = ()
    tree_tokens: Sequence[int] = ()


@dataclass(frozen=True)
class Timings:
    """Nanoseconds of a step or of a session; `step_end_unix_ns` is a point in Unix time."""

    queue_ns: int = 0
    prefill_ns: int = 0
    draft_ns: int = 0
    verify_ns: int = 0
    accept_ns: int = 0
    commit_ns: int = 0
    total_ns: int = 0
    step_end_unix_ns: int = 0


@dataclass(frozen=True)
class Usage:
    """What a session cost. Draft tokens are not completion tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True)
class Started:
    """The first event: the session is in the store. `exact`: one fixed token sequence, whatever happens."""

    session_id: str
    model: str
    prompt_tokens: int
    sampling: Sampling
    fingerprint: str
    exact: bool
    digest: bytes


@dataclass(frozen=True)
class Chunk:
    """Committed tokens, and the text they release; the text lags behind where a character or a stop is unfinished.

    `deltas`, in a chat: the same text by the parts of the answer; see `Answer`.
    """

    token_offset: int
    text_offset: int
    tokens: Sequence[int]
    text: str
    digest: bytes
    steps: Sequence[Step] = ()
    timings: Timings | None = None
    deltas: Sequence[Delta] = ()


@dataclass(frozen=True)
class Finished:
    """The last event."""

    reason: FinishReason
    usage: Usage
    token_offset: int
    text_offset: int
    digest: bytes
    exact: bool
    matched_stop: str = ""
    matched_token: int | None = None
    timings: Timings | None = None


Event = Started | Chunk | Finished


@dataclass(frozen=True)
class Result:
    """A whole generation, or what came of a resumed one from its offset on.

    `text` is all of it, `answer` its parts where it is a chat's.
    """

    text: str
    tokens: Sequence[int]
    usage: Usage
    finish_reason: FinishReason
    steps: Sequence[Step]
    session_id: str
    seed: int
    answer: Answer = field(default_factory=Answer)


@dataclass(frozen=True)
class Model:
    """A model that can be asked for."""

    name: str
    context_length: int
    vocab_size: int
    fingerprint: str
    ready: bool
    default_budget: int


@dataclass(frozen=True)
class Running:
    """A session that runs; times are Unix milliseconds, a deadline of 0 is none."""

    session_id: str
    model: str
    prompt_tokens: int
    token_count: int
    max_tokens: int
    created_unix_ms: int
    deadline_unix_ms: int
    readers: int
    uncommitted_tokens: int
    detach: bool
    exact: bool
    gateway: str
    """The address that told of it."""


class SessionStatus(enum.StrEnum):
    """What becomes of a session now; equal to its name as text."""

    RUNNING = "running"
    """A gateway runs it."""
    PAUSED = "paused"
    """Its gateway has given it up; it waits for a resume."""
    ORPHANED = "orphaned"
    """Its gateway is gone; a resume goes on with it, or a sweep ends it."""
    ENDED = "ended"


@dataclass(frozen=True)
class Stored:
    """A session that is retained; times are Unix milliseconds, a deadline of 0 is none.

    `owner` is the incarnation of the gateway that runs it or ran it last, in hexadecimal digits, as that gateway's
    status has it; "" where there is none.
    """

    session_id: str
    tenant: str
    model: str
    status: SessionStatus
    prompt_tokens: int
    token_count: int
    max_tokens: int
    created_unix_ms: int
    deadline_unix_ms: int
    detach: bool
    exact: bool
    finish_reason: FinishReason
    owner: str


@dataclass(frozen=True)
class Session:
    """What is recorded of a session."""

    session_id: str
    model: str
    prompt_tokens: int
    token_count: int
    finish_reason: FinishReason
    usage: Usage
    digest: bytes
    sampling: Sampling
    exact: bool
    fingerprint: str
