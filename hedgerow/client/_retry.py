"""When to try again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hedgerow.client._fields import seconds
from hedgerow.errors import HedgerowError, InvalidRequest, Overloaded, Unavailable


@dataclass(frozen=True)
class Retry:
    """Up to `attempts` tries in all, with exponential delays in seconds; a server's own hint counts if it is longer.

    Only calls that have given nothing yet are tried again, and only after Unavailable or Overloaded. `Retry.never()`
    gives up at once. Raises InvalidRequest.
    """

    attempts: int = 4
    first_delay: float = 0.1
    last_delay: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.attempts, int) or self.attempts < 1:
            raise InvalidRequest("attempts", self.attempts, "a whole number of at least 1")
        for name in ("first_delay", "last_delay"):
            delay = getattr(self, name)
            if not (isinstance(delay, int | float) and delay == 0):
                seconds(name, delay)

    @classmethod
    def never(cls) -> Retry:
        """One try."""
        return cls(attempts=1)

    def delay(self, error: HedgerowError, attempt: int) -> float | None:
        """Seconds to wait after the try numbered `attempt` (from 1) failed with `error`; None: give up."""
        if attempt >= self.attempts or not isinstance(error, Unavailable | Overloaded):
            return None
        delay: float = min(self.first_delay * 2 ** (attempt - 1), self.last_delay) * random.uniform(0.5, 1.0)
        return max(delay, error.retry_after or 0.0)
