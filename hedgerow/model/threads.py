"""How many threads a step of the compiled engine takes: as few as usual, or more while measured steps show a gain.

A second thread on a core that something else wants is worse than none: the step waits for whoever is not scheduled. So
the larger number has to earn its place for every kind of step, and loses it with the first step that shows otherwise.
No result depends on the choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

GAIN = 0.92  # of the usual number's time: at most that takes the larger number into use; it stays while it is no worse
NEWEST = 0.25  # weight of the newest step in a smoothed time
SOONEST, LATEST = 32, 1024  # steps of a kind between two trials of the number that is not in use
SPELL = 2  # steps of a trial; it ends with the first that speaks for the number in use


@dataclass
class Kind:
    """Steps of about the same number of rows. Times in seconds, smoothed, by number of threads."""

    times: dict[int, float] = field(default_factory=dict)
    more: bool = False  # whether the larger number is in use
    pause: int = SOONEST  # steps from the end of a trial to the next
    left: int = SPELL  # until the next trial begins: the usual number is measured first
    trial: int = 0  # steps of the present trial that are still to come


class ThreadChoice:
    """Between `usual` threads and `most`. Not safe for use by several threads at once.

    count = choice.threads(rows); ...the step...; choice.took(rows, count, seconds)
    """

    def __init__(self, most: int, usual: int) -> None:
        self.most, self.usual = most, min(most, usual)
        self._kinds: dict[int, Kind] = {}

    def threads(self, rows: int) -> int:
        """Threads of the next step, which has `rows` rows."""
        if self.most == self.usual:
            return self.most
        kind = self._kind(rows)
        return self.most if kind.more != bool(kind.trial) else self.usual

    def took(self, rows: int, threads: int, seconds: float) -> None:
        """Tells what the step cost that `threads` was asked for."""
        if self.most == self.usual:
            return
        kind = self._kind(rows)
        if kind.trial == SPELL:  # a trial's first step counts as its own, without what was long ago
            kind.times[threads] = seconds
        else:
            kind.times[threads] = seconds * NEWEST + kind.times.get(threads, seconds) * (1 - NEWEST)
        if kind.trial:
            kind.trial -= 1
            if kind.trial == 0 or self._gains(kind) == kind.more:
                self._end_trial(kind)
            return
        if kind.more and not self._gains(kind):
            kind.more, kind.pause, kind.left = False, SOONEST, SOONEST
            return
        kind.left -= 1
        if kind.left <= 0:
            kind.trial = SPELL

    def _kind(self, rows: int) -> Kind:
        return self._kinds.setdefault(rows.bit_length(), Kind())

    def _gains(self, kind: Kind) -> bool:
        """Whether the larger number is the better one, as far as is known."""
        usual, most = kind.times.get(self.usual), kind.times.get(self.most)
        return usual is not None and most is not None and most <= usual * (1 if kind.more else GAIN)

    def _end_trial(self, kind: Kind) -> None:
        """A trial that changed nothing makes the next one rarer."""
        better, kind.trial = self._gains(kind), 0
        kind.pause = SOONEST if better != kind.more else min(2 * kind.pause, LATEST)
        kind.more, kind.left = better, kind.pause


def usual_threads(cores: int) -> int:
    """One fewer than cores, for whatever else runs here; at least one."""
    return max(1, cores - 1)
