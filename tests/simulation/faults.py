"""What goes wrong, when and for how long, drawn from a seed. Everything heals."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tests.simulation.world import World


class Fault(NamedTuple):
    """`strike` begins it; it ends by itself after `lasts` seconds."""

    at: float
    lasts: float
    kind: str
    subject: str
    action: Callable[[Any, Fault], None]
    number: float = 0.0

    def strike(self, world: World) -> None:
        """It happens."""
        world.note("fault", str(self))
        self.action(world, self)

    def __str__(self) -> str:
        return f"{self.kind} {self.subject} at {self.at:.3f} for {self.lasts:.3f} ({self.number:.3g})"


def _later(world: World, seconds: float, callback: Callable[..., None], *args: Any) -> None:
    world.loop.at(world.loop.time() + seconds, callback, *args)


def _kill(world: World, fault: Fault) -> None:
    world.kill(fault.subject, crash=fault.number > 0.5)
    _later(world, fault.lasts, world.restart, fault.subject)


def _pause(world: World, fault: Fault) -> None:
    world.pause(fault.subject)
    _later(world, fault.lasts, world.resume, fault.subject)


def _drain(world: World, fault: Fault) -> None:
    """A service is told to end, and is there again once it has."""
    world.drain(fault.subject)
    _later(world, world.grace + fault.lasts, world.restart, fault.subject)


def _cut(world: World, fault: Fault) -> None:
    world.network.cut(*fault.subject.split("-"))


def _hold(world: World, fault: Fault) -> None:
    pair = fault.subject.split("-")
    world.network.hold(*pair)
    _later(world, fault.lasts, world.network.heal, *pair)


def _jump(world: World, fault: Fault) -> None:
    world.processes[fault.subject].wall_offset += fault.number


def _noise(world: World, fault: Fault) -> None:
    """Unary calls are lost or delivered twice for a while."""
    network = world.network
    network.lose, network.repeat = (fault.number, 0.0) if fault.subject == "lost" else (0.0, fault.number)

    def end() -> None:
        network.lose = network.repeat = 0.0

    _later(world, fault.lasts, end)


def _failover(world: World, fault: Fault) -> None:
    """The primary is gone and a replica takes over that lacks the last transactions."""
    world.kill("redis")
    lost = world.lose(int(fault.number))
    world.note("redis", f"lost {lost} transactions")
    world.memory.scripts.clear()
    _later(world, fault.lasts, world.restart, "redis")


def _ambush(world: World, fault: Fault) -> None:
    """A fail-over that comes shortly after the next change of a kind, and loses it, or only its answer."""
    world.armed.setdefault(fault.subject, []).append((0.2, lambda: _failover(world, fault)))


def _snap(world: World, fault: Fault) -> None:
    """A connection breaks shortly after the next change of a kind: it is made, and its answer may be lost."""
    script, pair = fault.subject.split()
    world.armed.setdefault(script, []).append((4 * world.network.slowness, lambda: world.network.cut(*pair.split("-"))))


class Kind(NamedTuple):
    """A kind of fault: what it does, how long it lasts in seconds, how often it comes."""

    action: Callable[[Any, Fault], None]
    low: float
    high: float
    weight: float


KINDS = {
    "kill": Kind(_kill, 0.05, 8.0, 3),
    "drain": Kind(_drain, 0.05, 8.0, 2),
    "pause": Kind(_pause, 0.05, 25.0, 3),
    "cut": Kind(_cut, 0.0, 0.0, 2),
    "hold": Kind(_hold, 0.05, 25.0, 3),
    "jump": Kind(_jump, 0.0, 0.0, 1),
    "noise": Kind(_noise, 0.1, 2.0, 2),
    "failover": Kind(_failover, 0.01, 3.0, 3),
    "snap": Kind(_snap, 0.0, 0.0, 2),
    "ambush": Kind(_ambush, 0.01, 3.0, 3),
}


def make_faults(chance: random.Random, world: World) -> list[Fault]:
    """A few faults of the schedule's kinds, in the order of their times."""
    services = world.settings["services"]
    weights = world.settings.get("faults", {})
    kinds = [kind for kind in KINDS if weights.get(kind, 1)]
    span = chance.choice((0.3, 0.6, 1.0, 6.0))
    faults = []
    for _ in range(chance.choice((0, 1, 2, 2, 3, 3, 4, 5))):
        kind = chance.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
        action, low, high, _ = KINDS[kind]
        lasts = low + (high - low) * chance.random() ** chance.choice((1, 3))
        fault = Fault(
            chance.uniform(0, span), lasts, kind, _subject(chance, kind, services), action, _number(chance, kind)
        )
        faults.append(fault)
    if world.settings["variants"]:  # sessions have to go without a verifier of their own for a while
        kind = chance.choice(("kill", "kill", "drain", "pause"))
        at, lasts = chance.uniform(0, 1.0), chance.uniform(1.0, 12.0)
        faults.append(Fault(at, lasts, kind, chance.choice(("v0", "v1")), KINDS[kind].action, _number(chance, kind)))
    return sorted(faults, key=lambda fault: fault.at)


def _subject(chance: random.Random, kind: str, services: list[str]) -> str:
    if kind in ("cut", "hold"):
        return chance.choice(_pairs(services, "cg", "gv", "gk", "kr"))
    if kind == "snap":
        script = chance.choice(("append", "append", "append", "create", "acquire", "release", "close", "cancel"))
        return f"{script} {chance.choice(_pairs(services, 'gk', 'kr', 'kr'))}"
    if kind == "noise":
        return chance.choice(("lost", "repeated"))
    if kind == "failover":
        return "redis"
    if kind == "ambush":
        return chance.choice((*["acquire"] * 3, *["append"] * 4, "release", "create", "close", "cancel"))
    if kind in ("kill", "pause"):
        return chance.choice([*services, *(name for name in services if name[0] in "gv"), "redis"])
    return chance.choice(services)


def _pairs(services: list[str], *kinds: str) -> list[str]:
    return [
        f"{client}-{server}"
        for kind in kinds
        for client in (*services, "c0", "c1")
        for server in (*services, "redis")
        if client[0] + server[0] == kind
    ]


def _number(chance: random.Random, kind: str) -> float:
    if kind == "jump":
        return chance.choice((-1, 1)) * 10 ** chance.uniform(-1, 5)
    if kind == "ambush":
        return float(chance.choice((0, 0, 1, 1, 2, 3, 6)))
    if kind == "failover":
        return float(chance.choice((0, 1, 2, 4, 8, 16, 64)))
    return chance.random()
