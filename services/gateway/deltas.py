"""An answer's parts as they grow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Reasoning(NamedTuple):
    """More of what the model thinks."""

    text: str


class Content(NamedTuple):
    """More of what it says."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """More of one call. `id` and `name` come once, and with them or after them the arguments in pieces.

    The last one is `complete`, when the arguments are a JSON object, or says as `malformed` why they are no call.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
    complete: bool = False
    malformed: str = ""


Delta = Reasoning | Content | Call
