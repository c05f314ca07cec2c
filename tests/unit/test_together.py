"""A verifier and a drafter in one container: deploy/docker/together.py with two small programs in their place."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from deploy.docker import together
from tests.polling import soon

# Each writes down what it was given, once a start; the drafter dies twice before it stays.
NOTE = "import os, pathlib, signal, sys, time\nplace = pathlib.Path(os.environ['PLACE'])\n"
NOTE += (
    "names = sorted(name for name in os.environ if name.startswith(('HEDGEROW_', 'DRAFTER__', 'VERIFIER__', 'OWN')))\n"
)
NOTE += "with (place / sys.argv[1]).open('a') as file: file.write(','.join(names) + '\\n')\n"
VERIFIER = NOTE + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n(place / 'ready').touch()\ntime.sleep(60)\n"
DRAFTER = (
    NOTE
    + "if len((place / 'drafter').read_text().split()) < 3: sys.exit(1)\n(place / 'stays').touch()\ntime.sleep(60)\n"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("verifier", "drafter"):
        folder = tmp_path / "settings" / name
        folder.mkdir(parents=True)
        (folder / "HEDGEROW_LISTEN").write_text("127.0.0.1:0")
        (folder / f"HEDGEROW_{name.upper()}_ONLY").write_text("1")
        (folder / "..data").mkdir()  # as in a mounted ConfigMap
    commands = {
        "verifier": (sys.executable, "-c", VERIFIER, "verifier"),
        "drafter": (sys.executable, "-c", DRAFTER, "drafter"),
    }
    monkeypatch.setattr(together, "COMMANDS", commands)
    monkeypatch.setattr(together, "FIRST_DELAY", 0.05)
    return tmp_path


def lines(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


async def test_each_has_its_own_settings_and_a_drafter_that_dies_is_started_again(place: Path) -> None:
    own = {"DRAFTER__OWN_DRAFTS": "1", "VERIFIER__HEDGEROW_HEALTH_LISTEN": "here", "OWN_OF_BOTH": "1"}
    base = dict(os.environ) | {"PLACE": str(place), "HEDGEROW_ADMIN_LISTEN": "the container's"} | own
    running = asyncio.create_task(together.run(place / "settings", base))
    await soon(lambda: (place / "stays").exists() and (place / "ready").exists(), 20)
    assert lines(place / "drafter") == ["HEDGEROW_DRAFTER_ONLY,HEDGEROW_LISTEN,OWN_DRAFTS,OWN_OF_BOTH"] * 3
    assert lines(place / "verifier") == ["HEDGEROW_HEALTH_LISTEN,HEDGEROW_LISTEN,HEDGEROW_VERIFIER_ONLY,OWN_OF_BOTH"]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 20) == 7, "the verifier's status"
    assert lines(place / "verifier") == lines(place / "verifier")[:1], "it is the container: started once"


async def test_a_verifier_that_is_killed_ends_the_container(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    monkeypatch.setattr(together, "COMMANDS", together.COMMANDS | {"verifier": killed})
    base = dict(os.environ) | {"PLACE": str(place)}
    assert await asyncio.wait_for(together.run(place / "settings", base), 20) == 128 + signal.SIGKILL
