"""Hops that are far away, deliver in crumbs, or break after so many bytes: toxiproxy between the services.

Our own wires (tests/chaos/wires.py) cut, refuse, fall silent and leave connections half-open at a moment that a test
chooses. These faults last, and a cut comes in the middle of whatever message is on its way.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from hedgerow.cli.ports import free_ports
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import Client, Options, Retry
from tests.integration.test_drafter_kinds import numbers
from tests.polling import eventually
from tests.stack import BUDGET, ROOT, Models
from tests.system.tools import tool

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]
TOKENS = 200
OPTIONS: Options = {"temperature": 0.8, "seed": 11, "ignore_eos": True, "budget": BUDGET, "max_tokens": TOKENS}
PROMPT = list(range(1, 40))
FAR = {"latency": {"latency": 40, "jitter": 20}, "slicer": {"average_size": 300, "size_variation": 200, "delay": 100}}
BREAKS = {"limit_data": {"bytes": 2500}}
HOPS = {"VERIFIER": ("gateway", "verifier"), "KVSTORE": ("gateway", "kvstore"), "DRAFTER": ("verifier", "drafter")}

# What grows whenever a hop is connected again.
CONNECTED = {
    "VERIFIER": "gateway_attached", "KVSTORE": "gateway_resent_entries", "DRAFTER": "verifier_drafter_connections",
}  # fmt: skip


class Proxies:
    """toxiproxy-server, and a proxy for each hop."""

    def __init__(self, api: int) -> None:
        self.api, self.targets = api, dict[str, str]()
        self._process = subprocess.Popen(
            [tool("toxiproxy-server"), "-host", "127.0.0.1", "-port", str(api)], stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        eventually(self._answers, 10, "toxiproxy")

    def make(self, hop: str, target: str) -> str:
        """Where to call instead."""
        listen = f"127.0.0.1:{next(iter(free_ports(1)))}"
        self._ask("POST", "/proxies", {"name": hop, "listen": listen, "upstream": target, "enabled": True})
        return listen

    @contextlib.contextmanager
    def disturbed(
        self, hops: Iterable[str], toxics: Mapping[str, Mapping[str, int]], streams: Sequence[str]
    ) -> Iterator[None]:
        """While the block runs, of connections that there are, too."""
        names = [(hop, f"{kind}-{stream}", kind, stream) for hop in hops for kind in toxics for stream in streams]
        for hop, name, kind, stream in names:
            given = {"name": name, "type": kind, "stream": stream, "attributes": dict(toxics[kind])}
            self._ask("POST", f"/proxies/{hop}/toxics", given)
        try:
            yield
        finally:
            for hop, name, _, _ in names:
                self._ask("DELETE", f"/proxies/{hop}/toxics/{name}")

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.api), 1):
            return True
        return False

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> None:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.api}{path}", json.dumps(body).encode() if body else None,
            {"Content-Type": "application/json"}, method=method,
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status in (200, 201, 204)


class Proxied(Stack):
    """Gateway to verifier and kvstore, and verifier to drafter, through proxies."""

    def __init__(self, config: StackConfig, proxies: Proxies) -> None:
        super().__init__(config)
        self.proxies = proxies

    def _plan(self) -> dict[str, dict[str, str]]:
        plan = super()._plan()
        for hop, (caller, target) in HOPS.items():
            plan[caller][hop] = self.proxies.make(hop, self.address(target))
        return plan


@pytest.fixture(scope="module")
def proxied(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxied]:
    proxies = Proxies(next(iter(free_ports(1))))
    try:
        config = StackConfig(ROOT, tiny.target, tmp_path_factory.mktemp("data"), drafter=tiny.drafter, budget=BUDGET)
        with Proxied(config, proxies) as running:
            yield running
    finally:
        proxies.close()


@pytest.fixture(scope="module")
def expected(proxied: Proxied) -> list[int]:
    """Undisturbed."""
    tokens = generated(proxied)
    assert len(tokens) == TOKENS
    return tokens


def generated(stack: Stack) -> list[int]:
    with Client(stack.address("gateway"), retry=Retry(total=120)) as client:
        return list(client.complete(PROMPT, **OPTIONS).tokens)


def counted(stack: Stack, *names: str) -> list[float]:
    """Counters, by SERVICE_NAME."""
    return [numbers(stack, name.partition("_")[0])[f"hedgerow_{name}_total"] for name in names]


def test_far_hops_in_crumbs_change_no_token_and_are_no_failure(proxied: Proxied, expected: list[int]) -> None:
    """40 ms and its jitter each way on every hop, in pieces of 100 to 500 bytes: slow, and nobody takes it for dead."""
    before = counted(proxied, "gateway_failed_over", "gateway_attached")
    with proxied.proxies.disturbed(HOPS, FAR, ("upstream", "downstream")):
        assert generated(proxied) == expected
    failed_over, attached = counted(proxied, "gateway_failed_over", "gateway_attached")
    assert (failed_over, attached) == (before[0], before[1] + 1)


@pytest.mark.parametrize("hop", HOPS)
def test_a_hop_that_breaks_again_and_again_changes_no_token(proxied: Proxied, expected: list[int], hop: str) -> None:
    """Each connection ends after 2,500 bytes of answers, wherever in a message that is."""
    before = counted(proxied, *CONNECTED.values())

    def again() -> float:
        """How often the hop was connected since."""
        more = [after - was for after, was in zip(counted(proxied, *CONNECTED.values()), before, strict=True)]
        told = dict(zip(CONNECTED, more, strict=True))
        print(f"{hop}: {told}")
        return told[hop]

    with proxied.proxies.disturbed([hop], BREAKS, ("downstream",)):
        # a drafter that broke is left alone for a growing while: one text may be done before it is asked again
        deadline = time.monotonic() + 120
        while True:
            assert generated(proxied) == expected
            if again() >= 3:
                return
            assert time.monotonic() < deadline, "it broke again and again"
