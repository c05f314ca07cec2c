"""When to try again, and how long for."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hedgerow.client._fields import seconds
from hedgerow.errors import Fenced, HedgerowError, InvalidRequest, Overloaded, Unavailable

DOUBLINGS = 60  # of a delay; more would leave the range of a float


@dataclass(frozen=True)
class Retry:
    """How calls are tried again, and streams resumed. Times are in seconds.

    A call that has given nothing yet is tried up to `attempts` times in all. A stream whose session has started, or may
    have when its connection broke, goes on up to `resumes` times in a row without anything new; `resumes=0` raises the
    error at once. Delays are exponential, from `first_delay` to `last_delay`, with jitter; a server's own hint counts
    if it is longer. Both end `total` seconds after the first failure since which nothing new has come, and before the
    call's own deadline. With the defaults a new call outlasts ten seconds without any gateway, as where the only one is
    restarted. Only Unavailable, Overloaded and Fenced are worth another try. `Retry.never()` gives up at once.
    Raises InvalidRequest.
    """

    attempts: int = 10
    first_delay: float = 0.1
    last_delay: float = 5.0
    resumes: int = 50
    total: float = 120.0

    def __post_init__(self) -> None:
        for name, least in (("attempts", 1), ("resumes", 0)):
            count = getattr(self, name)
            if not isinstance(count, int) or isinstance(count, bool) or count < least:
                raise InvalidRequest(name, count, f"a whole number of at least {least}")
        for name in ("first_delay", "last_delay", "total"):
            delay = getattr(self, name)
            if not (isinstance(delay, int | float) and not isinstance(delay, bool) and delay == 0):
                seconds(name, delay)

    @classmethod
    def never(cls) -> Retry:
        """One try, nothing resumed."""
        return cls(attempts=1, resumes=0)


class Patience:
    """How often one call has failed in a row, and since when."""

    def __init__(self, retry: Retry) -> None:
        self._retry = retry
        self._failures, self._since = 0, 0.0

    def progress(self) -> None:
        """Something new came."""
        self._failures = 0

    def delay(self, error: HedgerowError, now: float, *, begun: bool, others: int = 0) -> float | None:
        """Seconds to wait before the next try; None: give up.

        `now` in seconds of any clock; `begun`: the session may have started; `others`: gateways that have not failed in
        a row yet and need not be waited for, whatever the last one said of itself.
        """
        if self._failures == 0:
            self._since = now
        self._failures += 1
        retry = self._retry
        most = retry.resumes if begun else retry.attempts - 1
        if self._failures > most or not worth_another(error):
            return None
        doubled = retry.first_delay * 2 ** min(self._failures - 1, DOUBLINGS)
        delay: float = min(doubled, retry.last_delay) * random.uniform(0.5, 1.0)
        if self._failures > others or isinstance(error, Overloaded):
            delay = max(delay, error.retry_after or 0.0)
        return delay if now + delay - self._since <= retry.total else None


def worth_another(error: HedgerowError) -> bool:
    """Whether the same call may succeed later: a gateway that says so gives a hint, a broken connection cannot."""
    hinted = error.retry_after is not None or "reason" not in error.metadata
    return hinted and isinstance(error, Unavailable | Overloaded | Fenced)
