"""One schedule: what a seed makes of the stack, its clients and its faults, and what came of it."""

from __future__ import annotations

import gc
import hashlib
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.simulation.checker import Checker
from tests.simulation.clients import Client
from tests.simulation.faults import Fault, make_faults
from tests.simulation.loop import Restless
from tests.simulation.processes import CURRENT, KILLED, PAUSED
from tests.simulation.world import World, patched

SETTLE = 240.0
"""Virtual seconds after the last fault within which everybody must have what he wants."""
REST = 90.0
"""Virtual seconds after which nothing may be left."""


@dataclass
class Outcome:
    """What a schedule did. `digest` is that of its whole history."""

    seed: int
    violations: list[str]
    trace: list[tuple[float, str, str]]
    seconds: float
    callbacks: int
    tokens: int
    digest: str = ""
    faults: Sequence[Fault] = field(default_factory=tuple)


@dataclass
class Settings:
    """What may be switched off, for tests of one thing."""

    faults: bool = True
    only: Callable[[Fault], bool] = lambda fault: True
    world: dict[str, Any] = field(default_factory=dict)
    verbose: bool = False  # the services' logs and every fault's details go into the trace


def run_schedule(seed: int, settings: Settings = Settings()) -> Outcome:  # noqa: B008  never changed
    """Run one schedule from its seed. The same seed gives the same history, to the last message."""
    chance = random.Random(seed)
    world = World(chance.getrandbits(32))
    world.settings = _stack(chance) | settings.world
    checker = Checker(world.memory, world.note, world.loop.time, lambda: world.calm)
    world.network.sent = checker.sent
    checker.changed, world.forgot, world.generated = world.changed, checker.forgot, checker.generated
    collecting = gc.isenabled()
    gc.disable()
    handler = _Logs(world)
    if settings.verbose:
        logging.getLogger().addHandler(handler)
        logging.getLogger().setLevel(logging.DEBUG)
    else:
        logging.disable(logging.CRITICAL)
    try:
        with patched(world, chance.getrandbits(32)):
            try:
                outcome = _run(seed, chance, world, checker, settings)
            except Restless as restless:
                checker.fail(str(restless))
                outcome = _outcome(seed, world, checker, ())
            finally:
                world.loop.callbacks = 0
                world.loop.end(world.all)
    finally:
        logging.disable(logging.NOTSET)
        logging.getLogger().removeHandler(handler)
        if collecting:
            gc.enable()
    return outcome


def _stack(chance: random.Random) -> dict[str, Any]:
    """Services and their limits."""
    gateways, verifiers, stores = chance.choice((1, 2, 2)), chance.choice((1, 2)), chance.choice((1, 1, 2))
    services = [
        f"{kind}{i}" for kind, count in (("k", stores), ("v", verifiers), ("g", gateways)) for i in range(count)
    ]
    grace = chance.choice((1.0, 1.0, 5.0))
    mixed = verifiers == 2 and chance.random() < 0.3
    return {
        "services": services,
        "variants": {"v1": 1} if mixed else {},
        "step_seconds": chance.choice((0.01, 0.04, 0.2)),
        "most_tokens": chance.choice((1, 3, 5)),
        "gateway": {
            "grace": grace, "client_lag": chance.choice((2, 2048)), "lease_seconds": chance.choice((1.0, 4.0)),
            "orphan_seconds": chance.choice((1.0, 30.0)),
            "fingerprint_policy": chance.choice(("wait", "best_effort")) if mixed else "wait",
            "fingerprint_patience": chance.choice((0.2, 1.0)),
        },
        "kvstore": {"grace": grace, "tail_poll_ms": 50},
        "verifier": {
            "model_name": "m", "grace": grace, "max_budget": 0, "default_budget": 0,
            "max_sequences": chance.choice((1, 4)), "max_waiting": chance.choice((0, 1, 256)),
            "prefill_rows": chance.choice((2, 64)), "run_ahead": chance.choice((1, 4, 64)),
        },
    }  # fmt: skip


def _run(seed: int, chance: random.Random, world: World, checker: Checker, settings: Settings) -> Outcome:
    loop = world.loop
    world.network.slowness = chance.choice((0.001, 0.004, 0.02))
    world.network.window = chance.choice((2, 64))
    world.start("redis")
    for name in world.settings["services"]:
        world.start(name)
    loop.run(lambda: False, chance.choice((0.1, 1.0, 1.0, 3.0)))
    clients = [Client(world, checker, chance, i, f"key {i}") for i in range(chance.choice((1, 1, 2, 3)))]
    if len(clients) > 1 and chance.random() < 0.2:
        clients[1].same_as(clients[0])
    faults = [fault for fault in make_faults(chance, world) if settings.only(fault)] if settings.faults else []
    checker.jumps = any(fault.kind == "jump" for fault in faults)
    for fault in faults:
        loop.at(loop.time() + fault.at, fault.strike, world)
        world.note("plan", str(fault))
    for client in clients:
        client.begin()

    def disarm() -> None:
        world.armed.clear()

    loop.at(loop.time() + 60.0, disarm)
    last = max((fault.at + fault.lasts + world.grace * (fault.kind == "drain") for fault in faults), default=0.0)
    calm = world.calm = loop.time() + last
    done = loop.run(lambda: all(client.done for client in clients), calm + SETTLE)
    if not done:
        left = [f"{client.name} {client.progress()}" for client in clients if not client.done]
        checker.fail(f"not done {SETTLE:g} s after the last fault: {', '.join(left)}")
    loop.run(lambda: False, max(calm, loop.time()) + 1.0)
    rested = loop.time() + REST
    while _left(world) and loop.time() < rested:
        loop.run(lambda: False, loop.time() + 1.0)
    for what in _left(world):
        checker.fail(f"left over: {what}")
    checker.final(world.lost, [view for client in clients for view in client.views])
    return _outcome(seed, world, checker, faults)


def _outcome(seed: int, world: World, checker: Checker, faults: Sequence[Fault]) -> Outcome:
    loop, violations = world.loop, checker.violations + world.faults + world.loop.failures
    text = "\n".join(f"{at:.6f} {who} {what}" for at, who, what in world.trace if not what.startswith("["))
    digest = hashlib.sha256(f"{text}\n{loop.callbacks} {loop.time():.9f}".encode()).hexdigest()
    tokens = sum(known.committed for known in checker.sessions.values())
    return Outcome(seed, violations, world.trace, loop.time(), loop.callbacks, tokens, digest, faults)


def _left(world: World) -> list[str]:
    """What live processes still hold for nobody."""
    found = []
    for process, gateway in world.gateways.items():
        if process.state is KILLED or process.state is PAUSED:
            continue
        held = gateway.held()
        found += [
            f"{process} {what} {held[what]}" for what in ("sessions", "creating", "readers", "unanswered") if held[what]
        ]
    for process, engine in world.engines.items():
        if process.state is KILLED or process.state is PAUSED:
            continue
        if engine.load().held_sequences:
            found.append(f"{process} sequences {engine.load().held_sequences}")
    return found


class _Logs(logging.Handler):
    """Puts the services' logs into the trace."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        fields = getattr(record, "fields", {})
        text = " ".join((record.getMessage(), *(f"{name}={value}" for name, value in fields.items())))
        if record.exc_info and record.exc_info[1] is not None:
            text += "\n" + logging.Formatter().formatException(record.exc_info)
        self._world.note(CURRENT.get(), f"[{record.levelname.lower()}] {text}")
