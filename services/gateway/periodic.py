"""What a gateway does again and again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from hedgerow.errors import Unavailable
from hedgerow.rpc.logs import get_log

log = get_log(__name__)


async def every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Do `work` about every so many seconds, for ever. What it raises is logged: the next time may do."""
    while True:
        await asyncio.sleep(seconds * random.uniform(0.75, 1.0))  # not all gateways at the same time
        try:
            await work()
        except Unavailable as away:
            log.debug("a peer is away", why=away.message)  # its stream breaks as well, and says so
        except Exception as error:  # noqa: BLE001  one session's fault must not end all others
            log.error("a periodic task failed", exception=error, task=getattr(work, "__qualname__", ""))
