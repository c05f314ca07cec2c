"""Code that attacks the machine it runs on: held, ended in time, and named as what it is."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hedgerow.cli.evaluation import sandbox
from hedgerow.cli.evaluation.sandbox import Limits, judge, prove
from hedgerow.errors import Unsupported

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")
LIMITS = Limits(seconds=30, memory=256 << 20)
SOON = Limits(seconds=2, memory=256 << 20)  # for what does not end by itself
MARK = "/tmp/hedgerow-eval-broke-out"


@pytest.fixture(scope="module", autouse=True)
def held() -> Iterator[None]:
    """This machine's kernel has what it takes; afterwards nothing was written."""
    layers = prove()
    assert {"landlock", "seccomp"} <= set(layers)
    yield
    assert not Path(MARK).exists()


ATTACKS = {
    "fork bomb": ("import os\ndef f():\n while True: os.fork()", "forbidden"),
    "fork bomb that goes on": (
        "import os\ndef f():\n while True:\n  try: os.fork()\n  except OSError: pass", "time limit",
    ),
    "thread bomb": ("import threading\ndef f():\n while True: threading.Thread(target=print).start()", "exception"),
    "infinite loop": ("def f():\n while True: pass", "time limit"),
    "infinite loop at import": ("while True: pass", "time limit"),
    "sleeps": ("import time\ndef f(): time.sleep(600)", "time limit"),
    "ignores the warning": (
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", "time limit",
    ),
    "closes its pipes and goes on": ("import os\nos.closerange(0, 1024)\nwhile True: pass", "time limit"),
    "memory hog": ("kept = []\nwhile True: kept.append('a' * 10**6 + str(len(kept)))", "memory limit"),
    "one large block": ("def f(): return len(bytearray(1 << 40))", "memory limit"),
    "writes a file": (f"def f(): open({MARK!r}, 'w').write('x')", "forbidden"),
    "writes beside itself": ("def f(): open('written', 'w').write('x')", "forbidden"),
    "reads a file": ("def f(): return open('/etc/passwd').read()", "forbidden"),
    "reads through a link": (
        "import os\ndef f():\n os.symlink('/etc/passwd', 'x')\n return open('x').read()", "forbidden",
    ),
    "reads its parent": ("import os\ndef f(): return open(f'/proc/{os.getppid()}/environ').read()", "forbidden"),
    "reads where its parent is": ("import os\ndef f(): return os.readlink(f'/proc/{os.getppid()}/cwd')", "forbidden"),
    "imports the tasks": ("import hedgerow.cli.evaluation.tasks as t\ndef f(): return t.TASKS[0].calls", "exception"),
    "changes what it was asked": ("import os\ndef f():\n os.lseek(0, 0, 0)\n return os.write(0, b'x')", "exception"),
    "nests without an end": ("def f():\n x = []\n for _ in range(10**5): x = [x]\n return x", "exception"),
    "sends what nests without an end": (
        'import os\nfor fd in range(3, 1024):\n try: os.write(fd, b\'{"value":\' + b\'[\' * 200000 + b\'\\n\')\n'
        " except OSError: pass\nos._exit(0)", "ended with status 0 before it had answered",
    ),
    "ignores every signal": (
        "import signal\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nwhile True: pass", "time limit",
    ),
    "goes on after its answer": (
        "class D:\n def __del__(self):\n  while True: pass\ndef f():\n D()\n return 1", "time limit",
    ),
    "maps memory": ("import mmap\ndef f():\n k = []\n while True: k.append(mmap.mmap(-1, 1 << 26))", "exception"),
    "is equal to all": ("class I(int):\n def __eq__(self, other): return True\ndef f(): return I(7)", "wrong answer"),
    "too large a number": ("def f(): return 10 ** 5000", "exception"),
    "reads its memory": ("def f(): return open('/proc/self/mem', 'rb').read(1)", "forbidden"),
    "lists a folder": ("import os\ndef f(): return os.listdir('/')", "forbidden"),
    "removes a file": ("import os\ndef f(): os.remove('/etc/hostname')", "forbidden"),
    "prints for ever": ("def f():\n while True: print('x' * 1000)", "output limit"),
    "returns too much": ("def f(): return 'x' * 10**7", "output limit"),
    "kills its parent": ("import os\ndef f(): os.kill(os.getppid(), 9)", "forbidden"),
    "kills everybody": ("import os\ndef f(): os.kill(-1, 9)", "forbidden"),
    "starts a program": (f"import subprocess\ndef f(): subprocess.run(['touch', {MARK!r}])", "forbidden"),
    "starts a shell": (f"import os\ndef f(): return os.system('touch {MARK}') + 1", "wrong answer"),
    "becomes a program": ("import os\ndef f(): os.execv('/bin/sh', ['sh'])", "forbidden"),
    "raises its limits": (
        "import resource\ndef f(): resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "exception",
    ),
    "leaves at once": ("import os\nos._exit(0)", "ended with status 0 before it had answered"),
    "leaves politely": ("import sys\nsys.exit(0)", "exception"),
    "crashes": ("import ctypes\ndef f(): ctypes.string_at(0)", "died of SIGSEGV"),
    "recursion": ("def f(): return f()", "exception"),
    "invents an answer": (
        'import os\nfor fd in range(3, 1024):\n try: os.write(fd, b\'{"value": 2}\\n\')\n except OSError: pass\n'
        "os._exit(0)", "wrong answer",
    ),
    "no Python": ("def f(:", "syntax error"),
    "not the function": ("def g(): return 1", "exception"),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_held_and_named(name: str) -> None:
    source, failure = ATTACKS[name]
    limits, began = SOON if failure == "time limit" else LIMITS, time.monotonic()
    verdict = judge(source, [("f()", 1)], limits=limits)
    assert verdict.failure == failure, verdict
    assert time.monotonic() - began < limits.seconds + 10


@pytest.mark.parametrize(
    "connect",
    ["socket.create_connection(('127.0.0.1', PORT))", "socket.socket(socket.AF_UNIX)", "socket.socketpair()",
     "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))"],
)  # fmt: skip
def test_the_network_is_not_there(connect: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        source = f"import socket\nPORT = {server.getsockname()[1]}\ndef f(): {connect}"
        verdict = judge(source, [("f()", 1)], limits=LIMITS)
        assert verdict.failure == "forbidden", verdict
        assert "Operation not permitted" in verdict.detail
        server.settimeout(0)
        with pytest.raises(BlockingIOError):
            server.accept()


RAW = """
import ctypes, os
LIBC = ctypes.CDLL(None, use_errno=True)
def f(number):
    return [LIBC.syscall(number, 0, 0, 0, 0, 0), ctypes.get_errno()]
"""


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
@pytest.mark.parametrize(
    "number",
    [41, 53, 56, 57, 58, 59, 62, 72, 101, 141, 155, 161, 165, 200, 234, 248, 272, 298, 302, 308, 310, 311, 319, 321,
     322, 323, 424, 425, 434, 435, 438],
)  # fmt: skip
def test_a_system_call_past_python_is_refused(number: int) -> None:
    """Sockets, processes, signals, ptrace, mounts, keys, BPF, io_uring and the like, straight to the kernel."""
    verdict = judge(RAW, [(f"f({number})", [-1, 1])], limits=LIMITS)
    assert verdict.passed, verdict


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="numbers of x86-64")
def test_the_other_numbering_is_refused_too() -> None:
    """x32's calls have bit 30 set: the same kernel functions behind other numbers."""
    assert judge(RAW, [(f"f({(1 << 30) + 41})", [-1, 1])], limits=LIMITS).passed


def test_what_is_installed_below_the_standard_library_is_not_read() -> None:
    """There lies this package, with the values that answers must have, where Python has no environment of its own."""
    found = [path for path in Path(os.__file__).resolve().parent.glob("*-packages/**/*") if path.is_file()]
    if not found:
        pytest.skip("nothing is installed there")
    verdict = judge(f"def f(): return open({str(found[0])!r}).read()", [("f()", 1)], limits=LIMITS)
    assert verdict.failure == "forbidden", verdict


def test_what_must_come_out_is_nowhere_within_reach() -> None:
    """Frames, objects, arguments and input: the calls are there, and nothing of what they must give."""
    source = """
import gc, sys
def f():
    frame, seen = sys._getframe(), [repr(sys.argv)]
    while frame:
        seen.append(repr((frame.f_locals, frame.f_globals)))
        frame = frame.f_back
    seen += [repr(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple))]
    sys.stdin.seek(0)
    return bytes(b ^ 1 for b in b"rdr`ld").decode() in "".join(seen) + sys.stdin.read()
"""
    asked = judge(source, [("f() and 'sesame'", "sesame")], limits=LIMITS)
    assert asked.passed, f"what is in a call is found: {asked}"
    expected = judge(source, [("f()", False), ("None", "sesame")], limits=LIMITS)
    assert expected.detail == "None is None", f"and what is expected is not: {expected}"


def test_ordinary_code_runs() -> None:
    source = "import json, re, hashlib, random, datetime, decimal\ndef f(): return hashlib.sha256(b'').hexdigest()[:4]"
    assert judge(source, [("f()", "e3b0")], limits=LIMITS).passed


def test_the_environment_and_the_folder_are_empty() -> None:
    source = "import os, sys\ndef f(): return [dict(os.environ), sys.flags.isolated, sys.flags.no_site, len(sys.argv)]"
    verdict = judge(source, [("f()[0].get('HOME', 'none')", "none"), ("f()[1:3]", [1, 1])], limits=LIMITS)
    assert verdict.passed, verdict


def test_a_kernel_without_isolation_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A jail whose seccomp cannot be had: nothing runs, unless it was asked for."""
    broken = tmp_path / "jail.py"
    broken.write_text(sandbox.JAIL.read_text().replace("prctl(PR_SET_SECCOMP,", "prctl(99,"))
    monkeypatch.setattr(sandbox, "JAIL", broken)
    with pytest.raises(Unsupported, match=r"does not isolate.*seccomp"):
        judge("def f(): return 1", [("f()", 1)])
    with pytest.raises(Unsupported):
        prove()
    assert judge("def f(): return 1", [("f()", 1)], isolate=False).passed


def test_a_leak_is_found_before_anything_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A jail that says it holds and does not."""
    leaky = tmp_path / "jail.py"
    text = sandbox.JAIL.read_text()
    leaky.write_text(text.replace("syscall(446, ctypes.c_int(ruleset), ctypes.c_uint32(0))", "pass"))
    assert leaky.read_text() != text
    monkeypatch.setattr(sandbox, "JAIL", leaky)
    with pytest.raises(Unsupported, match="leaks"):
        prove()
