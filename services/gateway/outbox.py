"""Appends on their way to the store: in each session's order, one entry a session in a message, until it has them.

An answer UNAVAILABLE leaves open whether its entry was applied. So the session's entries stay, nothing of it is sent
until all that is on its way is answered, and then everything that has no other answer goes out again from the same
offset, the oldest first, after a back-off; the store compares what it has already. store_peer.py moves the messages.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hedgerow.errors import InvariantViolation
from services.gateway.messages import ENTRY_TOKENS, ENTRY_VIEW, Append, Appended, AppendStatus

MESSAGE_ENTRIES, MESSAGE_BYTES = 1024, 8 << 20  # of one message; the bytes are exceeded by less than one entry
FIRST_RETRY, LAST_RETRY = 0.05, 0.5  # seconds until what was UNAVAILABLE is sent again


@dataclass
class _Line:
    """One session's entries without an answer; the first `sent` are in `flying` messages on their way."""

    entries: list[Append] = field(default_factory=list)
    sent: int = 0
    flying: int = 0
    since: float | None = None  # when the first of the answers UNAVAILABLE came that no OK followed


class Outbox:
    """`patience`: seconds for which UNAVAILABLE is not passed on; `clock` in seconds."""

    def __init__(self, patience: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._clock = patience, clock
        self._lines: dict[str, _Line] = {}
        self._ready: dict[str, None] = {}  # sessions with something to send now, as they came
        self._refused: dict[str, None] = {}  # sessions that wait for `_retry_at`
        self._troubled: set[str] = set()  # sessions with `since`
        self._flights: deque[list[_Line]] = deque()  # whose entries the messages on their way are, the oldest first
        self.resent = 0
        """Entries that were sent again after an answer UNAVAILABLE."""
        self._retry_at, self._retries = 0.0, 0

    def __len__(self) -> int:
        """Entries without an answer."""
        return sum(len(line.entries) for line in self._lines.values())

    def add(self, entries: Sequence[Append]) -> None:
        """Take what is to be appended."""
        for entry in entries:
            line = self._lines.setdefault(entry.session_id, _Line())
            line.entries.append(entry)
            if line.since is None:
                self._ready[entry.session_id] = None

    def due(self) -> float | None:
        """Seconds until `take` has something; None: nothing waits."""
        if self._ready:
            return 0.0
        return max(0.0, self._retry_at - self._clock()) if self._refused else None

    def take(self) -> list[Append]:
        """What is to be sent now, as the entries of one message; empty: nothing."""
        if self._refused and self._clock() >= self._retry_at:
            self._ready.update(self._refused)
            self._refused.clear()
        message: list[Append] = []
        lines: list[_Line] = []
        left: list[str] = []
        size = 0
        while self._ready and len(message) < MESSAGE_ENTRIES and size < MESSAGE_BYTES:
            session_id = next(iter(self._ready))
            del self._ready[session_id]
            line = self._lines[session_id]
            lines.append(line)
            entry = _joined(line)
            if line.since is None and line.sent < len(line.entries):
                left.append(session_id)
            message.append(entry)
            size += 512 + 5 * len(entry.tokens) + _view(entry)
        self._ready.update(dict.fromkeys(left))
        if message:
            self._flights.append(lines)
        return message

    def answered(self, message: Sequence[Append], results: Sequence[Appended]) -> list[Appended]:
        """The store's answers to a message that `take` gave, and those of them that are to be passed on.

        Messages are answered in the order in which they were taken. Raises InvariantViolation where they are not.
        """
        if [entry.session_id for entry in message] != [result.session_id for result in results]:
            raise InvariantViolation("kvstore answered other sessions than it was asked about")
        parts = zip(self._flights.popleft(), message, results, strict=True)
        passed = [result for line, entry, result in parts if self._settled(line, entry, result)]
        if self._troubled and len(passed) < len(results):
            delay = min(FIRST_RETRY * 2.0**self._retries, LAST_RETRY) * random.uniform(0.5, 1.0)
            self._retry_at, self._retries = self._clock() + delay, min(self._retries + 1, 10)
        return passed

    def clear(self) -> None:
        """Forget everything."""
        for kept in (self._lines, self._ready, self._refused, self._troubled, self._flights):
            kept.clear()
        self._retries = 0

    def forget(self, session_id: str) -> None:
        """Send nothing more of a session, and pass no answer on: it begins anew with what is added next."""
        if session_id in self._lines:
            self._drop(session_id)

    def _settled(self, line: _Line, entry: Append, result: Appended) -> bool:
        """Whether this is the session's answer, rather than one that sending again may change."""
        if self._lines.get(entry.session_id) is not line:
            return False  # it was given up while this was on its way
        line.flying -= 1
        if result.status is AppendStatus.OK:
            self._acknowledge(line, entry)
        elif not self._to_be_sent_again(line, entry, result.status):
            self._drop(entry.session_id)
            return True
        if line.since is not None and not line.flying:
            self.resent += line.sent
            line.sent = 0
            self._refused[entry.session_id] = None
        return result.status is AppendStatus.OK

    def _to_be_sent_again(self, line: _Line, entry: Append, status: AppendStatus) -> bool:
        if status is AppendStatus.UNAVAILABLE:
            now = self._clock()
            if line.since is None:
                line.since = now
                self._troubled.add(entry.session_id)
                self._ready.pop(entry.session_id, None)
            return now - line.since < self._patience
        # What an entry before it would have filled, had that been applied.
        return status is AppendStatus.GAP and line.entries[0].offset < entry.offset

    def _acknowledge(self, line: _Line, entry: Append) -> None:
        """The store has this entry, and so whatever came before it."""
        known = 0
        while known < len(line.entries) and _covers(entry, line.entries[known]):
            known += 1
        del line.entries[:known]
        line.sent = max(0, line.sent - known)
        line.since = None
        self._calm(entry.session_id)
        if not line.entries and not line.flying:
            self._drop(entry.session_id)
        elif line.sent < len(line.entries):
            self._ready[entry.session_id] = None

    def _drop(self, session_id: str) -> None:
        del self._lines[session_id]
        self._ready.pop(session_id, None)
        self._calm(session_id)

    def _calm(self, session_id: str) -> None:
        self._refused.pop(session_id, None)
        self._troubled.discard(session_id)
        if not self._troubled:
            self._retries = 0


def _joined(line: _Line) -> Append:
    """The next entries of a session as one, as far as one may grow; they count as sent."""
    entry = line.entries[line.sent]
    line.sent += 1
    line.flying += 1
    tokens, view = len(entry.tokens), _view(entry)
    for later in line.entries[line.sent :]:
        tokens, view = tokens + len(later.tokens), view + _view(later)
        if tokens > ENTRY_TOKENS or view > ENTRY_VIEW:
            break
        entry = entry.joined(later)
        line.sent += 1
    return entry


def _view(entry: Append) -> int:
    """An upper bound on the bytes of an entry's statistics."""
    return sum(note.size for note in entry.notes)


def _covers(answered: Append, entry: Append) -> bool:
    end = entry.offset + len(entry.tokens)
    return end <= answered.offset + len(answered.tokens) and (entry.end is None or answered.end is not None)
