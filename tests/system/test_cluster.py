"""The chart in a real cluster, with images from the Dockerfile that users build, and streams in flight.

The tests of this file run in order, on one release. Clients repeat the same generations meanwhile: not one may break,
and each answer must be the undisturbed one, token for token.
"""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.cluster import CHOSEN, NAMESPACE, RELEASE, Cluster, Failed, Streams, started, unbroken
from tests.system.test_chart import MATRIX
from tests.system.tools import CHART, ROOT, VALUES, pod_specs, render, tool

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
ROLLED = (("deployment", "gateway"), ("deployment", "kvstore"), ("deployment", "drafter"), ("statefulset", "verifier"))
KINDS = ("gateway", "kvstore", "drafter", "verifier", "redis")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster that has the images."""
    with started() as made:
        yield made


@pytest.fixture(scope="module")
def release(cluster: Cluster) -> Cluster:
    """The laptop's profile, ready."""
    cluster.claim(f"data-{RELEASE}-redis-0")
    cluster.install()
    cluster.settle()
    return cluster


@pytest.mark.parametrize("sets", MATRIX[1:], ids=",".join)
def test_an_api_server_accepts_the_options(cluster: Cluster, sets: tuple[str, ...]) -> None:
    accepted(cluster, render("values-laptop", *sets))


def accepted(cluster: Cluster, objects: list[dict[str, Any]]) -> None:
    """By the API server, as it would take them."""
    listed = {
        "apiVersion": "v1",
        "kind": "List",
        "items": [each | {"metadata": each["metadata"] | {"namespace": NAMESPACE}} for each in objects],
    }
    told = cluster.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", given=json.dumps(listed))
    assert told.count("server dry run") == len(objects)


@pytest.mark.parametrize("values", VALUES)
def test_an_api_server_accepts_every_object(cluster: Cluster, values: str) -> None:
    objects = render(values)
    accepted(cluster, objects)
    # The pod of a LeaderWorkerSet is no pod to its API: it is checked as one.
    for where, spec in pod_specs(objects).items():
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "one"},
            "spec": {**spec, "serviceAccountName": "default"},
        }
        pod["spec"].pop("runtimeClassName", None)  # the class is a cluster's own
        if not where.startswith("StatefulSet/") or "redis" not in where:
            cluster.kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", given=json.dumps(pod))


def test_helm_test_generates_text(release: Cluster) -> None:
    release.helm("test", RELEASE, "--timeout=120s")
    text = release.kubectl("logs", f"{RELEASE}-test")
    print(text)
    assert len(text.split()) > 5


def test_another_client_reads_the_contract(release: Cluster) -> None:
    words = ["-plaintext", "-import-path", "protos", "-proto", "hedgerow/v1/gateway.proto", release.address()]
    models = json.loads(release.run("exec", tool("grpcurl"), *words, "hedgerow.v1.GatewayService/ListModels"))
    assert [each["name"] for each in models["models"]] == ["sapling"]


def test_pods_write_nowhere_and_are_nobody(release: Cluster) -> None:
    for kind in KINDS:
        name = release.pods(kind)[0]["metadata"]["name"]
        code = "import os; print(os.getuid()); open('/app/x', 'w')"
        with pytest.raises(Failed, match="Read-only file system"):
            release.kubectl("exec", name, "--", "python3", "-c", code)
        assert release.kubectl("exec", name, "--", "python3", "-c", "import os; print(os.getuid())").strip() == "10001"
        if kind != "redis":  # the images' HEALTHCHECK
            release.kubectl("exec", name, "--", "python3", "-m", "hedgerow.rpc.probe", "127.0.0.1:7412")


def test_the_compiled_engine_is_the_images(release: Cluster) -> None:
    for kind in ("verifier", "drafter"):
        name = release.pods(kind)[0]["metadata"]["name"]
        found = release.kubectl(
            "exec", name, "--", "python3", "-c", "from kernels.cpu.build import build; print(build())"
        )
        assert "/app/.hedgerow/engine/prebuilt-" in found
        assert "runs on PyTorch" not in release.kubectl("logs", name)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_is_deleted(release: Cluster, kind: str) -> None:
    with release.streams() as streams:
        release.kubectl("delete", "pod", release.pods(kind)[0]["metadata"]["name"], timeout=90)
        release.settle()
        streams.wait_running()
        unbroken(streams.finish())


@pytest.mark.parametrize("kind", ["gateway", "verifier", "redis"])
def test_a_pod_is_gone_at_once(release: Cluster, kind: str) -> None:
    with release.streams() as streams:
        release.kubectl("delete", "pod", release.pods(kind)[0]["metadata"]["name"], "--grace-period=0", "--force")
        release.settle()
        streams.wait_running()
        unbroken(streams.finish())


def test_a_node_is_drained_and_comes_back(release: Cluster) -> None:
    with release.streams() as streams:
        words = ["drain", "lab", "--delete-emptydir-data", "--ignore-daemonsets", "--timeout=15s"]
        with pytest.raises(Failed, match="disruption budget"):  # the one node is all there is
            release.kubectl(*words, "--pod-selector=app.kubernetes.io/name=hedgerow,app.kubernetes.io/component!=test")
        try:
            for kind in ("gateway", "kvstore"):
                assert [pod for pod in release.pods(kind) if pod["status"]["phase"] == "Running"], kind
        finally:
            release.kubectl("uncordon", "lab")
        release.settle()
        streams.wait_running()
        unbroken(streams.finish())


def test_each_service_is_restarted_in_turn_under_sixteen_streams(release: Cluster) -> None:
    """With one verifier group. New calls are tried a few times only: while the group restarts, they wait."""
    with release.streams(16, 250, "--attempts", "8") as streams:
        for kind, service in ROLLED:
            release.kubectl("rollout", "restart", f"{kind}/{RELEASE}-{service}")
            release.kubectl("rollout", "status", f"{kind}/{RELEASE}-{service}", "--timeout=120s", timeout=150)
            release.settle()
            streams.wait_running()
        told = streams.finish()
    unbroken(told)


def test_an_upgrade_rolls_everything_and_a_rollback_too(release: Cluster) -> None:
    before = release.get("secret", f"{RELEASE}-secrets")["data"]
    with release.streams(16, 250) as streams:
        settings = "gateway.config.max_sessions=500,kvstore.config.max_entries=900,drafter.mode=colocated"
        release.install("--set", settings)
        release.settle()
        assert not release.pods("drafter")
        assert "HEDGEROW_MAX_SESSIONS" in release.get("configmap", f"{RELEASE}-gateway")["data"]
        streams.wait_running()
        release.helm("rollback", RELEASE, "--wait", "--timeout=300s")
        release.settle()
        assert release.pods("drafter")
        streams.wait_running()
        unbroken(streams.finish())
    assert release.get("secret", f"{RELEASE}-secrets")["data"] == before


def test_wrong_values_change_nothing(release: Cluster) -> None:
    before = release.helm("history", RELEASE, "-o", "json")
    with pytest.raises(Failed, match="max_session"):
        release.install("--set", "gateway.config.max_session=1")
    assert release.helm("history", RELEASE, "-o", "json") == before


def test_no_secret_is_in_logs_or_arguments(release: Cluster) -> None:
    secrets = {
        name: base64.b64decode(value).decode()
        for name, value in release.get("secret", f"{RELEASE}-secrets")["data"].items()
    }
    for kind in KINDS:
        for pod in release.pods(kind):
            name = pod["metadata"]["name"]
            shown = (
                release.kubectl("logs", name)
                + json.dumps(pod)
                + release.kubectl("exec", name, "--", "cat", "/proc/1/cmdline")
            )
            for key in ("tenant-secret", "redis-password", "redis-url", "operator-password"):
                assert secrets[key] not in shown, f"{key} of {name}"


def test_sessions_outlive_the_release(release: Cluster) -> None:
    """Uninstalled and installed again with the data volume kept, now with TLS: a session goes on where it was left."""
    source = (ROOT / "tests" / "system" / "leaving.py").read_text()

    def client(*words: str) -> dict[str, Any]:
        pod = release.pods("gateway")[0]["metadata"]["name"]
        command = ["exec", "-i", pod, "--", "python3", "-", f"{RELEASE}-gateway:7411", *words]
        told: dict[str, Any] = json.loads(release.kubectl(*command, given=source))
        return told

    whole, left = client("--whole"), client()
    release.helm("uninstall", RELEASE, "--wait", "--timeout=120s")
    ours = "app.kubernetes.io/name=hedgerow,app.kubernetes.io/component!=test"
    release.until(lambda: not release.get("pods", "-l", ours)["items"], 60, "no pod is left")
    release.install("--set", "tls.enabled=true")
    release.settle()
    release.helm("test", RELEASE, "--timeout=120s")
    rest = client(json.dumps(left["position"]))
    assert left["tokens"] + rest["tokens"] == whole["tokens"]
    store = f"{RELEASE}-redis-0"
    assert release.kubectl("exec", store, "-c", "valkey", "--", "hedgerow-store", "PING") == "PONG\n"
    for container in ("valkey", "tls"):  # each is started again by itself
        release.kubectl("exec", store, "-c", container, "--", "python3", "-c", "import os; os.kill(1, 15)")
    release.kubectl("delete", "pod", store, timeout=90)
    release.settle()
    assert client("--whole")["tokens"] == whole["tokens"]


def test_keys_and_limits_change_under_the_pods_that_run(cluster: Cluster, tmp_path: Path) -> None:
    """A second release, whose calls carry API keys: an upgrade adds a key and lowers a limit, and no pod restarts."""
    name, space, keys = "keyed", "keyed", tmp_path / "keys"

    def install(sessions: int, *lines: str) -> None:
        keys.write_text("".join(f"{line}\n" for line in lines))
        sets = f"apiKeys.enabled=true,gateway.limits.max_sessions={sessions},gateway.replicas=1"
        words = [*CHOSEN, "--set", f"{sets},redis.storage.enabled=false", f"--set-file=apiKeys.keys={keys}"]
        words += ["--create-namespace", "--wait", "--timeout=300s"]
        cluster.run("helm", "-n", space, "upgrade", "--install", name, str(CHART), *words, timeout=400)

    def get(*words: str) -> Any:
        return json.loads(cluster.run("kubectl", "-n", space, "get", *words, "-o", "json"))

    def hedgerow(key: str, *words: str) -> str:
        return cluster.run("exec", "env", f"HEDGEROW_API_KEY={key}", sys.executable, "-m", "hedgerow.cli", *words)

    def gateway() -> dict[str, Any]:
        (pod,) = get("pods", "-l", "app.kubernetes.io/component=gateway")["items"]
        return dict(pod)

    def works(key: str) -> bool:
        with contextlib.suppress(Failed):
            return "sapling" in hedgerow(key, "models", "--address", address)
        return False

    old, new = "planted-key-old-0123456789", "planted-key-new-0123456789"
    try:
        install(64, f"acme {old}")
        cluster.run("helm", "-n", space, "test", name, "--timeout=120s")
        address = f"{get('service', f'{name}-hedgerow-gateway')['spec']['clusterIP']}:7411"
        for key, why in (("", "no API key came"), (new, "none that this gateway knows")):
            with pytest.raises(Failed, match=why):
                hedgerow(key, "models", "--address", address)
        before = gateway()
        client = ["exec", "env", f"HEDGEROW_API_KEY={old}", sys.executable, "-m", "tests.system.streams", address]
        streams = Streams([cluster.lab, *client], 4, 400)
        try:
            install(8, f"acme {old}", f"lab {new}")
            cluster.until(lambda: works(new), 180, "the new key")
            unbroken(streams.finish())
        finally:
            streams.kill()
        after = gateway()
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        assert after["status"]["containerStatuses"][0]["restartCount"] == 0
        told = hedgerow("", "status", f"{after['status']['podIP']}:7412")
        assert "limits generation 2" in told
        assert "api keys generation 2" in told
        said = cluster.run("kubectl", "-n", space, "logs", after["metadata"]["name"])
        assert not [key for key in (old, new) if key in said + told]
    finally:
        cluster.run("kubectl", "delete", "namespace", space, "--ignore-not-found", "--timeout=90s")
