"""The verifier's spans, told after the fact.

An attachment is a leaf below its gateway's span for the attempt. Where that gateway's stream has broken, its span may
never come: then the attachment is a trace of its own, with a link. Of every n-th step that has a traced request in it
there is a trace too, with links to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hedgerow.engine.types import StepResult, StepTimings, Update
from hedgerow.rpc import tracing
from hedgerow.rpc.trace_export import LINKS

PARTS = ("queue_ns", "prefill_ns", "draft_ns", "verify_ns", "accept_ns", "total_ns")
Key = tuple[str, int, int]


@dataclass
class _Attachment:
    traceparent: str
    begun: int  # Unix nanoseconds
    left: bool = False  # its gateway's stream has broken


class Attachments:
    """Those of traced requests. `share`: of the steps that have spans. `clock` in Unix nanoseconds."""

    def __init__(self, share: float = 0.0, clock: Callable[[], int] = time.time_ns) -> None:
        self._every, self._clock = round(1 / share) if share > 0 else 0, clock
        self._open: dict[Key, _Attachment] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, session_id: str, epoch: int, attempt: int, traceparent: str) -> None:
        """A start was taken."""
        if tracing.is_sampled(traceparent):
            self._open.setdefault((session_id, epoch, attempt), _Attachment(traceparent, self._clock()))

    def left(self, keys: Iterable[Key]) -> None:
        """The stream of their gateway has broken."""
        for key in keys:
            if (attachment := self._open.get(key)) is not None:
                attachment.left = True

    def end(self, update: Update) -> None:
        """Its last update is on its way."""
        known = self._open.pop((update.session_id, update.epoch, update.attempt), None)
        if known is None:
            return
        parent, links = ("", [known.traceparent]) if known.left else (known.traceparent, [])
        error = None if update.error is None else getattr(update.error, "reason", type(update.error).__name__)
        times = (known.begun, self._clock())
        tracing.told("attachment", times, parent, links, kind="server", error=error, attributes=_about(update))

    def traced(self, step_id: int) -> Sequence[str]:
        """The requests that a step's spans link to; none where that step has no spans."""
        if not self._every or not self._open or step_id % self._every:
            return ()
        return [each.traceparent for each in list(self._open.values())[:LINKS]]

    def stepped(self, result: StepResult, experts: float | None = None) -> None:
        """A step is over: its spans, if it has any. `experts`: distinct ones of a layer, where that was counted."""
        links = self.traced(result.step_id)
        if not links:
            return
        timings, stats = result.timings, [each.stats for each in result.updates if each.stats is not None]
        end = timings.step_end_unix_ns
        about: dict[str, tracing.Attribute] = {"hedgerow.step_id": result.step_id}
        if stats:
            about["hedgerow.sequences"] = max(each.batch_sequences for each in stats)
            about["hedgerow.rows"] = max(each.batch_rows for each in stats)
            about["hedgerow.tree_nodes"] = sum(each.tree_nodes for each in stats)
            about["hedgerow.accepted"] = sum(each.accepted for each in stats)
        if experts is not None:
            about["hedgerow.experts"] = experts
        parent = tracing.told("step", (end - timings.total_ns, end), links=links, attributes=about)
        for name, times in _parts(timings, end):
            tracing.told(name, times, parent)


def _parts(timings: StepTimings, end: int) -> list[tuple[str, tuple[int, int]]]:
    """One after the other, up to the step's end."""
    accept = end - timings.accept_ns
    verify = accept - timings.verify_ns
    draft = verify - timings.draft_ns
    return [("draft", (draft, verify)), ("verify", (verify, accept)), ("accept", (accept, end))]


def _about(update: Update) -> dict[str, tracing.Attribute]:
    about: dict[str, tracing.Attribute] = {
        "hedgerow.session.id": update.session_id,
        "hedgerow.epoch": update.epoch,
        "hedgerow.attempt": update.attempt,
        "hedgerow.finish": update.finish.name.lower(),
    }
    if update.usage is not None:
        about["gen_ai.usage.output_tokens"] = update.usage.completion_tokens
        about["hedgerow.cached_prompt_tokens"] = update.usage.cached_prompt_tokens
    if update.timings is not None:
        spent = vars(update.timings)
        about |= {f"hedgerow.{name.replace('_ns', '_ms')}": spent[name] / 1e6 for name in PARTS}
    return about
