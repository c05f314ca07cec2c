"""What the checker knows of a session: what it was asked, and everything that its log has been."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from hedgerow import digest
from hedgerow.engine.types import Finish
from tests.simulation.law import KERNEL_LAWS, Asked, Truth, end_of, next_token, truth


@dataclass
class Known:
    """What the checker knows of a session. `committed` is the longest log that ever was."""

    session_id: str
    asked: Asked
    variant: int
    committed: int = 0
    released: int = 0
    ended: int = 0
    epoch: int = 0
    losses: int = 0
    deleted: bool = False
    deleting: bool = False
    forgotten: bool = False  # the store has lost its record at some time
    failed: bool = False  # it has ended with an error before its first token
    short: bool = False  # it has ended before what was released: the store had lost that
    over: float = math.inf  # virtual time of its deadline, or of a cancel that was acknowledged
    births: set[bytes] = field(default_factory=set)
    inexact_from: float = math.inf  # the least offset from which it was ever marked as best effort
    forgot: bool = False  # the store has lost something of it, and it is inexact
    logs: list[tuple[int, ...]] = field(default_factory=list)
    """Every log that was not the beginning of a later one: one, where the session is exact."""

    @property
    def is_lost(self) -> bool:
        """Whether what was released may be gone for good."""
        return self.forgotten or self.short or self.forgot

    @property
    def is_gone(self) -> bool:
        """Whether there may be no record."""
        return self.forgotten or self.deleted or self.deleting

    @property
    def truth(self) -> Truth:
        """What an undisturbed run gives, where it is exact."""
        return truth(self.asked, self.variant)

    def end_of(self, tokens: Sequence[int]) -> Finish:
        """Why it ends with these tokens; NONE: it does not."""
        return end_of(self.asked, tokens)

    def digest_of(self, tokens: Sequence[int]) -> bytes:
        """Of its first tokens."""
        return digest.extend(digest.first(self.session_id, self.asked.prompt), tokens)

    def begins_again(self, variant: int) -> None:
        """Its record is written, which may have been lost: by whoever asks again, from whatever verifier is there."""
        if variant != self.variant or self.inexact_from < math.inf:
            self.forgot, self.variant, self.inexact_from = True, variant, math.inf

    def stored(self, tokens: tuple[int, ...], inexact_from: float) -> str | None:
        """A log as it is now; what is wrong with it."""
        self.forgot |= inexact_from < min(self.inexact_from, self.committed)  # lost first: others may take the places
        self.inexact_from = min(self.inexact_from, inexact_from)
        exact = tokens if self.inexact_from == math.inf else tokens[: int(self.inexact_from)]
        if exact != self.truth.tokens[: len(exact)]:
            return f"the log {tokens} is not the law {self.truth.tokens}"
        for i in range(len(exact), len(tokens)):
            either = [next_token(self.asked.seed, self.asked.prompt, tokens[:i], v) for v in range(len(KERNEL_LAWS))]
            if tokens[i] not in either:
                return f"token {i} of the log {tokens} is no verifier's: {either}"
        self.logs = [log for log in self.logs if log != tokens[: len(log)]]
        if not self.has_been(tokens):
            self.logs.append(tokens)
        return None

    def has_been(self, tokens: tuple[int, ...]) -> bool:
        """Whether the log began so at some time."""
        return any(log[: len(tokens)] == tokens for log in self.logs)
