"""Which running sessions nobody drives: indexes of owners and of their sessions, each a sorted set by time.

At least once: a session is put into its owner's index before it is created or acquired, and is taken out after it has
ended, so the indexes may name sessions that are gone, ended or another's by now; whoever reads them looks at the
session itself. Such a member is dropped when it is found, but not before GRACE: the session that it stands for may be
about to be created.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from hedgerow.errors import InvalidRequest
from services.kvstore import codec
from services.kvstore.keys import SHARDS, owner_keys, owner_shard, owners_key, released_key, session_keys, session_shard
from services.kvstore.listing import Listing
from services.kvstore.records import NOBODY, Abandoned, NewSession, Status
from services.kvstore.replies import is_newer, sound
from services.kvstore.runner import Runner
from services.kvstore.scripts import Call, Plain, Script

GRACE = 120_000
"""Milliseconds after which a member that stands for nothing is dropped. More than any call to Redis takes."""
MOST_OWNERS = 4096
"""Owners without life that one look at a shard sees; those without sessions are dropped, so that others come."""
MOST_LEAVING = 65_536
"""Members that wait to be taken out; those above it stay until they are found."""
FLUSHED = 1024
"""Members that are taken out in one round trip."""


class Stamp(NamedTuple):
    """A member of an index, and its time as it was when we saw it; b"": whatever it is."""

    key: bytes
    member: bytes
    at: bytes = b""


class Cursor(NamedTuple):
    """Where a sweep goes on: after the member of time `at` of one holder's sessions."""

    shard: int = 0
    owner: bytes = b""
    at: int = 0

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """The inverse of str. Raises InvalidRequest."""
        try:
            shard, owner, at = text.split(".")
            cursor = cls(int(shard), bytes.fromhex(owner), int(at))
        except ValueError:
            cursor = cls(-1)
        if not (0 <= cursor.shard < SHARDS and len(cursor.owner) in (0, len(NOBODY)) and 0 <= cursor.at < 2**63):
            raise InvalidRequest("cursor", text, "what the last answer gave, or empty")
        return cursor

    def __str__(self) -> str:
        return f"{self.shard}.{self.owner.hex()}.{self.at}"


class Index:
    """`keep` is how long an index outlives its last change, in milliseconds, beside the longest life of a session that
    this process has seen: more than its sessions do.
    """

    def __init__(self, runner: Runner, *, keep: int, grace: int = GRACE) -> None:
        self.runner, self.keep, self.grace = runner, keep, grace
        self._least = keep
        self._stamp, self._unstamp = Script("stamp", shared=False), Script("unstamp", shared=False)
        self._page, self._brief = Script("page", shared=False), Script("brief")
        self._leaving: dict[tuple[bytes, bytes], bytes] = {}
        self.listing = Listing(runner, grace)

    async def enter(self, owner: bytes, session_id: str, new: NewSession | None = None) -> Stamp:
        """`owner` is about to get the session, which may be a `new` one."""
        self.keep = keep = max(self.keep, self._least + (new.ttl if new else 0))
        sessions = owner_keys(owner).sessions
        calls = [
            self._put(sessions, session_id.encode(), keep=keep),
            self._put(*_place(owner), keep=keep, only_later=True),
        ]
        if new is not None and new.summary:
            calls.append(self._put(*self.listing.place(new), keep=keep))
        at, *_ = [sound(reply) for reply in await self.runner.call_all(calls)]
        return Stamp(sessions, session_id.encode(), at)

    async def enter_released(self, owner: bytes, session_id: str) -> tuple[Stamp, Stamp | None]:
        """`owner` is about to release the session: its stamp among the released, and the one that it leaves."""
        member, sessions = session_id.encode(), owner_keys(owner).sessions
        released = released_key(session_shard(session_id))
        calls: list[Call | Plain] = [self._put(released, member, keep=self.keep)]
        calls.append(self.time_of(owner, session_id))
        at, before = [sound(reply) for reply in await self.runner.call_all(calls)]
        return Stamp(released, member, at), Stamp(sessions, member, before) if before else None

    def renewal(self, owner: bytes, life: int) -> Call:
        """The call that says that an owner lives `life` ms from now."""
        return self._put(*_place(owner), life=life, keep=self.keep + life)

    def leave(self, stamp: Stamp) -> None:
        """Take a member out with the next `flush`, unless it has been put in again by then."""
        if len(self._leaving) < MOST_LEAVING:
            self._leaving[stamp.key, stamp.member] = stamp.at

    def time_of(self, owner: bytes, session_id: str) -> Plain:
        """What asks for the time of an owner's session: to be sent before what ends it, for `ended`."""
        sessions = owner_keys(owner).sessions
        return Plain((b"ZSCORE", sessions, session_id.encode()), sessions)

    def ended(self, owner: bytes, session_id: str, at: Any = b"") -> None:
        """The session is no longer a running one, nor will be again: `at` is b"". Or another one of its id may be put
        in before this one is taken out: `at` is what `time_of` told before the end.
        """
        if isinstance(at, bytes):  # else it is not there, or Redis did not tell; what stays is found
            self.leave(Stamp(owner_keys(owner).sessions, session_id.encode(), at))

    def flush(self) -> list[Call]:
        """The calls that take out what is to leave. A call that is lost leaves a member to be found."""
        some = [Stamp(*pair, at) for pair, at in islice(self._leaving.items(), FLUSHED)]
        for stamp in some:
            del self._leaving[stamp.key, stamp.member]
        return [self._take(stamp, 0) for stamp in some]

    async def expired(self, limit: int, text: str) -> tuple[list[Abandoned], str]:
        """At most `limit` running sessions without a living owner, and the next call's cursor; "": that was all."""
        cursor = Cursor.parse(text) if text else Cursor()
        found: list[Abandoned] = []
        holders = await self._holders(cursor.shard)
        for shard, owner, ended in (holder for holder in holders if holder[:2] >= cursor[:2]):
            at = cursor.at if (shard, owner) == cursor[:2] else 0
            while True:
                if len(found) >= limit:
                    return found, str(Cursor(shard, owner, at))
                key = owner_keys(owner).sessions if owner else released_key(shard)
                page = await self._members(key, at, limit - len(found))
                if not page:
                    break
                found += await self._running(page, owner or NOBODY)
                at = int(page[-1].at)
            if owner and at == 0:  # it has no sessions, nor will: an owner that lives puts itself in again
                await self._drop([Stamp(owners_key(shard), owner.hex().encode(), ended)])
        return found, ""

    async def _holders(self, first: int) -> list[tuple[int, bytes, bytes]]:
        """From shard `first` on: nobody (b"") where it has any, every owner that is dead, and when its life ended."""
        shards = range(first, SHARDS)
        counts: list[Plain | Call] = [Plain((b"ZCARD", released_key(s)), released_key(s)) for s in shards]
        pages: list[Plain | Call] = [self._look(owners_key(s), 0, MOST_OWNERS) for s in shards]
        replies = [sound(reply) for reply in await self.runner.call_all(counts + pages)]
        holders = [(s, b"", b"") for s, count in zip(shards, replies, strict=False) if count]
        owners = [
            (s, bytes.fromhex(member.decode()), at)
            for s, page in zip(shards, replies[len(shards) :], strict=True)
            for member, at in zip(page[::2], page[1::2], strict=True)
        ]
        alive = [owner_keys(owner).alive for _, owner, _ in owners]
        lives = await self.runner.call_all([Plain((b"EXISTS", key), key) for key in alive])
        dead = [owner for owner, life in zip(owners, lives, strict=True) if not sound(life)]
        return sorted(holders + dead)

    async def _members(self, key: bytes, after: int, most: int) -> list[Stamp]:
        (reply,) = await self.runner.call_all([self._look(key, after, most)])
        page = sound(reply)
        return [Stamp(key, member, at) for member, at in zip(page[::2], page[1::2], strict=True)]

    async def _running(self, members: Sequence[Stamp], owner: bytes) -> list[Abandoned]:
        """Those of the members that run and are still `owner`'s; others are dropped."""
        ids = [stamp.member.decode() for stamp in members]
        replies = await self.runner.call_all([Call(self._brief, session_keys(i), ()) for i in ids])
        running, stale = [], []
        for stamp, session_id, reply in zip(members, ids, replies, strict=True):
            if is_newer(reply):
                continue  # whoever wrote it may know what it means
            packed, *about = sound(reply)
            answer = codec.unpack_answer(packed)
            if answer.status == Status.OK and answer.state.finish == 0 and answer.state.owner == owner:
                running.append(codec.unpack_abandoned(session_id, answer.state, about))
            else:
                stale.append(stamp)
        await self._drop(stale)
        return running

    async def _drop(self, stale: Sequence[Stamp]) -> None:
        await self.runner.call_all([self._take(stamp, self.grace) for stamp in stale])

    def _look(self, key: bytes, after: int, most: int) -> Call:
        return Call(self._page, (key,), (b"%d" % after, b"%d" % most))

    def _take(self, stamp: Stamp, age: int) -> Call:
        return Call(self._unstamp, (stamp.key,), (stamp.member, stamp.at, b"%d" % age))

    def _put(self, key: bytes, member: bytes, *, keep: int, life: int = 0, only_later: bool = False) -> Call:
        return Call(self._stamp, (key,), (member, b"%d" % life, b"GT" if only_later else b"", b"%d" % keep))


def _place(owner: bytes) -> tuple[bytes, bytes]:
    return owners_key(owner_shard(owner)), owner.hex().encode()
