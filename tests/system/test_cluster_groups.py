"""A verifier group of two pods in a real cluster, and one group alone whose node is drained. The tests run in order.

There is no controller of LeaderWorkerSets: `groups.py` makes what it makes, of the object that Helm has installed.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.cluster import CHOSEN, RELEASE, Cluster, Failed, started, unbroken
from tests.system.groups import made_of
from tests.system.tools import CHART, ROOT, tool

pytestmark = [pytest.mark.system, pytest.mark.slow, pytest.mark.timeout(600)]  # five minutes
SEVERAL = "verifier.kind=LeaderWorkerSet,verifier.groupSize=2,verifier.config.tensor_parallel=2"
SEVERAL += ",verifier.config.engine=compiled"
STREAMS = 48
AT_ONCE = ("--grace-period=0", "--force")
LEADER, WORKER = f"{RELEASE}-groups-0", f"{RELEASE}-groups-0-1"


@pytest.fixture(scope="module")
def release() -> Iterator[Cluster]:
    """The laptop's profile: one group of one pod, a StatefulSet."""
    with started("grouped") as made:
        made.install("--set", "redis.storage.enabled=false")
        made.settle()
        yield made


def drained(cluster: Cluster, *components: str) -> dict[str, str]:
    """Drains the one node, and gives it back when all verifier pods were evicted. Their identities before."""
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in cluster.pods("verifier")}
    only = f"app.kubernetes.io/name=hedgerow,app.kubernetes.io/component in ({','.join(components)})"
    try:
        words = ["--delete-emptydir-data", "--ignore-daemonsets", "--timeout=60s", f"--pod-selector={only}"]
        cluster.kubectl("drain", "lab", *words, timeout=90)  # Failed where a budget holds one
    finally:
        cluster.kubectl("uncordon", "lab")
    return before


def changed(cluster: Cluster, before: dict[str, str]) -> bool:
    now = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in cluster.pods("verifier")}
    return now.keys() == before.keys() and not set(now.values()) & set(before.values())


def test_a_drain_takes_the_only_group_and_its_sessions_resume(release: Cluster) -> None:
    with release.streams() as streams:
        before = drained(release, "verifier", "drafter")
        release.settle()
        assert changed(release, before)
        streams.wait_running()
        unbroken(streams.finish())


def test_groups_become_of_another_kind_and_of_two_pods(release: Cluster) -> None:
    release.helm("upgrade", RELEASE, str(CHART), *CHOSEN, "--reuse-values", "--set", SEVERAL)
    (lws,) = release.get("leaderworkersets")["items"]
    listed = {"apiVersion": "v1", "kind": "List", "items": made_of(lws)}
    release.kubectl("apply", "-f", "-", given=json.dumps(listed))
    release.until(lambda: len(release.pods("verifier")) == 2, 60, "two pods")
    release.settle()
    assert {pod["metadata"]["name"] for pod in release.pods("verifier")} == {LEADER, WORKER}
    release.helm("test", RELEASE, "--timeout=120s")
    said = release.kubectl("logs", LEADER)
    assert "all ranks are ready" in said
    secret = release.get("secret", f"{RELEASE}-secrets")["data"]["group-secret"]
    assert secret
    for pod in (LEADER, WORKER):
        assert secret not in release.kubectl("logs", pod)


@pytest.mark.parametrize(
    ("pod", "how"),
    [(LEADER, AT_ONCE), (WORKER, ()), (WORKER, AT_ONCE)],
    ids=["leader gone at once", "worker deleted", "worker gone at once"],
)
def test_a_pod_of_a_group_goes_and_its_streams_go_on(release: Cluster, pod: str, how: tuple[str, ...]) -> None:
    with release.streams() as streams:
        release.kubectl("delete", "pod", pod, *how, timeout=90)
        release.until(lambda: whole(release), 120, "both pods of the group ready")
        streams.wait_running()
        unbroken(streams.finish())


def whole(cluster: Cluster) -> bool:
    try:
        cluster.settle(0)
    except Failed:
        return False
    return len(cluster.pods("verifier")) == 2


def test_a_drain_takes_all_pods_of_the_only_group(release: Cluster) -> None:
    with release.streams() as streams:
        before = drained(release, "verifier")
        release.until(lambda: whole(release), 120, "both pods of the group ready")
        assert changed(release, before)
        streams.wait_running()
        unbroken(streams.finish())


def test_and_they_become_a_stateful_set_again(release: Cluster) -> None:
    """Helm finds no Service of the controller's in its way."""
    (lws,) = release.get("leaderworkersets")["items"]
    owned: list[dict[str, Any]] = made_of(lws)
    release.install(
        "--reuse-values", "--set", "verifier.kind=StatefulSet,verifier.groupSize=1", "--set-json", "verifier.config={}"
    )
    for each in owned:  # the controller collects them with their owner
        release.kubectl("delete", each["kind"], each["metadata"]["name"], "--wait=false")
    release.until(
        lambda: [pod["metadata"]["name"] for pod in release.pods("verifier")] == [f"{RELEASE}-verifier-0"],
        90,
        "one pod",
    )
    release.settle()
    release.helm("test", RELEASE, "--timeout=120s")


def test_a_load_of_a_client_that_we_did_not_write_ends_well_at_both_gateways(release: Cluster, tmp_path: Path) -> None:
    """ghz: streams over connections of its own through the clients' Service, so both gateways get some. Its clients
    neither retry nor resume: every stream must end with OK by itself. Its times are this machine's and no claim."""
    contract, words = tmp_path / "gateway.protoset", ["-import-path", "protos", "-proto", "hedgerow/v1/gateway.proto"]
    call = "hedgerow.v1.GatewayService"
    subprocess.run([tool("grpcurl"), *words, "-protoset-out", str(contract), "describe", call], cwd=ROOT, check=True)
    before = calls(release)
    given = json.dumps({"text": "def f{{.RequestNumber}}(x):", "sampling": {"maxTokens": 24}})
    load = ["--insecure", "--protoset", str(contract), "--call", f"{call}/Generate", "-d", given, "-O", "json"]
    load += ["-n", str(STREAMS), "-c", "8", "--connections", "8", "--timeout", "120s"]
    told = json.loads(release.run("exec", tool("ghz"), *load, release.address(), timeout=300))
    print({key: told[key] for key in ("count", "rps", "average", "slowest", "statusCodeDistribution")})
    assert told["statusCodeDistribution"] == {"OK": STREAMS}
    after = calls(release)
    assert before.keys() == after.keys()
    assert sum(after.values()) - sum(before.values()) == STREAMS
    assert all(after[pod] > before[pod] for pod in after), "a connection stays with one gateway, and there are eight"


def calls(cluster: Cluster) -> dict[str, float]:
    """Calls that ended well, by gateway."""
    found = {}
    for pod in cluster.pods("gateway"):
        name = pod["metadata"]["name"]
        command = ["exec", name, "--", "python3", "-m", "hedgerow.cli", "status", "--json", "127.0.0.1:7412"]
        numbers = json.loads(cluster.kubectl(*command))["numbers"]
        found[name] = sum(
            value
            for series, value in numbers.items()
            if series.startswith("hedgerow_gateway_calls_total") and 'outcome="length"' in series
        )
    return found
