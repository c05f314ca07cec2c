"""What a line of steps that feed each other is made of: its members, and what was launched and not read."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hedgerow.engine.rows import Part
from hedgerow.engine.sampler import RowDraw, law_of
from hedgerow.engine.scheduler import Work
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.types import DraftBatch
from hedgerow.engine.verifier import Plan
from hedgerow.model.fed import FedMember
from hedgerow.model.interface import Context


@dataclass
class Member:
    """A sequence in the line."""

    sequence: AttachedSequence
    context: Context | None
    output: int  # tokens when its last step that counted was read
    cap: int
    until: int  # position up to which its context has room
    last: int  # position of the last anchor
    asked: int  # most nodes
    gone: bool = False  # what the device computes for it does not count any more

    @property
    def here(self) -> bool:
        return not self.gone and not self.sequence.finish and len(self.sequence.output) == self.output


@dataclass(frozen=True)
class Flight:
    """A step that was launched."""

    plan: Plan
    launched: Any
    asked: Sequence[int]


class Chunk(NamedTuple):
    """Prompts' rows that were launched between two steps."""

    parts: Sequence[Part]
    launched: Any


def entering(member: Member) -> FedMember:
    sequence, sampling = member.sequence, member.sequence.start.sampling
    prompt, at = len(sequence.start.prompt), sequence.anchor_position
    return FedMember(
        anchor=sequence.output[-1],
        prefix=at,
        pages=sequence.pages,
        law=law_of(RowDraw(sampling, at + 1, at + 1 - prompt)),
        limit=prompt + sampling.max_tokens,
        last=member.last,
        budget=member.asked,
        cap=member.cap,
        context=member.context,
    )


def now(step_id: int, works: Sequence[Work]) -> Plan:
    """Of a step that begins now, and asks nobody for trees."""
    moment = time.perf_counter_ns()
    return Plan(step_id, list(works), DraftBatch(step_id, ()), moment, moment)


def apart_from_prompts(works: Sequence[Work]) -> tuple[list[Work], list[Work]]:
    """What a line has to be asked about, and the prompts' chunks beside it."""
    chunks = [work for work in works if work.phase is Phase.PREFILLING]
    return [work for work in works if work.phase is not Phase.PREFILLING], chunks
