"""What a gateway does for its clients: open sessions, find them, end them."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from hedgerow import digest
from hedgerow.errors import AlreadyExists, Fenced, Overloaded, Unavailable
from hedgerow.rpc.logs import get_log
from services.gateway.config import GatewayConfig
from services.gateway.endings import ALL, Endings
from services.gateway.leases import Leases
from services.gateway.limits import KEY_BYTES, check_bytes
from services.gateway.messages import Created, Stored
from services.gateway.peers import VerifierPeer
from services.gateway.resolve import SEEDS, Limits, Resolved, Resolver, check_model, default_thinking
from services.gateway.session import Options, Session
from services.gateway.store_peer import StorePeer
from services.gateway.stream import Stream
from services.gateway.table import SessionTable
from services.gateway.tokenizer import Tokenizer
from services.gateway.types import Chat, Finish, Generation, Mode, Model, Record
from services.gateway.verifiers import Policy, Verifiers

ID_BYTES = 16
POLL = 0.01
SWEEP = 0.1  # seconds between two looks for deadlines that passed and sessions that wait for a verifier
NO_DEADLINE = 1e9  # gRPC tells a call without a deadline by a time in another century
log = get_log(__name__)


@dataclass
class _Creation:
    """A session that is being written to the store, and how many clients wait for it."""

    task: asyncio.Task[Session]
    waiting: int = 0


class Gateway:
    """The sessions of this process and the two peers behind them."""

    def __init__(
        self, config: GatewayConfig, tokenizer: Tokenizer, verifiers: Sequence[VerifierPeer], store: StorePeer
    ) -> None:
        self._config, self._tokenizer, self._verifiers, self._store = config, tokenizer, verifiers, store
        self._secret = config.tenant_secret.encode() or secrets.token_bytes(ID_BYTES)
        limits = Limits(config.max_prompt_bytes, config.default_max_tokens)
        self._resolver = Resolver(tokenizer, limits, default_thinking(config.model_path))
        self._endings = Endings(store, config.max_sessions)
        self._leases = Leases(store, config.store_patience)
        later = config.fingerprint_patience if config.fingerprint_policy == "best_effort" else None
        self.table = SessionTable(
            Verifiers(verifiers, Policy(config.failover_patience, later)),
            store,
            self._leases,
            lag=config.client_lag,
            patience=config.client_patience,
            unrecorded=self._endings.remember,
        )
        self._creating: dict[str, _Creation] = {}

    async def run(self) -> None:
        """Keep the peers' streams and this gateway's leases, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for verifier in self._verifiers:
                tasks.create_task(verifier.run(self.table))
            tasks.create_task(self._store.run(self.table.appended, self.table.store_lost))
            tasks.create_task(every(self._config.lease_seconds / 4, self._renew))
            tasks.create_task(every(SWEEP, self._sweep))
            tasks.create_task(every(1.0, self._endings.record))

    async def drained(self, patience: float) -> None:
        """Return once the store has every session's end, or after about `patience` seconds."""
        for _ in range(int(patience / POLL)):
            if not self.table.sessions and not self._creating and not len(self._endings) and not len(self._leases):
                return
            await asyncio.sleep(POLL)

    def held(self) -> dict[str, int]:
        """What this process holds for its clients; all but `tasks` is zero when there are none."""
        return {
            "sessions": len(self.table.sessions),
            "creating": len(self._creating),
            "readers": sum(len(session.readers) for session in self.table.sessions.values()),
            "unanswered": self._store.unanswered,
            "unrecorded": len(self._endings),
            "leases": len(self._leases),
            "dropped": self.table.dropped,
            "tasks": len(asyncio.all_tasks()),
        }

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together, at most. Raises Unavailable while that is not known."""
        return self._attached().context_length

    async def generate(self, asked: Generation, seconds_left: float | None) -> Stream:
        """Start a session, or join the one of the same idempotency key; the caller closes the stream.

        The key's session is the same where prompt, sampling parameters and model are: the budget changes no token, so
        another one joins, and gets the session as the first caller asked for it: its speed, its deadline, and
        statistics only if that one wanted some.
        Raises InvalidRequest, Unsupported, Overloaded, Unavailable; AlreadyExists where the key's session is another.
        """
        model = self._attached(asked.model)
        resolved = await self._resolver.resolve(asked, model)
        record = self._record(asked, resolved, model)
        session = self.table.sessions.get(record.session_id)
        if session is None:
            session = await self._create(record, self._options(asked, seconds_left))
        _check_same(session.record, record)
        return Stream(session, self._tokenizer.pieces, self.table)

    async def cancel(self, session_id: str) -> bool:
        """End a session wherever it runs; False: it had ended. Raises InvalidRequest, NotFound, Unavailable."""
        check_bytes("session_id", session_id, KEY_BYTES)
        session = self.table.sessions.get(session_id)
        if session:
            return self.table.cancel(session)
        was_running = await self._store.mark_cancel(session_id)
        if was_running and not self._runs_here(session_id):
            await self._endings.cancelled(session_id)
        return was_running

    async def session(self, session_id: str) -> Stored:
        """What is recorded of a session, without its tokens. Raises InvalidRequest, NotFound, Unavailable."""
        check_bytes("session_id", session_id, KEY_BYTES)
        return await self._store.get(session_id, from_offset=ALL)

    async def delete(self, session_id: str) -> bool:
        """Remove a session, ending it if it runs here; False: there was none. Raises InvalidRequest, Unavailable."""
        check_bytes("session_id", session_id, KEY_BYTES)
        session = self.table.sessions.get(session_id)
        if session:
            self.table.cancel(session)
            ended = asyncio.Event()
            reader = self.table.read(session, ended.set)
            while not session.done:
                await ended.wait()
                ended.clear()
            self.table.leave(reader)
        return await self._store.delete(session_id, session.record.birth if session else b"")

    def models(self) -> Sequence[tuple[Model, bool]]:
        """What is served, and whether it is ready."""
        ready: dict[str, tuple[Model, bool]] = {}
        for verifier in self._verifiers:
            if verifier.model and not ready.get(verifier.model.name, (None, False))[1]:
                ready[verifier.model.name] = (verifier.model, verifier.attached)
        return list(ready.values())

    async def tokenize(self, model: str, prompt: str | Chat | None) -> list[int]:
        """The ids of text or messages. Raises InvalidRequest, Unsupported, Unavailable."""
        check_model(model, self._attached(model))
        return await self._resolver.encode(prompt)

    def _attached(self, name: str = "") -> Model:
        """The model of this name where a verifier serves it, else of any that takes sessions."""
        open_ = [v.model for v in self._verifiers if v.model and v.attached and not v.draining]
        if not open_:
            raise Unavailable("verifier", "no stream to one that takes sessions is open")
        return next((model for model in open_ if model.name == name), open_[0])

    def _record(self, asked: Generation, resolved: Resolved, model: Model) -> Record:
        session_id, sampling = self._session_id(asked), resolved.sampling
        if sampling.seed is None:
            sampling = dataclasses.replace(sampling, seed=_seed_of(session_id))
        return Record(
            session_id, secrets.token_bytes(ID_BYTES), model.name, asked.tenant, resolved.prompt, asked.sampling,
            sampling, resolved.speculation, model.fingerprint, Mode.EXACT, time.time_ns() // 1_000_000,
        )  # fmt: skip

    def _session_id(self, asked: Generation) -> str:
        if not asked.idempotency_key:
            return secrets.token_hex(ID_BYTES)
        text = f"{len(asked.tenant)}:{asked.tenant}{asked.idempotency_key}".encode()
        return hmac.digest(self._secret, text, "sha256")[:ID_BYTES].hex()

    def _options(self, asked: Generation, seconds_left: float | None) -> Options:
        given = [seconds_left] if seconds_left is not None and seconds_left < NO_DEADLINE else []
        if asked.deadline_ms:
            given.append(asked.deadline_ms / 1000)
        deadline = time.monotonic() + min(given) if given else None
        return Options(asked.priority, deadline, asked.trace, asked.return_steps, asked.return_trees)

    async def _create(self, record: Record, options: Options) -> Session:
        creation = self._creating.get(record.session_id)
        if creation is None:
            count = len(self.table.sessions) + len(self._creating)
            if count >= self._config.max_sessions:
                raise Overloaded("the gateway", count, self._config.max_sessions, 1.0)
            creation = _Creation(asyncio.create_task(self._write(record, options)))
            self._creating[record.session_id] = creation
        creation.waiting += 1
        try:
            # Not cancelled with the client's call: the store may have written it, and then somebody must end it.
            return await asyncio.shield(creation.task)
        except asyncio.CancelledError:
            creation.waiting -= 1
            if creation.task.done() and not creation.task.exception():
                self._end_unread(creation)
            raise

    async def _write(self, record: Record, options: Options) -> Session:
        try:
            created = await self._create_record(record)
            if created.existing:
                return await self._replay(record.session_id)
            session = self.table.begin(record, created.epoch, options)
        finally:
            creation = self._creating.pop(record.session_id)
        if not creation.waiting:
            self.table.cancel(session)
        return session

    def _end_unread(self, creation: _Creation) -> None:
        session = creation.task.result()
        if not creation.waiting and not session.readers:
            self.table.cancel(session)

    async def _create_record(self, record: Record) -> Created:
        try:
            return await self._store.create(record, digest.first(record.session_id, record.prompt))
        except Unavailable:
            self._endings.remember(record, written=False)  # though it may be
            raise

    async def _replay(self, session_id: str) -> Session:
        """The session that an idempotency key names, which does not run here."""
        stored = await self._store.get(session_id)
        if stored.state.finish is Finish.NONE:
            try:
                await self._endings.end(stored, Finish.ERROR)
            except Fenced:
                raise Unavailable(f"session {session_id}", "it runs under another gateway") from None
            stored = await self._store.get(session_id)
        session = Session.ended(stored)
        if stored.state.finish is Finish.ERROR:
            session.error = Unavailable(f"session {session_id}", "it ended with an error; use another idempotency key")
        return session

    def _runs_here(self, session_id: str) -> bool:
        return session_id in self.table.sessions or session_id in self._creating

    async def _renew(self) -> None:
        for session_id in await self._store.renew():
            session = self.table.sessions.get(session_id)
            if session:
                self.table.cancel(session)
            elif not self._runs_here(session_id):
                await self._endings.cancelled(session_id)

    async def _sweep(self) -> None:
        self.table.sweep()


async def every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do `work` again and again, for ever. What it raises is logged: the next time may do."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Unavailable as away:
            log.debug("a peer is away", why=away.message)  # its stream breaks as well, and says so
        except Exception as error:  # noqa: BLE001  one session's fault must not end all others
            log.error("a periodic task failed", exception=error, task=getattr(work, "__qualname__", ""))


def _seed_of(session_id: str) -> int:
    return int.from_bytes(hashlib.sha256(b"seed\0" + session_id.encode()).digest()[:8], "little") % SEEDS


def _check_same(there: Record, asked: Record) -> None:
    for field, name in (("prompt", "prompt"), ("requested", "sampling"), ("model", "model")):
        if getattr(there, field) != getattr(asked, field):
            raise AlreadyExists(f"idempotency_key of a session with another {name}: session", there.session_id)
