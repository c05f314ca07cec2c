"""Files that are read again: the limits that they may change, and what is said of those that are not sound."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hedgerow import certificates
from hedgerow.rpc import reload, telemetry
from hedgerow.rpc.config import ConfigError, overlaid
from hedgerow.rpc.live import Live
from hedgerow.rpc.reload import Reloads
from hedgerow.rpc.server import ServerConfig
from tests.certificates import Authority, copied
from tests.polling import soon


@dataclass(frozen=True, kw_only=True)
class Config(ServerConfig):
    """Two that may change, and one that may not."""

    most: int = field(default=5, metadata={"min": 1, "max": 9, "live": True})
    share: float = field(default=0.5, metadata={"min": 0, "max": 1, "live": True})
    folder: str = "x"


def put(path: Path, text: str) -> None:
    """As a careful operator, and Kubernetes, do."""
    beside = path.with_suffix(".new")
    beside.write_text(text)
    os.replace(beside, path)


@pytest.fixture
def limits(tmp_path: Path) -> Path:
    path = tmp_path / "limits"
    put(path, "HEDGEROW_MOST=6\n")
    return path


@pytest.fixture
def live(limits: Path) -> Live[Config]:
    return Live(Config(limits_file=limits, most=4))


def test_a_file_goes_before_the_environment_and_only_for_what_may_change(limits: Path) -> None:
    put(limits, "# ours\n\n HEDGEROW_MOST = 7 \nHEDGEROW_LOG_LEVEL=debug\n")
    config = overlaid(Config(most=4, share=0.25), limits)
    assert (config.most, config.share, config.log_level) == (7, 0.25, "debug")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("HEDGEROW_MOST", "line 2: this is not allowed: must be HEDGEROW_NAME=value, or begin with #"),
        ("HEDGEROW_MOST=10", "line 2: HEDGEROW_MOST: '10' is not allowed: must be in [1, 9]"),
        ("HEDGEROW_MOST=", "line 2: HEDGEROW_MOST: '' is not allowed: must be a whole number"),
        ("HEDGEROW_SHARE=0.1", "line 2: HEDGEROW_SHARE: this is not allowed: it is in this file twice"),
        (
            "HEDGEROW_FOLDER=y",
            "line 2: HEDGEROW_FOLDER: this is not allowed: what may change while it runs is HEDGEROW_",
        ),
        (
            "MOST=1",
            "line 2: MOST: this is not allowed: what may change while it runs is HEDGEROW_TRACE_RATIO, HEDGEROW_",
        ),
    ],
)
def test_a_line_that_is_wrong_is_named_with_its_limit(limits: Path, line: str, told: str) -> None:
    put(limits, f"HEDGEROW_SHARE=0.5\n{line}\n")
    with pytest.raises(ConfigError) as refused:
        overlaid(Config(), limits)
    assert str(refused.value).startswith(f"{limits}, {told}")


def look(live: Live[Config]) -> None:
    """What a process does each second."""
    live.reloads.look()
    live.apply()


def test_a_changed_file_is_taken_and_told_once(live: Live[Config], limits: Path) -> None:
    applied: list[int] = []
    live.on_change(lambda config: applied.append(config.most))
    look(live)
    assert (live.config.most, applied) == (6, [])
    put(limits, "HEDGEROW_MOST=7\n")
    look(live)
    look(live)
    assert (live.config.most, applied) == (7, [7])
    put(limits, "")
    look(live)
    assert (live.config.most, applied) == (4, [7, 4]), "what the file does not say is the environment's again"
    assert str(live.reloads.states["limits"]).startswith("generation 3 of 2")


def test_a_broken_file_changes_nothing_and_is_told_until_it_is_well(
    live: Live[Config], limits: Path, caplog: pytest.LogCaptureFixture
) -> None:
    live.reloads.export()
    applied: list[int] = []
    live.on_change(lambda config: applied.append(config.most))
    put(limits, "HEDGEROW_MOST=many\n")
    for _ in range(3):
        look(live)
    assert (live.config.most, applied) == (6, [])
    (line,) = (line for line in caplog.records if line.levelno == logging.ERROR)
    about = json.dumps(line.__dict__["fields"], default=str)
    assert "limits, line 1: HEDGEROW_MOST: 'many' is not allowed: must be a whole number" in about
    assert telemetry.value("hedgerow_reload_refused", file="limits") == 1
    assert telemetry.value("hedgerow_reload_generation", file="limits") == 1
    assert "the newest file is not taken: " in str(live.reloads.states["limits"])
    limits.unlink()
    look(live)
    assert live.config.most == 6
    put(limits, "HEDGEROW_MOST=6\n")
    look(live)
    assert telemetry.value("hedgerow_reload_refused", file="limits") == 0
    assert telemetry.value("hedgerow_reload_generation", file="limits") == 1
    put(limits, "HEDGEROW_MOST=8\n")
    look(live)
    assert applied == [8]
    assert telemetry.value("hedgerow_reload_generation", file="limits") == 2


def test_a_signal_reads_again_what_a_look_would_not(live: Live[Config], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        live.reloads.look()
        assert not caplog.records
        live.reloads.look(again=True)
    (line,) = caplog.records
    assert line.__dict__["fields"]["changed"] is False


def test_a_file_that_is_wrong_at_the_start_stops_it(limits: Path) -> None:
    put(limits, "HEDGEROW_MOST=0\n")
    with pytest.raises(ConfigError, match="limits, line 1: HEDGEROW_MOST"):
        Live(Config(limits_file=limits))


def test_certificates_are_told_of_as_any_other_file(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    files, complaints, reloads = copied(authority.issue("one"), tmp_path / "here"), list[str](), Reloads()
    watched = certificates.Watched(
        certificates.Tls(files.ca, files.cert, files.key), lambda why: complaints.append(why.field)
    )
    reloads.follow("certificates", watched)
    state = reloads.states["certificates"]
    second = authority.issue("two")
    files.cert.write_bytes(second.cert.read_bytes())  # its key is not there yet
    reloads.look()
    reloads.look()
    assert (complaints, state.generation, "the key of the certificate" in state.refused) == (["key"], 1, True)
    files.key.write_bytes(second.key.read_bytes())
    reloads.look()
    assert (complaints, state.generation, state.refused) == (["key"], 2, "")


async def test_a_file_that_takes_long_to_read_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty thousand keys are a tenth of a second: what is in force is there meanwhile, without a wait."""
    monkeypatch.setattr(reload, "EVERY", 0.01)
    path, reads, loop_runs, told = tmp_path / "keys", list[str](), threading.Event(), asyncio.Event()
    path.write_text("old")

    def read() -> str:
        reads.append(path.read_text())
        if reads[-1] == "new":
            assert loop_runs.wait(20), "the event loop waits for the file"
        return reads[-1]

    reloads = Reloads()
    file = reloads.watch("keys", path, read)
    running = asyncio.create_task(reloads.run(lambda: told.set() if file.held == "new" else None))
    try:
        put(path, "new")
        await soon(lambda: reads[-1] == "new", 20)
        assert file.held == "old"
        loop_runs.set()
        async with asyncio.timeout(20):
            await told.wait()
        assert (reads, reloads.states["keys"].generation) == (["old", "new"], 2)
    finally:
        loop_runs.set()
        running.cancel()
