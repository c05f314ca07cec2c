"""The simulated Redis against a real one: random calls of every script that is shipped, the same replies and data."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from redis.exceptions import ResponseError

from hedgerow.cli.embedded_redis import EmbeddedRedis
from services.kvstore import codec
from services.kvstore.records import Entry, Lease
from services.kvstore.scripts import FOLDER, Script
from tests.redis_servers import redis_server  # noqa: F401  a fixture
from tests.simulation.memory_redis import MemoryRedis

MARKS = [bytes([i]) * 16 for i in range(3)]
CALLS = 600


def scripts() -> dict[str, Script]:
    """Every script in the folder; those that use session.lua's functions get it."""
    names = sorted(path.stem for path in FOLDER.glob("*.lua") if path.stem != "session")
    text = {name: (FOLDER / f"{name}.lua").read_text() for name in names}
    return {name: Script(name, shared="load_session" in text[name]) for name in names}


class Calls:
    """Random calls that often fit each other. The two servers' clocks are not the same to the millisecond, so no answer
    may depend on less than seconds: lives are far apart, and what is for later is for long after the test.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self._lives = self.chance.sample(range(60_000, 60_000_000, 10_000), CALLS)

    def one(self, name: str) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Keys and arguments of a call of the script."""
        chance = self.chance
        session = b"s%d" % chance.randrange(3)
        tag = b"sim:{%b}:" % session
        keys: Sequence[bytes] = (tag + b"record", tag + b"log", tag + b"mark")
        owner, birth = chance.choice(MARKS), chance.choice(MARKS[:2])
        epoch, ttl = b"%d" % chance.randint(1, 3), b"%d" % chance.choice((60_000, 100_000))
        arguments: dict[str, Any] = {
            "create": lambda: self._creation(birth, owner, ttl, epoch),
            "append": lambda: (self._entry(session, owner, birth),),
            "acquire": lambda: (owner, epoch, chance.choice((birth, b"")), chance.choice((epoch, b""))),
            "close": lambda: (epoch, owner, birth, b"5", b"usage"),
            "cancel": tuple,
            "delete": lambda: (b"60000", chance.choice((birth, b""))),
            "read": lambda: (b"%d" % chance.randrange(6), b"%d" % chance.randrange(4), b"1"),
            "brief": tuple,
            "release": lambda: (epoch, owner, birth),
        }
        if name in arguments:
            return keys, arguments[name]()
        key = b"sim:{x}:%b%d" % (name[:4].encode(), chance.randrange(2))
        member = b"m%d" % chance.randrange(3)
        others: dict[str, tuple[Sequence[bytes], Sequence[bytes]]] = {
            "put_prefix": ((b"sim:{x}:prefix",), (member, b"%d" % self._lives.pop(), b"2")),
            "find_prefix": ((b"sim:{x}:prefix",), ()),
            "stamp": (
                (b"sim:{x}:index",),
                (member, chance.choice((b"0", b"9000000")), chance.choice((b"GT", b"")), b"60000"),
            ),
            "unstamp": ((b"sim:{x}:index",), (member, b"", b"0")),
            "page": ((b"sim:{x}:index",), (b"0", b"2")),
            "newest": ((b"sim:{x}:index",), (chance.choice((b"", b"5", b"9" * 16)), b"2")),
            "notify": ((b"sim:{x}:cancelled",), (member, b"60000", b"channel", b"message")),
            "renew": ((b"sim:{x}:alive", b"sim:{x}:cancelled", b"sim:{x}:index"), (b"60000", b"90000")),
        }
        return others.get(name, ((key,), ()))

    def _creation(self, birth: bytes, owner: bytes, ttl: bytes, epoch: bytes) -> tuple[bytes, ...]:
        numbers = (ttl, b"60000", self.chance.choice((b"1", epoch)), b"1", b"123", b"")
        return (b"record", birth, owner, MARKS[0], *numbers, self.chance.choice((b"", *MARKS[:2])))

    def _entry(self, session: bytes, owner: bytes, birth: bytes) -> bytes:
        chance = self.chance
        count = chance.randrange(3)
        tokens = struct.pack(f"<{count}I", *(chance.randrange(2) for _ in range(count)))
        digests = [MARKS[0]] * 4
        entry = Entry(
            session.decode(), Lease(chance.randint(1, 2), owner), birth, chance.randrange(4), tokens, MARKS[0],
            MARKS[0] if not count or chance.random() < 0.8 else MARKS[1], chance.choice((0, 0, 0, 1, 6)), b"usage",
            "stop", chance.choice((None, 7)), chance.choice((b"", b"view")),
            chance.choice((b"", b"".join(digests[:count]))), None, chance.choice((b"", b"spent")),
        )  # fmt: skip
        return codec.pack_entry(entry)


def same(name: str, ours: Any, real: Any) -> bool:
    """Whether replies are the same, but for the servers' own times."""
    if isinstance(real, ResponseError) or isinstance(ours, ResponseError):
        return type(ours) is type(real) and str(ours).split()[0] == str(real).split()[0]
    if name == "stamp":
        return abs(float(ours) - float(real)) < 5e6
    if name in ("page", "newest"):
        return ours[::2] == real[::2]
    if name in ("renew", "find_prefix"):  # a set has no order; scores are times
        return sorted(ours) == sorted(real)
    return bool(ours == real)


@pytest.mark.parametrize("seed", range(4))
def test_every_script_answers_as_on_a_real_server(redis_server: EmbeddedRedis, seed: int) -> None:  # noqa: F811
    ours, calls, known = MemoryRedis(time.time), Calls(seed), scripts()
    with redis.Redis.from_url(redis_server.url, protocol=2) as real:
        real.flushall()
        for number in range(CALLS):
            name = calls.chance.choice([*known, "append", "append", "append"])
            script = known[name]
            keys, arguments = calls.one(name)
            words = [b"EVAL", script.source, b"%d" % len(keys), *keys, *arguments]
            try:
                expected = real.execute_command(*words)
            except ResponseError as error:
                expected = error
            got = ours.execute(words)
            assert same(name, got, expected), f"call {number} of {name}: {got!r}, the server says {expected!r}"
        for key in sorted(real.keys("sim:*")):
            kind = real.type(key)
            if kind == b"hash":
                assert ours.value(key) == real.hgetall(key)
            elif kind == b"stream":
                stored = [(b"%d-%d" % at, dict(zip(f[::2], f[1::2], strict=True))) for at, f in ours.value(key)]
                assert stored == real.xrange(key)
            elif kind == b"string":
                assert ours.value(key) == real.get(key)
            assert abs(ours.execute([b"PTTL", key]) - real.pttl(key)) < 5000, key
        live = {key for key in ours.data if ours.value(key) is not None}
        assert live == set(real.keys("sim:*"))


def test_a_fail_over_loses_whole_transactions_and_nothing_before() -> None:
    now = [1000.0]
    store, create, append = MemoryRedis(lambda: now[0]), Script("create"), Script("append")
    keys = (b"a:record", b"a:log", b"a:mark")
    new = (b"record", MARKS[1], MARKS[2], MARKS[0], b"60000", b"60000", b"1", b"0", b"0", b"")
    store.execute([b"EVAL", create.source, b"3", *keys, *new])
    before = {key: dict(value) if isinstance(value, dict) else value for key, value in store.data.items()}
    entry = Entry("a", Lease(1, MARKS[2]), MARKS[1], 0, struct.pack("<I", 5), MARKS[0], MARKS[1])
    answer = codec.unpack_answer(store.execute([b"EVAL", append.source, b"3", *keys, codec.pack_entry(entry)]))
    assert answer.state.length == 1
    assert store.lose(1) == 1
    assert store.data == before
    assert store.execute([b"GET", b"a:mark"]) == b"live"
