"""What services log while sessions are made, fail over and are cancelled: JSON, and nothing of what users said."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from hedgerow.cli.child import Backoff, Child, Command
from hedgerow.cli.supervisor import Stack, StackConfig
from hedgerow.client import AsyncClient
from hedgerow.errors import InvalidRequest
from tests.polling import eventually
from tests.stack import ROOT, Models

PROMPT, STOP, TENANT_SECRET = "planted_prompt = 1", "planted-stop", "planted-tenant-secret"
SERVICES = ("kvstore", "drafter", "verifier", "gateway")


@pytest.fixture(scope="module")
def telling(tiny: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {name: {"LOG_FORMAT": "json", "LOG_LEVEL": "debug"} for name in SERVICES}
    settings["gateway"]["TENANT_SECRET"] = TENANT_SECRET
    data = tmp_path_factory.mktemp("data")
    with Stack(StackConfig(ROOT, tiny.target, data, drafter=tiny.drafter, settings=settings)) as stack:
        yield stack


def lines(stack: Stack, name: str) -> list[dict[str, Any]]:
    """Every line but `ready`, which is for supervisors. Raises where one is no JSON object."""
    return [json.loads(line) for line in stack.logs(name) if not line.startswith("ready ")]


async def test_lines_are_json_of_a_session_and_have_nothing_of_what_it_said(telling: Stack) -> None:
    async with AsyncClient(telling.address("gateway")) as client:
        stream, killed = client.generate(PROMPT, max_tokens=2000, ignore_eos=True, stop=[STOP]), False
        async for _ in stream:
            if not killed:
                telling.kill("verifier")
            killed = True
        session_id = stream.position.session_id
        with pytest.raises(InvalidRequest):
            await client.generate(PROMPT, stop=["planted" * 100]).result()
        cancelled = client.generate(PROMPT, max_tokens=3000, ignore_eos=True)
        async for _ in cancelled:
            break
        await client.cancel(cancelled.position.session_id)
        await cancelled.result()
        told = "".join([chunk.text async for chunk in client.resume(session_id)])
        await client.delete_session(session_id)
    assert len(told) > 100
    for name in SERVICES:
        said = lines(telling, name)
        assert said, name
        assert all({"time", "level", "service", "event"} <= line.keys() for line in said)
        text = "\n".join(telling.logs(name))
        for secret in ("planted", TENANT_SECRET, told[:40]):
            assert secret not in text, f"{name} logs {secret!r}"
    broke = [line for line in lines(telling, "gateway") if line["event"] == "the verifier's stream broke"]
    assert [line["level"] for line in broke] == ["warning"]
    (lost,) = [line for line in lines(telling, "gateway") if line["event"] == "a session lost its verifier"]
    assert lost["session"] == session_id
    assert lost["step"] > 0, "that of the verifier's steps that spoke last of it"
    ended = [line for line in lines(telling, "verifier") if line["event"] == "a sequence ended"]
    assert {"stop", "length", "cancelled"} >= {line["finish"] for line in ended} >= {"length", "cancelled"}
    assert all(line["step"] > 0 and line["session"] for line in ended)


def test_a_password_in_an_address_is_in_no_line() -> None:
    """Of a Redis that is not there: its address is told, the password is not."""
    settings = {"REDIS_URL": "redis://user:planted-password@127.0.0.1:1/0", "LOG_FORMAT": "json", "LOG_LEVEL": "debug"}
    env = {**os.environ, **{f"HEDGEROW_{name}": value for name, value in settings.items()}}
    command = Command("kvstore", [sys.executable, "-m", "services.kvstore"], env, ROOT)
    child = Child(command, lambda name, line: None, Backoff())
    child.start()
    try:
        eventually(lambda: any("not ready yet" in line for line in child.lines()), 30, "the reason")
        assert any("127.0.0.1:1" in line for line in child.lines()), child.lines()
        assert not any("planted" in line for line in child.lines()), child.lines()
    finally:
        child.stop(10)
