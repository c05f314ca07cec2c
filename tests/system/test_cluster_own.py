"""What an operator has already, in a cluster: a Redis with its own authority that asks for a certificate, a public
certificate for clients beside that of the services, a trace collector that wants a key."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority, Files
from tests.system.cluster import RELEASE, Cluster, started
from tests.system.tools import ROOT, tool

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
NAMESPACE = "own"
REDIS_PORT, COLLECTOR_PORT = 16390, 14317
PASSWORD, KEY = "plantedPasswordOfMine", "planted-collector-key"


@contextlib.contextmanager
def process(cluster: Cluster, *words: str) -> Iterator[subprocess.Popen[str]]:
    """One of this machine in the cluster's network, while the block runs."""
    command = [cluster.lab, "exec", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True) as made:
        try:
            yield made
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(made.pid, signal.SIGKILL)


def own_redis(folder: Path, address: str, files: Files) -> list[str]:
    """A command line: TLS alone, client certificates, the kvstore's user and no other."""
    hashed = "#" + hashlib.sha256(PASSWORD.encode()).hexdigest()
    rights = (ROOT / "deploy" / "redis.acl").read_text().strip().replace("<password>", hashed)
    (folder / "users.acl").write_text(f"user default off\n{rights}\n")
    settings = {
        "bind": address, "port": "0", "tls-port": str(REDIS_PORT), "tls-cert-file": files.cert,
        "tls-key-file": files.key, "tls-ca-cert-file": files.ca, "tls-auth-clients": "yes", "dir": folder,
        "aclfile": folder / "users.acl", "save": "", "appendonly": "yes", "protected-mode": "no",
    }  # fmt: skip
    return [tool("redis-server"), *(str(word) for name, each in settings.items() for word in (f"--{name}", each))]


def secret(cluster: Cluster, name: str, files: Files, kind: str = "Secret") -> None:
    """A certificate as an object; of a ConfigMap the authority alone."""
    texts = {"ca.crt": files.ca, "tls.crt": files.cert, "tls.key": files.key}
    data = {key: path.read_text() for key, path in texts.items() if kind == "Secret" or key == "ca.crt"}
    made = {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}}
    cluster.kubectl("apply", "-f", "-", given=json.dumps(made | {"stringData" if kind == "Secret" else "data": data}))


def test_what_is_there_already_is_used(tmp_path: Path) -> None:
    with started(NAMESPACE) as cluster:
        (node,) = cluster.get("nodes")["items"]
        address = next(each["address"] for each in node["status"]["addresses"] if each["type"] == "InternalIP")
        store, public = Authority(tmp_path / "store"), Authority(tmp_path / "public")
        secret(cluster, "authority", store.issue("client"), "ConfigMap")
        secret(cluster, "client", store.issue("kvstore"))
        name = f"{RELEASE}-gateway.{NAMESPACE}.svc"
        secret(cluster, "public", public.issue("gateway", hosts=f"DNS:{name}"))
        headers = base64.b64encode(f"x-key={KEY}".encode()).decode()
        collector = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "collector"},
            "data": {"headers": headers},
        }
        cluster.kubectl("apply", "-f", "-", given=json.dumps(collector))
        values = {
            "redis.bundled": "false", "secrets.redisUrl": f"rediss://hedgerow:{PASSWORD}@{address}:{REDIS_PORT}/0",
            "redis.tls.caConfigMap": "authority", "redis.tls.certSecret": "client",
            "tls.enabled": "true", "tls.publicSecret": "public", "tls.publicCa": "true", "test.address": f"{name}:7411",
            "tracing.endpoint": f"{address}:{COLLECTOR_PORT}", "tracing.existingSecret": "collector",
        }  # fmt: skip
        folder = tmp_path / "redis"
        folder.mkdir()
        redis = own_redis(folder, address, store.issue("redis", hosts=f"IP:{address}"))
        collecting = [sys.executable, "-m", "tests.trace_collector", f"{address}:{COLLECTOR_PORT}", KEY]
        with process(cluster, *redis), process(cluster, *collecting) as told:
            assert told.stdout is not None
            assert told.stdout.readline() == "listening\n"
            cluster.install(*(word for each in values.items() for word in ("--set", "=".join(each))))
            cluster.settle()
            assert not cluster.pods("redis")
            cluster.helm("test", RELEASE, "--timeout=120s")
            assert len(cluster.kubectl("logs", f"{RELEASE}-test").split()) > 5
            pods = [pod for kind in ("gateway", "kvstore", "verifier", "drafter") for pod in cluster.pods(kind)]
            shown = json.dumps(pods) + "".join(cluster.kubectl("logs", pod["metadata"]["name"]) for pod in pods)
            assert not [word for word in (KEY, PASSWORD) if word in shown]
            gateways, with_key = {pod["status"]["podIP"] for pod in cluster.pods("gateway")}, set[str]()
            while not with_key & gateways:  # the one that answered; the test's own limit is the end of it
                line = told.stdout.readline()
                assert line, "the collector has ended"
                with_key.add(line.strip())
