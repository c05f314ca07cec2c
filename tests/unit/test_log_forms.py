"""Logs as JSON, with the trace and session of the call that they are about."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from hedgerow.rpc.logs import bind, get_log, set_up_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def told(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_an_event_is_one_json_object_with_its_fields_types(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("kvstore", form="json")
    get_log("x").warning('100% "full"\n', step=4, left=0.5, why=None, odd=ValueError("é"))
    (line,) = told(capsys)
    assert line.pop("time").endswith("Z")
    head = {"level": "warning", "service": "kvstore", "event": '100% "full"\n'}
    assert line == {**head, "step": 4, "left": 0.5, "why": None, "odd": "é"}


def test_a_traceback_and_a_librarys_line_are_objects_too(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("x", form="json")
    try:
        raise ValueError("deep\ninside")
    except ValueError as error:
        get_log("x").error("failed", exception=error)
    logging.getLogger("grpc").warning("odd %s", "thing")
    ours, theirs = told(capsys)
    assert "ValueError: deep\ninside" in ours["traceback"]
    assert theirs["event"] == "odd thing"


async def test_what_is_bound_to_a_call_is_in_its_lines_and_in_no_others(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("gateway", form="json")
    log = get_log("x")

    async def call(session: str) -> None:
        bind(trace=f"t-{session}")
        bind(session=session)
        await asyncio.sleep(0)
        log.info("inside", own=session)
        await asyncio.create_task(deeper(session))

    async def deeper(session: str) -> None:
        log.info("deeper", own=session, session=f"{session} itself")
        bind(trace="")
        log.info("without", own=session)

    await asyncio.gather(*(asyncio.create_task(call(name)) for name in "ab"))
    log.info("outside")
    lines = told(capsys)
    assert "trace" not in lines[-1]
    for line in lines[:-1]:
        if line["event"] == "inside":
            assert (line["trace"], line["session"]) == (f"t-{line['own']}", line["own"])
        elif line["event"] == "deeper":
            assert (line["trace"], line["session"]) == (f"t-{line['own']}", f"{line['own']} itself")
        else:
            assert ("trace" in line, line["session"]) == (False, line["own"])
