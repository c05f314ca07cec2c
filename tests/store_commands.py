"""What the pages tell an operator to say to the store, and a store with the users of the chart to say it to."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hedgerow.cli.ports import free_ports
from tests.polling import eventually

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "deploy" / "docker" / "hedgerow-store"
PAGES = ("operations.md", "runbooks.md", "systemd.md")
COMMAND = re.compile(r"hedgerow-store((?: [A-Za-z0-9_-]+)+)")


def documented() -> list[str]:
    """Every command of the pages, once: those in a block and those in backquotes."""
    found: dict[str, None] = {}
    for page in PAGES:
        text = (ROOT / "docs" / page).read_text()
        for code in re.findall(r"^```\n(.*?)^```|`([^`\n]+)`", text, re.M | re.S):
            found |= dict.fromkeys(words.strip() for words in COMMAND.findall("".join(code)))
    return list(found)


@dataclass
class Store:
    """A server whose users are those of the chart's Secret."""

    folder: Path
    port: int
    kvstore: list[str]
    operator: str = "planted-operator-word"
    env: dict[str, str] = field(default_factory=dict)

    def write(self) -> None:
        """Lays down the users, as deploy/k8s/hedgerow/templates/secrets.yaml does."""
        lines = ["user default off"]
        for name, passwords in (("redis", self.kvstore), ("operator", [self.operator])):
            hashes = " ".join("#" + hashlib.sha256(each.encode()).hexdigest() for each in passwords)
            lines.append((ROOT / "deploy" / f"{name}.acl").read_text().strip().replace("<password>", hashes))
        (self.folder / "users.acl").write_text("\n".join(lines) + "\n")
        (self.folder / "operator").write_text(self.operator)
        self.env = {**os.environ, "STORE_OPERATOR_FILE": str(self.folder / "operator")}
        self.env["STORE_SOCKET"] = str(self.folder / "socket")

    def ask(self, words: str = "", given: str = "", status: int = 0) -> str:
        """`hedgerow-store WORDS`: what it printed."""
        done = subprocess.run(
            ["sh", str(SCRIPT), *words.split()],
            input=given,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
        assert done.returncode == status, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@contextmanager
def store(folder: Path, binary: Path) -> Iterator[Store]:
    """It answers. Skips the test where there is no redis-cli."""
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not on PATH")
    folder.mkdir(exist_ok=True)
    made = Store(folder, next(free_ports(1)), ["first-password-of-kvstores"])
    made.write()
    words = [f"--port {made.port}", "--save ''", "--appendonly yes", "--repl-diskless-sync-delay 0", f"--dir {folder}"]
    words += [f"--aclfile {folder / 'users.acl'}", f"--unixsocket {folder / 'socket'}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([binary, *words], stdout=log, stderr=subprocess.STDOUT)
    try:
        eventually(
            lambda: (folder / "socket").exists() or process.poll() is not None, 20, "the socket"
        )  # made when it is about to take commands
        assert process.poll() is None, (folder / "log").read_text()
        eventually(lambda: "PONG" in made.ask("PING"), 20, "PONG")
        yield made
    finally:
        process.kill()
        process.wait()
