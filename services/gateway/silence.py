"""Whether a verifier that should be speaking is dead: no I/O, the caller brings what happened and when."""

from __future__ import annotations

from services.gateway.verifiers import Work


class Silence:
    """A verifier that has work and neither sends a message nor answers a probe for `patience` seconds is lost; one that
    answers, but makes no step in twice that time although it had begun, is lost as well.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._sign = self._answer = 0.0  # when it last moved, and when it last spoke
        self._steps = -1

    def opened(self, now: float) -> None:
        """A stream has opened."""
        self._sign = self._answer = now
        self._steps = -1

    def heard(self, now: float) -> None:
        """A message came."""
        self._sign = self._answer = now

    def answered(self, now: float, steps: int) -> None:
        """It answered a probe; `steps` since its start."""
        self._answer = now
        if steps != self._steps:
            self._sign, self._steps = now, steps

    def is_lost(self, now: float, work: Work) -> str | None:
        """Why it is taken to be lost; None: it is not. To be asked several times in `patience`."""
        if not work.any:
            self._sign = self._answer = now  # nothing is expected of it
        elif now - self._answer >= self.patience:
            return f"it has said nothing for {now - self._answer:.1f} s"
        elif not work.decoding:
            self._sign = now  # it may wait in a queue
        elif now - self._sign >= 2 * self.patience:
            return f"it has made no step for {now - self._sign:.1f} s"
        return None
