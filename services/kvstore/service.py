"""The kvstore as a process: parse, connect, serve."""

from __future__ import annotations

import asyncio

from hedgerow.certificates import Tls, read
from hedgerow.errors import HedgerowError, InvalidRequest, Unavailable
from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.health import Health
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.server import serve
from hedgerow.rpc.work import serve_while
from services.kvstore.cancels import CancelWatch
from services.kvstore.config import KvStoreConfig
from services.kvstore.fitness import Fitness
from services.kvstore.index import Index
from services.kvstore.metrics import watch_redis
from services.kvstore.owners import Owners
from services.kvstore.prefixes import Prefixes
from services.kvstore.runner import Runner, Wait
from services.kvstore.servicer import SERVICE, KvStoreServicer
from services.kvstore.store import Store
from services.kvstore.tail import Followers
from services.kvstore.topology import topology_of, with_options

TIDY = 1.0  # seconds
log = get_log(__name__)


async def run(config: KvStoreConfig) -> None:
    """Serve until SIGTERM. SERVING while a Redis that may hold sessions answers."""
    runner = _connect(config)
    index = Index(runner, keep=config.session_ttl_ms + config.tombstone_ms)
    owners = Owners(runner, index, lease=config.lease_ms, marks=config.tombstone_ms)
    store = Store(runner, index, owners, tombstone=config.tombstone_ms)
    followers = Followers(store, config.tail_poll_ms / 1000)
    cancels = CancelWatch(runner, store.marked)
    fitness = Fitness(runner, config.redis_wait_replicas)
    watch_redis(runner, fitness)
    health = Health([SERVICE], {"redis": fitness.check}, timeout=2 * config.redis_timeout)
    servicer = KvStoreServicer(config, store, followers, cancels, Prefixes(runner), health.draining)

    async def listen() -> None:
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(cancels.run())
            tidying = group.create_task(tidy(index))
            await health.draining.wait()
            listening.cancel()
            tidying.cancel()
            draining = Unavailable("kvstore", "it is draining", retry_after=0.0)
            followers.close(draining)
            cancels.close(draining)

    try:
        await serve_while(serve("kvstore", servicer.register, config, health), listen())
    finally:
        await runner.close()


async def tidy(index: Index) -> None:
    """Keep the lists of sessions as short as they may be, for ever."""
    while True:
        await asyncio.sleep(TIDY)
        try:
            await index.listing.tidy()
        except HedgerowError as away:
            log.debug("lists of sessions are not tidied", why=away.message)


def _check_files(config: KvStoreConfig) -> None:
    """Raises ConfigError with the variable and the file. They are read for each connection: what changes is taken."""
    files = Tls(config.redis_tls_ca, config.redis_tls_cert, config.redis_tls_key)
    if files != Tls() and not config.redis_url.partition("://")[0].startswith("rediss"):
        limit = "a rediss:// URL, because files for TLS are given"
        raise ConfigError(variable_of("redis_url"), "the value", limit)
    try:
        read(files)
    except InvalidRequest as why:
        raise ConfigError(variable_of(f"redis_tls_{why.field}"), str(why.value), why.limit) from None


def _connect(config: KvStoreConfig) -> Runner:
    files = {
        "ssl_ca_certs": config.redis_tls_ca,
        "ssl_certfile": config.redis_tls_cert,
        "ssl_keyfile": config.redis_tls_key,
    }
    _check_files(config)
    try:
        url = with_options(config.redis_url, {name: str(path) for name, path in files.items() if path is not None})
        topology = topology_of(url, timeout=config.redis_timeout, connections=config.redis_connections)
    except ValueError:  # whose text may show a part of the URL, a password among it
        limit = "a redis://, rediss://, unix://, redis+sentinel:// or redis+cluster:// URL"
        raise ConfigError(variable_of("redis_url"), "the value", limit) from None
    wait = Wait(config.redis_wait_replicas, config.redis_wait_ms)
    return Runner(topology, timeout=config.redis_timeout, wait=wait)
