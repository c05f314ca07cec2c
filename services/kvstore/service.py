"""The kvstore as a process: parse, connect, serve."""

from __future__ import annotations

import asyncio

from redis.exceptions import RedisError

from hedgerow.errors import Unavailable
from hedgerow.rpc.config import ConfigError, variable_of
from hedgerow.rpc.health import Health
from hedgerow.rpc.server import serve
from hedgerow.rpc.work import serve_while
from services.kvstore.cancels import CancelWatch
from services.kvstore.config import KvStoreConfig
from services.kvstore.index import Index
from services.kvstore.owners import Owners
from services.kvstore.prefixes import Prefixes
from services.kvstore.replies import parse_info
from services.kvstore.scripts import Runner
from services.kvstore.servicer import SERVICE, KvStoreServicer
from services.kvstore.store import Store
from services.kvstore.tail import Followers

OLDEST_REDIS = (7, 0)


async def run(config: KvStoreConfig) -> None:
    """Serve until SIGTERM. SERVING while a Redis that may hold sessions answers."""
    runner = _connect(config)
    index = Index(runner, keep=config.session_ttl_ms + config.tombstone_ms)
    owners = Owners(runner, index, lease=config.lease_ms, marks=config.tombstone_ms)
    store = Store(runner, index, owners, tombstone=config.tombstone_ms)
    followers = Followers(store, config.tail_poll_ms / 1000)
    cancels = CancelWatch(runner, store.marked)
    health = Health([SERVICE], {"redis": lambda: fitness(runner)}, timeout=2 * config.redis_timeout)
    servicer = KvStoreServicer(config, store, followers, cancels, Prefixes(runner), health.draining)

    async def listen() -> None:
        async with asyncio.TaskGroup() as group:
            listening = group.create_task(cancels.run())
            await health.draining.wait()
            listening.cancel()
            draining = Unavailable("kvstore", "it is draining", retry_after=0.0)
            followers.close(draining)
            cancels.close(draining)

    try:
        await serve_while(serve("kvstore", servicer.register, config, health), listen())
    finally:
        await runner.close()


async def fitness(runner: Runner) -> str | None:
    """Why this Redis may not hold sessions; None: it may."""
    info: dict[str, str] = {}
    for reply in await runner.exchange([(b"INFO", b"server"), (b"INFO", b"memory"), (b"INFO", b"replication")]):
        if isinstance(reply, RedisError):
            return f"INFO was refused: {reply}"
        info.update(parse_info(reply))
    version = tuple(int(part) for part in info["redis_version"].split(".")[:2])
    if version < OLDEST_REDIS:
        return f"Redis {info['redis_version']} is too old: scripts with flags need 7.0"
    policy, role = info.get("maxmemory_policy", "not told"), info.get("role", "not told")
    if policy != "noeviction":
        return f"maxmemory-policy is {policy}: it would evict sessions; set noeviction"
    if role != "master":
        return f"this Redis is a {role}: it takes no writes"
    return None


def _connect(config: KvStoreConfig) -> Runner:
    try:
        return Runner(config.redis_url, timeout=config.redis_timeout, connections=config.redis_connections)
    except ValueError:  # whose text may show a part of the URL, a password among it
        limit = "a redis://, rediss:// or unix:// URL"
        raise ConfigError(variable_of("redis_url"), "the value", limit) from None
