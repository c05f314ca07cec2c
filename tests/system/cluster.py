"""A cluster of one node on this machine, and what the tests ask of it.

`lab` is a command on PATH that starts one in a network of its own, and passes on: `lab up`, `lab down`,
`lab base-image`, `lab build ARGS` (podman build), `lab load IMAGE`, `lab kubectl ARGS`, `lab helm ARGS`,
`lab exec COMMAND` (a process of this machine in the cluster's network).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.system.tools import CHART, ROOT, tool

RELEASE, NAMESPACE, TAG = "hedgerow", "serving", "0.0.0-test"
IMAGES = {"slim": f"localhost/hedgerow:{TAG}", "cpu": f"localhost/hedgerow-cpu:{TAG}"}
APIS = ROOT / "tests" / "system" / "apis"
KEEP = bool(os.environ.get("HEDGEROW_KEEP_CLUSTER"))  # for work on these tests: images and cluster stay as they are
GPU_IMAGE = f"localhost/hedgerow-gpu:{TAG}"
BASE = "localhost/debian:bookworm"  # Debian's own packages, where no registry of images is reached
CHOSEN = (
    "-f",
    str(CHART / "values-laptop.yaml"),
    "--set",
    f"images.registry=localhost,images.slim.tag={TAG},images.engine.tag={TAG}",
)


class Failed(AssertionError):
    """A command that should have worked; with its output."""


class Cluster:
    """The lab, and one release in it."""

    def __init__(self, namespace: str = NAMESPACE) -> None:
        self.lab, self.namespace = tool("lab"), namespace

    def run(self, *words: str, timeout: float = 120, given: str | None = None) -> str:
        """`lab WORDS`: its standard output. Raises Failed with all of its output."""
        done = subprocess.run(
            [self.lab, *words],
            input=given,
            capture_output=True,
            text=True,
            timeout=timeout,
            cwd=ROOT,
            check=False,
        )
        if done.returncode:
            raise Failed(
                f"lab {' '.join(words)[:300]}: exit {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        return done.stdout

    def kubectl(self, *words: str, timeout: float = 120, given: str | None = None) -> str:
        """In the release's namespace."""
        return self.run("kubectl", "--namespace", self.namespace, *words, timeout=timeout, given=given)

    def helm(self, *words: str, timeout: float = 400) -> str:
        """In the release's namespace."""
        return self.run("helm", "--namespace", self.namespace, *words, timeout=timeout)

    def build(self, target: str) -> str:
        """Builds an image from the Dockerfile that users build. Its name."""
        name = GPU_IMAGE if target == "gpu" else IMAGES[target]
        words = ["build", "-q", "-f", "deploy/docker/Dockerfile", "--target", target, "-t", name]
        self.run("base-image", timeout=300)
        words += ["--build-arg", f"BASE={BASE}"]
        if os.environ.get("PIP_FIND_LINKS"):  # the machine has its wheels at hand
            words += ["--build-arg", "TORCH_INDEX="]
        if target == "gpu":  # its steps are 8 GB each: none is kept for the next build
            words += ["--layers=false"]
        self.run(*words, ".", timeout=3000 if target == "gpu" else 900)
        return name

    def install(self, *words: str) -> None:
        """Installs or upgrades the release, and waits until all of it is ready."""
        self.helm("upgrade", "--install", RELEASE, str(CHART), *CHOSEN, *words, "--wait", "--timeout=300s")

    def claim(self, name: str) -> None:
        """Makes a volume claim that the release will find, and opens its folder: the lab's volumes get no fsGroup."""
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": name}, "spec": spec}
        self.kubectl("apply", "-f", "-", given=json.dumps(claim))
        self.until(lambda: self.get("pvc", name)["status"].get("phase") == "Bound", 30, f"{name} is bound")
        volume = self.get("pv", self.get("pvc", name)["spec"]["volumeName"])
        Path(volume["spec"]["hostPath"]["path"]).chmod(0o777)

    def get(self, *words: str) -> Any:
        """What the API server has of some objects."""
        return json.loads(self.kubectl("get", *words, "-o", "json"))

    def pods(self, component: str) -> list[dict[str, Any]]:
        """The pods of a service that are not on their way out."""
        found = self.get("pods", "-l", f"app.kubernetes.io/component={component}")["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def address(self) -> str:
        """The clients' Service."""
        spec = self.get("service", f"{RELEASE}-gateway")["spec"]
        return f"{spec['clusterIP']}:{spec['ports'][0]['port']}"

    def settle(self, seconds: float = 120) -> None:
        """Waits until every pod is ready and none is on its way out."""
        self.until(self._settled, seconds, "every pod ready")

    def _settled(self) -> bool:
        pods = self.get("pods", "-l", "app.kubernetes.io/component!=test")["items"]
        return bool(pods) and all("deletionTimestamp" not in pod["metadata"] and ready(pod) for pod in pods)

    def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Polls. Failed with the pods' state when it takes too long."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise Failed(f"not within {seconds:g} s: {what}\n{self.kubectl('get', 'pods', '-o', 'wide')}")
            time.sleep(0.5)

    @contextlib.contextmanager
    def streams(self, count: int = 4, tokens: int = 400, *more: str) -> Iterator[Streams]:
        """Clients in the cluster's network, while the block runs; `more` for them."""
        command = [self.lab, "exec", sys.executable, "-m", "tests.system.streams", self.address(), *more]
        streams = Streams(command, count, tokens)
        try:
            yield streams
        finally:
            streams.kill()


@contextlib.contextmanager
def started(namespace: str = NAMESPACE) -> Iterator[Cluster]:
    """A cluster that has the images, the APIs of others and the namespace, while the block runs."""
    made = Cluster(namespace)
    try:
        made.run("up", timeout=300)  # first: it installs what builds images
        if not KEEP:
            made.run("load", *map(made.build, IMAGES), timeout=600)
        made.run("kubectl", "apply", "-f", str(APIS))
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        made.run("kubectl", "apply", "-f", "-", given=json.dumps(space))
        yield made
    finally:
        if not KEEP:
            made.run("down", timeout=120)


def unbroken(told: dict[str, Any], fingerprints: int = 1) -> None:
    """What clients must have seen."""
    print(told)
    assert told["errors"] == []
    assert told["wrong"] == 0
    assert told["done"] >= 4
    assert len(told["fingerprints"]) == fingerprints


class Streams:
    """`tests.system.streams` as a process."""

    def __init__(self, command: list[str], count: int, tokens: int) -> None:
        self.count, self.told = count, {}
        self.process = subprocess.Popen(
            [*command, "--streams", str(count), "--tokens", str(tokens)],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._wait(lambda: "undisturbed" in self.told, 120)
        self.wait_running()

    def wait_running(self, seconds: float = 120) -> None:
        """Until each client is in the midst of an answer, anew."""
        while not self._lines.empty():
            self._lines.get()
        self.told.pop("running", None)
        self._wait(lambda: self.told.get("running") == self.count, seconds)

    def finish(self) -> dict[str, Any]:
        """Lets each answer come to its end; the summary."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._wait(lambda: "done" in self.told, 240)
        self.process.wait(20)
        return self.told

    def kill(self) -> None:
        """Whatever it does, with what it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not condition():
            try:
                self.told |= json.loads(self._lines.get(timeout=max(0.0, end - time.monotonic())))
            except queue.Empty:
                raise Failed(f"the clients told {self.told} within {seconds:g} s") from None

    def _read(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        for line in self.process.stdout:
            self._lines.put(line)
        if self.process.wait() > 0:
            self._lines.put(json.dumps({"died": self.process.stderr.read()[-2000:]}))


def ready(pod: dict[str, Any]) -> bool:
    """Whether its Ready condition is true."""
    return any(each["type"] == "Ready" and each["status"] == "True" for each in pod["status"].get("conditions", []))
