"""Waiting for a condition instead of for a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], seconds: float = 30, what: str = "the condition") -> None:
    """Returns when `condition` holds; AssertionError after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {seconds:g} s"
        time.sleep(0.01)


async def soon(condition: Callable[[], object], seconds: float = 30, what: str = "the condition") -> None:
    """As `eventually`, in a loop that goes on meanwhile."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come true within {seconds:g} s"
        await asyncio.sleep(0.005)
