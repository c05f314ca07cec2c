"""Runs inside the sandbox: `python -I -S -B jail.py RESULT_FD`, a request on standard input. See `sandbox.py`.

Imports nothing of this project. First it takes from itself, for good, all that a pure function does not need; then it
runs the code it was given. What holds the code are the kernel's own limits, not Python:

- Landlock: no file can be opened, but for reading those of the standard library, packages installed below it left out;
  no TCP, no signal to another process.
- seccomp: system calls that are not in ALLOWED fail with EPERM: no socket, process, thread, program, signal, mount.
- Namespaces of its own for users, network, IPC and host name, where the kernel lets us make them.
- No capabilities, no new privileges, bounded memory, time and file size; it dies with its parent.

The request is JSON: source, driver, calls, memory (bytes), seconds, isolate. One line of JSON a message on RESULT_FD:
{"layers": [...], "missing": [...]}, then {"value": ...} a call, or {"failure": kind, "detail": text} and the end.
"""

import ctypes
import json
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any

# arithmetic and containers that answers use; what else is imported is read from the standard library
for _name in (
    "bisect", "collections", "copy", "dataclasses", "datetime", "decimal", "enum", "fractions", "functools", "heapq",
    "itertools", "math", "operator", "random", "re", "statistics", "string", "textwrap", "typing",
):  # fmt: skip
    __import__(_name)

LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.syscall.restype = ctypes.c_long
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH of the filter
# name: (x86_64, aarch64); None: the architecture has another call for it
ALLOWED = {
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None), "fstat": (5, 80),
    "lstat": (6, None), "lseek": (8, 62), "mmap": (9, 222), "mprotect": (10, 226), "munmap": (11, 215),
    "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139),
    "ioctl": (16, 29), "pread64": (17, 67), "readv": (19, 65), "writev": (20, 66), "access": (21, None),
    "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23), "nanosleep": (35, 101),
    "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "getdents": (78, None), "getcwd": (79, 17),
    "readlink": (89, None), "gettimeofday": (96, 169), "getrusage": (98, 165), "sysinfo": (99, 179),
    "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177),
    "getppid": (110, 173), "sigaltstack": (131, 132), "gettid": (186, 178), "time": (201, None), "futex": (202, 98),
    "getdents64": (217, 61), "restart_syscall": (219, 128), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "openat": (257, 56), "newfstatat": (262, 79),
    "readlinkat": (267, 78), "faccessat": (269, 48), "getrandom": (318, 278), "statx": (332, 291), "rseq": (334, 293),
    "faccessat2": (439, 439),
}  # fmt: skip
# what an answer may try, as Python's audit events name it
TRIED = ("os.fork", "os.exec", "os.posix_spawn", "os.system", "os.kill", "subprocess.Popen", "socket.", "open",
         "_thread.start_new_thread", "os.remove", "os.rename", "os.mkdir", "os.listdir", "shutil.")  # fmt: skip
# below the standard library of a Python without an environment lies what was installed: this package, and its answers
INSTALLED = ("site-packages", "dist-packages")
READ_FILE, READ_FOLDER = 0b0100, 0b1000
CLONE_NEWUSER, OTHER_NAMESPACES = 0x10000000, 0x40000000 | 0x08000000 | 0x04000000  # network, IPC, host name
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER_MODE = 1, 38, 22, 2


def checked(result: int) -> int:
    """Raises OSError for a call that failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def syscall(number: int, *arguments: object) -> int:
    return checked(LIBC.syscall(ctypes.c_long(number), *arguments))


def namespaces() -> None:
    checked(LIBC.unshare(CLONE_NEWUSER | OTHER_NAMESPACES))


def no_capabilities() -> None:
    """Empties all three sets (capset, version 3)."""
    number = {"x86_64": 126, "aarch64": 91}[os.uname().machine]
    syscall(number, struct.pack("=Ii", 0x20080522, 0), bytes(24))


def landlock() -> None:
    """Handles every access that this kernel knows, and grants reading below the standard library alone."""
    abi = syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    files = (1 << (13 + (abi >= 2) + (abi >= 3) + (abi >= 5))) - 1
    attributes = struct.pack("=QQQ", files, 3, 3)[: 8 if abi < 4 else 16 if abi < 6 else 24]
    ruleset = syscall(444, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint32(0))
    library = os.path.dirname(os.path.realpath(os.__file__))
    grant(ruleset, library, READ_FOLDER)
    for entry in os.scandir(library):
        if entry.name not in INSTALLED and not entry.is_symlink():
            grant(ruleset, entry.path, READ_FILE)
    syscall(446, ctypes.c_int(ruleset), ctypes.c_uint32(0))
    os.close(ruleset)


def grant(ruleset: int, path: str, access: int) -> None:
    """Of `path` and of all below it."""
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", access, place)
    syscall(445, ctypes.c_int(ruleset), ctypes.c_int(1), rule, ctypes.c_uint32(0))
    os.close(place)


def seccomp() -> None:
    """Another architecture's call ends the process; of ours, what is not ALLOWED fails with EPERM."""
    machine = os.uname().machine
    column = list(MACHINES).index(machine)
    numbers = [number for pair in ALLOWED.values() if (number := pair[column]) is not None]
    load, equal, give = 0x20, 0x15, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, MACHINES[machine]), (give, 0, 0, 0x80000000), (load, 0, 0, 0)]
    program += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    program += [(give, 0, 0, 0x00050000 | 1), (give, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    pointer = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    checked(LIBC.prctl(PR_SET_SECCOMP, FILTER_MODE, pointer, 0, 0))


def limits(memory: int, seconds: int, told: dict[str, list[str]]) -> None:
    """Bytes of address space, seconds of processor; no file grows."""
    for name, most in (("AS", memory), ("CPU", seconds), ("FSIZE", 0), ("CORE", 0), ("NOFILE", 64), ("STACK", 8 << 20)):
        try:
            hard = most + 1 if name == "CPU" else most  # of processor time the first limit is told, the second kills
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, hard))
        except (OSError, ValueError) as error:
            told["missing"].append(f"RLIMIT_{name} ({error})")


def lock_up(request: dict[str, Any]) -> dict[str, list[str]]:
    """What could be taken away, in this order, and what could not."""
    told: dict[str, list[str]] = {"layers": [], "missing": []}
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for layer in (namespaces, landlock, no_capabilities) if request["isolate"] else ():
        attempt(layer, told)
    limits(request["memory"], request["seconds"], told)
    if request["isolate"]:
        attempt(seccomp, told)
    return told


def attempt(layer: Callable[[], None], told: dict[str, list[str]]) -> None:
    try:
        layer()
    except (OSError, AttributeError, LookupError) as error:
        told["missing"].append(f"{layer.__name__} ({error})")
    else:
        told["layers"].append(layer.__name__)


def failure(error: BaseException, tried: list[str]) -> dict[str, str]:
    """What the report says. A refusal is told by what was tried."""
    detail = f"{type(error).__name__}: {error}"[:300]
    if isinstance(error, MemoryError):
        return {"failure": "memory limit", "detail": detail}
    if isinstance(error, PermissionError) or (isinstance(error, OSError | RuntimeError) and tried):
        return {"failure": "forbidden", "detail": f"{tried[-1]}: {detail}" if tried else detail}
    if isinstance(error, SyntaxError):
        return {"failure": "syntax error", "detail": detail}
    return {"failure": "exception", "detail": detail}


def main() -> None:
    out, request = int(sys.argv[1]), json.load(sys.stdin)
    tried: list[str] = []

    def tell(message: Any) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(out, data) :]

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(TRIED) and not (event == "open" and str(arguments[0]).endswith((".py", ".pyc"))):
            tried[:] = [event]

    tell(lock_up(request))
    spare = bytearray(1 << 20)  # to tell of a lack of memory with
    sys.addaudithook(note)
    names = {"__name__": "answer"}
    try:
        exec(compile(request["source"], "answer.py", "exec"), names)
        exec(compile(request["driver"], "driver.py", "exec"), names)
        for call in request["calls"]:
            tell({"value": eval(compile(call, "call", "eval"), names)})
    except BaseException as error:  # noqa: BLE001  SystemExit too: whatever an answer raises is its failure
        del spare
        names.clear()
        tell(failure(error, tried))


if __name__ == "__main__":
    main()
