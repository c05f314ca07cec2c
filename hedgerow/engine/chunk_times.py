"""What a chunk of prompts adds to a step: something however few its rows are, and something for each.

On a GPU the first row brings most of it where a model is small: a launch of every kernel, and tiles that hold 16 or 64
rows. On a CPU rows are all. Of a large mixture each row brings experts, the first ones more. So what chunks added is
kept by kind of their size, two terms are fitted to these, and a level follows what has changed since: longer prompts,
other streams, busier cores.
"""

from __future__ import annotations

from collections.abc import Iterator

from hedgerow.engine.step_times import kind

UNKNOWN = 16  # rows of the first chunk
GROWS = 2  # times the largest chunk that was seen: the next one is no larger, whatever a few noisy times promise
YOUNG = 3  # times of a kind from which on it tells what to expect of its size
SIZES = 3  # kinds from which on the fit does, of the others
LEARNS, FOLLOWS, FARTHEST = 0.2, 0.3, 2.0  # weight of a new time; share of a deviation that the level follows; times
# what a whole step was expected to take, or added, that count at most
FORGETS = 0.95  # what is left, a step later, of the weight of kinds that did not come again
KEPT = 0.001  # of that weight, what is always left: a fit to one kind alone gives its rows all that it adds
LITTLE = 0.25  # of what the first row adds: fewer rows would save no more than that
TRUSTED = 4.0  # times of a kind from which on half of it is believed


class ChunkTimes:
    """One engine's. Milliseconds that steps took beyond what they would have taken without their chunks."""

    def __init__(self) -> None:
        self._kinds: dict[int, list[float]] = {}  # times, rows, ms at a level of 1, ms of the whole step
        self._level, self._most = 1.0, 0

    def took(self, rows: int, added: float, whole: float) -> None:
        """A step of `whole` ms, to which a chunk of so many rows added `added`."""
        added, expected = max(added, 0.01 * whole), self._expected(rows)
        if expected:  # where next to nothing was, a step that takes twice as long still shows what is true
            most = FARTHEST * (expected + max(whole - added, 0.0)) - (whole - added)
            added = min(max(added, expected / FARTHEST), most)
            self._level *= 1 + FOLLOWS * (added / expected - 1)
        seen = self._kinds.setdefault(kind(rows), [0.0, 0.0, 0.0, 0.0])
        for one in self._kinds.values():
            one[0] = max(one[0] * FORGETS, KEPT)
        seen[0] += 1
        weight = max(1 / seen[0], LEARNS)
        for place, value in enumerate((rows, added / self._level, whole), 1):
            seen[place] += weight * (value - seen[place])
        self._most = max(self._most, rows)

    def rows(self, allowed: float) -> int:
        """So many add no more than `allowed` ms. Where even few would, so many that fewer would help little. At least
        1, and not many more than were seen."""
        if not self._most:
            return UNKNOWN
        first, each = (one * self._level for one in self._fit())
        most = max(GROWS * self._most, UNKNOWN)
        if each * most <= max(allowed - first, LITTLE * first):
            return most
        return max(1, int(max(allowed - first, LITTLE * first) / each))

    def _expected(self, rows: int) -> float:
        """ms that such a chunk is likely to add; 0: too little is known. Sizes that were hardly seen count too, or the
        level would lag behind a prompt whose chunks take longer and become smaller with each."""
        seen = self._kinds.get(kind(rows))
        if seen is not None and seen[0] >= YOUNG:
            return seen[2] * self._level
        if len(self._kinds) < SIZES:
            return 0.0
        first, each = self._fit()
        return (first + each * rows) * self._level

    def _fit(self) -> tuple[float, float]:
        """The smallest sum of squared errors, of each step relative to all of it. Neither term is negative."""
        n = x = y = xx = xy = 0.0
        for weight, rows, ms in self._weighed():
            n, x, y = n + weight, x + weight * rows, y + weight * ms
            xx, xy = xx + weight * rows * rows, xy + weight * rows * ms
        if not n:
            return 0.0, 0.0
        spread = n * xx - x * x
        each = (n * xy - x * y) / spread if spread > 1e-9 * n * xx else xy / xx
        first = (y - each * x) / n
        if each < 0:
            return y / n, 0.0
        return (first, each) if first > 0 else (0.0, xy / xx)

    def _weighed(self) -> Iterator[tuple[float, float, float]]:
        for times, rows, ms, whole in self._kinds.values():
            yield times / (times + TRUSTED) / (whole * whole), rows, ms
