"""A stack of several processes a service, with a wire that can be broken on every hop, for the faults of `cases.py`."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from hedgerow.cli.child import Backoff
from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout, instances
from hedgerow.errors import Unavailable
from hedgerow.v1 import gateway_pb2, gateway_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.chaos.redises import Alone, Redises, Sentinel
from tests.chaos.wires import Loop, Wire
from tests.polling import eventually

ROOT = find_checkout()
LEASE = 4.0  # seconds, the gateway's default
QUICK = Backoff(first=0.2, most=1.0, calm=3.0)
COUNTED = ("tasks", "dropped")  # what a gateway tells beside what it holds
CLIENT_LAG = 512  # tokens: a slow reader's sequence is held soon


@dataclass(frozen=True)
class Shape:
    """What a cluster is made of. Equal shapes can share one."""

    gateways: int = 2
    verifiers: int = 2
    kvstores: int = 2
    sentinel: bool = False
    restart: bool = True  # whether killed services come back at once

    @property
    def name(self) -> str:
        """For a folder and a log line."""
        kind = "sentinel" if self.sentinel else "alone"
        return f"g{self.gateways}v{self.verifiers}k{self.kvstores}-{kind}"


PLAIN = Shape()


@dataclass
class Cluster:
    """Starts and stops everything of a shape. Every connection between two processes goes through a wire.

    `wires` has one for each process that others connect to, by its name, and "redis".
    """

    shape: Shape
    folder: Path
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    model: Path = ROOT / "models" / "sapling"
    drafter: Path = ROOT / "models" / "sapling-dflash"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.redises: Redises = Sentinel(self.folder) if self.shape.sentinel else Alone(self.folder / "redis")
        self.loop = Loop()
        self.wires: dict[str, Wire] = {"redis": Wire(self.loop, self.redises.target)}
        shape = self.shape
        counts = {"gateway": shape.gateways, "verifier": shape.verifiers, "kvstore": shape.kvstores, "drafter": 1}
        for service, count in counts.items():
            for name in instances(service, count):
                self.wires[name] = Wire(self.loop, self._target_of(name))
        self.stack = Stack(self._config())

    def _target_of(self, name: str) -> Any:
        async def target() -> tuple[str, int]:
            host, _, port = self.stack.address(name).rpartition(":")
            return host, int(port)

        return target

    def _config(self) -> StackConfig:
        shape = self.shape
        peers = {
            "gateway": {
                "VERIFIER": self.through("verifier", shape.verifiers),
                "KVSTORE": self.through("kvstore", shape.kvstores),
                "CLIENT_LAG": str(CLIENT_LAG),
            },
            "verifier": {"DRAFTER": self.wires["drafter"].address},
        }
        settings = {name: peers.get(name, {}) | self.settings.get(name, {}) for name in (*peers, *self.settings)}
        url = self.redises.url or f"redis://{self.wires['redis'].address}/0"
        return StackConfig(
            ROOT, self.model, self.folder / "stack", self.drafter, gateways=shape.gateways, verifiers=shape.verifiers,
            kvstores=shape.kvstores, redis_url=url, backoff=QUICK,
            settings=settings,
        )  # fmt: skip

    def through(self, service: str, count: int) -> str:
        """Addresses of a service's wires, with commas between them."""
        return ",".join(self.wires[name].address for name in instances(service, count))

    def __enter__(self) -> Cluster:
        try:
            self.redises.start()
            self.stack.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stops everything, healed or not."""
        for wire in self.wires.values():
            wire.close()
        self.stack.stop()
        self.redises.stop()
        self.loop.close()

    def names(self, service: str) -> list[str]:
        """The processes of a service."""
        return list(self.stack.names(service))

    def gateways(self, first: int = 0) -> list[str]:
        """What a client is given: every gateway's address, `first` in front."""
        names = self.names("gateway")
        turned = [names[(first + i) % len(names)] for i in range(len(names))]
        return [self.wires[name].address for name in turned]

    def gateway_at(self, address: str) -> str:
        """The gateway behind a wire's address."""
        return next(name for name in self.names("gateway") if self.wires[name].address == address)

    def busy(self, service: str = "verifier") -> str:
        """The verifier with the most running sequences."""
        return max(self.names(service), key=lambda name: load_of(self.stack, name).held_sequences)

    def settle(self, seconds: float = 60) -> None:
        """Heals every wire, wakes everybody, and returns when all are ready, know each other and hold nothing."""
        for wire in self.wires.values():
            wire.heal()
        for name in self.stack.services:
            try:
                self.stack.resume(name)
            except Unavailable:
                continue  # between two starts
        self.redises.settle()
        for name in self.stack.services:
            self.stack.wait_ready(name, seconds)
        eventually(lambda: all(self._serves(name) for name in self.names("gateway")), seconds, "gateways that serve")
        last: list[str | None] = [None]

        def nothing_held() -> bool:
            try:
                last[0] = at_rest(self.stack)[0]
            except (grpc.RpcError, AssertionError, Unavailable) as error:
                last[0] = str(error)
            return last[0] is None

        try:
            eventually(nothing_held, seconds, "idle")
        except AssertionError:
            raise AssertionError(f"not idle within {seconds:g} s: {last[0]}") from None

    def _serves(self, name: str) -> bool:
        """Whether a gateway is attached to as many verifiers as there are, and has its store."""
        try:
            with grpc.insecure_channel(self.stack.address(name)) as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
                models = stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=5).models
        except grpc.RpcError:
            return False
        # a verifier has a connection from each gateway, through its wire
        attached = all(self.wires[v].connections >= len(self.names("gateway")) for v in self.names("verifier"))
        return bool(models) and all(model.ready for model in models) and attached

    def last_words(self, lines: int = 12) -> str:
        """The end of every process' log, for a failure's report."""
        return "\n".join(f"--- {name}\n" + "\n".join(self.stack.logs(name)[-lines:]) for name in self.stack.services)


def load_of(stack: Stack, name: str) -> verifier_pb2.GetLoadResponse:
    """A verifier's counters, asked past any wire."""
    with grpc.insecure_channel(stack.address(name)) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)  # type: ignore[no-untyped-call]
        load: verifier_pb2.GetLoadResponse = stub.GetLoad(verifier_pb2.GetLoadRequest(), timeout=10)
        return load


def held_by(stack: Stack, gateway: str) -> dict[str, int]:
    """What a gateway says that it holds, asked with SIGUSR1. AssertionError where it does not say it soon."""

    def said() -> list[str]:
        return [line for line in stack.logs(gateway) if " event=held " in line]

    before = said()[-1:]
    stack.send(gateway, signal.SIGUSR1)
    eventually(lambda: said()[-1:] != before, 5, f"{gateway}'s answer to SIGUSR1")
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)(?= |$)", said()[-1])}


def at_rest(stack: Stack) -> tuple[str | None, dict[str, int]]:
    """What any process still holds for a client, None: nothing; and the tasks of each gateway."""
    tasks: dict[str, int] = {}
    for name in stack.names("verifier"):
        load = load_of(stack, name)
        if load.held_sequences or load.running or load.waiting or load.free_pages != load.total_pages:
            return f"{name} holds {load.held_sequences} sequences", tasks
    for name in stack.names("gateway"):
        held = held_by(stack, name)
        tasks[name] = held["tasks"]
        kept = {what: count for what, count in held.items() if count and what not in COUNTED}
        if kept:
            return f"{name} holds {kept}", tasks
    return None, tasks
