"""The whole stack as child processes: Redis, kvstore, drafter, verifier and gateway, on addresses that never change.

A `Stack` is what `hedgerow up` runs in the foreground and what the demo and the tests run beside themselves. It needs a
checkout, because the services are not in the wheel.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import hedgerow
from hedgerow.cli.child import Backoff, Child, Command, OnLine
from hedgerow.cli.embedded_redis import EmbeddedRedis
from hedgerow.errors import InvalidRequest, Unavailable

# The gateway last: before the verifier is there it could only wait, on a core that a loading model wants.
START_ORDER = (("kvstore", "drafter", "verifier"), ("gateway",))
STOP_ORDER = (("gateway",), ("verifier", "drafter", "kvstore"))

# Seconds beyond the grace until a service is killed: calls that ignore their end have 5 (rpc.server.STUBBORN), a
# gateway's last appends 2, and the machine may be busy.
PATIENCE = 10.0

# gRPC's older poller: its event engine costs every hop two more wake-ups of a thread. Measured on two cores, from a
# step's end to the client: 10.2 ms with it, 5.8 to 7.1 ms without (docs/LOG.md). A value that is set already is kept.
GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"

# Below Linux' ephemeral range: no outgoing connection can take a child's port while the child is down.
_PORTS = range(20000, 30000)


@dataclass(frozen=True)
class StackConfig:
    """What to run and where. `settings` are further HEDGEROW_* variables, by service and without the prefix."""

    root: Path
    model: Path
    data: Path
    drafter: Path | None = None
    listen: str = "127.0.0.1:0"  # the gateway's; port 0 takes a free one
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
        """Names of the services that run, in starting order."""
        return tuple(self._children)

    def start(self, progress: Callable[[str], None] = lambda text: None) -> None:
        """Starts everything and returns when all are ready. Raises Unavailable, with nothing left running."""
        began = time.monotonic()
        try:
            self._prepare()
            progress(f"redis: ready on {self.redis_url} after {time.monotonic() - began:.1f} s")
            for together in START_ORDER:
                started = [name for name in together if name in self._children]
                for name in started:
                    self._children[name].start()
                for name in started:
                    self._children[name].wait_ready(self.config.start_timeout)
                    progress(f"{name}: ready on {self.address(name)} after {time.monotonic() - began:.1f} s")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stops everything in order: the gateway first, which ends its streams, and Redis last."""
        for together in STOP_ORDER:
            stopping = [self._children[name] for name in together if name in self._children]
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
        config.data.mkdir(parents=True, exist_ok=True)
        self._exits.enter_context(_locked(config.data / "lock"))
        self._addresses = self._choose_addresses()
        self.redis_url = config.redis_url or self._start_redis()
        for name, settings in self._plan().items():
            self._children[name] = Child(self._command(name, settings), self._on_line, config.backoff)

    def _choose_addresses(self) -> dict[str, tuple[str, str]]:
        names = ("kvstore", *(("drafter",) if self.config.drafter else ()), "verifier", "gateway")
        ports = _free_ports(2 * len(names))
        chosen = {name: (f"127.0.0.1:{next(ports)}", f"127.0.0.1:{next(ports)}") for name in names}
        host, port = parse_address(self.config.listen)
        if port:
            _check_free(host, port)
            chosen["gateway"] = (self.config.listen, chosen["gateway"][1])
        else:
            chosen["gateway"] = (f"{host}:{chosen['gateway'][0].rpartition(':')[2]}", chosen["gateway"][1])
        return chosen

    def _start_redis(self) -> str:
        self._redis = EmbeddedRedis(self.config.data / "redis", backoff=self.config.backoff)
        self._exits.callback(self._redis.stop)
        return self._redis.start()

    def _plan(self) -> dict[str, dict[str, str]]:
        """Each service's settings, in starting order."""
        config, model = self.config, str(self.config.model)
        plan = {"kvstore": {"REDIS_URL": self.redis_url}}
        if config.drafter is not None:
            plan["drafter"] = {"MODEL_PATH": str(config.drafter), "TARGET_PATH": model}
        plan["verifier"] = {"MODEL_PATH": model, "MODEL_NAME": config.model.name}
        if config.drafter is not None:
            layers = ",".join(map(str, _feature_layers(config.drafter)))
            plan["verifier"] |= {"DRAFTER": self.address("drafter"), "FEATURE_LAYERS": layers}
        if config.budget is not None:
            plan["verifier"]["DEFAULT_BUDGET"] = str(config.budget)
        plan["gateway"] = {
            "VERIFIER": self.address("verifier"),
            "KVSTORE": self.address("kvstore"),
            "MODEL_PATH": model,
            "TENANT_SECRET": _secret(config.data / "tenant_secret"),
        }
        return {name: settings | dict(config.settings.get(name, {})) for name, settings in plan.items()}

    def _command(self, name: str, settings: Mapping[str, str]) -> Command:
        address, admin = self._addresses[name]
        served = {"LISTEN": address, "ADMIN_LISTEN": admin, "GRACE": f"{self.config.grace:g}"}
        mine = served | {"LOG_LEVEL": self.config.log_level} | dict(settings)
        env = {key: value for key, value in os.environ.items() if not key.startswith("HEDGEROW_")}
        env |= {f"HEDGEROW_{key}": value for key, value in mine.items()} | {"PYTHONUNBUFFERED": "1"}
        env.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
        return Command(name, [sys.executable, "-m", f"services.{name}"], env, self.config.root)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises InvalidRequest."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise InvalidRequest("listen", address, "host:port with a port of at most 65535")
    return host.strip("[]"), int(port)


def _check_free(host: str, port: int) -> None:
    """Raises Unavailable when somebody listens there; gRPC itself would share the port without a word."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an old connection in TIME_WAIT is no listener
        try:
            probe.bind((host, port))
        except OSError as error:
            why = "another process listens there" if error.errno == errno.EADDRINUSE else str(error)
            raise Unavailable(f"{host}:{port}", f"{why}; choose another with --listen") from error


def _free_ports(count: int) -> Iterator[int]:
    """`count` distinct ports on which nobody listens now."""
    found: list[int] = []
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        with contextlib.suppress(Unavailable):
            _check_free("127.0.0.1", port)
            found.append(port)
        if len(found) == count:
            return iter(found)
    raise Unavailable("ports", f"fewer than {count} free ones from {_PORTS.start} to {_PORTS.stop}")


def _feature_layers(drafter: Path) -> list[int]:
    """The target's layers that a DFlash checkpoint reads; with them the verifier need not wait for the drafter."""
    path = drafter / "config.json"
    try:
        return [int(layer) for layer in json.loads(path.read_bytes())["dflash_config"]["target_layer_ids"]]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise InvalidRequest(
            "drafter", str(path), "a DFlash config.json with dflash_config.target_layer_ids"
        ) from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds a lock file: two stores in one folder would destroy each other's log."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(str(path.parent), "another stack uses this folder; choose another with --data") from None
        yield


def _secret(path: Path) -> str:
    """The secret behind session ids, made once: with another one, idempotency keys would not find their sessions."""
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    return path.read_text()
