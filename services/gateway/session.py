"""A session as its owner holds it: what came from the verifier, what the store has, what readers may see.

Nothing here does I/O or waits: methods take what happened and give what is to be sent. `table.py` moves the messages.

    tokens   0 ........ acked ........ len(tokens)
             released   on its way to
             to readers the store
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hedgerow import digest
from hedgerow.errors import Fenced, HedgerowError, InvariantViolation
from services.gateway.messages import (
    ENTRY_TOKENS,
    ENTRY_VIEW,
    Append,
    End,
    Note,
    State,
    StepStats,
    Stored,
    Timings,
    Update,
    Usage,
)
from services.gateway.types import Finish, Record, Trace

if TYPE_CHECKING:
    from services.gateway.reader import Reader


@dataclass(frozen=True)
class Options:
    """What a session was asked to do beside its record. `deadline` is on the table's clock, None: there is none."""

    priority: int = 0
    deadline: float | None = None
    trace: Trace = field(default_factory=Trace)
    return_steps: bool = False
    return_trees: bool = False


class Gap(Exception):
    """An update is ahead of what came before it."""


class _Unacked(NamedTuple):
    """An append on its way to the store."""

    length: int
    digest: bytes
    final: bool
    sent_ns: int
    note: Note | None


class Session:
    """One durable generation, begun here under `epoch` unless it is `restored`. `end` is set when the end is decided,
    `done` when the store has it or there is no hope.

    `error`, where set, is what readers get in place of an end.
    """

    def __init__(self, record: Record, epoch: int = 0, options: Options = Options()) -> None:
        self.record, self.epoch, self.options = record, epoch, options
        self.id = record.session_id
        self.attempt, self._begun = 0, epoch
        self.tokens = array("I")
        self.first_digest = self.digest = self.acked_digest = digest.first(record.session_id, record.prompt)
        self.acked = 0
        self.told = 0  # the committed offset that the verifier knows of
        self.held_since: float | None = None  # since when it is told less than it could be, for a slow reader
        self.end: End | None = None
        self.done = False
        self.pausing: HedgerowError | None = None  # what readers get once its appends have settled
        self.repairing = False  # a new lease is on its way: nothing is appended meanwhile
        self.is_late = False  # its end is not recorded, long after its deadline
        self.repairs = 0  # since the store took an append
        self.moved = False  # a verifier that had taken it was lost
        self.heard_at: float | None = None  # when the verifier last said something under this attempt
        self.best_effort_from: int | None = None  # tokens from here on are another fingerprint's
        self.error: HedgerowError | None = None
        self.timings: Timings | None = None
        self.notes: list[Note] = []
        self.readers: dict[Reader, None] = {}  # as they came
        self.appended_ns = 0  # when the last append left
        self.commit_ns = -1  # how long the last answer took; -1: it was to none of what is here
        self._unacked: deque[_Unacked] = deque()
        self._steps = self._draft_tokens = self._accepted = self._cached = 0
        self.step = 0  # of the verifier that spoke last

    @classmethod
    def restored(cls, stored: Stored, epoch: int, options: Options = Options()) -> Session:
        """A session with all that the store has of it in place, to be gone on with under a new lease."""
        session, spent = cls(stored.record, epoch, options), stored.state.usage
        session._begun, session.notes = 0, list(stored.notes)
        session._steps, session._draft_tokens = spent.steps, spent.draft_tokens
        session._accepted, session._cached = spent.accepted_draft_tokens, spent.cached_prompt_tokens
        session.tokens.extend(stored.tokens)
        session.acked = session.told = len(session.tokens)
        session.digest = session.acked_digest = stored.state.digest
        session.best_effort_from = stored.state.best_effort_from
        return session

    @classmethod
    def ended(cls, stored: Stored) -> Session:
        """A session that is over, for readers that come after its end."""
        session = cls.restored(stored, stored.state.epoch)
        session.end, session.done = _recorded_end(stored.state), True
        return session

    def extend(self, update: Update, timings: Timings, now_ns: int) -> Append | None:
        """Take an update of the current attempt; gives what is to be appended, None where nothing is new.

        Raises Gap where it is ahead, InvariantViolation where it has a different token at a known offset.
        """
        known = len(self.tokens) - update.offset
        if known < 0:
            raise Gap
        overlap = update.tokens[:known]
        if self.tokens[update.offset : update.offset + len(overlap)] != array("I", overlap):
            if self.best_effort_from is not None:
                raise Gap  # other bits may choose another token; what is known stays
            raise InvariantViolation(f"session {self.id}: the verifier changed a token at or after {update.offset}")
        fresh = update.tokens[known:]
        if not fresh and not update.finish:
            return None
        self._count(update.stats, bool(fresh))
        if (first := (self.epoch, self.attempt) == (self._begun, 1)) and update.cached_prompt_tokens:
            self._cached = update.cached_prompt_tokens  # later attempts compute again what was paid for
        self.error, self.timings = update.error, update.timings
        end = None
        if update.finish:
            # A verifier counts from its own attach on; over several attempts only what gateways count is whole.
            told = update.usage if first else None
            usage = told or self.usage(len(self.tokens) + len(fresh))
            end = End(update.finish, usage, update.matched_stop, update.matched_token)
        stats = update.stats if self.options.return_steps and fresh else None
        note = Note(len(self.tokens) + len(fresh), stats, timings) if stats else None
        return self._append(fresh, end, note, now_ns)

    def close(self, reason: Finish, now_ns: int, error: HedgerowError | None = None) -> Append:
        """End the session where it stands; gives the append that records it."""
        assert self.end is None, "a session ends once"
        self.error = error
        return self._append((), End(reason, self.usage(len(self.tokens))), None, now_ns)

    def refresh(self, now_ns: int) -> Append:
        """An append of nothing: the store keeps what is appended to."""
        assert self.end is None, "an end is refreshed by nobody"
        return self._append((), None, None, now_ns)

    def digest_at(self, offset: int) -> bytes:
        """The digest of the first `offset` tokens: half a millisecond for a thousand."""
        if offset == self.acked:
            return self.acked_digest
        return digest.extend(self.first_digest, self.tokens[:offset])

    def again(self, offset: int) -> list[Append]:
        """Everything from `offset` on, the end included, to be appended again in entries of bounded size."""
        appends, before, begin = list[Append](), self.digest_at(offset), offset
        for end, notes in self._portions(offset):
            fresh = self.tokens[begin:end]
            entry = self._entry(begin, fresh, before, before := digest.extend(before, fresh))
            appends.append(entry._replace(notes=notes))
            begin = end
        if self.end is not None:
            last = appends.pop() if appends else self._entry(offset, (), before, before)
            appends.append(last._replace(end=self.end))
        elif appends:
            appends[-1] = appends[-1]._replace(spent=self.usage(len(self.tokens)))
        return appends

    def acknowledge(self, state: State, now_ns: int) -> None:
        """The store has everything below `state.length`, and the end if it says so; readers may see it."""
        self.commit_ns = -1
        while self._unacked and self._unacked[0].length <= state.length:
            if self._unacked[0].final and not state.finish:
                break  # an empty append with the end has no length of its own
            append = self._unacked.popleft()
            self.acked, self.acked_digest, self.done = append.length, append.digest, append.final
            self.commit_ns = now_ns - append.sent_ns
            if append.note:
                append.note.commit_ns = now_ns - append.sent_ns
        self.wake()

    def adopt(self, state: State) -> None:
        """The store says that the session has ended; that end counts, at what is committed."""
        self.end, self.error = _recorded_end(state), None
        if self.acked < state.length <= len(self.tokens) and self.digest_at(state.length) == state.digest:
            self.acked, self.acked_digest = state.length, state.digest
        if state.length != self.acked:
            self.error = Fenced(self.id, self.epoch, state.epoch)
        self._stop()

    @property
    def named(self) -> dict[str, Any]:
        """What log lines about it carry: its trace is that of the call for which it goes on."""
        trace, step = self.options.trace.id or self.record.trace.id, self.step
        return {"session": self.id} | ({"trace": trace} if trace else {}) | ({"step": step} if step else {})

    @property
    def may_be_held(self) -> bool:
        """Whether its verifier may rightly say nothing more: not all of its tokens are acknowledged, or it is over."""
        return self.end is not None or self.told < len(self.tokens)

    @property
    def is_new(self) -> bool:
        """Whether nothing has come of it yet."""
        return self.epoch == self._begun and not self.tokens and not self.moved

    @property
    def has_failed(self) -> bool:
        """Whether it is over, by an error, and nobody has got a token of it."""
        return self.done and self.end is not None and self.end.reason is Finish.ERROR and not self.tokens

    @property
    def settled(self) -> bool:
        """Whether nothing of it is on its way to the store."""
        return not self._unacked

    def fail(self, error: HedgerowError) -> None:
        """End without a record of it: readers get what is committed, then `error`."""
        self.end = self.end or End(Finish.ERROR, self.usage(self.acked))
        self.error = error
        self._stop()

    def usage(self, completion_tokens: int) -> Usage:
        """What the session cost, here and at the gateways before, as far as those told the store."""
        prompt = len(self.record.prompt)
        return Usage(prompt, completion_tokens, self._cached, self._steps, self._draft_tokens, self._accepted)

    def wake(self) -> None:
        """Tell the readers that there may be something."""
        for reader in self.readers:
            reader.wake()

    def _append(self, fresh: Sequence[int], end: End | None, note: Note | None, now_ns: int) -> Append:
        offset, before = len(self.tokens), self.digest
        self.tokens.extend(fresh)
        self.digest = digest.extend(before, fresh)
        self.end, self.appended_ns = end, now_ns
        if note:
            self.notes.append(note)
        self._unacked.append(_Unacked(len(self.tokens), self.digest, end is not None, now_ns, note))
        notes = (note,) if note else ()
        spent = self.usage(len(self.tokens)) if fresh and end is None else None
        return self._entry(offset, fresh, before, self.digest)._replace(end=end, notes=notes, spent=spent)

    def _portions(self, begin: int) -> Iterator[tuple[int, Sequence[Note]]]:
        """The ends of entries of bounded size from `begin` on, and the notes of each."""
        notes, total = self.notes, len(self.tokens)
        at = bisect_right(notes, begin, key=lambda note: note.end)
        while begin < total:
            begin, first, size = min(begin + ENTRY_TOKENS, total), at, 0
            while at < len(notes) and notes[at].end <= begin:
                size += notes[at].size
                if size > ENTRY_VIEW and at > first:
                    begin = notes[at - 1].end
                    break
                at += 1
            yield begin, notes[first:at]

    def _entry(self, offset: int, tokens: Sequence[int], before: bytes, after: bytes) -> Append:
        best_effort_from = self.best_effort_from
        return Append(
            self.id, self.epoch, self.record.birth, offset, tokens, before, after, best_effort_from=best_effort_from
        )

    def _count(self, stats: StepStats | None, emitted: bool) -> None:
        self._steps += emitted
        if stats:
            self.step = stats.step_id
        if stats and emitted:
            self._draft_tokens += stats.tree_nodes
            self._accepted += min(stats.accepted, stats.emitted)

    def _stop(self) -> None:
        self.done = True
        self._unacked.clear()
        self.wake()


def _recorded_end(state: State) -> End:
    return End(state.finish, state.usage, state.matched_stop, state.matched_token)
