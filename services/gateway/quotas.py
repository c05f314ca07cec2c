"""How many calls a tenant may make of this gateway, where its API keys' lines say so.

Only what begins is refused. A Resume counts, and is let in: to refuse it would break a stream that a limit let begin.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hedgerow.errors import InvalidRequest, Overloaded
from services.gateway.keys import MOST_KEYS, Tenant

RETRY = 1.0  # seconds: nobody knows when a generation of a tenant ends
MINUTE = 60.0


class Quotas:
    """`left_alone` counts a tenant's sessions that run here and that no call reads. `clock` in seconds."""

    def __init__(self, left_alone: Callable[[str], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._left_alone, self._clock = left_alone, clock
        self._open: Counter[str] = Counter()
        self._buckets: dict[str, tuple[float, float]] = {}  # calls that are allowed at once, and when that was so

    def priority(self, tenant: Tenant, asked: int) -> int:
        """What the request gets. Raises InvalidRequest."""
        most = tenant.max_priority
        if most is None or asked <= most:
            return asked
        if asked:
            raise InvalidRequest("priority", asked, f"at most {most}, the tenant's")
        return most

    def generate(self, tenant: Tenant) -> None:
        """One more Generate. Raises Overloaded."""
        most = tenant.concurrent
        if most is not None:
            count = self._open[tenant.name]
            if count < most:
                count += self._left_alone(tenant.name)
            if count >= most:
                raise Overloaded(f"the quota of tenant {tenant.name}, in requests at once,", count, most, RETRY)
        self.spend(tenant)

    def spend(self, tenant: Tenant) -> None:
        """One more Generate or Tokenize. Raises Overloaded."""
        most = tenant.requests_per_minute
        if most is None:
            return
        now = self._clock()
        left, since = self._buckets.get(tenant.name, (float(most), now))
        left = min(float(most), left + (now - since) * most / MINUTE)
        if left < 1.0:
            what = f"the quota of tenant {tenant.name}, in requests a minute,"
            raise Overloaded(what, most, most, (1.0 - left) * MINUTE / most)
        self._buckets[tenant.name] = left - 1.0, now
        if len(self._buckets) > MOST_KEYS:  # of tenants that are gone
            del self._buckets[next(iter(self._buckets))]

    @contextmanager
    def reading(self, tenant: Tenant) -> Iterator[None]:
        """Around a Generate or Resume."""
        self._open[tenant.name] += 1
        try:
            yield
        finally:
            self._open[tenant.name] -= 1
            if not self._open[tenant.name]:
                del self._open[tenant.name]
