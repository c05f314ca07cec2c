"""JSON from outside, read so that every reader of the same text gets the same value, or none.

RFC 8259 leaves open what a name that comes twice means and how large a number may be, and Python reads words that are
no JSON at all. Refused here: NaN and the infinities, a number that no double holds (1e999 would become infinity, an
integer of 400 digits too, elsewhere), a name twice in one object, and what is nested too deeply to be read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, NoReturn

Pairs = list[tuple[str, Any]]
SHOWN = 24  # characters of a number in a message


def loads(text: str | bytes | bytearray, pairs: Callable[[Pairs], Any] | None = None) -> Any:
    """The value of `text`. `pairs` makes what an object becomes, and then says itself what a repeated name means.

    Raises ValueError that says what is wrong, and nothing else.
    """
    try:
        return json.loads(
            text, parse_constant=_no_number, parse_float=_finite, parse_int=_whole, object_pairs_hook=pairs or _once
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{_brief(digits)} is beyond the largest number")
    return value


def _whole(digits: str) -> int:
    if len(digits) > 300 and not math.isfinite(float(digits)):  # shorter ones fit, whatever their digits
        raise ValueError(f"{_brief(digits)} is beyond the largest number")
    return int(digits)


def _once(pairs: Pairs) -> dict[str, Any]:
    """Of a name that comes twice readers take the first or the last: no two would read the same."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name comes twice in one object")
    return found


def _brief(digits: str) -> str:
    return digits if len(digits) <= SHOWN else f"{digits[:SHOWN]}... ({len(digits)} characters)"
