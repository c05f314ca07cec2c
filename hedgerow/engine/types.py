"""The nouns of the engine. Plain data: no tensor leaves the process in any of these but `features`."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Finish(enum.IntEnum):
    """Why a sequence ended; the numbers are those of hedgerow.v1.FinishReason."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    TOOL_CALLS = 3
    DEADLINE = 4
    CANCELLED = 5
    ERROR = 6


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters as resolved: nothing is optional any more.

    Validated by `validate()`, which raises InvalidRequest with the field, the value and the limit.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """One attachment of a session to this engine."""

    session_id: str
    epoch: int
    attempt: int
    prompt: Sequence[int]
    sampling: Sampling
    committed: Sequence[int] = ()  # output tokens to be replayed as forced chains
    budget: int | None = None  # None: the engine's default
    topk_cap: int = 0  # 0: no cap but the budget
    priority: int = 0
    deadline: float | None = None  # time.monotonic() seconds
    want_trees: bool = False
    owner: bytes = b""  # the gateway whose stream gets the updates
    trace: str = ""  # the id of its trace, for logs
    tenant: str = ""  # whose prompts its own may share pages with

    @property
    def named(self) -> dict[str, str]:
        """What log lines about it carry."""
        return {"session": self.session_id} | ({"trace": self.trace} if self.trace else {})


class TreeNodes(NamedTuple):
    """A draft tree below the anchor, as it came from a drafter: nothing in it is trusted yet."""

    tokens: Sequence[int]
    parents: Sequence[int]  # -1: the anchor
    logprobs: Sequence[float]


@dataclass(frozen=True)
class DraftWork:
    """What the drafter is asked to do for one sequence in one step."""

    sequence: int  # the engine's number, never used twice
    feature_position: int  # position of the first row of `features`
    features: torch.Tensor  # [rows, feature width] float32; rows may be 0
    anchor: int
    anchor_position: int
    budget: int  # 0: take the features and build nothing
    topk_cap: int


@dataclass(frozen=True)
class DraftBatch:
    """One step's work for the drafter, one message on the wire."""

    step_id: int
    works: Sequence[DraftWork]
    release: Sequence[int] = ()
    drafter: bytes = b""  # whose state the features follow: the last answer's incarnation; b"" before the first


@dataclass(frozen=True)
class DraftTree:
    """One sequence's answer."""

    sequence: int
    nodes: TreeNodes
    features_from: int  # first position whose features the drafter lacks


@dataclass(frozen=True)
class DraftAnswer:
    """One step's trees. `incarnation` tells a restarted drafter from the one before."""

    step_id: int
    trees: Sequence[DraftTree]
    incarnation: bytes
    forward_ns: int = 0
    build_ns: int = 0


class StepStats(NamedTuple):
    """One step of one sequence; the fields of hedgerow.v1.StepStats."""

    step_id: int
    budget: int
    tree_nodes: int
    accepted: int
    emitted: int
    batch_sequences: int
    batch_rows: int
    tree_parents: Sequence[int] = ()
    tree_tokens: Sequence[int] = ()


class UsageCount(NamedTuple):
    """What a sequence cost so far; the fields of hedgerow.v1.Usage."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0
    steps: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass
class SequenceTimings:
    """Where a sequence's time went since its attach, in nanoseconds; the fields of hedgerow.v1.Timings."""

    queue_ns: int = 0
    prefill_ns: int = 0
    draft_ns: int = 0
    verify_ns: int = 0
    accept_ns: int = 0
    total_ns: int = 0
    step_end_unix_ns: int = 0


class PrefillChunk(NamedTuple):
    """Steps of one sequence that computed its prompt, or committed output again; as hedgerow.v1.PrefillChunk."""

    steps: int
    prompt_rows: int
    replayed_rows: int
    took_ns: int  # of the whole steps
    end_unix_ns: int  # of the last one


@dataclass(frozen=True)
class Update:
    """What a step did for one sequence."""

    owner: bytes
    session_id: str
    epoch: int
    attempt: int
    offset: int  # output tokens before this update
    tokens: Sequence[int]  # already truncated at a stop
    finish: Finish = Finish.NONE
    matched_stop: str = ""
    matched_token: int | None = None
    usage: UsageCount | None = None  # with the last update
    stats: StepStats | None = None
    error: Exception | None = None  # finish is ERROR
    timings: SequenceTimings | None = None  # with the first and the last; whole once the step's result is out
    chunks: Sequence[PrefillChunk] = ()  # of this attempt, with the timings
    cached_prompt_tokens: int = 0  # with the timings: those that were not computed, since another prompt had them
    trace: str = ""  # its start's


class StepTimings(NamedTuple):
    """Nanoseconds of one step, and the Unix time at which it ended."""

    draft_ns: int
    verify_ns: int
    accept_ns: int
    total_ns: int
    step_end_unix_ns: int


@dataclass(frozen=True)
class StepResult:
    """Everything a step has to say."""

    step_id: int
    updates: Sequence[Update]
    timings: StepTimings


class PrefixLoad(NamedTuple):
    """What the prefix cache holds, and its counters since start."""

    query_tokens: int = 0  # of prompts that were admitted
    hit_tokens: int = 0  # those of them that were not computed
    pages: int = 0  # kept, in use or not
    feature_bytes: int = 0
    reclaimed_pages: int = 0  # for sequences that needed them


class PaceLoad(NamedTuple):
    """How well steps were predicted; counters since start."""

    predicted_seconds: float = 0.0  # that steps were reckoned to take, before they ran
    measured_seconds: float = 0.0  # that those took, each to the next one's plan
    budget_trials: int = 0  # steps with other budgets than the best known ones, to learn from


class EngineLoad(NamedTuple):
    """What routing, health and tests need to know; counters since start."""

    running: int
    waiting: int
    waiting_limit: int
    free_pages: int  # and those that only the prefix cache holds
    total_pages: int
    held_sequences: int
    steps: int
    tokens: int
    refused_trees: Mapping[str, int]
    missed_drafts: int
    adopted: int  # attachments that went on with what was here
    rebuilt: int  # those that came with output and were computed again
    kept_ends: int  # sequences that have ended and are not acknowledged
    faults: int
    prefixes: PrefixLoad = PrefixLoad()
    pace: PaceLoad = PaceLoad()
    fed: int = 0  # steps whose acceptance fed the next one on the device
