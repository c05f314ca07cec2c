"""The command line, in this process, against a scripted gateway."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from pathlib import Path

import pytest

from hedgerow.cli.command import FAILED, INTERRUPTED, NOBODY_THERE, REFUSED
from hedgerow.cli.main import main
from hedgerow.cli.show import COLOURS, RESET
from hedgerow.cli.status import row
from hedgerow.client import ProcessStatus
from hedgerow.errors import Internal, InvalidRequest, NotFound, Unavailable
from tests.unit.client_gateway import ScriptedGateway, chunk, digest, finished, for_ever, started
from tests.unit.test_client_sync import served

WHOLE = [started(), chunk(0, [1, 2], "a\nb"), chunk(2, [3], "c"), finished("LENGTH", 3)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(server: object, *arguments: str) -> int:
    return main([arguments[0], "--address", server.address, *arguments[1:]])  # type: ignore[attr-defined]


def test_generate_streams_the_text(capsys: pytest.CaptureFixture[str]) -> None:
    with served(WHOLE) as (server, _):
        options = ["--max-tokens", "3", "--temperature", "0.5", "--top-k", "4", "--seed", "9", "--budget", "0"]
        assert run(server, "generate", "def f", *options, "--stop", "\\n\\n", "--stop", "END") == 0
    assert capsys.readouterr().out == "a\nbc\n"
    asked = server.requests[0]
    assert asked.text == "def f"
    assert (asked.sampling.max_tokens, asked.sampling.temperature, asked.sampling.top_k) == (3, 0.5, 4)
    assert (asked.sampling.seed, list(asked.sampling.stop)) == (9, ["\n\n", "END"])
    assert asked.speculation.HasField("budget")
    assert not asked.sampling.HasField("top_p")
    assert not asked.return_steps


def test_the_prompt_may_be_a_file_or_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.py").write_text("# héllo\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    with served(WHOLE, WHOLE) as (server, _):
        assert run(server, "generate", "--file", str(tmp_path / "p.py")) == 0
        assert run(server, "generate", "-") == 0
    assert [request.text for request in server.requests] == ["# héllo\n", "from a pipe"]
    capsys.readouterr()


def test_json_is_an_event_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with served(WHOLE) as (server, _):
        assert run(server, "generate", "x", "--json") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["started", "chunk", "chunk", "finished"]
    assert (events[1]["tokens"], events[1]["steps"][0]["tree_nodes"]) == ([1, 2], 5)
    assert (events[3]["reason"], events[3]["usage"]["completion_tokens"]) == ("length", 3)


def test_runs_are_brackets_in_a_pipe_and_colours_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(WHOLE, WHOLE) as (server, _):
        assert run(server, "generate", "x", "--show-runs") == 0
        assert capsys.readouterr().out == "[a\nb][c]\n[3 tokens, 2 steps, 1.50 tokens a step, length]\n"
        terminal = Terminal()
        monkeypatch.setattr(sys, "stdout", terminal)
        assert run(server, "generate", "x", "--show-runs") == 0
    first, second = COLOURS
    assert terminal.getvalue().startswith(f"{first}a{RESET}\n{first}b{RESET}{second}c{RESET}\n")
    assert server.requests[0].return_steps


def test_chat_keeps_the_conversation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = iter(["first", "", "second", "/new", "third", "/exit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    with served(WHOLE, WHOLE, WHOLE) as (server, _):
        assert run(server, "chat", "--system", "Be brief.", "--no-thinking") == 0
    turns = [[(m.role, m.content) for m in request.chat.messages] for request in server.requests]
    system, answer = ("system", "Be brief."), ("assistant", "a\nbc")
    assert turns == [
        [system, ("user", "first")],
        [system, ("user", "first"), answer, ("user", "second")],
        [system, ("user", "third")],
    ]
    assert server.requests[0].chat.HasField("thinking")
    assert not server.requests[0].chat.thinking
    capsys.readouterr()


def test_chat_goes_on_after_an_answer_that_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter(["too long", "short"])

    def next_line(prompt: str = "") -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", next_line)
    refusal = InvalidRequest("chat", "9 tokens", "below 8")
    with served([refusal], WHOLE) as (server, _):
        assert run(server, "chat") == REFUSED, "a script must see that an answer is missing"
    assert [m.content for m in server.requests[1].chat.messages] == ["short"]
    assert "below 8" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", Terminal())
    lines = iter(["too long", "short"])
    with served([refusal], WHOLE) as (server, _):
        assert run(server, "chat") == 0, "a person has seen it"


@pytest.mark.parametrize(("reason", "status"), [("LENGTH", 0), ("DEADLINE", FAILED), ("ERROR", FAILED)])
def test_chat_in_a_pipe_tells_of_an_answer_that_ended_early(
    reason: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ended with 0, whatever the answers were."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    with served([started(), chunk(0, [1], "a"), finished(reason, 1)], WHOLE) as (server, _):
        assert run(server, "chat") == status
    assert len(server.requests) == 2
    capsys.readouterr()


def test_one_question(capsys: pytest.CaptureFixture[str]) -> None:
    with served(WHOLE) as (server, _):
        assert run(server, "chat", "hi") == 0
    assert [(m.role, m.content) for m in server.requests[0].chat.messages] == [("user", "hi")]
    assert capsys.readouterr().out == "a\nbc\n"


def test_the_small_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as (server, _):
        assert run(server, "models") == 0
        assert run(server, "models", "--json") == 0
        assert run(server, "tokenize", "ab") == 0
        assert run(server, "tokenize", "ab", "--chat", "--json") == 0
        assert run(server, "session", "s1") == 0
        assert run(server, "session", "s1", "--delete") == 0
        assert run(server, "cancel", "s1") == 0
        assert run(server, "cancel", "s2") == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("m  ready, context 64, vocabulary 99")
    assert json.loads(out[1])["name"] == "m"
    assert out[2] == "97 98"
    assert bytes(json.loads(out[3])) == b"user:ab;"
    assert json.loads("\n".join(out[4:-3]))["token_count"] == 5
    assert out[-3:] == ["deleted", "cancelled", "it had ended"]


def test_exit_status_tells_what_went_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--address", "localhost:1", "x"]) == NOBODY_THERE
    said = capsys.readouterr().err
    assert "localhost:1" in said
    assert "hedgerow up" in said
    scripts = (
        [InvalidRequest("sampling.top_p", 2.0, "in (0, 1]")],
        [NotFound("session", "s")],
        [started(), chunk(0, [1], "a"), Unavailable("verifier", "it broke", 0.0)],
        [Internal("oops")],
        [started(), finished("CANCELLED")],
    )
    with served(*scripts) as (server, _):
        assert run(server, "generate", "x") == REFUSED
        assert "sampling.top_p: 2.0 is not allowed: in (0, 1]" in capsys.readouterr().err
        assert run(server, "generate", "x") == REFUSED
        assert run(server, "generate", "x") == FAILED
        assert "oops" in capsys.readouterr().err
        assert run(server, "generate", "x") == FAILED
        assert run(server, "generate", "x", "--file", "/nowhere") == REFUSED
        assert run(server, "generate", "--file", "/nowhere") == REFUSED


@pytest.mark.parametrize("command", [["generate", "x"], ["chat", "x"]])
def test_an_answer_that_breaks_off_is_not_called_a_gateway_that_is_not_there(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """After half an answer it advised to start a stack. Now it says how to go on, behind what was shown."""
    servers: list[ScriptedGateway] = []

    async def die() -> None:
        servers[0].dying = asyncio.create_task(servers[0].die())  # type: ignore[attr-defined]
        await for_ever()

    with served([started(), chunk(0, [1, 2], "café"), die]) as (server, _):
        servers.append(server)
        assert run(server, *command, "--patience", "0.3") == FAILED
    said = capsys.readouterr().err
    assert "hedgerow up" not in said
    assert f"hedgerow resume s1 --token-offset 2 --digest {digest(2).hex()} --text-offset 5\n" in said


def test_an_answer_goes_on_by_itself(capsys: pytest.CaptureFixture[str]) -> None:
    broken = [started(), chunk(0, [1, 2], "a\nb"), Unavailable("verifier", "away", 0.0)]
    with served(broken, WHOLE[:1] + WHOLE[2:]) as (server, _):
        assert run(server, "generate", "x") == 0
    assert capsys.readouterr().out == "a\nbc\n"


def test_resume_goes_on_from_what_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    rest = [started(), chunk(2, [3], "c"), finished("LENGTH", 3)]
    known = ["--token-offset", "2", "--digest", digest(2).hex(), "--text-offset", "3"]
    with served(WHOLE, rest, rest) as (server, _):
        assert run(server, "resume", "s1") == 0
        assert capsys.readouterr().out == "a\nbc\n"
        assert run(server, "resume", "s1", *known) == 0
        assert capsys.readouterr().out == "c\n"
        asked = server.resumes[1]
        assert (asked.session_id, asked.token_offset, asked.digest, asked.text_offset) == ("s1", 2, digest(2), 3)
        assert run(server, "resume", "s1", *known, "--json", "--tenant", "acme") == 0
        assert json.loads(capsys.readouterr().out.splitlines()[1])["tokens"] == [3]
        assert server.metadata[-1]["hedgerow-tenant"] == "acme"


@pytest.mark.parametrize(
    ("option", "value", "field"),
    [
        ("--digest", "xy", "--digest"), ("--digest", "abcd", "digest"), ("--token-offset", "-1", "token_offset"),
        ("--text-offset", "-1", "text_offset"), ("--patience", "-1", "--patience"), ("--patience", "nan", "--patience"),
        ("--tenant", "two words", "tenant"), ("--address", ",", "address"),
    ],
)  # fmt: skip
def test_a_position_that_cannot_be_is_refused(
    option: str, value: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["resume", "s1", "--address", "localhost:1", option, value]) == REFUSED
    assert capsys.readouterr().err.startswith(f"hedgerow: {field}: ")


def test_several_addresses_are_tried(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with served() as (server, _):
        for _turn in range(4):
            assert main(["models", "--address", f"localhost:1,{server.address}"]) == 0
        monkeypatch.setenv("HEDGEROW_ADDRESS", f"localhost:1,{server.address}")
        assert main(["models"]) == 0
    assert main(["models", "--address", "localhost:1,localhost:2"]) == NOBODY_THERE
    assert "nothing answers at localhost:1,localhost:2" in capsys.readouterr().err


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hedgerow.cli.show.show", interrupted)
    with served(WHOLE) as (server, _):
        assert run(server, "generate", "x") == INTERRUPTED
    assert "Traceback" not in capsys.readouterr().err


def test_the_address_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with served() as (server, _):
        monkeypatch.setenv("HEDGEROW_ADDRESS", server.address)
        assert main(["models"]) == 0
    with pytest.raises(SystemExit, match="2"):
        main(["frobnicate"])
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "generate" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--budget", "--seed", "--top-k", "--max-tokens"])
def test_a_number_out_of_range_is_refused_with_its_range(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It said "Value out of range: -1" and no more."""
    assert main(["generate", "--address", "localhost:1", "x", option, "-1"]) == REFUSED
    name = option.removeprefix("--").replace("-", "_")
    assert f"hedgerow: {name}: -1 is not allowed: a whole number in [0, " in capsys.readouterr().err


def test_bytes_that_are_no_text_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A traceback of UnicodeEncodeError came from an argument, one of UnicodeDecodeError from a pipe."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab\xff\xfe"), "utf-8"))
    for arguments in (["generate", "\udcff\udcfe"], ["generate", "-"], ["chat", "\udcff"], ["tokenize", "\udcff"]):
        assert main([*arguments, "--address", "localhost:1"]) == REFUSED
    said = capsys.readouterr().err
    assert said.count(" is not allowed: ") == 4
    assert "prompt: 'standard input' is not allowed: UTF-8 text" in said
    assert "messages[0].content: '\\udcff' is not allowed" in said


def test_status_says_which_limits_and_keys_are_in_force() -> None:
    facts = {"owner": "ab", "limits": "generation 3 of 2026-01-02 03:04:05 UTC", "api keys": "generation 1 of 2026"}
    told = ProcessStatus("a:1", "gateway", "0.1.0", 7.0, True, False, {}, facts, {})
    assert row("a:1", told)[-1] == f"limits {facts['limits']}, api keys generation 1 of 2026"
