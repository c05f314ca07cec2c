"""A network in memory below grpc.aio: channels for clients, a server for servicers, links that break, hang and delay.

Messages are the real ones, serialized. Within a call they keep their order; between calls they may overtake each other.
What a call does when its peer cancels, ends, breaks or says nothing is what grpc.aio 1.84 does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

from tests.simulation.loop import SimLoop
from tests.simulation.processes import KILLED, PAUSED, Process

CLIENT_PATIENCE, SERVER_PATIENCE = 15.0, 30.0  # seconds of keep-alive until a silent peer's connection breaks


class Link:
    """A connection between two processes. `ends` are who still believes in it."""

    def __init__(self, network: Network, client: Process, server: Process, address: str) -> None:
        self.network, self.client, self.server, self.address = network, client, server, address
        self.client_alive = self.server_alive = True
        self.waiting: list[tuple[Process, Callable[..., None], tuple[Any, ...]]] = []
        self.calls: dict[int, Any] = {}

    def send(self, to_server: bool, last: float, callback: Callable[..., None], *args: Any) -> float:
        """Bring a callback to the other end; when it arrives, not before `last`."""
        loop = self.network.loop
        when = max(last, loop.time() + self.network.delay())
        loop.at(when, self._arrive, to_server, callback, args)
        return when

    def _arrive(self, to_server: bool, callback: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not (self.server_alive if to_server else self.client_alive):
            return
        process = self.server if to_server else self.client
        if self.network.is_held(self):
            self.waiting.append((process, callback, args))
        else:
            self.network.loop.now(process, callback, *args)

    def flush(self) -> None:
        """What was held goes on."""
        waiting, self.waiting = self.waiting, []
        for process, callback, args in waiting:
            if self.client_alive if process is self.client else self.server_alive:
                self.network.loop.soon(process, callback, *args)

    def fail_client(self, why: str) -> None:
        """The client's end finds the connection broken; the server's follows once it can be told."""
        if self.client_alive:
            self.client_alive = False
            self.network.forget(self)
            for call in list(self.calls.values()):
                self.network.loop.soon(self.client, call.broken, why)
            self._tell(self.fail_server, why)

    def fail_server(self, why: str) -> None:
        """The server's end finds the connection broken."""
        if self.server_alive:
            self.server_alive = False
            self.network.forget(self)
            for call in list(self.calls.values()):
                self.network.loop.soon(self.server, call.abandoned)
            self._tell(self.fail_client, why)

    def _tell(self, fail: Callable[[str], None], why: str) -> None:
        loop, network = self.network.loop, self.network
        if network.is_held(self):
            network.loop.at(loop.time() + SERVER_PATIENCE, fail, why)
            network.unaware.append((self, fail))
        else:
            loop.at(loop.time() + network.delay(), fail, why)


class Network:
    """All links. `lose` and `repeat` are the chances that a unary call breaks its link or is delivered twice."""

    def __init__(self, loop: SimLoop, chance: random.Random) -> None:
        self.loop, self.chance = loop, chance
        self.servers: dict[str, Process] = {}
        self.handlers: dict[Process, dict[str, Any]] = {}
        self.links: dict[tuple[Process, str], Link] = {}
        self.every: list[Link] = []
        self.unaware: list[tuple[Link, Callable[[str], None]]] = []
        self._held: dict[tuple[str, str], int] = {}
        self.slowness = 0.002
        self.lose = self.repeat = 0.0
        self.window = 64
        self.calls = self.handled = 0
        self.running: dict[Process, dict[int, Any]] = {}
        """The calls that a server's handlers are at, in the order in which they came."""
        self.sent: Callable[[Any, str, Any], None] = lambda call, path, message: None
        """Told of every message that a server sends: its call, the method, the message."""

    def delay(self) -> float:
        """Seconds that a message takes; rarely a hundred times as long."""
        x = self.chance.random()
        return self.slowness * (0.1 + x) if x < 0.97 else self.slowness * 100 * (x - 0.95)

    def link(self, client: Process, address: str) -> Link | None:
        """The client's connection to an address, which its calls share; None: nobody listens there."""
        link = self.links.get((client, address))
        if link is None and (link := self.connect(client, address)) is not None:
            self.links[client, address] = link
        return link

    def connect(self, client: Process, address: str) -> Link | None:
        """A new connection; None: nobody listens there."""
        server = self.servers.get(address)
        if server is None or server.state is KILLED:
            return None
        link = Link(self, client, server, address)
        self.every = [link for link in self.every if link.client_alive or link.server_alive]
        self.every.append(link)
        if self.is_held(link) or server.state is PAUSED:
            self._watch(link)
        return link

    def forget(self, link: Link) -> None:
        """The next call of this client opens another one."""
        if self.links.get((link.client, link.address)) is link:
            del self.links[link.client, link.address]

    def is_held(self, link: Link) -> bool:
        """Whether nothing passes now."""
        return bool(self._held) and (link.client.name, link.address) in self._held

    def hold(self, client: str, address: str) -> None:
        """Nothing passes between the two, and nobody is told: a cut cable."""
        self._held[client, address] = self._held.get((client, address), 0) + 1
        for link in self.every:
            if (link.client.name, link.address) == (client, address):
                self._watch(link)

    def heal(self, client: str, address: str) -> None:
        """What was sent meanwhile arrives; what broke at one end breaks at the other."""
        key = (client, address)
        if key not in self._held:
            return
        self._held[key] -= 1
        if self._held[key]:
            return
        del self._held[key]
        for link in self.every:
            if (link.client.name, link.address) == key:
                link.flush()
        aware = [(link, fail) for link, fail in self.unaware if (link.client.name, link.address) == key]
        self.unaware = [item for item in self.unaware if item not in aware]
        for _, fail in aware:
            self.loop.at(self.loop.time() + self.delay(), fail, "connection reset")

    def cut(self, client: str, address: str) -> None:
        """Break the connection; what was on its way is lost."""
        for link in list(self.every):
            if (link.client.name, link.address) == (client, address):
                link.fail_client("connection reset")

    def stop(self, process: Process) -> None:
        """The process takes no connections any more, and no calls over those that there are."""
        for address, server in list(self.servers.items()):
            if server is process:
                del self.servers[address]
        for link in self.every:
            if link.server is process:
                self.forget(link)

    def killed(self, process: Process, *, crash: bool) -> None:
        """The process is gone. The kernel says so to its peers, unless the whole machine is gone."""
        for address, server in list(self.servers.items()):
            if server is process:
                del self.servers[address]
        for link in list(self.every):
            client_side, server_side = link.client is process, link.server is process
            if client_side or server_side:
                fail = link.fail_server if client_side else link.fail_client
                patience = SERVER_PATIENCE if client_side else CLIENT_PATIENCE
                wait = patience if crash else self.delay()
                self.loop.at(self.loop.time() + wait, fail, "connection reset by peer")

    def paused(self, process: Process) -> None:
        """The process answers no pings."""
        for link in self.every:
            if process in (link.client, link.server):
                self._watch(link)

    def _watch(self, link: Link) -> None:
        """Break both ends by their keep-alive if the silence lasts."""

        ends = (
            (link.fail_client, CLIENT_PATIENCE, link.server, link.client),
            (link.fail_server, SERVER_PATIENCE, link.client, link.server),
        )
        for fail, patience, peer, own in ends:

            def check(
                fail: Any = fail, peer: Process = peer, own: Process = own, pauses: int = peer.pause_number
            ) -> None:
                still = self.is_held(link) or (peer.state is PAUSED and peer.pause_number == pauses)
                if still and own.state is not PAUSED:
                    fail("keepalive watchdog timeout")

            self.loop.at(self.loop.time() + patience, check)


class SimServer:
    """The part of grpc.aio.Server that registering needs."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        """Take a servicer's methods."""
        for name, handler in handlers.items():
            self.methods[f"/{service}/{name}"] = handler

    def add_generic_rpc_handlers(self, handlers: Iterable[Any]) -> None:
        """The same methods, in a form that is not needed."""
