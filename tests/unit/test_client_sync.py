"""The blocking client is the asynchronous one on a thread; here only what the thread adds."""

from __future__ import annotations

import asyncio
import gc
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from hedgerow.client import AsyncClient, Client, Position, Retry
from hedgerow.errors import Cancelled, NotFound, Unavailable
from tests.polling import eventually
from tests.unit.client_gateway import Script, ScriptedGateway, chunk, digest, finished, for_ever, gateway, started

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


@pytest.mark.parametrize("script", [STUCK, [for_ever]], ids=["streaming", "not started"])
def test_closing_the_client_beside_threads_that_read_ends_them_by_name(script: Script) -> None:
    """They got concurrent.futures.CancelledError, or waited for ever."""
    with served(script, script, [for_ever]) as (server, client):
        server.refused = [for_ever]
        got: list[BaseException] = []

        def read(ask: Callable[[], object]) -> None:
            try:
                ask()
            except BaseException as error:  # noqa: BLE001  whatever it is
                got.append(error)

        asks = (lambda: client.complete("x"), lambda: list(client.generate("x")), client.models)
        threads = [threading.Thread(target=read, args=(ask,)) for ask in asks]
        for thread in threads:
            thread.start()
        eventually(lambda: server.running == 2 and len(server.metadata) == 3, 30)
        began = time.monotonic()
        client.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        assert time.monotonic() - began < 5
        assert [(type(error), str(error)) for error in got] == [(Cancelled, "the client is closed")] * 3
        with pytest.raises(Cancelled):
            client.models()


def test_two_threads_may_close_and_ask_at_once() -> None:
    for _ in range(20):
        client = Client("localhost:1", retry=Retry.never())
        threads = [threading.Thread(target=client.close) for _ in range(2)]
        for thread in threads:
            thread.start()
        with pytest.raises((Cancelled, Unavailable)):
            client.models()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def test_leaving_cancels_the_session_and_detaching_does_not() -> None:
    with served(STUCK, STUCK, STUCK) as (server, client):
        with client.generate("x") as stream:
            next(stream)
        assert server.cancels == ["s1"]
        for _ in client.generate("x"):
            break
        gc.collect()
        eventually(lambda: server.cancels == ["s1"] * 2, 30)
        kept = client.generate("x")
        next(kept)
        assert kept.detach() == kept.position == Position("s1", 1, digest(1), 1)
        assert list(kept) == []
    assert server.cancels == ["s1"] * 2


def test_a_broken_stream_goes_on() -> None:
    away = Unavailable("verifier", "away", 0.0)
    rest = [started(), chunk(1, [2], "b"), finished("STOP", 2)]
    with served([*STUCK[:2], away], rest, rest) as (server, never), Client(server.address) as client:
        assert client.complete("x").text == "ab"
        assert client.resume("s1", 1, digest(1), 1).result().tokens == (2,)
        assert never.addresses == (server.address,)


@pytest.mark.parametrize(
    "end", ["", "del client, stream; gc.collect(); assert 'hedgerow-client' not in str(threading.enumerate())"]
)
def test_a_program_that_closes_nothing_ends_its_sessions(end: str) -> None:
    with served(STUCK) as (server, _):
        code = f"""
import gc, threading
from hedgerow.client import Client
client = Client({server.address!r})
stream = client.generate("x")
next(stream)
{end}
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")
        assert server.cancels == ["s1"]


def test_a_stream_keeps_its_client() -> None:
    with served(WHOLE) as (server, _):
        assert [piece.text for piece in Client(server.address).generate("x")] == ["ab"]


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
