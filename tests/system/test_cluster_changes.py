"""A release in a cluster that becomes another while streams run: more gateways by load, groups of another fingerprint.

As in test_cluster.py, not one stream may break, and each answer must be the undisturbed one of its fingerprint.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certificates import Authority
from tests.system.cluster import RELEASE, Cluster, started, unbroken
from tests.system.tools import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
SCALED = "gateway.autoscaling.enabled=true,gateway.autoscaling.minReplicas=1,gateway.autoscaling.maxReplicas=3"
# A kernel of another engine is another fingerprint, as another checkpoint is.
NEW = "verifier.set=b,verifier.config.engine=torch"
OLD = '[{"verifier": {"set": "", "config": {}}}]'
METRICS_PORT = 10443


@pytest.fixture(scope="module")
def release() -> Iterator[Cluster]:
    """The laptop's profile with an autoscaler, ready."""
    with started("changing") as made:
        made.install("--set", f"redis.storage.enabled=false,{SCALED}")
        made.settle()
        yield made


@contextlib.contextmanager
def metrics(cluster: Cluster, folder: Path) -> Iterator[None]:
    """The cluster has the API that an autoscaler asks, while the block runs."""
    files = Authority(folder / "authority").issue("metrics")
    (node,) = cluster.get("nodes")["items"]
    address = next(each["address"] for each in node["status"]["addresses"] if each["type"] == "InternalIP")
    where, name = {"namespace": "kube-system"}, "metrics"
    api = {"group": "metrics.k8s.io", "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100}
    port = {"port": 443, "targetPort": METRICS_PORT, "protocol": "TCP"}
    objects = [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, **where}, "spec": {"ports": [port]}},
        {
            "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
            "metadata": {"name": name, **where, "labels": {"kubernetes.io/service-name": name}},
            "endpoints": [{"addresses": [address]}], "ports": [{"port": METRICS_PORT, "protocol": "TCP"}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
            "metadata": {"name": "v1beta1.metrics.k8s.io"},
            "spec": api | {"insecureSkipTLSVerify": True, "service": {"name": name, **where}},
        },
    ]  # fmt: skip
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    command = [cluster.lab, "exec", sys.executable, "-m", "tests.system.metrics_api", node["metadata"]["name"]]
    command += [str(files.cert), str(files.key), f"{address}:{METRICS_PORT}"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "listening\n"
            cluster.run("kubectl", "apply", "-f", "-", given=listed)
            yield
        finally:
            cluster.run("kubectl", "delete", "--ignore-not-found", "-f", "-", given=listed)
            os.killpg(process.pid, signal.SIGKILL)


def test_gateways_are_as_many_as_their_load_asks_for(release: Cluster, tmp_path: Path) -> None:
    """Up by what sixteen streams cost, and down again under the same streams, by another target."""
    scaler = f"{RELEASE}-gateway"

    def patch(**spec: Any) -> None:
        release.kubectl("patch", "hpa", scaler, "--type=merge", "-p", json.dumps({"spec": spec}))

    def used() -> str:
        return json.dumps(release.get("hpa", scaler)["status"].get("currentMetrics"))

    with metrics(release, tmp_path):
        release.until(lambda: "averageUtilization" in used(), 120, "the autoscaler knows what gateways use")
        assert len(release.pods("gateway")) == 1
        with release.streams(16, 250) as streams:
            release.until(lambda: len(release.pods("gateway")) > 1, 120, "another gateway")
            print(used())
            release.settle()
            streams.wait_running()
            (spec,) = release.get("hpa", scaler)["spec"]["metrics"]
            spec["resource"]["target"]["averageUtilization"] = 10_000
            down = {"stabilizationWindowSeconds": 0, "policies": [{"type": "Pods", "value": 1, "periodSeconds": 15}]}
            patch(metrics=[spec], behavior={"scaleDown": down})
            release.until(lambda: len(release.pods("gateway")) == 1, 120, "one gateway again")
            release.settle()
            streams.wait_running()
            unbroken(streams.finish())


def running(cluster: Cluster, pod: str) -> float:
    """A verifier's sequences, as `hedgerow status` has them."""
    command = ["exec", pod, "--", "python3", "-m", "hedgerow.cli", "status", "--json", "127.0.0.1:7412"]
    numbers = json.loads(cluster.kubectl(*command))["numbers"]
    return float(numbers["hedgerow_verifier_running_sequences"] + numbers["hedgerow_verifier_waiting_sequences"])


def test_another_fingerprint_leaves_the_old_group_until_its_sessions_have_ended(release: Cluster) -> None:
    old = f"{RELEASE}-verifier-0"
    before = release.get("pod", old)["metadata"]["uid"]
    with release.streams(8, 1200) as streams:
        release.install("--reuse-values", "--set", NEW, "--set-json", f"previous={OLD}")
        release.settle()
        kept = release.get("pod", old)
        assert kept["metadata"]["uid"] == before
        assert kept["status"]["containerStatuses"][0]["restartCount"] == 0
        release.until(lambda: running(release, old) == 0, 120, "the old group has no sessions left")
        assert running(release, f"{RELEASE}-verifier-b-0") > 0
        release.install("--reuse-values", "--set-json", "previous=[]")
        release.settle()
        assert [pod["metadata"]["name"] for pod in release.pods("verifier")] == [f"{RELEASE}-verifier-b-0"]
        assert len(release.pods("drafter")) == 1
        streams.wait_running()
        told = streams.finish()
    unbroken(told, fingerprints=2)
    assert told["at_once"] == 2, "streams of the old group ran on beside those of the new"
    release.helm("test", RELEASE, "--timeout=120s")


def test_weights_are_those_that_a_job_has_converted(release: Cluster) -> None:
    """On a volume, from what the image holds; the tokens stay as they were."""

    def generated() -> str:
        words = ["--max-tokens=64", "--temperature=0", f"--address={release.address()}", "def read_config(path):"]
        return release.run("exec", sys.executable, "-m", "hedgerow.cli", "generate", *words)

    before = generated()
    assert len(before) > 64
    release.claim("models")
    where = "weights.source=pvc,weights.claimName=models,model.path=/models/sapling"
    resources = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
    job = {"enabled": True, "args": ["/app/models/sapling", "/models/sapling"], "resources": resources}
    release.install("--reuse-values", "--set", where, "--set-json", f"weights.convert={json.dumps(job)}")
    release.settle()
    (verifier,) = release.pods("verifier")
    command = ["exec", verifier["metadata"]["name"], "--", "cat", "/models/sapling/hedgerow.json"]
    assert json.loads(release.kubectl(*command))
    assert generated() == before
