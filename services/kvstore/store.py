"""The commit log over Redis: every change of a session is one atomic script (DESIGN: the commit log, leases).

Expiry and lease ends are judged by the Redis server's clock. Errors: Unavailable where Redis is away, NotFound's
children where the session is, Fenced where the lease is another's, Overloaded where Redis is out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from redis.exceptions import OutOfMemoryError, ResponseError

from hedgerow import errors
from hedgerow.rpc.logs import get_log
from services.kvstore import codec
from services.kvstore.index import Index, Stamp
from services.kvstore.keys import session_keys
from services.kvstore.owners import Owners
from services.kvstore.records import FAILED, NOBODY, Answer, Entry, Lease, NewSession, Session, State, Status
from services.kvstore.replies import is_newer, parse_info, refusal, refused, sound
from services.kvstore.runner import RETRY_AFTER, Runner
from services.kvstore.scripts import Call, Plain, Script

NAMED = 32  # sessions in one line of the log
log = get_log(__name__)

# A claim after a look at the lease is lost to another one this often at most before the caller hears of it.
CLAIMS = 3


class Store:
    """Sessions on one Redis. `tombstone` is a time in milliseconds.

    `on_change` is called with the id of every session that this process changed in a way that a reader can see.
    """

    def __init__(self, runner: Runner, index: Index, owners: Owners, *, tombstone: int) -> None:
        self.runner, self.index, self.owners, self.tombstone = runner, index, owners, tombstone
        self.on_change: Callable[[str], None] = lambda session_id: None
        self._create, self._append, self._acquire = Script("create"), Script("append"), Script("acquire")
        self._close, self._cancel, self._delete = Script("close"), Script("cancel"), Script("delete")
        self._read, self._release = Script("read"), Script("release")

    async def create(self, new: NewSession) -> Answer:
        """OK, or EXISTS with what is there. A repeated call of the same creation is OK.

        A session that failed before its first token gives way where the new one names it.
        """
        stamp = await self.index.enter(new.owner, new.session_id, new)
        answer = await self._write(new, stamp)
        if answer.status not in (Status.OK, Status.EXISTS):
            raise refusal(new.session_id, *answer)
        return answer

    async def append(self, entries: Sequence[Entry]) -> list[Answer]:
        """One step's entries, in one round trip to each node; answers in the same order. Never raises for Redis's sake.

        UNAVAILABLE leaves open whether the entry was applied: the same entry again tells.
        """
        appends = [Call(self._append, session_keys(entry.session_id), (codec.pack_entry(entry),)) for entry in entries]
        # Another one may take the place of a session that failed before its first token.
        failed = [each for each in entries if each.finish == FAILED and not each.offset and not each.tokens]
        times = [self.index.time_of(entry.lease.owner, entry.session_id) for entry in failed]
        told = await self.runner.call_all([*times, *appends], durable=True)
        at = {entry.session_id: time for entry, time in zip(failed, told, strict=False)}
        replies = told[len(times) :]
        lost = [reply for reply in replies if isinstance(reply, errors.HedgerowError)]
        if lost:
            pairs = zip(entries, replies, strict=True)
            named = [entry.session_id for entry, reply in pairs if isinstance(reply, errors.HedgerowError)][:NAMED]
            log.warning("append failed", entries=len(lost), of=len(entries), sessions=named, why=lost[0].message)
        answers = [_append_answer(entry, reply) for entry, reply in zip(entries, replies, strict=True)]
        for entry, answer in zip(entries, answers, strict=True):
            if answer.status == Status.OK and (entry.tokens or entry.finish):
                self.on_change(entry.session_id)
            if answer.status == Status.OK and answer.state.finish:
                self.index.ended(entry.lease.owner, entry.session_id, at.get(entry.session_id, b""))
        return answers

    async def acquire(
        self,
        session_id: str,
        owner: bytes,
        floor: int,
        birth: bytes,
        *,
        only_expired: bool,
        lost: NewSession | None = None,
    ) -> Answer:
        """Grants a lease of a higher epoch. `only_expired` refuses with Fenced while the present owner lives.

        `lost` is written where there is neither record nor tombstone.
        """
        for _ in range(CLAIMS):
            expected = b""
            if only_expired and (present := await self._present(session_id)) is not None:
                if await self.owners.lives(present.owner):
                    raise errors.Fenced(session_id, floor, present.epoch)
                expected = b"%d" % present.epoch
            stamp = await self.index.enter(owner, session_id, lost)
            answer = await self._change(self._acquire, session_id, owner, b"%d" % floor, birth, expected)
            if answer.status == Status.UNKNOWN and lost is not None:
                answer = await self._restore(lost, stamp, floor)
            if answer.status == Status.OK:
                if answer.state.finish:
                    self.index.leave(stamp)
                return answer
            self._left(stamp, answer.state, owner)
            if answer.status != Status.RACED:
                break
        raise refusal(session_id, *answer, floor)

    async def release(self, session_id: str, lease: Lease, birth: bytes) -> State:
        """Gives the lease up: from here on NOBODY owns the session. A repeated call is answered as the first was."""
        entered, left = await self.index.enter_released(lease.owner, session_id)
        answer = await self._change(self._release, session_id, b"%d" % lease.epoch, lease.owner, birth)
        if answer.status != Status.OK:
            self._left(entered, answer.state, NOBODY)
            if left is not None:
                self._left(left, answer.state, lease.owner)
            raise refusal(session_id, *answer, lease.epoch)
        if left is not None:
            self.index.leave(left)
        return answer.state

    async def close(self, session_id: str, lease: Lease, birth: bytes, finish: int, usage: bytes) -> State:
        """Ends a session without tokens; an earlier finish wins."""
        fields = (b"%d" % lease.epoch, lease.owner, birth, b"%d" % finish, usage)
        at = b""
        if finish == FAILED:  # another one may take its place
            (at,) = await self.runner.call_all([self.index.time_of(lease.owner, session_id)])
        answer = await self._change(self._close, session_id, *fields)
        if answer.status != Status.OK:
            raise refusal(session_id, *answer, lease.epoch)
        self.on_change(session_id)
        self.index.ended(lease.owner, session_id, at)
        return answer.state

    async def mark_cancel(self, session_id: str) -> tuple[bool, bytes]:
        """Whether the session was running, and its owner, who is told, and sees the mark at its next append."""
        answer = await self._change(self._cancel, session_id)
        if answer.status == Status.FINISHED:
            return False, answer.state.owner
        if answer.status != Status.OK:
            raise refusal(session_id, *answer)
        await self.owners.tell(answer.state.owner, session_id)
        return True, answer.state.owner

    async def delete(self, session_id: str, birth: bytes = b"") -> bool:
        """Removes a session and leaves a tombstone; False: there was none.

        No tombstone where nothing was, unless `birth` says that the caller knows the session.
        """
        answer = await self._change(self._delete, session_id, b"%d" % self.tombstone, birth)
        self.on_change(session_id)
        if answer.status == Status.OK:
            self.index.ended(answer.state.owner, session_id)
        return answer.status == Status.OK

    async def renew(self, owner: bytes, ttl: int) -> list[str]:
        """Keeps every lease of an owner for `ttl` ms (0: the default). The ids of its sessions to be cancelled."""
        return await self.marked(owner, await self.owners.renew(owner, ttl))

    async def marked(self, owner: bytes, ids: Sequence[str] | None = None) -> list[str]:
        """Which of an owner's sessions (None: all) are to be cancelled."""
        ids = await self.owners.told(owner) if ids is None else ids
        if not ids:
            return []
        states = await self.states(ids)
        ended = [i for i, s in states.items() if s is None or s.finish or s.owner != owner or not s.cancelled]
        await self.owners.forget(owner, ended)
        return [session_id for session_id in states if session_id not in ended]

    async def read(
        self, session_id: str, from_offset: int, *, chunks: int, record: bool = False, durable: bool = False
    ) -> Session:
        """A session at one moment, with at most `chunks` chunks from `from_offset` on.

        `durable`: as many replicas as configured have what is told, or it is Unavailable. Whoever gives tokens to a
        client asks so: an append that too few replicas have is there to be read, and may yet be lost.
        """
        limits = (b"%d" % from_offset, b"%d" % chunks, b"%d" % record)
        call = Call(self._read, session_keys(session_id), limits)
        (reply,) = await self.runner.call_all([call], durable=durable)
        packed, stored, *raw = sound(reply)
        answer = codec.unpack_answer(packed)
        if answer.status != Status.OK:
            raise refusal(session_id, *answer)
        return Session(stored, answer.state, codec.unpack_chunks(raw, from_offset))

    async def states(self, session_ids: Sequence[str]) -> dict[str, State | None]:
        """The states of many sessions in one round trip to each node; None: there is none.

        Left out are those of a newer version, and, while others can be read, those whose node is away.
        """
        replies = await self.runner.call_all(
            [Call(self._read, session_keys(session_id), (b"0", b"0", b"0")) for session_id in session_ids]
        )
        away = [isinstance(reply, errors.Unavailable) for reply in replies]
        told = [
            (session_id, codec.unpack_answer(sound(reply)[0]))
            for session_id, reply, silent in zip(session_ids, replies, away, strict=True)
            if not is_newer(reply) and (all(away) or not silent)
        ]
        return {session_id: answer.state if answer.status == Status.OK else None for session_id, answer in told}

    async def _present(self, session_id: str) -> State | None:
        """The session's state; None: there is no record."""
        (reply,) = await self.runner.call_all([Call(self._read, session_keys(session_id), (b"0", b"0", b"0"))])
        answer = codec.unpack_answer(sound(reply)[0])
        return answer.state if answer.status == Status.OK else None

    async def _restore(self, lost: NewSession, stamp: Stamp, floor: int) -> Answer:
        """OK, or RACED where the session is there by now. Raises Unavailable where Redis is out of memory."""
        try:
            answer = await self._write(lost, stamp)
        except errors.Overloaded as full:
            raise errors.Unavailable("store", full.message, RETRY_AFTER) from full
        if answer.status == Status.EXISTS or (answer.status == Status.OK and answer.state.epoch <= floor):
            return answer._replace(status=Status.RACED)
        if answer.status == Status.OK:
            log.warning("a lost session is written again", session=lost.session_id, epoch=answer.state.epoch)
        return answer

    async def _write(self, new: NewSession, stamp: Stamp) -> Answer:
        numbers = (b"%d" % new.ttl, b"%d" % self.tombstone, b"%d" % new.epoch, b"%d" % new.detach, b"%d" % new.deadline)
        inexact = b"0" if new.best_effort else b""
        marks = (new.birth, new.owner, new.digest)
        try:
            answer = await self._change(
                self._create, new.session_id, new.record, *marks, *numbers, inexact, new.replaces
            )
        except errors.Overloaded:
            self.index.leave(stamp)
            raise
        if answer.state.finish:
            self.index.leave(stamp)
        elif answer.status != Status.OK:
            self._left(stamp, answer.state, new.owner)
        return answer

    def _left(self, stamp: Stamp, state: State, owner: bytes) -> None:
        """The call for which an index was entered was refused; what is `owner`'s all the same stays in it."""
        if state.owner != owner:
            self.index.leave(stamp)

    async def _change(self, script: Script, session_id: str, *arguments: bytes) -> Answer:
        keys = session_keys(session_id)
        (reply,) = await self.runner.call_all([Call(script, keys, arguments)], durable=True)
        if isinstance(reply, OutOfMemoryError):
            used, limit = await self._memory(keys[0])
            raise errors.Overloaded("the store's memory in bytes", used, limit, RETRY_AFTER) from None
        return codec.unpack_answer(sound(reply))

    async def _memory(self, key: bytes) -> tuple[int, int]:
        """What the key's node uses, and what it may."""
        (info,) = await self.runner.call_all([Plain((b"INFO", b"memory"), key)])
        fields = parse_info(sound(info))
        return int(fields["used_memory"]), int(fields["maxmemory"])


def _append_answer(entry: Entry, reply: Any) -> Answer:
    if isinstance(reply, bytes):
        return codec.unpack_answer(reply)
    if isinstance(reply, ResponseError):
        log.warning(
            "append refused",
            session=entry.session_id,
            epoch=entry.lease.epoch,
            offset=entry.offset,
            why=refused("append", reply).message,
        )
    return Answer(Status.UNAVAILABLE, State())
