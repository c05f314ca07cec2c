"""The store's Lua scripts as Redis runs them: Lua 5.1, `redis.call`, `struct`; one runtime for the whole process."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import lupa.lua51
from redis.exceptions import ResponseError

Call = Callable[[Sequence[bytes]], Any]
_FORMAT = re.compile(r"([<>=!]?)([BbHhIiLlcsxdf])(\d*)")


class Status(bytes):
    """A status reply: +OK."""


class Scripts:
    """Compiles each source once. `run` is not reentrant."""

    def __init__(self) -> None:
        self._lua = lupa.lua51.LuaRuntime(
            encoding=None, unpack_returned_tuples=True, register_eval=False, register_builtins=False
        )
        self._call: Call = lambda words: None
        self._functions: dict[bytes, Any] = {}
        self._pcall = self._lua.eval(b"function(f, keys, argv) KEYS, ARGV = keys, argv return pcall(f) end")
        table = self._lua.table_from
        names = self._lua.globals()
        names[b"redis"] = table({b"call": self._from_lua})
        names[b"struct"] = table({b"pack": _pack, b"unpack": _unpack, b"size": _size})

    def run(self, source: bytes, keys: Sequence[bytes], arguments: Sequence[bytes], call: Call) -> Any:
        """The script's reply, as redis-py would read it. Raises ResponseError."""
        function = self._functions.get(source)
        if function is None:
            text = source.partition(b"\n")[2] if source.startswith(b"#!") else source
            function = self._functions[source] = self._lua.execute(b"return function()\n" + text + b"\nend")
        self._call = call
        table = self._lua.table_from
        told = self._pcall(function, table(keys), table(arguments))
        done, value = told if isinstance(told, tuple) else (told, None)
        if done:
            return _reply(value)
        if isinstance(value, BaseException):
            raise value
        if not isinstance(value, bytes):
            value = value[b"err"]
        raise ResponseError(value.decode(errors="replace"))

    def _from_lua(self, *words: Any) -> Any:
        return self._to_lua(self._call([_word(word) for word in words]))

    def _to_lua(self, value: Any) -> Any:
        if value is None:
            return False
        if isinstance(value, list):
            return self._lua.table_from([self._to_lua(item) for item in value])
        if isinstance(value, Status):
            return self._lua.table_from({b"ok": bytes(value)})
        return value


def _word(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return b"%d" % value if value == int(value) else repr(value).encode()
    raise ResponseError("ERR Lua redis lib command arguments must be strings or integers")


def _reply(value: Any) -> Any:
    if value is True:
        return 1
    if value is None or value is False:
        return None
    if isinstance(value, bytes):
        return value
    if isinstance(value, int | float):
        return int(value)
    if (error := value[b"err"]) is not None:
        raise ResponseError(error.decode())
    if (status := value[b"ok"]) is not None:
        return Status(status)
    items = []
    for i in range(1, len(value) + 1):
        if value[i] is None:
            break
        items.append(_reply(value[i]))
    return items


_PARSED: dict[bytes, list[tuple[str, str, int | None]]] = {}


def _parse(layout: bytes) -> list[tuple[str, str, int | None]]:
    found = _PARSED.get(layout)
    if found is None:
        text, order, found, at = layout.decode(), "<", [], 0
        for match in _FORMAT.finditer(text):
            assert match.start() == at, f"struct format {text}"
            at = match.end()
            order = match[1] or order
            found.append((order, match[2], int(match[3]) if match[3] else None))
        assert at == len(text), f"struct format {text}"
        _PARSED[layout] = found
    return found


def _number(order: str, kind: str, size: int | None) -> struct.Struct:
    sizes = {1: "b", 2: "h", 4: "i", 8: "q"}
    given = {"b": 1, "h": 2, "i": size or 4, "l": size or 8}.get(kind.lower())
    code = kind if given is None else (sizes[given] if kind.islower() else sizes[given].upper())
    return struct.Struct(("<" if order in "<=!" else ">") + code)


def _pack(layout: bytes, *values: Any) -> bytes:
    parts: list[bytes] = []
    left = iter(values)
    for order, kind, size in _parse(layout):
        if kind == "c":
            text = next(left)
            parts.append(text if not size else text[:size])
            if size and len(text) < size:
                raise ResponseError("ERR arg #1: string too short")
        elif kind == "s":
            parts.append(next(left) + b"\0")
        else:
            parts.append(_number(order, kind, size).pack(int(next(left))))
    return b"".join(parts)


def _unpack(layout: bytes, data: bytes, position: Any = 1) -> tuple[Any, ...]:
    """As Roberto's: c0 takes as many bytes as the number before it, which is not returned."""
    at, values = int(position) - 1, list[Any]()
    for order, kind, size in _parse(layout):
        if kind == "c":
            length = int(values.pop()) if size == 0 else (1 if size is None else size)
            if at + length > len(data):
                raise ResponseError("ERR data string too short")
            values.append(data[at : at + length])
            at += length
        else:
            number = _number(order, kind, size)
            if at + number.size > len(data):
                raise ResponseError("ERR data string too short")
            values.append(number.unpack_from(data, at)[0])
            at += number.size
    return (*values, at + 1)


def _size(layout: bytes) -> int:
    return sum(size or 1 if kind == "c" else _number(order, kind, size).size for order, kind, size in _parse(layout))
