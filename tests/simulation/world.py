"""The simulated stack: shipped gateways, verifiers and kvstores as processes of one loop, and a Redis in memory."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import grpc.aio
import redis.asyncio

from hedgerow.engine.config import EngineConfig
from hedgerow.rpc.ending import calls_until
from hedgerow.rpc.interceptors import guarded
from services.gateway import service as gateway_main
from services.gateway.chat import KimiTemplate
from services.gateway.config import GatewayConfig
from services.gateway.gateway import Gateway
from services.gateway.members import MEMBERS
from services.gateway.session import Session
from services.kvstore import service as kvstore_service
from services.kvstore.config import KvStoreConfig
from services.verifier import service as verifier_service
from services.verifier.config import VerifierServiceConfig
from tests.simulation import law
from tests.simulation.channels import Channel
from tests.simulation.clocks import EPOCH, simulated, take_over_defaults
from tests.simulation.loop import SimLoop
from tests.simulation.memory_redis import MemoryRedis
from tests.simulation.processes import CURRENT, KILLED, RUNNING, Process
from tests.simulation.redis_link import Pool, RedisServer
from tests.simulation.wire import Network, SimServer

take_over_defaults()
NOWHERE = Path("/nonexistent")
"""The model's folder: nothing of it is read."""


class World:
    """Every process by name. A name that is started again is another process."""

    def __init__(self, seed: int) -> None:
        self.loop = SimLoop()  # type: ignore[abstract]  # the rest of a loop is not needed
        self.chance = random.Random(seed)
        self.network = Network(self.loop, self.chance)
        self.redis_skew = 0.0
        self.memory = MemoryRedis(lambda: EPOCH + self.loop.time() + self.redis_skew)
        self.redis = RedisServer(self.network, self.memory)
        self.processes: dict[str, Process] = {}
        self.all: list[Process] = []
        self.stopping: dict[Process, asyncio.Event] = {}
        self.gateways: dict[Process, Any] = {}
        self.engines: dict[Process, Any] = {}
        self.trace: list[tuple[float, str, str]] = []
        self.faults: list[str] = []
        """What no service may do, of whatever kind."""
        self.settings: dict[str, Any] = {}
        self.cancels: set[str] = set()
        self.forgot: Callable[[], None] = lambda: None
        self.generated: Callable[[str, int], None] = lambda session_id, end: None
        self.armed: dict[str, list[tuple[float, Callable[[], None]]]] = {}
        """What happens within so many seconds of the next change of a session by a script of this name."""
        self.deletes = False
        self.calm = math.inf
        """Virtual time from which nothing goes wrong any more."""
        self.lost = 0
        """Transactions that Redis forgot."""

    def note(self, who: object, what: str) -> None:
        """A line of the trace."""
        self.trace.append((self.loop.time(), str(who), what))

    def start(self, name: str) -> Process:
        """Start a service by its name: g0, v0, k0, redis."""
        process = Process(name, self.chance.uniform(0, 1e5), self.chance.uniform(-0.05, 0.05))
        self.processes[name] = process
        self.all.append(process)
        self.note(name, "starts")
        if name == "redis":
            self.redis.start(process)
            return process
        run = {"g": self._gateway, "v": self._verifier, "k": self._kvstore}[name[0]]
        self.loop.spawn(process, self._main(process, run))
        return process

    def kill(self, name: str, *, crash: bool = False) -> None:
        """SIGKILL, or the machine is gone."""
        process = self.processes[name]
        if process.state is not KILLED:
            self.note(name, "crashes" if crash else "is killed")
            self.loop.kill(process)
            self.network.killed(process, crash=crash)

    def drain(self, name: str) -> None:
        """SIGTERM, and SIGKILL once its grace is over."""
        process = self.processes[name]
        if process.state is not RUNNING:
            return
        self.note(name, "is told to end")
        if (stopping := self.stopping.get(process)) is None:  # it only starts
            self.kill(name)
            return
        stopping.set()

        def overdue() -> None:
            if self.processes[name] is process:
                self.kill(name)

        self.loop.at(self.loop.time() + self.grace, overdue)

    @property
    def grace(self) -> float:
        """Seconds that a service has to end by itself."""
        return max(float(self.settings[kind]["grace"]) for kind in ("gateway", "kvstore", "verifier"))

    def restart(self, name: str) -> None:
        """Start what is dead."""
        if self.processes[name].state is KILLED:
            self.start(name)

    def lose(self, count: int) -> int:
        """Redis forgets its last transactions."""
        lost = self.memory.lose(count)
        self.lost += lost
        self.forgot()
        return lost

    def changed(self, script: str) -> None:
        """A session was changed."""
        for within, strike in self.armed.pop(script, ()):
            self.loop.at(self.loop.time() + self.chance.choice((0.0, self.chance.uniform(0, within))), strike)

    def pause(self, name: str) -> None:
        """SIGSTOP."""
        process = self.processes[name]
        if process.state is RUNNING:
            self.note(name, "is stopped")
            self.loop.pause(process)
            self.network.paused(process)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        process = self.processes[name]
        if process.state is not RUNNING and process.state is not KILLED:
            self.note(name, "goes on")
            self.loop.resume(process)

    def client(self, name: str) -> Process:
        """A client's process."""
        process = Process(name, self.chance.uniform(0, 1e5), self.chance.uniform(-5, 5))
        self.processes[name] = process
        self.all.append(process)
        return process

    def addresses(self, kind: str) -> list[str]:
        """Services of a kind."""
        return [name for name in self.settings["services"] if name[0] == kind]

    def is_up(self, name: str) -> bool:
        """Whether it runs."""
        return name in self.processes and self.processes[name].state is RUNNING

    async def _main(self, process: Process, run: Callable[[Process], Any]) -> None:
        try:
            await run(process)
            self.note(process, "ends")
        except Exception as error:  # noqa: BLE001  no service may end so
            self.faults.append(f"{process} ended: {error!r}")
        finally:
            if not self.loop.stopping:
                self.loop.kill(process)
                self.network.killed(process, crash=False)

    async def _gateway(self, process: Process) -> None:
        settings = self.settings
        config = GatewayConfig(
            verifier=",".join(self.addresses("v")), kvstore=",".join(self.addresses("k")), model_path=NOWHERE,
            tenant_secret="secret", **settings["gateway"],
        )  # fmt: skip
        await gateway_main.run(config, KimiTemplate(MEMBERS["k2.6"], law.tokenizer()))

    def made_gateway(self, *arguments: Any, **named: Any) -> Any:
        """In place of the gateway's class, to look into it later."""
        process = CURRENT.get()
        assert process is not None
        gateway = self.gateways[process] = Gateway(*arguments, **named)
        return gateway

    async def _kvstore(self, process: Process) -> None:
        await kvstore_service.run(KvStoreConfig(redis_url="redis://redis", **self.settings["kvstore"]))

    async def _verifier(self, process: Process) -> None:
        slow = self.settings["step_seconds"]
        process.work_seconds = lambda: self.chance.uniform(0.2, 1.0) * slow
        config = VerifierServiceConfig(model_path=NOWHERE, threads=1, **self.settings["verifier"])
        await verifier_service.run(config)

    def load(self, config: VerifierServiceConfig, layers: Any) -> Any:
        """In place of reading a checkpoint."""
        process = CURRENT.get()
        assert process is not None
        variant = self.settings["variants"].get(process.name, 0)
        engine = law.LawEngine(
            EngineConfig(
                max_sequences=config.max_sequences, max_waiting=config.max_waiting, pages=64,
                prefill_rows=config.prefill_rows, run_ahead=config.run_ahead, max_budget=0, default_budget=0,
                max_context=law.CONTEXT,
            ),
            self.chance,
            self.settings["most_tokens"],
            lambda session_id, end: self.generated(session_id, end),
            variant,
        )  # fmt: skip
        self.engines[process] = engine
        return verifier_service.Group(law.LawModel(variant), engine, {}, "")

    async def serve(
        self, name: str, register: Callable[[Any], None], config: Any, health: Any, live: Any = None, first: Any = ()
    ) -> None:
        """In place of `hedgerow.rpc.server.serve`: a server on the simulated network until the process is to stop.

        Nothing of the configuration changes, and nobody has a key: every call is let in, as nobody's.
        """
        process = CURRENT.get()
        assert process is not None
        server = SimServer()
        register(server)
        methods = {path: guarded(path, handler) for path, handler in server.methods.items()}
        self.network.handlers[process] = methods
        self.network.servers[process.name] = process
        stopping = self.stopping[process] = asyncio.Event()
        await stopping.wait()
        cancelled = calls_until(config.grace)
        health.drain()
        self.network.stop(process)
        running = self.network.running.get(process, {})
        if running:
            await asyncio.wait([call.task for call in running.values()], timeout=cancelled)
        for call in list(running.values()):
            call.shut()
        if running:
            patience = (config.grace - cancelled) / 2  # for handlers that ignore their cancellation
            await asyncio.wait([call.task for call in running.values()], timeout=patience)


def _watched(world: World, extend: Callable[..., Any]) -> Callable[..., Any]:
    """Session.extend, under the eyes of the checker."""

    def watched(session: Session, update: Any, *others: Any) -> Any:
        pair, held = (int(update.epoch), int(update.attempt)), (session.epoch, session.attempt)
        if pair != held:
            world.faults.append(f"{session.id[:6]}: an update of {pair} was taken under {held}")
        return extend(session, update, *others)

    return watched


@contextlib.contextmanager
def patched(world: World, seed: int) -> Iterator[None]:
    """The edges of the shipped services are the world's."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated(world.loop, seed))
        stack.enter_context(world.loop.current())
        edges: tuple[tuple[Any, str, Any], ...] = (
            (asyncio, "all_tasks", lambda loop=None: set()),  # which no protocol needs: it reads those of all schedules
            (grpc.aio, "insecure_channel", lambda address, **_: Channel(world.network, address)),
            (redis.asyncio.ConnectionPool, "from_url", lambda url, **_: Pool(world.network, world.redis)),
            (gateway_main, "serve", world.serve),
            (gateway_main, "Gateway", world.made_gateway),
            (Session, "extend", _watched(world, Session.extend)),
            (kvstore_service, "serve", world.serve),
            (verifier_service, "serve", world.serve),
            (verifier_service, "load", world.load),
        )
        for target, name, value in edges:
            stack.enter_context(mock.patch.object(target, name, value))
        yield
