"""`hedgerow up --tensor-parallel 2`: the whole stack over two rank processes, and streams that outlive a lost rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from hedgerow.cli.ports import free_ports
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, Options, Retry
from hedgerow.rpc import probe
from tests.polling import soon
from tests.tiny import TinyPaths, TinyTarget, write_tiny

ROOT = Path(__file__).resolve().parents[2]
TARGET = TinyTarget(expert_width=128, dense_width=256)
TEXT = "def f(x):\n    return"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    return write_tiny(tmp_path_factory.mktemp("models"), TARGET)


def two_ranks(models: TinyPaths, data: Path, **settings: str) -> Stack:
    verifier = {"verifier": {"TENSOR_PARALLEL": "2", **settings}}
    return Stack(StackConfig(ROOT, models.target, data, drafter=models.drafter, budget=8, settings=verifier))


@pytest.fixture(scope="module")
def stack(models: TinyPaths, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    beside = f"127.0.0.1:{next(free_ports(1))}"
    with two_ranks(models, tmp_path_factory.mktemp("data"), HEALTH_LISTEN=beside) as running:
        yield running


def health(stack: Stack) -> str:
    """What the process beside the verifier says of it, or the code of the error."""
    try:
        return probe.ask(stack.config.settings["verifier"]["HEALTH_LISTEN"], 10)
    except grpc.RpcError as error:
        return str(error.code().name)


def ranks(pid: int) -> list[int]:
    """Rank processes that this one started."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            command = (process / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and b"rank_process" in command:
            found.append(int(process.name))
    return found


OPTIONS: Options = {"temperature": 0.8, "seed": 5, "ignore_eos": True}


async def tokens(stack: Stack, budget: int, count: int) -> list[int]:
    async with AsyncClient(stack.address("gateway"), retry=Retry(total=100)) as client:
        return list((await client.complete(TEXT, budget=budget, max_tokens=count, **OPTIONS)).tokens)


async def test_trees_over_two_ranks_give_the_tokens_of_plain_decoding(stack: Stack) -> None:
    assert len(ranks(stack.pid("verifier"))) == 1
    plain = await tokens(stack, 0, 48)
    assert len(plain) == 48
    assert await tokens(stack, 8, 48) == plain


@pytest.mark.timeout(240)
async def test_compiled_ranks_do_too(models: TinyPaths, tmp_path: Path) -> None:
    with two_ranks(models, tmp_path, ENGINE="compiled") as compiled:
        assert any("law=c" in line and "-shards-2" in line for line in compiled.logs("verifier"))
        assert await tokens(compiled, 8, 48) == await tokens(compiled, 0, 48)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.long)], ids=["killed", "stopped"]
)
async def test_a_stream_outlives_a_lost_rank(stack: Stack, number: signal.Signals) -> None:
    """The group is out of service soon, comes back with other processes, and the text goes on as if."""
    stack.wait_ready("verifier")
    expected = await tokens(stack, 8, 100)
    verifier = stack.pid("verifier")
    (lost,) = ranks(verifier)
    await soon(lambda: health(stack) == "SERVING", 30, "SERVING")
    found: list[int] = []
    async with AsyncClient(stack.address("gateway"), retry=Retry(total=100)) as client:
        async for chunk in client.generate(TEXT, budget=8, max_tokens=100, **OPTIONS):
            if not found:
                os.kill(lost, number)
                await soon(lambda: not alive(verifier) and not alive(lost), 20, "the end of the group")
            found += chunk.tokens
    assert found == expected
    stack.wait_ready("verifier")
    assert len(ranks(stack.pid("verifier"))) == 1
    await soon(lambda: health(stack) == "SERVING", 30, "SERVING again, from the same port")
    assert any("a rank of the group is lost" in line for line in stack.logs("verifier"))


def alive(pid: int) -> bool:
    """What has ended and waits for its parent's look is not, unless that is us: then nobody knows of it yet.

    Who has lost its parent is looked after by process 1, which takes a second or two on some machines.
    """
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z" or int(parent) == os.getpid()
