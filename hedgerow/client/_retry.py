"""When to try again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hedgerow.errors import HedgerowError, Overloaded, Unavailable


@dataclass(frozen=True)
class Retry:
    """Up to `attempts` tries in all, with exponential delays in seconds; a server's own hint counts if it is longer.

    Only calls that have given nothing yet are tried again, and only after Unavailable or Overloaded. `Retry.never()`
    gives up at once.
    """

    attempts: int = 4
    first_delay: float = 0.1
    last_delay: float = 5.0

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
