"""How the command ends: on Ctrl-C, on a closed pipe, where it cannot start. Never with a traceback."""

from __future__ import annotations

import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.integration.test_stack_processes import is_alive
from tests.polling import eventually
from tests.stack import ROOT, Models
from tests.unit.client_gateway import chunk, digest, finished, for_ever, started
from tests.unit.test_client_sync import served

STUCK = [started(), chunk(0, [1], "first\n"), for_ever]
LONG = [started(), *(chunk(i, [1], "line\n" * 4000) for i in range(40)), finished("LENGTH", 40)]
INTERRUPTED = 130


@contextmanager
def command(*arguments: str, prelude: str = "") -> Iterator[subprocess.Popen[str]]:
    """`hedgerow arguments` as a process; `prelude` is code that runs before it."""
    code = f"import sys\n{prelude}\nfrom hedgerow.cli.__main__ import run\nsys.argv[0] = 'hedgerow'\nrun()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def interrupted(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert "Traceback" not in said
    assert "Error" not in said
    assert process.returncode == INTERRUPTED


@pytest.mark.parametrize("arguments", [("generate", "x"), ("chat", "x"), ("generate", "x", "--json")])
def test_an_interrupt_ends_an_answer_with_130(arguments: Sequence[str]) -> None:
    with served(STUCK) as (server, _), command(*arguments, "--address", server.address) as process:
        assert first_line(process)
        interrupted(process)


def test_an_interrupt_ends_a_conversation_in_a_pipe_with_130() -> None:
    with served(STUCK) as (server, _), command("chat", "--address", server.address) as process:
        assert process.stdin is not None
        process.stdin.write("hello\nand more\n")
        process.stdin.flush()
        assert first_line(process) == "first\n"
        interrupted(process)


@pytest.mark.parametrize("arguments", [("models",), ("generate", "x"), ("tokenize", "x")])
def test_an_interrupt_ends_the_wait_for_a_gateway_that_is_silent(arguments: Sequence[str]) -> None:
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    with silent, command(*arguments, "--address", address) as process:
        silent.settimeout(30)
        connection, _ = silent.accept()
        with connection:
            interrupted(process)


def test_an_interrupt_while_the_parts_are_imported_is_no_traceback() -> None:
    prelude = """
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "hedgerow.client":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
"""
    with command("models", prelude=prelude) as process:
        out, said = process.communicate(timeout=30)
    assert (process.returncode, out, said) == (INTERRUPTED, "", "")


@pytest.mark.parametrize("arguments", [("generate", "x"), ("generate", "x", "--json"), ("chat", "x")])
def test_a_reader_that_has_enough_is_no_error(arguments: Sequence[str]) -> None:
    """`hedgerow generate ... | head -1`."""
    with served(LONG) as (server, _), command(*arguments, "--address", server.address) as process:
        assert first_line(process)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 0


@pytest.mark.parametrize("arguments", [("models",), ("tokenize", "x"), ("--help",), ("up", "--help")])
def test_output_that_nobody_reads_is_no_error(arguments: Sequence[str]) -> None:
    """A few lines are written when the interpreter ends, too late to be told from a failure: status 120."""
    with served() as (server, _):
        options = () if "--help" in arguments else ("--address", server.address)
        with command(*arguments, *options, prelude="sys.stdin.readline()") as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stderr.read() == ""
            assert process.wait(30) == 0


@pytest.mark.parametrize(("options", "shown"), [((), "caf\\xe9\n"), (("--json",), r"caf\u00e9")], ids=["text", "json"])
def test_a_terminal_that_lacks_a_letter_is_shown_its_code(options: Sequence[str], shown: str) -> None:
    """It was a traceback of UnicodeEncodeError, and the end of the answer."""
    script = [started(), chunk(0, [1], "café"), finished("LENGTH", 1)]
    narrow = "sys.stdout.reconfigure(encoding='ascii', errors='strict')"
    with (
        served(script) as (server, _),
        command("generate", "x", *options, "--address", server.address, prelude=narrow) as process,
    ):
        out, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (0, "")
    assert shown in out


@pytest.mark.parametrize("arguments", [("generate", "x"), ("chat", "x"), ("generate", "x", "--json"), ("resume", "s1")])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, 143)])
def test_whoever_ends_an_answer_cancels_its_session(arguments: Sequence[str], number: int, status: int) -> None:
    """The session is detached from the call: the call's end alone would leave it going on."""
    with served(STUCK) as (server, _), command(*arguments, "--address", server.address) as process:
        assert first_line(process)
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert (process.returncode, said.strip()) == (status, "")
        assert server.cancels == ["s1"]


def test_an_answer_that_is_left_running_is_not_cancelled_and_says_how_to_go_on() -> None:
    with (
        served(STUCK) as (server, _),
        command("generate", "x", "--leave-running", "--address", server.address) as process,
    ):
        assert first_line(process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
        assert process.returncode == INTERRUPTED
        assert f"go on with: hedgerow resume s1 --token-offset 1 --digest {digest(1).hex()} --text-offset 6" in said
        assert server.cancels == []


@pytest.mark.parametrize(
    "arguments", [("generate", "x"), ("generate", "x", "--json"), ("chat", "x"), ("models",), ("session", "s1")]
)
def test_output_that_cannot_be_written_is_one_line_and_ends_the_session(arguments: Sequence[str]) -> None:
    """A full disk gave a traceback, and the session went on."""
    with served(STUCK) as (server, _), open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "hedgerow.cli", *arguments, "--address", server.address]
        done = subprocess.run(line, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, timeout=30, check=False)
        assert (done.returncode, done.stderr) == (
            1, "hedgerow: the output cannot be written: No space left on device\n",
        )  # fmt: skip
        assert server.cancels == (["s1"] if arguments[0] in ("generate", "chat") else [])


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "2>/dev/full", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_traceback(closed: str) -> None:
    """Python has None for each of them then."""
    with served([started(), chunk(0, [1], "a"), finished("LENGTH", 1)]) as (server, _):
        line = f"{shlex.quote(sys.executable)} -m hedgerow.cli %s --address {server.address} {closed}"
        for arguments, status in (("generate x", 0), ("models", 0), ("chat", 0), ("resume s1 --digest x", 2)):
            done = subprocess.run(line % arguments, shell=True, cwd=ROOT, capture_output=True, text=True, timeout=30,
                                  stdin=subprocess.DEVNULL, check=False)  # fmt: skip
            assert done.returncode == status, (arguments, done.stderr)
            assert "Traceback" not in done.stderr


def up(tiny: Models, data: Path, *more: str) -> list[str]:
    return [
        "up", "--model", str(tiny.target), "--no-drafter", "--listen", "127.0.0.1:0", "--data", str(data), *more,
    ]  # fmt: skip


def test_an_interrupt_of_a_start_ends_it_and_leaves_nothing(tiny: Models, tmp_path: Path) -> None:
    """Also where a script started it with `&`: a shell without job control has SIGINT ignored there."""
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    for prelude in ("", ignoring):
        with command(*up(tiny, tmp_path), prelude=prelude) as process:
            assert first_line(process).startswith("redis: ready")
            children = psutil.Process(process.pid).children(recursive=True)
            interrupted(process)
        assert children
        eventually(lambda children=children: not any(map(is_alive, children)), what="the end of all")


def test_a_reader_that_leaves_a_start_ends_it(tiny: Models, tmp_path: Path) -> None:
    with command(*up(tiny, tmp_path)) as process:
        assert first_line(process).startswith("redis: ready")
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()
        assert process.wait(30) == 0


def test_up_that_cannot_start_says_why_in_one_line(tiny: Models, tmp_path: Path) -> None:
    """`--data` with a file, and a port that is taken."""
    (tmp_path / "file").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        attempts = (
            (up(tiny, tmp_path / "file"), f"data: '{tmp_path}/file' is not allowed: a folder that can be written to"),
            (up(tiny, tmp_path, "--listen", f"127.0.0.1:{port}"), f"127.0.0.1:{port} is unavailable: another process"),
            (up(tiny, tmp_path, "--model", "/nonexistent"), "--model: '/nonexistent' is not allowed"),
        )
        for arguments, why in attempts:
            with command(*arguments) as process:
                out, said = process.communicate(timeout=30)
            assert (process.returncode, out) == (1, "")
            assert said.startswith(f"hedgerow up: {why}")
            assert said.count("\n") == 1
