"""A service whose work fails before it listens says why, and gRPC nothing beside it."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from hedgerow.rpc.config import ConfigError
from hedgerow.rpc.health import Health
from hedgerow.rpc.server import ServerConfig, serve
from hedgerow.rpc.work import serve_while


@pytest.mark.parametrize("turns", range(6))
def test_work_that_fails_while_the_ports_open(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the start is. The loop's handler of exceptions that nobody takes hears of none."""
    lost = list[dict[str, Any]]()
    monkeypatch.setattr("hedgerow.rpc.server._catch_signals", lambda grace: asyncio.Event())

    async def fail() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        raise ConfigError("HEDGEROW_X", "nothing", "it must be set")

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: lost.append(context))
        with pytest.raises(ConfigError, match="HEDGEROW_X"):
            await serve_while(serve("test", lambda server: None, ServerConfig(), Health(["test"])), fail())
        await asyncio.sleep(0.05)
        gc.collect()

    asyncio.run(main())
    assert not lost
