"""Owners, which are incarnations of gateways: whether they live, and which of their sessions are to be cancelled."""

from __future__ import annotations

from collections.abc import Sequence

from services.kvstore.index import Index
from services.kvstore.keys import CANCELS, owner_keys
from services.kvstore.records import NOBODY
from services.kvstore.replies import sound
from services.kvstore.runner import Runner
from services.kvstore.scripts import Call, Plain, Script


class Owners:
    """`lease` is how long an owner lives after a renewal, `marks` how long a mark waits for it; in milliseconds."""

    def __init__(self, runner: Runner, index: Index, *, lease: int, marks: int) -> None:
        self.runner, self.index, self.lease, self.marks = runner, index, lease, marks
        self._renew, self._notify = Script("renew", shared=False), Script("notify", shared=False)

    async def renew(self, owner: bytes, ttl: int) -> list[str]:
        """Keeps an owner alive for `ttl` ms (0: the default). Its sessions that were marked, some of them long ended.

        What is to leave the indexes rides along.
        """
        life = ttl or self.lease
        renewal = Call(self._renew, owner_keys(owner), (b"%d" % life, b"%d" % (self.index.keep + life)))
        replies = await self.runner.call_all([renewal, self.index.renewal(owner, life), *self.index.flush()])
        marked, _ = (sound(reply) for reply in replies[:2])
        return _ids(marked)

    async def lives(self, owner: bytes) -> bool:
        """Whether the owner renewed within its life."""
        if owner == NOBODY:
            return False
        alive = owner_keys(owner).alive
        (reply,) = await self.runner.call_all([Plain((b"EXISTS", alive), alive)])
        return bool(sound(reply))

    async def tell(self, owner: bytes, session_id: str) -> None:
        """The session carries a mark: write it down for its owner's next renewal, and wake who watches for it."""
        if owner == NOBODY:
            return
        word = session_id.encode()
        arguments = (word, b"%d" % self.marks, CANCELS, owner + word)
        (reply,) = await self.runner.call_all([Call(self._notify, (owner_keys(owner).cancelled,), arguments)])
        sound(reply)

    async def told(self, owner: bytes) -> list[str]:
        """Its sessions that were marked, some of them long ended."""
        cancelled = owner_keys(owner).cancelled
        (reply,) = await self.runner.call_all([Plain((b"SMEMBERS", cancelled), cancelled)])
        return _ids(sound(reply))

    async def forget(self, owner: bytes, session_ids: Sequence[str]) -> None:
        """These need no mark any more."""
        if session_ids:
            cancelled = owner_keys(owner).cancelled
            words = (b"SREM", cancelled, *(session_id.encode() for session_id in session_ids))
            sound(*await self.runner.call_all([Plain(words, cancelled)]))


def _ids(members: Sequence[bytes]) -> list[str]:
    return sorted(member.decode() for member in members)
