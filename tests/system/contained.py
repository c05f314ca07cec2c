"""A stack whose verifier and drafter are containers of an engine image, on this machine's network."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from hedgerow.cli.child import Command
from hedgerow.cli.supervisor import Stack, StackConfig, service_of
from tests.system.tools import tool

ENGINES = ("drafter", "verifier")
# As the chart runs them: what Triton compiles is below /tmp.
CLOSED = ("--read-only", "--tmpfs=/tmp:exec", "--cap-drop=ALL", "--security-opt=no-new-privileges")


class Podman:
    """The command, with limits that every machine gives; `folder` for its configuration."""

    def __init__(self, folder: Path) -> None:
        self.path = tool("podman")
        config = folder / "containers.conf"  # podman asks for a million files
        config.write_text('[containers]\ndefault_ulimits = ["nofile=4096:4096","nproc=4096:4096"]\n')
        self.env = {**os.environ, "CONTAINERS_CONF": str(config)}

    def run(self, *words: str, timeout: float = 120, status: int = 0) -> str:
        """`podman WORDS`: what it printed. Raises AssertionError with all of it where it ends otherwise."""
        done = subprocess.run(
            [self.path, *words], env=self.env, capture_output=True, text=True, timeout=timeout, check=False
        )
        told = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        assert done.returncode == status, f"podman {words}: exit {done.returncode}\n{told}"
        return done.stdout if status == 0 else told

    def inspected(self, container: str) -> dict[str, object]:
        """What podman knows of a container."""
        return dict(json.loads(self.run("inspect", container))[0])


class Contained(Stack):
    """`image`: an engine image with the bundled models."""

    def __init__(self, config: StackConfig, podman: Podman, image: str) -> None:
        super().__init__(config)
        self.podman, self.image = podman, image

    def container(self, name: str) -> str:
        """Of one of its processes."""
        return f"hedgerow-{os.getpid()}-{name}"

    def _plan(self) -> dict[str, dict[str, str]]:
        plan = super()._plan()
        target, drafter = "/app/models/sapling", "/app/models/sapling-dflash"
        for name in plan:
            if service_of(name) == "verifier":
                plan[name]["MODEL_PATH"] = target
            if service_of(name) == "drafter":
                plan[name] |= {"MODEL_PATH": drafter, "TARGET_PATH": target}
        return plan

    def _command(self, name: str, settings: Mapping[str, str]) -> Command:
        command = super()._command(name, settings)
        if service_of(name) not in ENGINES:
            return command
        given = ["--env=HEDGEROW_METRICS_ADDRESS="]  # the image's port is one for both here
        given += [f"--env={key}={value}" for key, value in command.env.items() if key.startswith("HEDGEROW_")]
        words = ["run", "--rm", f"--name={self.container(name)}", "--network=host", *CLOSED, *given, self.image]
        argv = [self.podman.path, *words, f"services.{service_of(name)}"]
        return dataclasses.replace(command, argv=argv, env=self.podman.env)
