"""Callers' values into fields of messages. One that its field cannot hold is the caller's mistake: InvalidRequest."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hedgerow.errors import InvalidRequest

MESSAGE_LIMIT = 64 << 20
MOST_SECONDS = 1e9  # what gRPC and the gateway tell from "for ever"
UNFIT = (TypeError, ValueError, OverflowError)  # what protobuf raises; text that is not UTF-8 is a ValueError
KINDS = {
    FieldDescriptor.CPPTYPE_INT32: "a whole number in [-2147483648, 2147483647]",
    FieldDescriptor.CPPTYPE_UINT32: "a whole number in [0, 4294967295]",
    FieldDescriptor.CPPTYPE_UINT64: "a whole number in [0, 18446744073709551615]",
    FieldDescriptor.CPPTYPE_FLOAT: "a number",
    FieldDescriptor.CPPTYPE_BOOL: "True or False",
    FieldDescriptor.CPPTYPE_STRING: "text that is valid Unicode (UTF-8)",
}


def fill(message: Message, name: str, value: Any, known_as: str = "") -> None:
    """Set a field; None leaves it out. `known_as`: what the caller calls it. Raises InvalidRequest."""
    if value is None:
        return
    try:
        message.MergeFrom(type(message)(**{name: value}))
    except UNFIT:
        raise _refusal(message, message.DESCRIPTOR.fields_by_name[name], value, known_as or name) from None


def seconds(name: str, value: Any) -> float | None:
    """A time span; None stays None. Raises InvalidRequest, for NaN too."""
    if value is None:
        return None
    given: Any = value if isinstance(value, Real) and not isinstance(value, bool) else 0
    if not 0 < given <= MOST_SECONDS:
        raise InvalidRequest(name, value, f"seconds, more than 0 and at most {MOST_SECONDS:.0f}")
    return float(given)


def check_size(request: Message) -> None:
    """Raises InvalidRequest for what no gateway takes; gRPC would call it an exhausted resource, as an overload."""
    if (size := request.ByteSize()) > MESSAGE_LIMIT:
        raise InvalidRequest("request", f"{size} bytes", f"at most {MESSAGE_LIMIT} bytes")


def _refusal(message: Message, field: Any, value: Any, known_as: str) -> InvalidRequest:
    """What is wrong with `value`: of a sequence, the first item that does not fit."""
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, held = (KINDS[entry.fields_by_name[side].cpp_type] for side in ("key", "value"))
        return InvalidRequest(known_as, value, f"a mapping; its keys: {key}; its values: {held}")
    kind = KINDS[field.cpp_type]
    if not field.is_repeated:
        return InvalidRequest(known_as, value, kind)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for i, item in enumerate(value):
            try:
                type(message)(**{field.name: [item]})
            except UNFIT:
                return InvalidRequest(f"{known_as}[{i}]", item, kind)
    return InvalidRequest(known_as, value, f"a sequence; each item: {kind}")
