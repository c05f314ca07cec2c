"""Clocks and randomness of simulated processes, in place of the interpreter's while a simulation runs."""

from __future__ import annotations

import os
import random
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from tests.simulation.loop import SimLoop
from tests.simulation.processes import CURRENT

EPOCH = 1_800_000_000.0
"""Unix time at which virtual time is 0."""
_REAL = time.monotonic
_running: SimLoop | None = None


def monotonic() -> float:
    """The process's clock; the machine's while no simulation runs."""
    if _running is None:
        return _REAL()
    process = CURRENT.get()
    return _running.time() + (process.offset if process else 0.0)


def take_over_defaults() -> None:
    """An argument `clock=time.monotonic` was bound when its module was loaded: from here on it is `monotonic`."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("services.", "hedgerow.")):
            for value in list(vars(module).values()):
                owner = vars(value).values() if isinstance(value, type) else (value,)
                for function in owner:
                    if isinstance(function, FunctionType):
                        _take_over(function)


def _take_over(function: Any) -> None:
    if function.__defaults__ and _REAL in function.__defaults__:
        function.__defaults__ = tuple(monotonic if value is _REAL else value for value in function.__defaults__)
    for name, value in (function.__kwdefaults__ or {}).items():
        if value is _REAL:
            function.__kwdefaults__[name] = monotonic


@contextmanager
def simulated(loop: SimLoop, seed: int) -> Iterator[None]:
    """Clocks show virtual time plus the process's offset; everything random follows from `seed`."""
    global _running
    chance = random.Random(seed)

    def wall() -> float:
        process = CURRENT.get()
        return EPOCH + loop.time() + (process.wall_offset if process else 0.0)

    def token_bytes(nbytes: int | None = None) -> bytes:
        return chance.randbytes(32 if nbytes is None else nbytes)

    def token_hex(nbytes: int | None = None) -> str:
        return token_bytes(nbytes).hex()

    replaced: dict[tuple[Any, str], Callable[..., Any]] = {
        (time, "monotonic"): monotonic,
        (time, "monotonic_ns"): lambda: int(monotonic() * 1e9),
        (time, "perf_counter"): monotonic,
        (time, "perf_counter_ns"): lambda: int(monotonic() * 1e9),
        (time, "time"): wall,
        (time, "time_ns"): lambda: int(wall() * 1e9),
        (secrets, "token_bytes"): token_bytes,
        (secrets, "token_hex"): token_hex,
        (os, "urandom"): token_bytes,
    }
    before = {key: getattr(*key) for key in replaced}
    state = random.getstate()
    random.seed(seed)
    _running = loop
    try:
        for (module, name), function in replaced.items():
            setattr(module, name, function)
        yield
    finally:
        _running = None
        for (module, name), function in before.items():
            setattr(module, name, function)
        random.setstate(state)
