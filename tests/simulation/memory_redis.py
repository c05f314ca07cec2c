"""A Redis in memory: the commands that the store uses, its scripts as they are, and fail-overs that lose a suffix."""

from __future__ import annotations

import copy
import hashlib
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from redis.exceptions import NoScriptError, ResponseError

from tests.simulation.lua import Scripts, Status

LUA = Scripts()
OK = Status(b"OK")
KEPT = 512  # transactions that a fail-over may lose


class Transaction(NamedTuple):
    """What a command or a script changed: the values from before."""

    at: float
    before: dict[bytes, Any]


class MemoryRedis:
    """One server. `clock` gives its Unix time in seconds.

    `before` and `after` are told of each script that is about to run, and has run: its source, keys, arguments, reply.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.data: dict[bytes, Any] = {}
        self.expiry: dict[bytes, float] = {}  # Unix ms
        self.scripts: dict[bytes, bytes] = {}
        self.journal: deque[Transaction] = deque(maxlen=KEPT)
        self.before: Callable[[Sequence[bytes], Sequence[bytes]], Any] = lambda keys, arguments: None
        self.after: Callable[[bytes, Sequence[bytes], Sequence[bytes], Any, Any], None] = lambda *told: None
        self.published: Callable[[bytes, bytes], int] = lambda channel, message: 0
        self._changed: dict[bytes, Any] | None = None
        self._last_time = 0

    def execute(self, words: Sequence[bytes]) -> Any:
        """One command; an error is returned, as a pipeline gives it."""
        self._changed = {}
        try:
            return self._run(words)
        except ResponseError as error:
            return error
        finally:
            if self._changed:
                self.journal.append(Transaction(self.clock(), self._changed))
            self._changed = None

    def lose(self, count: int) -> int:
        """Forget the last `count` transactions, as a fail-over to a replica that lags; how many were there."""
        lost = 0
        while self.journal and lost < count:
            for key, (value, expiry) in self.journal.pop().before.items():
                self.data.pop(key, None)
                self.expiry.pop(key, None)
                if value is not None:
                    self.data[key] = value
                if expiry is not None:
                    self.expiry[key] = expiry
            lost += 1
        return lost

    def value(self, key: bytes) -> Any:
        """What is stored, for a look from outside."""
        return self._get(key)

    def _run(self, words: Sequence[bytes]) -> Any:
        name = words[0].upper().decode()
        if name in ("EVALSHA", "EVAL"):
            return self._eval(name, words)
        method = getattr(self, f"_{name.lower()}_", None)
        if method is None:
            raise ResponseError(f"ERR unknown command '{name}'")
        return method(*words[1:])

    def _eval(self, name: str, words: Sequence[bytes]) -> Any:
        if name == "EVAL":
            source = words[1]
            self.scripts[hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()] = source
        else:
            if words[1] not in self.scripts:
                raise NoScriptError("No matching script. Please use EVAL.")
            source = self.scripts[words[1]]
        count = int(words[2])
        keys, arguments = words[3 : 3 + count], words[3 + count :]
        seen = self.before(keys, arguments)
        reply = LUA.run(source, keys, arguments, self._run)
        self.after(source, keys, arguments, reply, seen)
        return reply

    # Keys.

    def _get(self, key: bytes) -> Any:
        expiry = self.expiry.get(key)
        if expiry is not None and expiry <= self._now():
            self.data.pop(key, None)
            del self.expiry[key]
        return self.data.get(key)

    def _write(self, key: bytes, kind: type, make: bool = True) -> Any:
        """The value, which is about to be changed."""
        value = self._get(key)
        if self._changed is not None and key not in self._changed:
            self._changed[key] = (copy.copy(value), self.expiry.get(key))
        if value is None and make:
            value = self.data[key] = kind()
        if value is not None and not isinstance(value, kind):
            raise ResponseError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return value

    def _drop_empty(self, key: bytes) -> None:
        if not self.data.get(key):
            self.data.pop(key, None)
            self.expiry.pop(key, None)

    def _now(self) -> int:
        return int(self.clock() * 1000)

    def _del_(self, *keys: bytes) -> int:
        removed = 0
        for key in keys:
            if self._get(key) is not None:
                self._write(key, object, make=False)
                del self.data[key]
                self.expiry.pop(key, None)
                removed += 1
        return removed

    def _exists_(self, *keys: bytes) -> int:
        return sum(self._get(key) is not None for key in keys)

    def _pexpireat_(self, key: bytes, at: bytes) -> int:
        if self._get(key) is None:
            return 0
        self._write(key, object)
        self.expiry[key] = float(at)
        return 1

    def _pexpire_(self, key: bytes, life: bytes) -> int:
        return self._pexpireat_(key, b"%d" % (self._now() + int(life)))

    def _pttl_(self, key: bytes) -> int:
        if self._get(key) is None:
            return -2
        return int(self.expiry[key] - self._now()) if key in self.expiry else -1

    def _time_(self) -> list[bytes]:
        now = self._last_time = max(self._last_time + 1, int(self.clock() * 1e6))  # no two scripts in one us
        return [b"%d" % (now // 1_000_000), b"%d" % (now % 1_000_000)]

    def _info_(self, section: bytes = b"") -> bytes:
        return (
            b"redis_version:7.4.0\r\nused_memory:1000\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\nrole:master\r\n"
            b"aof_enabled:1\r\nconnected_slaves:0\r\n"
        )

    def _ping_(self) -> bytes:
        return Status(b"PONG")

    def _publish_(self, channel: bytes, message: bytes) -> int:
        return self.published(channel, message)

    # Strings.

    def _get_(self, key: bytes) -> Any:
        return self._get(key)

    def _set_(self, key: bytes, value: bytes, *options: bytes) -> Any:
        self._write(key, object, make=False)
        names = [option.upper() for option in options]
        self.data[key] = value
        if b"KEEPTTL" not in names:
            self.expiry.pop(key, None)
        if b"PX" in names:
            self.expiry[key] = self._now() + int(options[names.index(b"PX") + 1])
        return OK

    # Hashes.

    def _hget_(self, key: bytes, field: bytes) -> Any:
        return (self._get(key) or {}).get(field)

    def _hmget_(self, key: bytes, *fields: bytes) -> list[Any]:
        value = self._get(key) or {}
        return [value.get(field) for field in fields]

    def _hset_(self, key: bytes, *pairs: bytes) -> int:
        value = self._write(key, dict)
        before = len(value)
        value.update(zip(pairs[::2], pairs[1::2], strict=True))
        return len(value) - before

    def _hdel_(self, key: bytes, *fields: bytes) -> int:
        value = self._write(key, dict, make=False) or {}
        removed = sum(value.pop(field, None) is not None for field in fields)
        self._drop_empty(key)
        return removed

    # Streams: lists of (milliseconds, sequence, fields).

    def _xadd_(self, key: bytes, entry_id: bytes, *fields: bytes) -> bytes:
        stream = self._write(key, list)
        at = _entry_id(entry_id, 0)
        if stream and stream[-1][0] >= at:
            raise ResponseError("ERR The ID specified in XADD is equal or smaller than the target stream top item")
        stream.append((at, list(fields)))
        return entry_id

    def _xrange_(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[Any]:
        low, high = _entry_id(first, 0), _entry_id(last, math.inf)
        found = [[b"%d-%d" % at, list(fields)] for at, fields in self._get(key) or [] if low <= at <= high]
        return found[: int(options[1])] if options else found

    def _xrevrange_(self, key: bytes, last: bytes, first: bytes, *options: bytes) -> list[Any]:
        found = self._xrange_(key, first, last)[::-1]
        return found[: int(options[1])] if options else found

    # Sets.

    def _sadd_(self, key: bytes, *members: bytes) -> int:
        value = self._write(key, dict)
        before = len(value)
        value.update(dict.fromkeys(members))
        return len(value) - before

    def _srem_(self, key: bytes, *members: bytes) -> int:
        value = self._write(key, dict, make=False) or {}
        removed = sum(value.pop(member, 0) is None for member in members)
        self._drop_empty(key)
        return removed

    def _smembers_(self, key: bytes) -> list[bytes]:
        return list(self._get(key) or {})

    # Sorted sets: scores by member.

    def _zadd_(self, key: bytes, *words: bytes) -> int:
        flags, pairs = [], list(words)
        while pairs and pairs[0].upper() in (b"GT", b"LT", b"NX", b"XX", b"CH"):
            flags.append(pairs.pop(0).upper())
        value, added = self._write(key, dict), 0
        for text, member in zip(pairs[::2], pairs[1::2], strict=True):
            score, known = float(text), value.get(member)
            if (known is None and b"XX" in flags) or (known is not None and b"NX" in flags):
                continue
            if known is not None and ((b"GT" in flags and score <= known) or (b"LT" in flags and score >= known)):
                continue
            added += known is None
            value[member] = score
        self._drop_empty(key)
        return added

    def _zrem_(self, key: bytes, *members: bytes) -> int:
        value = self._write(key, dict, make=False) or {}
        removed = sum(value.pop(member, None) is not None for member in members)
        self._drop_empty(key)
        return removed

    def _zcard_(self, key: bytes) -> int:
        return len(self._get(key) or {})

    def _zscore_(self, key: bytes, member: bytes) -> bytes | None:
        score = (self._get(key) or {}).get(member)
        return None if score is None else _score(score)

    def _zrange_(self, key: bytes, first: bytes, last: bytes, *options: bytes) -> list[bytes]:
        names = [option.upper() for option in options]
        if names[:2] == [b"BYSCORE", b"REV"]:
            return _limited([pair for pair in self._sorted(key)[::-1] if _within(pair[1], last, first)], names)
        return _listed(_slice(self._sorted(key), int(first), int(last)), options)

    def _zrangebyscore_(self, key: bytes, low: bytes, high: bytes, *options: bytes) -> list[bytes]:
        found = [pair for pair in self._sorted(key) if _within(pair[1], low, high)]
        return _limited(found, [option.upper() for option in options])

    def _zremrangebyscore_(self, key: bytes, low: bytes, high: bytes) -> int:
        gone = [member for member, score in self._sorted(key) if _within(score, low, high)]
        return self._zrem_(key, *gone) if gone else 0

    def _zremrangebyrank_(self, key: bytes, first: bytes, last: bytes) -> int:
        gone = [member for member, _ in _slice(self._sorted(key), int(first), int(last))]
        return self._zrem_(key, *gone) if gone else 0

    def _sorted(self, key: bytes) -> list[tuple[bytes, float]]:
        return sorted((self._get(key) or {}).items(), key=lambda pair: (pair[1], pair[0]))


def _entry_id(text: bytes, missing: float) -> tuple[float, float]:
    if text in (b"-", b"+"):
        return (0, 0) if text == b"-" else (math.inf, math.inf)
    first, _, second = text.partition(b"-")
    return int(first), int(second) if second else missing


def _score(score: float) -> bytes:
    return b"%d" % score if score == int(score) else repr(score).encode()


def _slice(pairs: list[Any], first: int, last: int) -> list[Any]:
    count = len(pairs)
    begin = max(0, first + count) if first < 0 else first
    end = last + count if last < 0 else last
    return pairs[begin : end + 1]


def _within(score: float, low: bytes, high: bytes) -> bool:
    above = score > float(low[1:]) if low.startswith(b"(") else score >= float(low)
    below = score < float(high[1:]) if high.startswith(b"(") else score <= float(high)
    return above and below


def _limited(pairs: list[tuple[bytes, float]], names: Sequence[bytes]) -> list[bytes]:
    if b"LIMIT" in names:
        at = names.index(b"LIMIT")
        skip, most = int(names[at + 1]), int(names[at + 2])
        pairs = pairs[skip : skip + most if most >= 0 else None]
    return _listed(pairs, names)


def _listed(pairs: list[tuple[bytes, float]], options: Sequence[bytes]) -> list[bytes]:
    if b"WITHSCORES" in [option.upper() for option in options]:
        return [word for member, score in pairs for word in (member, _score(score))]
    return [member for member, _ in pairs]
