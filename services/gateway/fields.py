"""Reading a message's fields as Python has them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, TypeVar

from hedgerow.errors import InvariantViolation

Row = TypeVar("Row")
Number = TypeVar("Number", bound=enum.IntEnum)


def optional(message: Any, name: str) -> Any:
    """The field, None where it is not set."""
    return getattr(message, name) if message.HasField(name) else None


def row(kind: type[Row], message: Any) -> Row:
    """A NamedTuple whose fields are named as the message's."""
    names: Sequence[str] = kind._fields  # type: ignore[attr-defined]
    return kind(*[getattr(message, name) for name in names])


def known(kind: type[Number], number: int) -> Number:
    """A peer of another version may send what this one does not know. Raises InvariantViolation."""
    try:
        return kind(number)
    except ValueError:
        raise InvariantViolation(f"a peer sent {kind.__name__} {number}, which is none of {list(kind)}") from None
