"""What a gateway does for its clients: open sessions, find them, end them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing

from hedgerow.errors import DeadlineExceeded, HedgerowError, NotFound, Unavailable
from hedgerow.rpc.logs import get_log
from services.gateway.access import allowed
from services.gateway.chat import Template
from services.gateway.config import GatewayConfig
from services.gateway.creating import ID_BYTES, Creating, new_record, seconds_until, session_id_of
from services.gateway.endings import ALL, Endings
from services.gateway.following import Times
from services.gateway.leases import Leases
from services.gateway.limits import KEY_BYTES, check_bytes
from services.gateway.messages import Listed, Stored
from services.gateway.metrics import commit_seconds
from services.gateway.orphans import Orphans, Sweep
from services.gateway.peers import FIRST_DELAY, LAST_DELAY, VerifierPeer
from services.gateway.periodic import every
from services.gateway.position import Position, check_fields
from services.gateway.quotas import Quotas
from services.gateway.reading import Readers
from services.gateway.resolve import Limits, Resolver
from services.gateway.resuming import Resuming
from services.gateway.session import Options
from services.gateway.spans import Spans
from services.gateway.store_peer import StorePeer
from services.gateway.stream import Stream
from services.gateway.table import SessionTable
from services.gateway.takeover import TakeOver
from services.gateway.types import NO_TRACE, Chat, Generation, Model, Trace
from services.gateway.verifiers import Policy, Verifiers
from services.gateway.waiting import Waiting

POLL = 0.01
SWEEP = 0.1  # seconds between two looks for deadlines that passed and sessions that wait for a verifier
REFRESHES = 3  # appends of nothing in the time after which a silent session would expire
log = get_log(__name__)


class Gateway:
    """The sessions of this process and the two peers behind them."""

    def __init__(
        self, config: GatewayConfig, template: Template, verifiers: Sequence[VerifierPeer], store: StorePeer
    ) -> None:
        self._config, self._verifiers, self._store = config, verifiers, store
        self._secret = config.tenant_secret.encode() or secrets.token_bytes(ID_BYTES)
        limits = Limits(config.max_prompt_bytes, config.default_max_tokens)
        self._resolver, self._readers = Resolver(template, limits), Readers(template.tokenizer)
        self._endings, self.spans = Endings(store, config.max_sessions), Spans(commit_seconds())
        self._leases = Leases(store, config.store_patience)
        later = config.fingerprint_patience if config.fingerprint_policy == "best_effort" else None
        self.table = SessionTable(
            Verifiers(verifiers, Policy(config.failover_patience, later), watcher=self.spans),
            store,
            self._leases,
            lag=config.client_lag,
            patience=config.client_patience,
            quiet=config.quiet_seconds,
            unrecorded=self._endings.remember,
        )
        self._takeover = TakeOver(
            self.table,
            store,
            self._leases,
            most=config.max_sessions,
            patience=config.store_patience,
            settled=self._settled,
        )
        self._leases.kept = self._takeover.doubt
        lease = config.lease_seconds
        times = Times.of(lease, config.store_patience)
        self._resuming = Resuming(self.table, store, self._takeover, template.tokenizer.pieces, times)
        self._creating = Creating(self.table, store, self._resuming, self._takeover, config.max_sessions)
        self.waiting = Waiting(verifiers, config.verifier_wait_seconds, config.max_sessions, self._count)
        self._orphans = Orphans(self.table, config.orphan_seconds)
        self._expired = Sweep(store, self._endings, config.orphan_seconds)
        self.quotas = Quotas(self._orphans.of_tenant)

    def limit(self, config: GatewayConfig) -> None:
        """Other limits from now on, of those that may change; what runs, runs on."""
        self._creating.most = self._takeover.most = self.waiting.most = config.max_sessions
        self._resolver.limits = Limits(config.max_prompt_bytes, config.default_max_tokens)
        self.table.hold(config.client_lag, config.client_patience)
        self._orphans.patience = self._expired.patience = config.orphan_seconds

    async def run(self) -> None:
        """Keep the peers' streams and this gateway's leases, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for verifier in self._verifiers:
                tasks.create_task(verifier.run(self.table))
            tasks.create_task(self._store.run(self.table.appended, self.table.store_lost))
            tasks.create_task(every(self._config.lease_seconds / 4, self._renew))
            tasks.create_task(every(SWEEP, self._sweep))
            tasks.create_task(every(1.0, self._tidy))
            tasks.create_task(every(self._config.lease_seconds, self._expired.sweep))
            tasks.create_task(self._watch_cancels())

    def release(self) -> None:
        """Give up what runs here, for other gateways to take at once. Clients get a retryable error."""
        error = Unavailable("gateway", "it is draining; resume on another one", 0.0)
        self._resuming.close(error)
        self.waiting.close(error)
        for session in list(self.table.sessions.values()):
            self.table.pause(session, error, hand_over=True)

    async def drained(self, patience: float) -> None:
        """Return once the store has every session's end or release, or after about `patience` seconds."""
        self.release()
        for _ in range(int(patience / POLL)):
            if not self.table.sessions and not len(self._creating) + len(self._endings) + len(self._leases):
                return
            await asyncio.sleep(POLL)

    def held(self) -> dict[str, int]:
        """What this process holds for its clients; all but `tasks` is zero when there are none."""
        return {
            "sessions": len(self.table.sessions),
            "creating": len(self._creating),
            "waiting": len(self.waiting),
            "readers": sum(len(session.readers) for session in self.table.sessions.values()),
            "unanswered": self._store.unanswered,
            "unrecorded": len(self._endings),
            "leases": len(self._leases),
            "followed": len(self._resuming),
            "dropped": self.table.dropped,
            "traces": self.spans.held,
            "tasks": len(asyncio.all_tasks()),
        }

    @property
    def swept(self) -> int:
        """Sessions without a gateway that this one ended, since the start."""
        return self._expired.ended

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together, at most. Raises Unavailable while that is not known."""
        return self.waiting.known().context_length

    async def generate(self, asked: Generation, seconds_left: float | None) -> Stream:
        """Start a session, or join the one of the same idempotency key; the caller closes the stream.

        The key's session is the same where prompt, sampling parameters and model are: the budget changes no token, so
        another one joins, and gets the session as the first caller asked for it: its speed, its deadline, and
        statistics only if that one wanted some.
        Raises InvalidRequest, Unsupported, Overloaded, Unavailable, DeadlineExceeded; KeyConflict where the key's
        session is another.
        """
        seconds = seconds_until(asked, seconds_left)
        deadline = None if seconds is None else time.monotonic() + seconds
        self.waiting.check(asked.model)
        model = self.waiting.model(asked.model)
        if model is None:
            with self.spans.part(asked.trace, "wait for a verifier"):
                model = await self.waiting.opened(asked.model, deadline)
            seconds = None if deadline is None else deadline - time.monotonic()
        with self.spans.part(asked.trace, "tokenize"):
            resolved = await self._resolver.resolve(asked, model)
        record = new_record(session_id_of(asked, self._secret), asked, resolved, model, seconds)
        options = Options(asked.priority, deadline, asked.trace, asked.return_steps, asked.return_trees)
        try:
            async with asyncio.timeout(seconds):
                with self.spans.part(asked.trace, "create session"):
                    session = await self._creating.open(record, options)
        except TimeoutError:
            raise DeadlineExceeded("the session could not be written to the store before its deadline") from None
        return Stream(session, self._readers.pieces, self._resuming, detach=asked.detach, reader=self._readers.of)

    async def resume(
        self,
        session_id: str,
        tenant: str,
        at: Position,
        trace: Trace = NO_TRACE,
        *,
        detach: bool,
    ) -> Stream:
        """Go on with a session for a client that has `at` of it; the caller closes the stream.

        Raises InvalidRequest, NotFound, LostSuffix, Overloaded, Unavailable.
        """
        check_bytes("session_id", session_id, KEY_BYTES)
        check_fields(at)
        with self.spans.part(trace, "find session"):
            await self._creating.settled(session_id)
            session = await self._resuming.find(session_id, allowed(tenant), at, trace)
        return Stream(session, self._readers.pieces, self._resuming, at, detach=detach, reader=self._readers.of)

    async def cancel(self, session_id: str, tenant: str) -> bool:
        """End a session wherever it runs; False: it had ended. Raises InvalidRequest, NotFound, Unavailable."""
        check_bytes("session_id", session_id, KEY_BYTES)
        session = self.table.sessions.get(session_id)
        if session:
            allowed(tenant)(session.record)
            was_running = self.table.cancel(session)
            if was_running:  # whoever goes on with it, should this gateway die before its end is stored, has to know
                with contextlib.suppress(NotFound):  # the store has lost it: it is written again, with its end
                    await self._store.mark_cancel(session_id)
            return was_running
        await self.session(session_id, tenant)
        was_running = await self._store.mark_cancel(session_id)
        if was_running:
            await self._cancelled(session_id)
        return was_running

    async def session(self, session_id: str, tenant: str) -> Stored:
        """What is recorded of a session, without its tokens. Raises InvalidRequest, NotFound, Unavailable."""
        check_bytes("session_id", session_id, KEY_BYTES)
        stored = await self._store.get(session_id, from_offset=ALL)
        allowed(tenant)(stored.record)
        return stored

    async def stored(self, tenant: str, limit: int, cursor: str) -> tuple[list[Listed], str]:
        """A tenant's sessions that are retained, and the next cursor. Raises InvalidRequest, Unavailable."""
        return await self._store.listed(tenant, limit, cursor)

    async def delete(self, session_id: str, tenant: str) -> bool:
        """Remove a session, ending it if it runs here; False: there was none.

        Raises InvalidRequest, Unavailable; SessionUnknown where it is another tenant's.
        """
        check_bytes("session_id", session_id, KEY_BYTES)
        session = self.table.sessions.get(session_id)
        if session:
            allowed(tenant)(session.record)
            self.table.cancel(session)
            ended = asyncio.Event()
            reader = self.table.read(session, ended.set)
            while not session.done:
                await ended.wait()
                ended.clear()
            self.table.leave(reader)
            return await self._store.delete(session_id, session.record.birth)
        try:
            stored = await self._store.get(session_id, from_offset=ALL)
        except NotFound:
            return await self._store.delete(session_id, b"")
        allowed(tenant)(stored.record)
        return await self._store.delete(session_id, b"")

    def models(self) -> Sequence[tuple[Model, bool]]:
        """What is served, and whether it is ready."""
        ready: dict[str, tuple[Model, bool]] = {}
        for verifier in self._verifiers:
            if verifier.model and not ready.get(verifier.model.name, (None, False))[1]:
                ready[verifier.model.name] = (verifier.model, verifier.attached)
        return list(ready.values())

    async def tokenize(self, model: str, prompt: str | Chat | None) -> list[int]:
        """The ids of text or messages. Raises InvalidRequest, Unsupported, Unavailable."""
        self.waiting.check(model)
        self.waiting.known(model)
        return await self._resolver.encode(prompt)

    def _count(self) -> int:
        return len(self.table.sessions) + len(self._creating)

    async def _cancelled(self, session_id: str) -> None:
        """A session carries a cancel mark."""
        session = self.table.sessions.get(session_id)
        if session:
            self.table.cancel(session)
        elif session_id not in self._creating and session_id not in self._takeover:
            await self._endings.cancelled(session_id)

    async def _watch_cancels(self) -> None:
        delay = FIRST_DELAY
        while True:
            try:
                async with aclosing(self._store.watch_cancels()) as marks:
                    async for session_ids in marks:
                        delay = FIRST_DELAY
                        for session_id in session_ids:
                            await self._cancelled(session_id)
            except HedgerowError as away:
                log.debug("cancel marks come with renewals alone", why=away.message)
            except Exception as error:  # noqa: BLE001  one session's fault must not end all others
                log.error("a cancel mark was not acted on", exception=error)
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, LAST_DELAY)

    async def _settled(self, session_id: str) -> None:
        await self._leases.released(session_id)
        await self._endings.recorded(session_id)

    async def _renew(self) -> None:
        for session_id in await self._store.renew():
            await self._cancelled(session_id)

    async def _tidy(self) -> None:
        self._orphans.sweep()
        self.table.refresh(self._config.session_ttl / REFRESHES)
        await self._takeover.settle()
        await self._endings.record()

    async def _sweep(self) -> None:
        self.table.sweep()
        self.waiting.wake()
        self.spans.sweep()
