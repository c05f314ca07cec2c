"""A verifier on two hosts under the whole stack: the same text, streams that outlive either, and a drain of one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hedgerow.cli.child import Backoff, Child, Command
from hedgerow.cli.ports import free_ports
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient, Retry
from tests.integration.test_tensor_parallel import OPTIONS, ROOT, TARGET, TEXT, alive, ranks, tokens
from tests.polling import soon
from tests.redis_servers import Service
from tests.tiny import TinyPaths, write_tiny

SECRET = "planted-group-secret"
pytestmark = [pytest.mark.timeout(240), pytest.mark.long]  # minutes; `test_rank_hosts.py` has the core of it


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyPaths:
    return write_tiny(tmp_path_factory.mktemp("models"), TARGET)


def member(models: TinyPaths, leader: str, **more: object) -> Child:
    """The other host's verifier, supervised as its pod would be."""
    settings = {
        "model_path": models.target, "model_name": "tiny", "tensor_parallel": 2, "threads": 1, "group_hosts": 2,
        "group_host": 1, "group_leader": leader, "group_address": "127.0.0.2", "group_secret": SECRET,
    } | more  # fmt: skip
    env = {f"HEDGEROW_{key.upper()}": str(value) for key, value in settings.items()}
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HEDGEROW_")}
    command = Command("member", [sys.executable, "-m", "services.verifier"], kept | env, ROOT)
    return Child(command, lambda name, line: None, Backoff())


@pytest.fixture(scope="module")
def both(models: TinyPaths, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, Child]]:
    """A stack whose verifier is the first of two hosts, and the other one."""
    leader = f"127.0.0.1:{next(iter(free_ports(1)))}"
    verifier = {"TENSOR_PARALLEL": "2", "GROUP_HOSTS": "2", "GROUP_LISTEN": leader, "GROUP_SECRET": SECRET}
    other = member(models, leader)
    other.start()
    config = StackConfig(
        ROOT, models.target, tmp_path_factory.mktemp("data"), drafter=models.drafter, budget=8,
        settings={"verifier": verifier},
    )  # fmt: skip
    try:
        with Stack(config) as stack:
            yield stack, other
    finally:
        other.stop(20)


async def test_trees_over_two_hosts_give_the_tokens_of_plain_decoding(both: tuple[Stack, Child]) -> None:
    stack, other = both
    other.wait_ready(60)
    assert ranks(stack.pid("verifier")) == []
    assert len(ranks(other.pid)) == 1
    assert await tokens(stack, 8, 48) == await tokens(stack, 0, 48)


def test_no_secret_is_said(both: tuple[Stack, Child]) -> None:
    stack, other = both
    for lines in (stack.logs("verifier"), other.lines()):
        assert lines
        assert SECRET not in "\n".join(lines)
    for pid in (stack.pid("verifier"), other.pid, *ranks(other.pid)):
        assert SECRET.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("what", ["member", "rank", "leader"])
async def test_a_stream_outlives_what_is_lost(both: tuple[Stack, Child], what: str, number: signal.Signals) -> None:
    """The group is soon out of service; what was stopped comes to itself, and all of it comes back."""
    stack, other = both
    stack.wait_ready("verifier")
    other.wait_ready(60)
    expected = await tokens(stack, 8, 100)
    verifier, joined, (rank,) = stack.pid("verifier"), other.pid, ranks(other.pid)
    lost = {"member": joined, "rank": rank, "leader": verifier}[what]
    found: list[int] = []
    async with AsyncClient(stack.address("gateway"), retry=Retry(total=200)) as client:
        async for chunk in client.generate(TEXT, budget=8, max_tokens=100, **OPTIONS):
            if not found:
                os.kill(lost, number)
                if what == "leader" and number == signal.SIGSTOP:  # it comes to itself when its ranks have gone
                    await soon(lambda: not alive(rank), 30, "the end of the ranks of one whose first host hangs")
                    os.kill(lost, signal.SIGCONT)
                began = time.monotonic()
                await soon(lambda: not alive(verifier), 20, "the end of the group")
                print(f"{what} {number.name}: {time.monotonic() - began:.1f} s")
                if what == "member" and number == signal.SIGSTOP:
                    os.kill(lost, signal.SIGCONT)
                await soon(lambda: not alive(rank), 20, "the end of its rank")
            found += chunk.tokens
    assert found == expected
    stack.wait_ready("verifier")
    assert ranks(other.pid) != [rank]
    if what == "rank" or (what == "member" and number == signal.SIGSTOP):
        assert other.pid == joined, "the host itself need not begin anew"


async def test_a_host_that_drains_has_the_group_drain_and_its_streams_move(both: tuple[Stack, Child]) -> None:
    """It keeps its rank until the first host has ended; nothing is killed in a step."""
    stack, other = both
    stack.wait_ready("verifier")
    other.wait_ready(60)
    expected, verifier, joined = await tokens(stack, 8, 100), stack.pid("verifier"), other.pid
    found: list[int] = []
    before = len(stack.logs("verifier"))
    async with AsyncClient(stack.address("gateway"), retry=Retry(total=200)) as client:
        async for chunk in client.generate(TEXT, budget=8, max_tokens=100, **OPTIONS):
            if not found:
                os.kill(joined, signal.SIGTERM)
            found += chunk.tokens
    await soon(lambda: not alive(verifier) and not alive(joined), 60, "the end of both")
    assert found == expected
    said = "\n".join(stack.logs("verifier")[before:])
    assert "a host of the group leaves; this process drains" in said
    assert "a rank of the group is lost" not in said
    await asyncio.to_thread(other.wait_ready, 60)
    stack.wait_ready("verifier")
    assert await tokens(stack, 8, 100) == expected


async def test_a_second_sigterm_ends_a_host_at_once(both: tuple[Stack, Child]) -> None:
    """The first host hangs, so that the first signal alone would take its time."""
    stack, other = both
    stack.wait_ready("verifier")
    other.wait_ready(60)
    verifier, joined, (rank,) = stack.pid("verifier"), other.pid, ranks(other.pid)
    os.kill(verifier, signal.SIGSTOP)
    try:
        os.kill(joined, signal.SIGTERM)
        await soon(lambda: "this host leaves its group" in "\n".join(other.lines()[-5:]), 20, "its drain")
        assert alive(joined)
        os.kill(joined, signal.SIGTERM)
        await soon(lambda: not alive(joined) and not alive(rank), 10, "its end")
    finally:
        os.kill(verifier, signal.SIGCONT)
    await soon(lambda: not alive(verifier), 20, "the end of the group")
    await asyncio.to_thread(other.wait_ready, 60)
    stack.wait_ready("verifier")


async def test_a_host_s_health_is_its_part_in_the_group(both: tuple[Stack, Child]) -> None:
    stack, other = both
    stack.wait_ready("verifier")
    other.wait_ready(60)
    before, (rank,) = len(other.lines()), ranks(other.pid)

    def told(*words: str) -> bool:
        return any(all(word in line for word in words) for line in other.lines()[before:])

    os.kill(rank, signal.SIGKILL)
    await soon(lambda: told("what=group", "it is not in the group", "serving=False"), 30, "its health")
    await soon(lambda: told("what=group", "why=well", "serving=True"), 60, "its health again")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"group_host": 2}, "HEDGEROW_GROUP_HOST: 2 is not allowed: must be below HEDGEROW_GROUP_HOSTS, 2"),
        (
            {"tensor_parallel": 3},
            "HEDGEROW_TENSOR_PARALLEL: 3 is not allowed: must be a multiple of HEDGEROW_GROUP_HOSTS",
        ),
        ({"group_secret": "too-short"}, "HEDGEROW_GROUP_SECRET: the value is not allowed: must have at least 16"),
        ({"group_leader": "nowhere"}, "HEDGEROW_GROUP_LEADER: 'nowhere' is not allowed: must be host:port"),
        ({"group_host": 0}, "HEDGEROW_GROUP_LISTEN: None is not allowed: must be host:port"),
        ({"group_host": 0, "group_listen": "192.0.2.7:7414"}, "HEDGEROW_GROUP_LISTEN: '192.0.2.7:7414' is not allowed"),
        ({"group_hosts": 1, "group_host": 1}, "HEDGEROW_GROUP_HOST: 1 is not allowed"),
    ],
)
def test_what_does_not_fit_stops_the_start(models: TinyPaths, given: dict[str, object], why: str) -> None:
    settings = {
        "model_path": models.target, "model_name": "tiny", "tensor_parallel": 2, "group_hosts": 2, "group_host": 1,
        "group_leader": "127.0.0.1:1", "group_secret": SECRET,
    } | given  # fmt: skip
    service = Service("services.verifier", **settings)
    try:
        assert service.wait(60) == 1
        assert why in service.text
        assert "too-short" not in service.text
    finally:
        service.stop()
