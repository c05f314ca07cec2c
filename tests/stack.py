"""Fixtures over real processes: one stack for integration and chaos tests, and the plain decoding that it must equal.

The stack serves the bundled model where its weights are there, else a small random one in the same layouts.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest
import pytest_asyncio

from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.v1 import verifier_pb2, verifier_pb2_grpc
from tests.polling import eventually
from tests.processes import address, service

if TYPE_CHECKING:
    from hedgerow.client import AsyncClient
    from hedgerow.client import Sampling as Resolved
    from hedgerow.engine.types import Sampling
    from hedgerow.model.interface import Target

ROOT = Path(__file__).resolve().parents[1]
BUDGET = 8
START_SECONDS: list[float] = []  # of the shared stack, for the test that bounds it
HELD = ("sessions", "creating", "readers", "unanswered")
SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop",
    "stop_token_ids", "logit_bias",
)  # fmt: skip


@dataclass(frozen=True)
class Models:
    """Folders of a target and its drafter."""

    target: Path
    drafter: Path
    feature_layers: tuple[int, ...]
    bundled: bool


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    target, drafter = ROOT / "models" / "sapling", ROOT / "models" / "sapling-dflash"
    if all((folder / "config.json").exists() and list(folder.glob("*.safetensors")) for folder in (target, drafter)):
        from hedgerow.model.draft_config import DraftConfig

        return Models(target, drafter, DraftConfig.from_folder(drafter).target_layer_ids, bundled=True)
    return write_models(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A random model with steps of a few milliseconds, for tests of a single process."""
    return write_models(tmp_path_factory.mktemp("tiny"))


def write_models(folder: Path) -> Models:
    from tests.tiny import write_tiny

    paths = write_tiny(folder)
    return Models(paths.target, paths.drafter, paths.feature_layers, bundled=False)


@pytest.fixture(scope="session")
def stack(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    data = tmp_path_factory.mktemp("data")
    running = Stack(StackConfig(ROOT, models.target, data, drafter=models.drafter, budget=BUDGET))
    began = time.monotonic()
    with running:
        START_SECONDS.append(time.monotonic() - began)
        yield running


@pytest_asyncio.fixture
async def client(stack: Stack) -> AsyncIterator[AsyncClient]:
    from hedgerow.client import AsyncClient

    async with AsyncClient(stack.address("gateway")) as made:
        yield made


@pytest.fixture
def idle(stack: Stack) -> Iterator[None]:
    """Afterwards nothing is held: no page, sequence, queue, reader or unanswered append."""
    yield
    assert_idle(stack)


@contextmanager
def another_gateway(stack: Stack, models: Models, **settings: object) -> Iterator[str]:
    """The address of a gateway of its own before the stack's verifier and store, with HEDGEROW_* settings."""
    peers = {name: stack.address(name) for name in ("verifier", "kvstore")}
    with service("gateway", model_path=models.target, **peers, **settings) as child:
        yield address(child)


def assert_idle(stack: Stack, tasks: int | None = None, seconds: float = 60) -> None:
    """Polls until verifier and gateway hold nothing, and the gateway has at most `tasks` tasks."""

    def nothing_held() -> bool:
        load, held = verifier_load(stack), gateway_holds(stack)
        return (
            load.held_sequences == load.running == load.waiting == 0
            and load.free_pages == load.total_pages
            and not any(held[name] for name in HELD)
            and (tasks is None or held["tasks"] <= tasks)
        )

    eventually(nothing_held, seconds, "an idle stack")


def verifier_load(stack: Stack) -> verifier_pb2.GetLoadResponse:
    """The verifier's counters."""
    with grpc.insecure_channel(stack.address("verifier")) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        load: verifier_pb2.GetLoadResponse = stub.GetLoad(
            verifier_pb2.GetLoadRequest(), timeout=10, wait_for_ready=True
        )
        return load


def gateway_holds(stack: Stack) -> dict[str, int]:
    """What the gateway says that it holds, asked with SIGUSR1."""
    said = [line for line in stack.logs("gateway") if " event=held " in line]
    os.kill(stack.pid("gateway"), signal.SIGUSR1)
    eventually(lambda: [line for line in stack.logs("gateway") if " event=held " in line][len(said) :], 30)
    last = [line for line in stack.logs("gateway") if " event=held " in line][-1]
    return {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)(?= |$)", last)}


def engine_sampling(resolved: Resolved) -> Sampling:
    """A session's parameters, as the gateway resolved them, for an engine in this process."""
    from hedgerow.engine.types import Sampling

    given = {name: getattr(resolved, name) for name in SAMPLING}
    return Sampling(**given | {"stop": tuple(resolved.stop), "stop_token_ids": tuple(resolved.stop_token_ids)})


class Plain:
    """Plain decoding in this process: one sequence, no drafter, no tree, no wire. `model`: not the one that a verifier
    loads of `models`."""

    def __init__(self, models: Models, model: Target | None = None) -> None:
        from hedgerow.model.select import load_target
        from services.verifier.vocabulary import read_vocabulary

        self._model = model or load_target(models.target, models.feature_layers, "auto", 1)  # as the verifier does
        self._vocabulary = read_vocabulary(models.target, self._model.config.vocab_size)
        self.vocab_size, self.feature_width = self._model.config.vocab_size, self._model.feature_width
        self.context = self._model.config.max_position_embeddings
        self._known: dict[tuple[tuple[int, ...], str], list[int]] = {}

    def tokens(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        """What the stack must answer to `prompt`, token for token."""
        key = (tuple(prompt), repr(sampling))
        if key not in self._known:
            self._known[key] = self._decode(prompt, sampling)
        return self._known[key]

    def _decode(self, prompt: Sequence[int], sampling: Sampling) -> list[int]:
        from hedgerow.engine.config import EngineConfig
        from hedgerow.engine.types import Finish, Start
        from hedgerow.engine.verifier import VerifierEngine

        eos = frozenset(self._model.config.eos_token_ids)
        config = EngineConfig(max_sequences=1, default_budget=0, run_ahead=1 << 30)
        engine = VerifierEngine(self._model, config, self._vocabulary, eos)
        engine.start(Start("plain", 1, 1, prompt, sampling, budget=0))
        tokens: list[int] = []
        while (plan := engine.plan()) is not None:
            for update in engine.verify(plan, None).updates:
                assert update.finish is not Finish.ERROR, update.error
                tokens += update.tokens
        return tokens


@pytest.fixture(scope="session")
def plain(models: Models) -> Plain:
    return Plain(models)


@pytest.fixture(scope="session")
def tiny_plain(tiny: Models) -> Plain:
    return Plain(tiny)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Puts the services' last lines under a test that failed."""
    report = yield
    running = getattr(item, "funcargs", {}).get("stack")
    if report.failed and isinstance(running, Stack):  # type: ignore[attr-defined]
        for name in running.services:
            report.sections.append((f"{name} log", "\n".join(running.logs(name)[-30:])))  # type: ignore[attr-defined]
    return report
