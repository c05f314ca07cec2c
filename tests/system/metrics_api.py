"""The resource metrics API (metrics.k8s.io) of a cluster of one node, for its autoscaler: a process for `lab exec`.

    python -m tests.system.metrics_api NODE CERT KEY ADDRESS:PORT

What a metrics server does, in small: the kubelet is asked what each container has used, twice and on, and what lies
between two answers is the rate. kubectl on PATH reaches the cluster. Prints a line when it listens.
"""

from __future__ import annotations

import json
import re
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

GROUP = "metrics.k8s.io/v1beta1"
BASE = f"/apis/{GROUP}"
EVERY = 3.0  # seconds
CPU = re.compile(
    r'^container_cpu_usage_seconds_total\{container="([^"]*)",namespace="([^"]*)",pod="([^"]*)"\} (\S+) (\d+)$', re.M
)


class Used(NamedTuple):
    """Processor seconds of a container, and the kubelet's clock in milliseconds."""

    seconds: float
    at: int


Container = tuple[str, str, str]  # namespace, pod, its name


def kubectl(*words: str) -> str:
    """Its answer."""
    return subprocess.run(["kubectl", *words], capture_output=True, text=True, check=True, timeout=30).stdout


class Rates:
    """Of all containers, in cores."""

    def __init__(self, node: str) -> None:
        self._path = f"/api/v1/nodes/{node}/proxy/metrics/resource"
        self._last: dict[Container, Used] = {}
        self.now: Mapping[Container, float] = {}

    def run(self) -> None:
        """For ever. A node that does not answer has no news."""
        while True:
            try:
                self._look()
            except (subprocess.SubprocessError, OSError) as error:
                print(f"no answer: {error}", file=sys.stderr, flush=True)
            time.sleep(EVERY)

    def _look(self) -> None:
        text = kubectl("get", "--raw", self._path)
        used = {(space, pod, name): Used(float(cpu), int(at)) for name, space, pod, cpu, at in CPU.findall(text)}
        rates = dict(self.now)
        for container, now in used.items():
            before = self._last.get(container)
            if before is not None and now.at > before.at:
                rates[container] = max(0.0, now.seconds - before.seconds) / ((now.at - before.at) / 1000)
        self.now, self._last = {each: rate for each, rate in rates.items() if each in used}, used

    def pods(self, namespace: str, selector: str) -> list[dict[str, Any]]:
        """PodMetrics of those that there is a rate of."""
        words = ["get", "pods", "-n", namespace, "-o", "json", *(["-l", selector] if selector else [])]
        found = []
        for pod in json.loads(kubectl(*words))["items"]:
            name = pod["metadata"]["name"]
            containers = [
                {"name": container, "usage": {"cpu": f"{round(1e9 * rate)}n", "memory": "0"}}
                for (space, owner, container), rate in self.now.items()
                if (space, owner) == (namespace, name)
            ]
            if containers:
                metadata = {key: pod["metadata"].get(key) for key in ("name", "namespace", "labels")}
                stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
                found.append(
                    {"metadata": metadata, "timestamp": stamp, "window": f"{EVERY:g}s", "containers": containers}
                )
        return found


class Handler(BaseHTTPRequestHandler):
    """GET for discovery and for pods of a namespace."""

    rates: Rates

    def do_GET(self) -> None:
        """See http.server."""
        url = urlsplit(self.path)
        found = re.fullmatch(f"{BASE}/namespaces/([^/]+)/pods", url.path)
        if url.path == BASE:
            pods = {
                "name": "pods",
                "singularName": "",
                "namespaced": True,
                "kind": "PodMetrics",
                "verbs": ["get", "list"],
            }
            self._answer({"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": [pods]})
        elif found:
            items = self.rates.pods(found[1], parse_qs(url.query).get("labelSelector", [""])[0])
            self._answer({"kind": "PodMetricsList", "apiVersion": GROUP, "metadata": {}, "items": items})
        else:
            self.send_error(404)

    def _answer(self, what: object) -> None:
        body = json.dumps(what).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *values: object) -> None:
        """Nothing."""


def main(node: str, cert: str, key: str, listen: str) -> None:
    """Serves until it is killed."""
    Handler.rates = Rates(node)
    threading.Thread(target=Handler.rates.run, daemon=True).start()
    host, _, port = listen.rpartition(":")
    server = ThreadingHTTPServer((host, int(port)), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    print("listening", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
