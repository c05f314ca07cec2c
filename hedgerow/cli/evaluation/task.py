"""What a coding task is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Task:
    """`name` is the function or class asked for. `calls` are expressions with the values that they must have, evaluated
    beside the answer after `driver`; the values stay outside the sandbox."""

    name: str
    stub: str
    calls: Sequence[tuple[str, Any]]
    driver: str = ""


RAISES = """
def refused(function, *arguments):
    try:
        function(*arguments)
    except ValueError:
        return True
    return False
"""


def task(name: str, stub: str, *calls: tuple[str, Any], driver: str = "") -> Task:
    return Task(name, stub.strip("\n"), calls, driver)
