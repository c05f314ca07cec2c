"""The gateway process: its parts, put together, until it is told to stop.

SIGUSR1 logs what it holds for its clients (sessions, readers, tasks), so that a leak can be seen from outside.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Callable
from functools import partial

from hedgerow.certificates import Watched
from hedgerow.rpc import ending
from hedgerow.rpc.access import AccessInterceptor
from hedgerow.rpc.health import Health
from hedgerow.rpc.live import Live
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.server import serve
from hedgerow.rpc.tls import peer_files
from hedgerow.rpc.work import serve_while
from services.gateway.access import Access
from services.gateway.chat import Template
from services.gateway.config import GatewayConfig, addresses
from services.gateway.creating import ID_BYTES
from services.gateway.gateway import Gateway
from services.gateway.keys import Keys, read_keys
from services.gateway.metrics import Calls, watch_limits, watch_peers, watch_sessions
from services.gateway.peers import Report, VerifierPeer
from services.gateway.servicer import SERVICE, GatewayServicer
from services.gateway.store_peer import StorePeer
from services.gateway.waiting import Patient

NOT_REACHED = "not reached yet"
LAST_APPENDS = 1 / 3  # of what the grace leaves for last words: for the ends of what the drain cancelled
RELEASE = 1.0  # seconds before calls are cancelled, half of their time at most, at which sessions are released
log = get_log(__name__)


async def run(config: GatewayConfig, template: Template) -> None:
    """Serve until SIGTERM. A fault in the peers' loops ends the process: nothing would work any more."""
    live = Live(config)
    config = live.config
    health, owner, tls = Health([SERVICE]), secrets.token_bytes(ID_BYTES), peer_files(config)
    verifiers = open_verifiers(config, owner, template.tokenizer.vocab_size, health, tls)
    health.report("kvstore", NOT_REACHED)
    health.facts |= {"verifiers": config.verifier, "kvstores": config.kvstore, "owner": owner.hex()}
    health.facts["template"] = template.name
    told = partial(health.report, "kvstore")
    store = open_store(config, owner, told, tls)
    gateway = Gateway(config, template, verifiers, store)
    store.traced = partial(gateway.spans.appended, round(1 / config.trace_steps) if config.trace_steps else 0)
    watch_sessions(gateway.table.counts, gateway.held, lambda: gateway.swept)
    watch_limits(config.max_sessions)
    live.on_change(gateway.limit)
    live.on_change(lambda changed: watch_limits(changed.max_sessions))
    access = AccessInterceptor(SERVICE, Access(keys_of(config, live)).admit)
    watch_peers(verifiers, store, lambda: gateway.table.waiting + len(gateway.waiting))
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: log.info("held", **gateway.held()))

    async def serving() -> None:
        releasing = asyncio.create_task(release(gateway, health, config.grace))
        try:
            servicer = GatewayServicer(gateway, Calls(gateway.spans, content=config.trace_content))
            await serve("gateway", servicer.register, config, health, live, [access])
            await gateway.drained((config.grace - ending.calls_until(config.grace)) * LAST_APPENDS)
        finally:
            gateway.spans.sweep(0.0)
            releasing.cancel()

    try:
        await serve_while(serving(), gateway.run())
    finally:
        for verifier in verifiers:
            await verifier.close()
        await store.close()


def keys_of(config: GatewayConfig, live: Live[GatewayConfig]) -> Callable[[], Keys] | None:
    """The keys in force; None: there are none, and nobody must have one. Raises ConfigError."""
    path = config.api_keys_file
    if path is None:
        return None
    file = live.reloads.watch("api keys", path, lambda: read_keys(path))
    if config.tls_cert is None:
        log.warning("API keys come over connections without TLS: whoever can read those has the keys")
    return lambda: file.held


async def release(gateway: Gateway, health: Health, grace: float) -> None:
    """Shortly before a drain cancels the calls that are left, give up what runs: so they end with a hint to resume."""
    await health.draining.wait()
    cancelled = ending.calls_until(grace)
    await asyncio.sleep(max(0.0, cancelled - min(RELEASE, cancelled / 2)))
    gateway.release()


def open_store(config: GatewayConfig, owner: bytes, told: Report, tls: Watched | None) -> StorePeer:
    """The store, with the times that the configuration gives it."""
    answer = config.store_answer_seconds
    store = StorePeer(config.kvstore, owner, config.store_patience, told, config.lease_seconds, tls, answer)
    store.retention = config.session_ttl
    return store


def open_verifiers(
    config: GatewayConfig, owner: bytes, vocab_size: int, health: Health, tls: Watched | None
) -> list[VerifierPeer]:
    """The peers. One that is attached is enough to be healthy, and none for as long as new calls wait for one."""
    troubles: dict[str, str | None] = dict.fromkeys(addresses(config.verifier), NOT_REACHED)

    def report(address: str, why: str | None) -> None:
        troubles[address] = why
        found = [f"{address}: {trouble}" for address, trouble in troubles.items() if trouble is not None]
        told("; ".join(found) if len(found) == len(troubles) else None)

    told = Patient(partial(health.report, "verifier"), config.verifier_wait_seconds)
    told(NOT_REACHED)
    return [
        VerifierPeer(address, owner, vocab_size, partial(report, address), config.verifier_patience, tls)
        for address in troubles
    ]
