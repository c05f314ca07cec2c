"""Sessions that are being written to the store, each once however many clients wait for it."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from hedgerow import digest
from hedgerow.errors import KeyConflict, Overloaded, SessionUnknown, Unavailable
from services.gateway.messages import Created
from services.gateway.resolve import SEEDS, Resolved
from services.gateway.resuming import Resuming
from services.gateway.session import Options, Session
from services.gateway.table import SessionTable
from services.gateway.takeover import TakeOver
from services.gateway.types import Generation, Mode, Model, Record

ID_BYTES = 16
TRIES = 4  # to write a session that is there, and is not when it is read
NO_DEADLINE = 1e9  # gRPC tells a call without a deadline by a time in another century


class Store(Protocol):
    """The store as far as creating needs it."""

    async def create(self, record: Record, digest: bytes, replaces: bytes = b"") -> Created:
        """Write a session's record, or find what is there; a failed one with the birth mark `replaces` gives way."""


@dataclass
class _Creation:
    task: asyncio.Task[Session]
    waiting: int = 0


class Creating:
    """`most` sessions run here."""

    def __init__(self, table: SessionTable, store: Store, resuming: Resuming, takeover: TakeOver, most: int) -> None:
        self._table, self._store, self._resuming, self._takeover = table, store, resuming, takeover
        self.most = most
        self._creations: dict[str, _Creation] = {}

    def __len__(self) -> int:
        return len(self._creations)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._creations

    async def settled(self, session_id: str) -> None:
        """Return once this session is not being written."""
        if creation := self._creations.get(session_id):
            await asyncio.wait([creation.task])

    async def open(self, record: Record, options: Options) -> Session:
        """The session of this record, or the one that is there under its id.

        Raises KeyConflict where that is another request's; Overloaded, Unavailable, NotFound.
        """
        session = self._resuming.running(record.session_id) or await self._opened(record, options)
        check_same(session.record, record)
        return session

    async def _opened(self, record: Record, options: Options) -> Session:
        creation = self._creations.get(record.session_id)
        if creation is None:
            count = len(self._table.sessions) + len(self._creations)
            if count >= self.most:
                raise Overloaded("the gateway", count, self.most, 1.0)
            creation = _Creation(asyncio.create_task(self._write(record, options)))
            self._creations[record.session_id] = creation
        creation.waiting += 1
        try:
            # Not cancelled with the client's call: the store may have written it, and then somebody must end it.
            return await asyncio.shield(creation.task)
        except asyncio.CancelledError:
            creation.waiting -= 1
            if creation.task.done() and not creation.task.exception():
                self._left(creation, creation.task.result())
            raise

    async def _write(self, record: Record, options: Options) -> Session:
        replaces = b""
        try:
            for _ in range(TRIES):
                created = await self._created(record, replaces)
                if not created.existing:
                    break
                with suppress(SessionUnknown):  # the store lost it between two answers: what was asked is all here
                    there = await self._resuming.find(
                        record.session_id, lambda there: check_same(there, record), trace=options.trace
                    )
                    if not there.has_failed:
                        return there
                    replaces = there.record.birth  # nobody has got a token of it, so its key is as good as new
            else:
                raise Unavailable("kvstore", f"session {record.session_id} comes and goes")
            session = self._table.begin(record, created.epoch, options)
        finally:
            creation = self._creations.pop(record.session_id)
        self._takeover.admit(session, options.deadline)  # the store may have been away for long
        self._left(creation, session)
        return session

    def _left(self, creation: _Creation, session: Session) -> None:
        """A session that nobody waits for any more is as one whose last reader has left."""
        here = self._table.sessions.get(session.id) is session
        if here and not creation.waiting and not session.readers and not session.record.detach:
            self._table.cancel(session)

    async def _created(self, record: Record, replaces: bytes) -> Created:
        try:
            return await self._store.create(record, digest.first(record.session_id, record.prompt), replaces)
        except Unavailable:
            self._takeover.doubt(record.session_id)  # it may have been written
            raise


def session_id_of(asked: Generation, secret: bytes) -> str:
    """A keyed hash of tenant and idempotency key, random without one."""
    if not asked.idempotency_key:
        return secrets.token_hex(ID_BYTES)
    text = f"{len(asked.tenant)}:{asked.tenant}{asked.idempotency_key}".encode()
    return hmac.digest(secret, text, "sha256")[:ID_BYTES].hex()


def new_record(session_id: str, asked: Generation, resolved: Resolved, model: Model, seconds: float | None) -> Record:
    """`seconds` from now it ends by its deadline; None: it has none."""
    sampling, now = resolved.sampling, time.time_ns() // 1_000_000
    if sampling.seed is None:
        sampling = dataclasses.replace(sampling, seed=_seed_of(session_id))
    deadline = 0 if seconds is None else max(1, now + int(seconds * 1000))
    return Record(
        session_id, secrets.token_bytes(ID_BYTES), model.name, asked.tenant, resolved.prompt, asked.sampling,
        sampling, resolved.speculation, model.fingerprint, Mode.EXACT, now, asked.detach, deadline, asked.priority,
        asked.return_steps, asked.return_trees, asked.trace,
    )  # fmt: skip


def seconds_until(asked: Generation, seconds_left: float | None) -> float | None:
    """What is left of the call's deadline or of the request's, whichever is less; None: there is none."""
    given = [seconds_left] if seconds_left is not None and seconds_left < NO_DEADLINE else []
    if asked.deadline_ms:
        given.append(asked.deadline_ms / 1000)
    return min(given, default=None)


def check_same(there: Record, asked: Record) -> None:
    """Raises KeyConflict, which names the first field that differs. The budget, priority and deadline may."""
    if there.prompt != asked.prompt:
        raise KeyConflict("prompt", there.session_id)
    for field in dataclasses.fields(there.requested):
        if getattr(there.requested, field.name) != getattr(asked.requested, field.name):
            raise KeyConflict(f"sampling.{field.name}", there.session_id)
    if there.model != asked.model:
        raise KeyConflict("model", there.session_id)


def _seed_of(session_id: str) -> int:
    return int.from_bytes(hashlib.sha256(b"seed\0" + session_id.encode()).digest()[:8], "little") % SEEDS
