"""One store for several gateways, in memory: the rules of leases and logs, no wire. It can be away, forget and hang."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from hedgerow import digest
from hedgerow.errors import Fenced, SessionUnknown, Unavailable
from services.gateway.leases import Leases
from services.gateway.messages import Append, Created, Expired, ExpiredPage, Granted, Growth, Note, State, Stored, Usage
from services.gateway.types import Finish, Record

NOBODY = bytes(16)


@dataclass
class Kept:
    """A session as it is stored."""

    record: Record
    state: State
    tokens: list[int] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    notes: list[Note] = field(default_factory=list)

    def steps(self, begin: int) -> list[Note]:
        """The statistics behind an offset."""
        return [note for note in self.notes if begin < note.end <= len(self.tokens)]

    def grow(self, tokens: Sequence[int], **state: object) -> None:
        """Its owner appends."""
        self.tokens += tokens
        after = digest.extend(self.state.digest, tokens)
        fields = {"length": len(self.tokens), "digest": after, **state}
        self.state = self.state._replace(**fields)  # type: ignore[arg-type]
        self.wake()

    def lose(self, length: int) -> None:
        """A fail-over: it comes back shorter."""
        del self.tokens[length:]
        first = digest.first(self.record.session_id, self.record.prompt)
        self.state = self.state._replace(length=length, digest=digest.extend(first, self.tokens))

    def wake(self) -> None:
        """Tell those who follow."""
        self.changed.set()
        self.changed = asyncio.Event()


class SharedStore:
    """Sessions, and which owners live."""

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}
        self.alive: set[bytes] = set()
        self.away = False
        self.grants_unheard = False
        """The next lease is granted and the answer lost."""
        self.follows = 0
        """Tails that are open."""

    def put(self, record: Record, owner: bytes, tokens: Sequence[int] = (), **state: object) -> Kept:
        """A session as its owner has left it."""
        kept = Kept(record, State(1, owner, 0, digest.first(record.session_id, record.prompt)))
        self.kept[record.session_id] = kept
        kept.grow(tokens, **state)
        return kept

    def of(self, owner: bytes) -> SharedStoreView:
        """The store as one living gateway sees it."""
        self.alive.add(owner)
        return SharedStoreView(self, owner)

    def found(self, session_id: str) -> Kept:
        """Raises Unavailable, SessionUnknown."""
        self.check()
        if session_id not in self.kept:
            raise SessionUnknown(session_id)
        return self.kept[session_id]

    def check(self) -> None:
        """Raises Unavailable while the store is away."""
        if self.away:
            raise Unavailable("kvstore", "away")


class SharedStoreView:
    """See the Store of resuming.py, takeover.py, creating.py, endings.py and orphans.py."""

    def __init__(self, store: SharedStore, owner: bytes) -> None:
        self.store, self.owner = store, owner
        self.acquired = self.unanswered = 0

    async def create(self, record: Record, digest: bytes, replaces: bytes = b"") -> Created:
        self.store.check()
        epoch = 1
        if kept := self.store.kept.get(record.session_id):
            failed = kept.state.finish is Finish.ERROR and not kept.tokens
            if not failed or kept.record.birth != replaces:
                return Created(0, kept.state)
            epoch = kept.state.epoch + 1
        assert self.store.put(record, self.owner, epoch=epoch).state.digest == digest
        if self.store.grants_unheard:
            self.store.grants_unheard = False
            raise Unavailable("kvstore", "no answer")
        return Created(epoch)

    async def renew(self) -> list[str]:
        self.store.check()
        states = [(i, k.state) for i, k in self.store.kept.items()]
        return [i for i, s in states if s.owner == self.owner and s.cancel_marked and not s.finish]

    def append(self, entries: Sequence[Append]) -> None:
        """The test says what is appended."""

    def forget(self, session_id: str) -> None:
        """Nothing is on its way."""

    async def get(self, session_id: str, from_offset: int = 0) -> Stored:
        kept = self.store.found(session_id)
        return Stored(kept.record, kept.state, kept.tokens[from_offset:], kept.steps(from_offset))

    async def acquire(
        self, record: Record, *, floor: int = 0, repair: bool = False, only_expired: bool = True
    ) -> Granted:
        if repair and record.session_id not in self.store.kept:
            self.store.check()
            kept = self.store.put(record, self.owner)
        else:
            kept = self.store.found(record.session_id)
        if only_expired and kept.state.owner != self.owner and kept.state.owner in self.store.alive:
            raise Fenced(record.session_id, 0, kept.state.epoch)
        epoch = max(kept.state.epoch, floor) + 1
        kept.state = kept.state._replace(epoch=epoch, owner=self.owner)
        self.acquired += 1
        if self.store.grants_unheard:
            self.store.grants_unheard = False
            raise Unavailable("kvstore", "no answer")
        return Granted(epoch, kept.state)

    async def release(self, record: Record, epoch: int) -> State:
        kept = self.store.found(record.session_id)
        if (kept.state.epoch, kept.state.owner) != (epoch, self.owner):
            raise Fenced(record.session_id, epoch, kept.state.epoch)
        kept.state = kept.state._replace(owner=NOBODY)
        return kept.state

    async def mark_cancel(self, session_id: str) -> bool:
        kept = self.store.found(session_id)
        kept.state = kept.state._replace(cancel_marked=True)
        return not kept.state.finish

    async def end(self, record: Record, epoch: int, finish: Finish, usage: Usage) -> State:
        kept = self.store.found(record.session_id)
        if (kept.state.epoch, kept.state.owner) != (epoch, self.owner):
            raise Fenced(record.session_id, epoch, kept.state.epoch)
        if not kept.state.finish:
            kept.grow([], finish=finish, usage=usage)
        return kept.state

    async def expired(self, cursor: str = "", limit: int = 0) -> ExpiredPage:
        self.store.check()
        ids = sorted(i for i, k in self.store.kept.items() if not k.state.finish and i > cursor)
        ids = [i for i in ids if self.store.kept[i].state.owner not in self.store.alive]
        page = [
            Expired(i, k.state, k.record.detach, k.record.deadline_unix_ms)
            for i in ids[:2]
            if (k := self.store.kept[i])
        ]
        return ExpiredPage(page, ids[1] if len(ids) > 2 else "")

    async def tail(self, session_id: str, from_offset: int) -> AsyncGenerator[Growth, None]:
        offset = from_offset
        self.store.follows += 1
        try:
            while True:
                kept = self.store.found(session_id)
                state, fresh = kept.state, kept.tokens[offset:]
                if fresh or (state.finish and offset >= state.length):
                    notes = kept.steps(offset)
                    offset += len(fresh)
                    yield Growth(offset - len(fresh), fresh, state.digest, state if state.finish else None, notes)
                else:
                    await kept.changed.wait()
        finally:
            self.store.follows -= 1


def leases_of(view: SharedStoreView) -> Leases:
    """The lease calls of one gateway."""
    return Leases(view, 5.0)
