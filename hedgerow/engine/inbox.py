"""What callers ask of a running engine: checked in their thread, taken in by the engine between two steps."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from hedgerow.engine.adopt import Pair, fenced
from hedgerow.engine.config import EngineConfig
from hedgerow.engine.curves import Curve
from hedgerow.engine.sampler import validate_sampling
from hedgerow.engine.scheduler import Scheduler
from hedgerow.engine.sequence import AttachedSequence
from hedgerow.engine.types import Start
from hedgerow.errors import InvalidRequest, Overloaded


class Cancel(NamedTuple):
    """End the session's sequence, whichever attempt up to `pair` it runs under."""

    session_id: str
    pair: Pair


class Committed(NamedTuple):
    """The store holds `offset` output tokens of the session."""

    session_id: str
    pair: Pair
    offset: int


class Limits(NamedTuple):
    """What a start is checked against."""

    vocabulary: Sequence[bytes]
    eos: frozenset[int]
    max_context: int
    max_slots: int  # of the whole latent cache


class Inbox:
    """Starts, cancels and committed offsets in the order of their calls. Safe for use by several threads.

    Keeps the (epoch, attempt) of every session that is queued or held, and whose it is, so that a fenced caller is
    refused at once.
    """

    def __init__(self, config: EngineConfig, limits: Limits, scheduler: Scheduler) -> None:
        self._config, self._limits, self._scheduler = config, limits, scheduler
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._pairs: dict[str, Pair] = {}
        self._owners: dict[str, bytes] = {}
        self._messages: deque[AttachedSequence | Cancel | Committed] = deque()
        self._starts = 0  # among the messages

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def held(self) -> int:
        """Sessions that are queued or held."""
        return len(self._pairs)

    @property
    def waiting(self) -> int:
        """Sequences that are started and not running yet."""
        return self._starts + len(self._scheduler.waiting)

    def start(self, start: Start) -> None:
        """Queues a sequence. The same (epoch, attempt) again changes nothing; a higher one goes on with the one held.

        Raises InvalidRequest; Fenced when a higher pair is held, or an equal one of another owner: a store that forgot
        a session may grant an epoch twice; Overloaded when the queue is full, but never for a
        session that has its place here.
        """
        sequence = self._checked(start)
        with self._lock:
            held = self._pairs.get(start.session_id)
            if held == sequence.pair:
                if self._owners[start.session_id] != start.owner:
                    raise fenced(start.session_id, sequence.pair, held)
                return
            self._fence(start.session_id, sequence.pair)
            limit = self._config.max_waiting + self._scheduler.free_places
            if held is None and self.waiting >= limit:
                raise Overloaded("the waiting queue", self.waiting, limit, self._scheduler.retry_after)
            self._pairs[start.session_id], self._owners[start.session_id] = sequence.pair, start.owner
            self._starts += 1
            self._messages.append(sequence)

    def holds(self, session_id: str) -> bool:
        """Whether the session is queued or held."""
        return session_id in self._pairs

    def cancel(self, session_id: str, epoch: int, attempt: int) -> None:
        """Ends the session within one step; one that is not here is ignored. Raises Fenced below the pair held."""
        with self._lock:
            if session_id in self._pairs:
                self._fence(session_id, (epoch, attempt))
            self._messages.append(Cancel(session_id, (epoch, attempt)))

    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None:
        """Notes a committed offset; it counts only for the attempt that is held."""
        self._messages.append(Committed(session_id, (epoch, attempt), offset))

    def take(self) -> AttachedSequence | Cancel | Committed | None:
        """The oldest message."""
        if not self._messages:
            return None
        message = self._messages.popleft()
        if isinstance(message, AttachedSequence):
            with self._lock:
                self._starts -= 1
        return message

    def forget(self, sequence: AttachedSequence) -> None:
        """The sequence has ended. A newer attempt that is queued stays."""
        with self._lock:
            if self._pairs.get(sequence.start.session_id) == sequence.pair:
                del self._pairs[sequence.start.session_id], self._owners[sequence.start.session_id]

    def _fence(self, session_id: str, pair: Pair) -> None:
        held = self._pairs.get(session_id)
        if held is not None and pair < held:
            raise fenced(session_id, pair, held)

    def _checked(self, start: Start) -> AttachedSequence:
        """A sequence made of what the caller gave, or InvalidRequest."""
        vocabulary, eos, max_context, max_slots = self._limits
        self._check_tokens("prompt", start.prompt)
        self._check_tokens("committed", start.committed)
        validate_sampling(start.sampling, len(vocabulary))
        for stop in start.sampling.stop:
            try:
                stop.encode()
            except UnicodeEncodeError:
                raise InvalidRequest("stop", stop, "text that UTF-8 can encode") from None
        room = max_context - len(start.prompt)
        if not start.prompt:
            raise InvalidRequest("prompt", start.prompt, "at least one token")
        if start.sampling.max_tokens > room:
            limit = f"prompt and output fit into {max_context} tokens: at most {room} here"
            raise InvalidRequest("max_tokens", start.sampling.max_tokens, limit)
        if len(start.committed) > start.sampling.max_tokens:
            raise InvalidRequest("committed", len(start.committed), f"at most max_tokens, {start.sampling.max_tokens}")
        if start.budget is not None and start.budget < 0:
            raise InvalidRequest("budget", start.budget, "at least 0")
        if start.topk_cap < 0:
            raise InvalidRequest("topk_cap", start.topk_cap, "at least 0")
        auto = self._config.auto_budget if start.budget is None else 0
        wanted = auto or (self._config.default_budget if start.budget is None else start.budget)
        budget = min(wanted, self._config.max_budget)
        ring = self._config.feature_ring
        sequence = AttachedSequence(next(self._numbers), start, budget, ring, vocabulary, eos)
        if auto:
            sequence.curve = Curve(auto)
        if sequence.slots > max_slots:
            raise InvalidRequest("max_tokens", start.sampling.max_tokens, f"the cache has {max_slots} slots")
        return sequence

    def _check_tokens(self, field: str, tokens: Sequence[int]) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < len(self._limits.vocabulary):
            wrong = next(token for token in tokens if not 0 <= token < len(self._limits.vocabulary))
            raise InvalidRequest(field, wrong, f"token ids are below {len(self._limits.vocabulary)}")
