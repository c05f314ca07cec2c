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
from services.kvstore.records import Answer, Entry, Lease, NewSession, Session, State, Status
from services.kvstore.scripts import RETRY_AFTER, Call, Runner, Script

log = get_log(__name__)

# A claim after a look at the lease is lost to another one this often at most before the caller hears of it.
CLAIMS = 3

# Error words of a Redis that cannot take writes now: a replica, a full disk or memory, a cluster without its primary.
PASSING = ("READONLY", "MISCONF", "OOM", "NOREPLICAS", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "LOADING", "BUSY")


class Store:
    """Sessions on one Redis. `tombstone` and `lease` are times in milliseconds.

    `on_change` is called with the id of every session that this process changed in a way that a reader can see.
    """

    def __init__(self, runner: Runner, *, tombstone: int, lease: int) -> None:
        self.runner, self.tombstone, self.lease = runner, tombstone, lease
        self.on_change: Callable[[str], None] = lambda session_id: None
        self._create, self._append, self._acquire = Script("create"), Script("append"), Script("acquire")
        self._close, self._cancel, self._delete = Script("close"), Script("cancel"), Script("delete")
        self._read = Script("read")

    async def create(self, new: NewSession) -> Answer:
        """OK, or EXISTS with what is there. A repeated call of the same creation is OK."""
        ttls = (b"%d" % new.ttl, b"%d" % self.tombstone)
        answer = await self._change(self._create, new.session_id, new.record, new.birth, new.owner, new.digest, *ttls)
        if answer.status not in (Status.OK, Status.EXISTS):
            raise _refusal(new.session_id, *answer)
        return answer

    async def append(self, entries: Sequence[Entry]) -> list[Answer]:
        """One step's entries, in one round trip; answers in the same order. Never raises for Redis's sake.

        UNAVAILABLE leaves open whether the entry was applied: the same entry again tells.
        """
        calls = [Call(self._append, keys(entry.session_id), (codec.pack_entry(entry),)) for entry in entries]
        try:
            replies = await self.runner.call_all(calls)
        except errors.Unavailable as error:
            log.warning("append failed", entries=len(entries), why=error.message)
            return [Answer(Status.UNAVAILABLE, State())] * len(entries)
        answers = [_append_answer(entry, reply) for entry, reply in zip(entries, replies, strict=True)]
        for entry, answer in zip(entries, answers, strict=True):
            if answer.status == Status.OK and (entry.tokens or entry.finish):
                self.on_change(entry.session_id)
        return answers

    async def acquire(self, session_id: str, owner: bytes, floor: int, birth: bytes, *, only_expired: bool) -> Answer:
        """Grants a lease of a higher epoch. `only_expired` refuses with Fenced while the present owner lives."""
        for _ in range(CLAIMS):
            expected = b""
            if only_expired:
                state = (await self.read(session_id, 0, chunks=0)).state
                if await self._lives(state.owner):
                    raise errors.Fenced(session_id, floor, state.epoch)
                expected = b"%d" % state.epoch
            answer = await self._change(self._acquire, session_id, owner, b"%d" % floor, birth, expected)
            if answer.status == Status.OK:
                return answer
            if answer.status != Status.RACED:
                break
        raise _refusal(session_id, *answer, floor)

    async def close(self, session_id: str, lease: Lease, birth: bytes, finish: int, usage: bytes) -> State:
        """Ends a session without tokens; an earlier finish wins."""
        fields = (b"%d" % lease.epoch, lease.owner, birth, b"%d" % finish, usage)
        answer = await self._change(self._close, session_id, *fields)
        if answer.status != Status.OK:
            raise _refusal(session_id, *answer, lease.epoch)
        self.on_change(session_id)
        return answer.state

    async def mark_cancel(self, session_id: str) -> tuple[bool, bytes]:
        """Whether the session was running, and its owner, who sees the mark at its next append or renewal."""
        answer = await self._change(self._cancel, session_id)
        if answer.status == Status.FINISHED:
            return False, answer.state.owner
        if answer.status != Status.OK:
            raise _refusal(session_id, *answer)
        cancelled, ttl = owner_keys(answer.state.owner)[1], b"%d" % self.tombstone
        await self._commands((b"SADD", cancelled, session_id.encode()), (b"PEXPIRE", cancelled, ttl))
        return True, answer.state.owner

    async def delete(self, session_id: str, birth: bytes = b"") -> bool:
        """Removes a session and leaves a tombstone; False: there was none.

        No tombstone where nothing was, unless `birth` says that the caller knows the session.
        """
        answer = await self._change(self._delete, session_id, b"%d" % self.tombstone, birth)
        self.on_change(session_id)
        return answer.status == Status.OK

    async def renew(self, owner: bytes, ttl: int) -> list[str]:
        """Keeps every lease of an owner for `ttl` ms (0: the default). The ids of its sessions to be cancelled."""
        alive, cancelled = owner_keys(owner)
        life = b"%d" % (ttl or self.lease)
        _, members = await self._commands((b"SET", alive, b"1", b"PX", life), (b"SMEMBERS", cancelled))
        ids = sorted(member.decode() for member in members)
        if not ids:
            return ids
        states = await self.states(ids)
        ended = [i for i in ids if (s := states[i]) is None or s.finish or s.owner != owner or not s.cancelled]
        if ended:
            await self._commands((b"SREM", cancelled, *(session_id.encode() for session_id in ended)))
        return [session_id for session_id in ids if session_id not in ended]

    async def read(self, session_id: str, from_offset: int, *, chunks: int, record: bool = False) -> Session:
        """A session at one moment, with at most `chunks` chunks from `from_offset` on."""
        limits = (b"%d" % from_offset, b"%d" % chunks, b"%d" % record)
        (reply,) = await self.runner.call_all([Call(self._read, keys(session_id), limits)])
        packed, stored, *raw = sound(reply)
        answer = codec.unpack_answer(packed)
        if answer.status != Status.OK:
            raise _refusal(session_id, *answer)
        return Session(stored, answer.state, codec.unpack_chunks(raw, from_offset))

    async def states(self, session_ids: Sequence[str]) -> dict[str, State | None]:
        """The states of many sessions in one round trip; None: there is none."""
        replies = await self.runner.call_all(
            [Call(self._read, keys(session_id), (b"0", b"0", b"0")) for session_id in session_ids]
        )
        answers = [codec.unpack_answer(sound(reply)[0]) for reply in replies]
        return {i: a.state if a.status == Status.OK else None for i, a in zip(session_ids, answers, strict=True)}

    async def _lives(self, owner: bytes) -> bool:
        (alive,) = await self._commands((b"EXISTS", owner_keys(owner)[0]))
        return bool(alive)

    async def _change(self, script: Script, session_id: str, *arguments: bytes) -> Answer:
        (reply,) = await self.runner.call_all([Call(script, keys(session_id), arguments)])
        if isinstance(reply, OutOfMemoryError):
            used, limit = await self._memory()
            raise errors.Overloaded("the store's memory in bytes", used, limit, RETRY_AFTER) from None
        return codec.unpack_answer(sound(reply))

    async def _memory(self) -> tuple[int, int]:
        (info,) = await self._commands((b"INFO", b"memory"))
        fields = parse_info(info)
        return int(fields["used_memory"]), int(fields["maxmemory"])

    async def _commands(self, *commands: Sequence[bytes]) -> list[Any]:
        return [sound(reply) for reply in await self.runner.exchange(commands)]


def keys(session_id: str) -> tuple[bytes, bytes, bytes]:
    """Record, log and mark of a session: one hash tag, so one slot of a Redis Cluster."""
    tag = b"hedgerow:{%b}:" % session_id.encode()
    return tag + b"record", tag + b"log", tag + b"mark"


def owner_keys(owner: bytes) -> tuple[bytes, bytes]:
    """An owner's liveness, and the set of its sessions that carry a cancel mark."""
    tag = b"hedgerow:{owner-%b}:" % owner.hex().encode()
    return tag + b"alive", tag + b"cancelled"


def parse_info(raw: bytes) -> dict[str, str]:
    """The reply of INFO as fields."""
    pairs = (line.partition(":") for line in raw.decode().splitlines() if ":" in line)
    return {name: value for name, _, value in pairs}


def _append_answer(entry: Entry, reply: Any) -> Answer:
    if not isinstance(reply, ResponseError):
        return codec.unpack_answer(reply)
    log.warning("append refused", session=entry.session_id, why=_refused("append", reply).message)
    return Answer(Status.UNAVAILABLE, State())


def sound(reply: Any) -> Any:
    """The reply, where Redis did not answer with an error."""
    if isinstance(reply, ResponseError):
        raise _refused("command", reply) from reply
    return reply


def _refused(what: str, error: ResponseError) -> errors.HedgerowError:
    """Redis answered, with an error: of its state, of its data's version, or of ours."""
    text = str(error)
    if any(word in text for word in PASSING):
        return errors.Unavailable("redis", text, RETRY_AFTER)
    if text.startswith("FORMAT"):
        return errors.Unsupported("store", f"its data was written by another version: {text}")
    log.error("redis refused", what=what, why=text)
    return errors.Internal(f"the store refused {what}")


def _refusal(session_id: str, status: Status, state: State, epoch: int = 0) -> errors.HedgerowError:
    """What a status other than OK means to the caller of a unary method."""
    if status == Status.EXPIRED:
        return errors.SessionExpired(session_id)
    if status in (Status.DELETED, Status.GONE):
        return errors.SessionDeleted(session_id)
    if status == Status.UNKNOWN or (status == Status.FORGOTTEN and state.epoch == 0):
        return errors.SessionUnknown(session_id)
    assert status in (Status.FENCED, Status.FORGOTTEN, Status.RACED), status
    return errors.Fenced(session_id, epoch, state.epoch)
