"""How many threads a step of the compiled engine takes: as few as usual, or more while measured steps show a gain.

A second thread on a core that something else wants is worse than none: the step waits for whoever is not scheduled. So
the larger number has to earn its place for every kind of step, and loses it with the first step that shows otherwise.
No result depends on the choice.
"""

from __future__ import annotations

from dataclasses import dataclass

GAIN = 0.92  # of the usual number's time: at most that takes the larger number into use
HOPELESS = 2.0  # times what the other number takes: a thread was not scheduled, and one step of that is enough
NEWEST = 0.25  # weight of the newest step in a smoothed time
FIRST, SOONEST, LATEST = 3, 32, 1024  # steps of a kind before its first trial; between two later ones
SPELL = 4  # steps of a trial; the first warms the other core's caches and does not count
EXACT = 17  # rows up to which every number of rows is a kind of its own; above, sixteen together


@dataclass
class Kind:
    """Steps of about the same number of rows. Times in seconds; 0: not known."""

    more: bool = False  # whether the larger number is in use
    time: float = 0.0  # of a step with the number in use, smoothed
    other: float = 0.0  # with the other number, at its last trial
    pause: int = SOONEST  # steps from the end of a trial to the next
    left: int = FIRST  # until the next trial begins: what is in use is measured first
    trial: list[float] | None = None  # steps of the present trial


class ThreadChoice:
    """Between `usual` threads and `most`. Not safe for use by several threads at once.

    count = choice.threads(rows); ...the step...; choice.took(rows, seconds)
    """

    def __init__(self, most: int, usual: int) -> None:
        self.most, self.usual = most, min(most, usual)
        self._kinds: dict[int, Kind] = {}

    def threads(self, rows: int) -> int:
        """Threads of the next step, which has `rows` rows."""
        if self.most == self.usual:
            return self.most
        kind = self._kind(rows)
        return self.most if kind.more != (kind.trial is not None) else self.usual

    def took(self, rows: int, seconds: float) -> None:
        """Tells what the step cost that `threads(rows)` was asked for last."""
        if self.most == self.usual:
            return
        kind = self._kind(rows)
        if kind.trial is not None:
            self._try(kind, kind.trial, seconds)
            return
        if kind.more and 0 < HOPELESS * kind.other < seconds:
            self._switch(kind, kind.other)
            return
        kind.time = seconds * NEWEST + (kind.time or seconds) * (1 - NEWEST)
        kind.left -= 1
        if kind.left <= 0:
            kind.trial = []

    def _try(self, kind: Kind, trial: list[float], seconds: float) -> None:
        trial.append(seconds)
        hopeless = seconds > HOPELESS * kind.time
        if len(trial) < SPELL and not hopeless:
            return
        measured = seconds if hopeless else sum(trial[1:]) / (SPELL - 1)
        if not hopeless and measured <= kind.time * (1 if kind.more else GAIN):
            self._switch(kind, measured)
            return
        # a trial that changed nothing makes the next one rarer
        kind.other, kind.trial, kind.pause = measured, None, min(2 * kind.pause, LATEST)
        kind.left = kind.pause

    def _switch(self, kind: Kind, time: float) -> None:
        kind.more, kind.time, kind.other = not kind.more, time, kind.time
        kind.pause, kind.left, kind.trial = SOONEST, SOONEST, None

    def _kind(self, rows: int) -> Kind:
        """A kind that is not known yet begins as the nearest smaller one does."""
        key = rows if rows <= EXACT else EXACT + (rows - EXACT + 15) // 16
        if key not in self._kinds:
            below = max((known for known in self._kinds if known < key), default=None)
            self._kinds[key] = Kind(more=below is not None and self._kinds[below].more)
        return self._kinds[key]


def usual_threads(cores: int) -> int:
    """One fewer than cores, for whatever else runs here; at least one."""
    return max(1, cores - 1)
