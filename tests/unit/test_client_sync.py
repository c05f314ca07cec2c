"""The blocking client is the asynchronous one on a thread; here only what the thread adds."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from hedgerow.client import AsyncClient, Client, Retry
from hedgerow.errors import NotFound, Unavailable
from tests.unit.client_gateway import Script, ScriptedGateway, chunk, finished, for_ever, gateway, started

WHOLE = [started(), chunk(0, [1, 2], "ab"), finished("STOP", 2)]
STUCK = [started(), chunk(0, [1], "a"), for_ever]


@contextmanager
def served(*scripts: Script) -> Iterator[tuple[ScriptedGateway, Client]]:
    """A scripted gateway on a loop of its own, and a client for it."""
    loop, ready, over = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    servers: list[ScriptedGateway] = []

    async def serve() -> None:
        async with gateway(*scripts) as server:
            servers.append(server)
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(5)
    try:
        with Client(servers[0].address, retry=Retry.never()) as client:
            yield servers[0], client
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join(10)
        loop.close()


def test_the_two_clients_have_the_same_methods() -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        found = inspect.getmembers(kind, inspect.isfunction)
        return {name: list(inspect.signature(f).parameters) for name, f in found if not name.startswith("_")}

    asynchronous = methods(AsyncClient)
    asynchronous["close"] = asynchronous.pop("aclose")
    assert methods(Client) == asynchronous


def test_a_stream_is_iterated_and_kept() -> None:
    with served(WHOLE, WHOLE, WHOLE) as (_, client):
        stream = client.generate("x")
        assert "".join(chunk.text for chunk in stream) == "ab"
        assert stream.finished is not None
        assert stream.started is not None
        assert stream.session_id == "s1"
        assert client.complete("x").tokens == (1, 2)
        assert len(list(client.chat([{"role": "user", "content": "x"}]).events())) == 3


def test_errors_cross_the_thread() -> None:
    with served([NotFound("session", "s")]) as (_, client), pytest.raises(NotFound):
        client.complete("x")
    with Client("localhost:1", retry=Retry.never()) as client, pytest.raises(Unavailable, match="localhost:1"):
        client.models()


def test_leaving_the_loop_cancels_the_call() -> None:
    """The generator is dropped on this thread, its call lives on another."""
    with served(STUCK, STUCK) as (server, client):
        for _ in client.generate("x"):
            break
        gc.collect()
        with client.generate("x") as stream:
            next(stream)
    assert server.running == 0, "the server waits for its calls before it ends"


def test_a_closed_client_leaves_no_thread() -> None:
    before = threading.active_count()
    client = Client("localhost:1")
    client.close()
    client.close()
    assert threading.active_count() == before


def test_threads_may_share_a_client() -> None:
    with served(*[WHOLE] * 8) as (_, client):
        texts: list[str] = []
        threads = [threading.Thread(target=lambda: texts.append(client.complete("x").text)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert texts == ["ab"] * 8
