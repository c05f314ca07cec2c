"""The sessions of a tenant that are retained: one sorted set a tenant, by the time at which each was made.

A member is a session's id and, behind a space, what a list tells of it and never changes, so that a page of the list
reads nothing else of a session but its state. As in the other indexes a session enters before it is created, and a
member may stand for one that is gone: a list leaves it out, and it is dropped when it is found. Where sessions are made
and never listed the index would grow for ever: `tidy` looks at two members for each that entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hedgerow.errors import InvalidRequest
from services.kvstore import codec
from services.kvstore.keys import owner_keys, session_keys, tenant_key
from services.kvstore.records import NOBODY, Listed, NewSession, Status
from services.kvstore.replies import is_newer, sound
from services.kvstore.runner import Runner
from services.kvstore.scripts import Call, Plain, Script

PAGES = 8  # that one call of a list reads at most: where most members are stale it gives fewer than were asked for
MOST_TENANTS = 4096  # of which it is known that sessions entered; others are tidied by who lists them
MOST_TIDIED = 1024  # members that one `tidy` looks at


class _Tidying(NamedTuple):
    """How many sessions have entered since it was tidied, and where that goes on."""

    entered: int
    after: int


class Listing:
    """`grace`: milliseconds after which a member that stands for nothing is dropped."""

    def __init__(self, runner: Runner, grace: int) -> None:
        self.runner, self.grace = runner, grace
        self._newest, self._page = Script("newest", shared=False), Script("page", shared=False)
        self._unstamp, self._brief = Script("unstamp", shared=False), Script("brief")
        self._tidying: dict[bytes, _Tidying] = {}

    def place(self, new: NewSession) -> tuple[bytes, bytes]:
        """The index and the member of a session that is about to enter."""
        key = tenant_key(new.tenant)
        known = self._tidying.pop(key, _Tidying(0, 0))
        self._tidying[key] = known._replace(entered=known.entered + 1)
        if len(self._tidying) > MOST_TENANTS:
            del self._tidying[next(iter(self._tidying))]
        return key, new.session_id.encode() + b" " + new.summary

    async def sessions(self, tenant: str, limit: int, cursor: str) -> tuple[list[Listed], str]:
        """At most `limit`, the newest first, and the next call's cursor; "": that was all. Raises InvalidRequest."""
        if cursor and not (cursor.isascii() and cursor.isdigit() and len(cursor) <= 17):
            raise InvalidRequest("cursor", cursor, "what the last answer gave, or empty")
        key, found = tenant_key(tenant), list[Listed]()
        for _ in range(PAGES):
            wanted = limit - len(found)
            members = await self._members(Call(self._newest, (key,), (cursor.encode(), b"%d" % wanted)))
            found += await self._living(key, members)
            if len(members) < wanted:
                return found, ""
            cursor = members[-1][1].decode()
            if len(found) >= limit:
                break
        return found, cursor

    async def tidy(self) -> None:
        """Drop what stands for nothing, in the indexes that sessions entered. To be called about once a second."""
        left = MOST_TIDIED
        for key, (entered, after) in list(self._tidying.items()):
            most = min(2 * entered, left)
            members = await self._members(Call(self._page, (key,), (b"%d" % after, b"%d" % most))) if most else []
            await self._living(key, members[::-1])  # of two of one session the newest stays
            left -= len(members)
            if key in self._tidying:
                more = self._tidying[key].entered - entered
                self._tidying[key] = _Tidying(more, int(members[-1][1]) if len(members) == most and most else 0)

    async def _members(self, call: Call) -> list[tuple[bytes, bytes]]:
        """Members and their times."""
        (reply,) = await self.runner.call_all([call])
        page = sound(reply)
        return list(zip(page[::2], page[1::2], strict=True))

    async def _living(self, key: bytes, members: Sequence[tuple[bytes, bytes]]) -> list[Listed]:
        """The sessions that are still there; the others' members are dropped."""
        ids = [member.partition(b" ")[0].decode() for member, _ in members]
        replies = await self.runner.call_all([Call(self._brief, session_keys(i), ()) for i in ids])
        there, stale, seen = [], [], set[str]()
        for (member, at), session_id, reply in zip(members, ids, replies, strict=True):
            if is_newer(reply):
                continue  # whoever wrote it may know what it means
            answer = codec.unpack_answer(sound(reply)[0])
            if answer.status != Status.OK or session_id in seen:
                stale.append(Call(self._unstamp, (key,), (member, at, b"%d" % self.grace)))
            else:
                there.append((member, answer.state))
            seen.add(session_id)
        owners = sorted({state.owner for _, state in there if not state.finish and state.owner != NOBODY})
        keys = [owner_keys(owner).alive for owner in owners]
        replies = await self.runner.call_all([*(Plain((b"EXISTS", key), key) for key in keys), *stale])
        lives = {owner: bool(sound(reply)) for owner, reply in zip(owners, replies, strict=False)}
        return [Listed(member.partition(b" ")[2], state, lives.get(state.owner, False)) for member, state in there]
