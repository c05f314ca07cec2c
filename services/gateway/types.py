"""What clients ask for and what a gateway serves. Plain data: protobuf stays in convert.py and peers.py.

Field names, units and limits are those of protos/hedgerow/v1, where each is explained.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Finish(enum.IntEnum):
    """Why a session ended; the numbers are those of hedgerow.v1.FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3
    DEADLINE = 4
    CANCELLED = 5
    ERROR = 6


class Mode(enum.IntEnum):
    """How the bits are computed; the numbers are those of hedgerow.v1.ExecutionMode."""

    UNSPECIFIED = 0
    EXACT = 1
    BEST_EFFORT = 2


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters as given (None: not given) or as resolved (nothing that matters is None)."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    sample_index: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str = ""  # which form of grammar was asked for; "": none


@dataclass(frozen=True)
class Speculation:
    """How much may be speculated; None: the server decides."""

    budget: int | None = None
    topk_cap: int | None = None


@dataclass(frozen=True)
class Trace:
    """W3C trace context."""

    traceparent: str = ""
    tracestate: str = ""

    @property
    def id(self) -> str:
        """Of the trace; "" where there is none."""
        return self.traceparent[3:35]


NO_TRACE = Trace()


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool in an assistant message."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message of a conversation."""

    role: str
    content: str = ""
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""


@dataclass(frozen=True)
class Chat:
    """A conversation; None: the model's default."""

    messages: tuple[Message, ...]
    tools_json: str = ""
    thinking: bool | None = None
    preserve_thinking: bool | None = None


Prompt = str | tuple[int, ...] | Chat


@dataclass(frozen=True)
class Generation:
    """What a client asks for, before anything is checked."""

    model: str
    prompt: Prompt | None
    sampling: Sampling = Sampling()
    speculation: Speculation = Speculation()
    mode: Mode = Mode.UNSPECIFIED
    idempotency_key: str = ""
    priority: int = 0
    tenant: str = ""
    deadline_ms: int = 0
    trace: Trace = Trace()
    detach: bool = False
    return_steps: bool = False
    return_trees: bool = False


class Fingerprint(NamedTuple):
    """Everything that decides the bits."""

    digest: str = ""
    checkpoint_hash: str = ""
    kernel_law: str = ""
    architecture: str = ""
    tp_size: int = 0
    dtypes: str = ""
    mode: int = 0


@dataclass(frozen=True)
class Model:
    """What a verifier says it serves."""

    name: str
    fingerprint: Fingerprint
    vocab_size: int
    context_length: int
    max_budget: int
    default_budget: int
    eos_token_ids: frozenset[int] = frozenset()
    default_sampling: Sampling = Sampling()


@dataclass(frozen=True)
class Record:
    """The durable part of a session that never changes."""

    session_id: str
    birth: bytes
    model: str
    tenant: str
    prompt: tuple[int, ...]
    requested: Sampling
    resolved: Sampling
    speculation: Speculation
    fingerprint: Fingerprint
    mode: Mode
    created_unix_ms: int
    detach: bool = False
    deadline_unix_ms: int = 0  # 0: none
    priority: int = 0
    return_steps: bool = False
    return_trees: bool = False
    trace: Trace = NO_TRACE  # the request that made it

    @property
    def named(self) -> dict[str, Any]:
        """What log lines about it carry."""
        about = {"session": self.session_id}
        return about | {"trace": self.trace.id} if self.trace.id else about
