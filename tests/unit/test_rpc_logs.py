"""Structured logs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from hedgerow.rpc.health import Health
from hedgerow.rpc.logs import get_log, set_up_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_event_is_one_line_of_quoted_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("kvstore")
    get_log("x").info("100% full", why='said "no"\nand left', count=3, empty="", pair="a=b")
    (line,) = lines(capsys)
    stamp, rest = line.split(" ", 1)
    assert stamp.startswith("time=2")
    assert stamp.endswith("Z")
    assert rest == (
        'level=info service=kvstore event="100% full" why="said \\"no\\"\\nand left" count=3 empty="" pair="a=b"'
    )


def test_events_below_the_level_are_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("x", "warning")
    log = get_log("x")
    log.debug("no")
    log.info("no")
    log.warning("yes")
    log.error("yes")
    assert [line.split("event=")[1] for line in lines(capsys)] == ["yes", "yes"]


def test_traceback_stays_on_the_line_of_its_event(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("x")
    try:
        raise ValueError("deep\ninside")
    except ValueError as error:
        get_log("x").error("failed", exception=error, step=4)
    (line,) = lines(capsys)
    assert "step=4" in line
    assert "ValueError: deep\\ninside" in line


def test_libraries_log_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("x")
    logging.getLogger("grpc").warning("odd %s", "thing")
    (line,) = lines(capsys)
    assert 'level=warning service=x event="odd thing"' in line


async def test_what_a_start_waits_for_is_no_news_and_what_changes_later_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Each service began its log with several lines of `health changed ... serving=False`."""
    set_up_logging("kvstore")
    health = Health(["x"])
    health.report("model", "its weights are being loaded")
    health.start()
    health.report("model", None)
    assert health.serving
    assert lines(capsys) == []
    health.report("model", "gone")
    health.report("model", None)
    assert [line.split(" event=")[1] for line in lines(capsys)] == [
        '"health changed" what=model why=gone serving=False',
        '"health changed" what=model why=well serving=True',
    ]
    await health.stop()
