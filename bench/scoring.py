"""Whether a completion is Python: the head of a function and what the model wrote after it must parse together."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass

MOST_DROPPED = 6  # trailing lines; the cut leaves brackets and strings open


@dataclass(frozen=True)
class Score:
    """A completion that parses after `dropped` of its last complete lines are left out; None: it never does."""

    lines: int  # complete lines that the model wrote
    dropped: int | None


def score(head: str, completion: str) -> Score:
    """Cuts at the last complete line, then drops trailing lines, at most MOST_DROPPED, until it parses.

    `head`: decorators, `def` and docstring, at its own indentation, without the file before it; blocks that enclose it
    are opened again around it. At least one line that the model wrote and that is not blank must remain: the head alone
    parses, and that would say nothing.
    """
    lines = completion[: completion.rfind("\n") + 1].splitlines(keepends=True)
    for dropped in range(min(MOST_DROPPED, len(lines) - 1) + 1):
        kept = lines[: len(lines) - dropped]
        if any(line.strip() for line in kept) and parses(enclosing(head) + head + "".join(kept)):
            return Score(len(lines), dropped)
    return Score(len(lines), None)


def enclosing(head: str) -> str:
    """One `if` for every four columns that the head stands in: what follows may go back to any of them."""
    column = len(head) - len(head.lstrip(" "))
    return "".join(" " * at + "if 1:\n" for at in range(0, column, 4))


def parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in the model's strings
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
