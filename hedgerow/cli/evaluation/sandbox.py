"""Runs code that a model wrote, where it can do nothing but compute, and compares what it computes.

A process of its own for every answer: `python -I -S -B`, an empty environment, an empty folder, no input. `jail.py`
says what it gives up before the code runs; the parent bounds its time and its output. Expected values never enter the
process, so code that lies about itself passes nothing.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hedgerow.errors import Unsupported

JAIL = Path(__file__).with_name("jail.py")
NEEDED = ("landlock", "seccomp")  # with both nothing is left to the namespaces but a second wall


@dataclass(frozen=True)
class Limits:
    """Of one answer."""

    seconds: float = 10.0  # by the clock; of processor, the next whole number
    memory: int = 512 << 20  # bytes of address space
    output: int = 64 << 10  # bytes printed
    result: int = 1 << 20  # bytes of computed values


class Verdict(NamedTuple):
    """`failure` is "" where every call gave what it should; else a kind, and what is known about it."""

    failure: str = ""
    detail: str = ""
    layers: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.failure


def judge(
    source: str,
    calls: Sequence[tuple[str, Any]],
    driver: str = "",
    limits: Limits = Limits(),
    isolate: bool = True,
) -> Verdict:
    """Runs `source`, then `driver`, then evaluates the calls, each with the value that it must have.

    Raises Unsupported where `isolate` and the kernel does not hold the process.
    """
    request = {
        "source": source,
        "driver": driver,
        "calls": [call for call, _ in calls],
        "memory": limits.memory,
        "seconds": math.ceil(limits.seconds) + 1,  # of processor: who watches the clock should be first
        "isolate": isolate,
    }
    done = _run(request, limits)
    messages = list(_messages(done.result))
    told = messages.pop(0) if messages and "layers" in messages[0] else {"layers": [], "missing": []}
    limited = not any(layer.startswith("RLIMIT") for layer in told["missing"])
    if isolate and not (limited and set(NEEDED) <= set(told["layers"])):
        detail = ", ".join(told["missing"]) or done.stopped or done.tail or "it ended before it began"
        raise Unsupported("eval", f"this machine does not isolate a process: {detail}")
    layers = tuple(told["layers"])
    if done.stopped:
        return Verdict(done.stopped, done.tail, layers)
    for number, (call, expected) in enumerate(calls):
        if number >= len(messages) or "value" not in messages[number]:
            said = messages[number] if number < len(messages) else {}
            kind = said.get("failure") or _death(done.status)
            return Verdict(str(kind), f"{call}: {said.get('detail')}" if said else done.tail, layers)
        if not same(messages[number]["value"], expected):
            return Verdict("wrong answer", f"{call} is {str(messages[number]['value'])[:200]}", layers)
    return Verdict("", "", layers)


def same(value: Any, expected: Any) -> bool:
    """Equal as JSON: tuples are lists, keys are text; true is not 1; numbers with a fraction to nine digits."""
    return _same(value, json.loads(json.dumps(expected)))


def _same(value: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(value, list) and len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(expected, dict):
        return isinstance(value, dict) and value.keys() == expected.keys() and all(
            _same(value[key], expected[key]) for key in expected
        )  # fmt: skip
    if isinstance(expected, float):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
    return type(value) is type(expected) and bool(value == expected)


PROBE = """
import os, socket
def refused(action):
    try:
        action()
    except OSError:
        return True
    return False
def fork():
    if os.fork() == 0:
        os._exit(0)
"""
PROBES: Sequence[tuple[str, Any]] = (
    ("refused(lambda: os.stat('/') and open('/etc/passwd'))", True),
    ("refused(lambda: open('written', 'w'))", True),
    ("refused(lambda: socket.socket())", True),
    ("refused(fork)", True),
    ("refused(lambda: os.kill(os.getppid(), 0))", True),
)


def prove() -> tuple[str, ...]:
    """Tries to break out on this machine; returns what holds. Raises Unsupported where something got through."""
    found = judge(PROBE, PROBES)
    if not found.passed:
        raise Unsupported("eval", f"this machine's sandbox leaks: {found.failure}, {found.detail}")
    return found.layers


class Done(NamedTuple):
    """A process that has ended."""

    result: bytes
    tail: str  # the last of what it printed
    status: int
    stopped: str  # the limit at which it was stopped; ""


def _run(request: dict[str, Any], limits: Limits) -> Done:
    with tempfile.TemporaryDirectory(prefix="hedgerow-eval-") as folder, ExitStack() as held:
        result, told = (held.enter_context(open(end, mode)) for end, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
        asked = held.enter_context(tempfile.TemporaryFile())
        asked.write(json.dumps(request).encode())
        asked.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(JAIL), str(told.fileno())],
            stdin=asked, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(told.fileno(),), env={},
            cwd=folder, start_new_session=True,
        )  # fmt: skip
        held.callback(lambda: child.stdout and child.stdout.close())
        told.close()
        return _watch(child, result.fileno(), limits)


def _watch(child: subprocess.Popen[bytes], result: int, limits: Limits) -> Done:
    """Reads until the process has closed both pipes or a limit is passed; then it is killed in any case."""
    assert child.stdout is not None
    printed, values, stopped = b"", b"", ""
    end = time.monotonic() + limits.seconds
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout.fileno(), selectors.EVENT_READ)
        ready.register(result, selectors.EVENT_READ)
        while ready.get_map() and not stopped:
            for key, _ in ready.select(max(0.0, end - time.monotonic())):
                data = os.read(key.fd, 1 << 16)
                if not data:
                    ready.unregister(key.fd)
                elif key.fd == result:
                    values += data
                else:
                    printed += data
            if len(printed) > limits.output or len(values) > limits.result:
                stopped = "output limit"
            elif time.monotonic() >= end:
                stopped = "time limit"
    if not stopped:
        try:
            child.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # it closed its pipes and went on
            stopped = "time limit"
    child.kill()
    status = child.wait()
    if status == -signal.SIGXCPU:
        stopped = "time limit"
    return Done(values, printed[-500:].decode("utf-8", "replace"), status, stopped)


def _messages(data: bytes) -> Iterator[dict[str, Any]]:
    for line in data.split(b"\n"):
        try:
            message = json.loads(line)  # NaN and infinity are answers too, wrong ones
        except (ValueError, RecursionError):
            return
        if not isinstance(message, dict):
            return
        yield message


def _death(status: int) -> str:
    if status < 0:
        return f"died of {signal.Signals(-status).name}"
    return f"ended with status {status} before it had answered"
