"""The whole stack as child processes: Redis, kvstore, drafter, verifier and gateway, on addresses that never change.

A `Stack` is what `hedgerow up` runs in the foreground and what the demo and the tests run beside themselves. It needs a
checkout, because the services are not in the wheel. Of gateways, verifiers and kvstores there may be several: the first
is named as its service is, the next "gateway-2"; every gateway knows all verifiers and all kvstores.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import hedgerow
from hedgerow.cli.child import Backoff, Child, Command, OnLine
from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.cli.folders import feature_layers, locked, make_data_folder, secret
from hedgerow.cli.ports import check_free, free_ports, parse_address
from hedgerow.errors import InvalidRequest, Unavailable

# The gateway last: before the verifier is there it could only wait, on a core that a loading model wants.
START_ORDER = (("kvstore", "drafter", "verifier"), ("gateway",))
STOP_ORDER = (("gateway",), ("verifier", "drafter", "kvstore"))

# Seconds beyond the grace until a service is killed. It ends itself within its grace; the machine may be busy.
PATIENCE = 10.0

# gRPC's older poller: its event engine costs every hop two more wake-ups of a thread. Measured on two cores, from a
# step's end to the client: 10.2 ms with it, 5.8 to 7.1 ms without (docs/LOG.md). A value that is set already is kept.
GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"

# Most threads of one verifier's steps, its own default; several verifiers share the cores between them.
THREADS = 2

_NOT_READY = re.compile(r'event="not ready yet" .*why="?([^"]+)')


@dataclass(frozen=True)
class StackConfig:
    """What to run and where.

    `settings` are further HEDGEROW_* variables without the prefix, by service, or by the name of one process.
    """

    root: Path
    model: Path
    data: Path
    drafter: Path | None = None
    lookup: bool = False  # without a drafter's checkpoint: drafts from the session's own text
    hosted: bool = False  # the drafter is computed in the verifiers' processes
    listen: str = "127.0.0.1:0"  # the first gateway's; port 0 takes a free one, else others have the ports after it
    gateways: int = 1
    verifiers: int = 1
    kvstores: int = 1
    redis_url: str | None = None
    budget: int | None = None
    log_level: str = "info"
    grace: float = 10.0  # seconds that a service may drain
    start_timeout: float = 120.0  # seconds until a service must be ready
    backoff: Backoff = field(default_factory=Backoff)
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


def find_checkout() -> Path:
    """The folder that holds `services/`: this package's own, or the current one. Raises Unavailable with what to do."""
    for folder in (Path(hedgerow.__file__).resolve().parents[1], Path.cwd()):
        if (folder / "services" / "verifier" / "__main__.py").is_file():
            return folder
    raise Unavailable(
        "the checkout",
        "the services are not part of the installed package; clone the Hedgerow repository, run `make setup` there, "
        "and then `hedgerow up` inside of it",
    )


class Stack:
    """Starts, watches and stops the services of one machine. All methods may be called from any thread."""

    def __init__(self, config: StackConfig, on_line: OnLine | None = None) -> None:
        self.config = config
        self.redis_url = ""
        self._on_line: OnLine = on_line or (lambda name, line: None)
        self._redis: EmbeddedRedis | None = None
        self._children: dict[str, Child] = {}
        self._addresses: dict[str, tuple[str, str]] = {}
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Stack:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def services(self) -> tuple[str, ...]:
        """Names of the processes that run, in starting order."""
        return tuple(self._children)

    def start(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Starts everything and returns when all are ready; says what it waits for.

        Raises InvalidRequest or Unavailable, with nothing left running.
        """
        began = time.monotonic()
        try:
            self._prepare()
            progress(f"redis: ready on {self.redis_url} after {time.monotonic() - began:.1f} s")
            for together in START_ORDER:
                started = self._of(together)
                progress(f"starting {', '.join(started)}")
                for name in started:
                    self._children[name].start()
                for name in started:
                    self._wait_ready(name, progress)
                    progress(f"{name}: ready on {self.address(name)} after {time.monotonic() - began:.1f} s")
        except BaseException:
            with contextlib.suppress(OSError):  # nobody reads it any more
                if self._children:
                    progress("stopping what was started")
            self.stop()
            raise

    def stop(self) -> None:
        """Stops everything in order: the gateway first, which ends its streams, and Redis last."""
        for together in STOP_ORDER:
            stopping = [self._children[name] for name in self._of(together)]
            for child in stopping:
                child.ask_to_stop()
            for child in stopping:
                child.stop(self.config.grace + PATIENCE)
        self._exits.close()

    def address(self, name: str) -> str:
        """host:port of a service; the same after a restart."""
        return self._addresses[name][0]

    def admin_address(self, name: str) -> str:
        """host:port of a service's admin server: health, reflection, channelz."""
        return self._addresses[name][1]

    def pid(self, name: str) -> int:
        """The process of a service, or of "redis". Raises Unavailable while it is down."""
        return self._process(name).pid

    def starts(self, name: str) -> int:
        """How often the service was started."""
        return self._children[name].starts

    def kill(self, name: str) -> None:
        """SIGKILL; returns when the process is gone. It is started again after the back-off."""
        self._process(name).kill()

    def terminate(self, name: str) -> None:
        """SIGTERM, as an orchestrator would send it; the service drains, ends and is started again."""
        self.send(name, signal.SIGTERM)

    def pause(self, name: str) -> None:
        """SIGSTOP: the process keeps its connections and answers nothing."""
        self.send(name, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """SIGCONT after `pause`."""
        self.send(name, signal.SIGCONT)

    def send(self, name: str, number: signal.Signals) -> None:
        """Any signal."""
        os.kill(self.pid(name), number)

    def wait_ready(self, name: str, timeout: float = 60.0) -> None:
        """Blocks until the service is ready. Raises Unavailable with its last line."""
        self._process(name).wait_ready(timeout)

    def logs(self, name: str) -> list[str]:
        """The service's last lines of output, restarts included."""
        return self._children[name].lines()

    def names(self, service: str) -> tuple[str, ...]:
        """The processes of one service: "gateway", "gateway-2", ..."""
        return tuple(name for name in self._addresses if service_of(name) == service)

    def addresses(self, service: str) -> str:
        """Where all processes of a service listen, with commas between them: what a client and a gateway take."""
        return ",".join(self.address(name) for name in self.names(service))

    def _of(self, services: Sequence[str]) -> list[str]:
        return [name for service in services for name in self.names(service) if name in self._children]

    def _wait_ready(self, name: str, progress: Callable[[str], None]) -> None:
        child, began = self._children[name], time.monotonic()

        def remind() -> None:
            said = [found[1] for line in child.lines() if (found := _NOT_READY.search(line))]
            why = said[-1] if said else "its process is starting"
            progress(f"waiting for {name}: {why} ({time.monotonic() - began:.0f} s)")

        child.wait_ready(self.config.start_timeout, remind)

    def _process(self, name: str) -> Child | EmbeddedRedis:
        if name == "redis" and self._redis is not None:
            return self._redis
        return self._children[name]

    def _prepare(self) -> None:
        config = self.config
        for folder in (config.model, config.drafter):
            if folder is not None and not folder.is_dir():
                raise InvalidRequest(
                    "model" if folder is config.model else "drafter", str(folder), "an existing folder"
                )
        make_data_folder(config.data)
        self._exits.enter_context(locked(config.data / "lock"))
        self._addresses = self._choose_addresses()
        self.redis_url = config.redis_url or self._start_redis()
        for name, settings in self._plan().items():
            self._children[name] = Child(self._command(name, settings), self._on_line, config.backoff)

    def _choose_addresses(self) -> dict[str, tuple[str, str]]:
        config = self.config
        counts = {
            "kvstore": config.kvstores,
            "drafter": int((config.drafter is not None and not config.hosted) or config.lookup),
            "verifier": config.verifiers,
            "gateway": config.gateways,
        }
        names = [name for service, count in counts.items() for name in instances(service, count)]
        ports = free_ports(2 * len(names))
        chosen = {name: (f"127.0.0.1:{next(ports)}", f"127.0.0.1:{next(ports)}") for name in names}
        host, first = parse_address(config.listen)
        for port, name in enumerate(instances("gateway", config.gateways), first):
            if first:
                check_free(host, port)
            shown = config.listen.rpartition(":")[0]  # an IPv6 address keeps its brackets
            chosen[name] = (f"{shown}:{port if first else chosen[name][0].rpartition(':')[2]}", chosen[name][1])
        return chosen

    def _start_redis(self) -> str:
        self._redis = EmbeddedRedis(self.config.data / "redis", backoff=self.config.backoff, on_line=self._on_line)
        self._exits.callback(self._redis.stop)
        return self._redis.start()

    def _plan(self) -> dict[str, dict[str, str]]:
        """Each process' settings, in starting order."""
        config, model = self.config, str(self.config.model)
        plan = {
            "kvstore": {"REDIS_URL": self.redis_url},
            "drafter": {"TARGET_PATH": model},
            "verifier": {"MODEL_PATH": model, "MODEL_NAME": config.model.name},
            "gateway": {
                "VERIFIER": self.addresses("verifier"),
                "KVSTORE": self.addresses("kvstore"),
                "MODEL_PATH": model,
                "TENANT_SECRET": secret(config.data / "tenant_secret"),
            },
        }
        if config.drafter is not None and config.hosted:
            plan["verifier"] |= {"DRAFTER": "in-process", "DRAFTER_PATH": str(config.drafter)}
        elif config.drafter is not None:
            layers = ",".join(map(str, feature_layers(config.drafter)))
            plan["drafter"]["MODEL_PATH"] = str(config.drafter)
            plan["verifier"] |= {"DRAFTER": self.address("drafter"), "FEATURE_LAYERS": layers}
        elif config.lookup:
            plan["drafter"]["KIND"] = "lookup"
            plan["verifier"] |= {"DRAFTER": self.address("drafter"), "FEATURES": "tokens"}
        if config.budget is not None:
            plan["verifier"]["DEFAULT_BUDGET"] = str(config.budget)
        if config.verifiers > 1:
            plan["verifier"]["THREADS"] = str(max(1, min(THREADS, _cores() // config.verifiers)))
            plan["drafter"]["MAX_VERIFIERS"] = str(2 * config.verifiers)  # one that comes back may be seen twice
        chosen = {
            name: plan[service_of(name)] | dict(config.settings.get(service_of(name), {})) for name in self._addresses
        }
        return {name: settings | dict(config.settings.get(name, {})) for name, settings in chosen.items()}

    def _command(self, name: str, settings: Mapping[str, str]) -> Command:
        address, admin = self._addresses[name]
        served = {"LISTEN": address, "ADMIN_LISTEN": admin, "GRACE": f"{self.config.grace:g}"}
        mine = served | {"LOG_LEVEL": self.config.log_level} | dict(settings)
        env = {key: value for key, value in os.environ.items() if not key.startswith("HEDGEROW_")}
        env |= {f"HEDGEROW_{key}": value for key, value in mine.items()} | {"PYTHONUNBUFFERED": "1"}
        env.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
        return Command(name, [sys.executable, "-m", f"services.{service_of(name)}"], env, self.config.root)


def service_of(name: str) -> str:
    """The service that a process is one of: "gateway-2" is a "gateway"."""
    return name.partition("-")[0]


def instances(service: str, count: int) -> list[str]:
    """Names of the processes of a service; the first is called as the service is."""
    return [service if number == 1 else f"{service}-{number}" for number in range(1, count + 1)]


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
