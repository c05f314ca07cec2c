"""A verifier that is not the first host of its group: it runs its ranks for the first one, and serves nobody itself.

Its health is its part in the group: NOT_SERVING until its ranks are ready, and again from the moment that the group is
over, until it is in the next one. It does not end with the group: the first host begins anew, and it joins it again.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch

from hedgerow.engine.numa import usable
from hedgerow.engine.rank_door import Split
from hedgerow.engine.rank_host import Joins, RankHost
from hedgerow.engine.ranks import check_folder
from hedgerow.model.config import K2Config
from hedgerow.model.room import check_room
from hedgerow.rpc.ending import calls_until
from hedgerow.rpc.health import Health
from hedgerow.rpc.health_keeper import answered_beside
from hedgerow.rpc.logs import get_log
from hedgerow.rpc.server import serve
from hedgerow.rpc.tls import mutual_contexts
from hedgerow.rpc.work import serve_while
from services.verifier.config import VerifierServiceConfig

log = get_log(__name__)


async def run(config: VerifierServiceConfig, split: Split) -> None:
    """Until SIGTERM; then as long as the first host takes to finish, at most the grace. Raises CheckpointError where
    the model does not fit into this host's memory, or its ranks cannot read their parts: it joins no group then."""
    check_room(config.model_path, K2Config.from_folder(config.model_path), here=split.each, ranks=split.ranks)
    check_folder(config.model_path, split.of(config.group_host), split.ranks)
    assert config.group_leader is not None
    joins = Joins(
        config.group_leader, config.group_secret.encode(), config.group_host, split, config.group_address or "",
        mutual_contexts(config, called=False),
    )  # fmt: skip
    threads = max(1, config.threads_used // split.each)
    host, over = RankHost(joins, config.model_path, threads, usable()), asyncio.Event()

    async def check() -> str | None:
        return host.why or None

    health = Health([], {"group": check})
    health.facts |= {
        "model": config.model_name,
        "tensor_parallel": str(split.ranks),
        "host": f"{config.group_host} of {split.hosts}",
    }

    async def serving() -> None:
        leaving = asyncio.create_task(_leave(host, health))
        try:
            answering = serve("verifier", lambda server: None, config, health)
            await answered_beside(answering, "verifier", config.health_listen, config, health)
            with contextlib.suppress(TimeoutError):  # the first host's sequences go on until it has no more of them
                await asyncio.wait_for(over.wait(), calls_until(config.grace))
        finally:
            leaving.cancel()
            host.close()

    async def working() -> None:
        with ThreadPoolExecutor(1, thread_name_prefix="group") as pool:
            await asyncio.get_running_loop().run_in_executor(pool, host.run)
        over.set()

    torch.set_num_threads(1)
    await serve_while(serving(), working())


async def _leave(host: RankHost, health: Health) -> None:
    await health.draining.wait()
    told = await asyncio.to_thread(host.leave)
    log.info("this host leaves its group", told=told)
