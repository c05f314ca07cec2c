"""How a process ends by a signal: always in time, also where it hangs, and where it is the first of its container.

The kernel ignores, for process 1 of a container, every signal that is left to its default action. So there the C
library's `_exit` is the action: like the default one it needs no Python, which may be in the middle of anything.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Sequence

STOP = (signal.SIGTERM, signal.SIGINT)
LEAST = 0.5
"""Seconds that even a process without any grace has to end in order."""
MOST_LAST, LAST_SHARE = 2.0, 1 / 3


def calls_until(grace: float) -> float:
    """Seconds from SIGTERM until calls are cancelled; the rest of the grace is for their last words."""
    return grace - min(MOST_LAST, grace * LAST_SHARE)


def from_the_start() -> None:
    """SIGTERM ends the process while it imports and loads, too. To be called before that."""
    if os.getpid() == 1:
        at_once(STOP)


def at_once(signals: Sequence[signal.Signals]) -> None:
    """From here on each of these ends the process, whatever it does."""
    for each in signals:
        signal.signal(each, signal.SIG_DFL)
        if os.getpid() == 1:
            library = ctypes.CDLL(None)
            library.signal(int(each), library._exit)  # its argument is the signal, and so is the exit status


def within(seconds: float) -> None:
    """The process ends within so many seconds, by SIGALRM if it has not by itself."""
    at_once((signal.SIGALRM,))
    signal.setitimer(signal.ITIMER_REAL, max(seconds, LEAST))
