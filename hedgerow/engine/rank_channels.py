"""How the first rank of a group reaches each of the others: a process of its own host, or one of another host's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from typing import Protocol

from hedgerow.engine.rank_process import BEAT_MESSAGE, Spec, pack
from hedgerow.engine.rank_wire import Sealed, write_all


class Channel(Protocol):
    """To one rank."""

    @property
    def name(self) -> str: ...  # for an operator

    def fileno(self) -> int: ...  # readable when there is something to read

    def read(self) -> bytes:
        """What it says, or b"" at its end. Raises WireError."""
        ...

    def write(self, data: bytes, patience: float) -> None:
        """Raises WireError."""
        ...

    def beat(self) -> None:
        """A sign of life, where the kernel would not tell of our end. Raises WireError."""
        ...

    def kill(self) -> None:
        """Returns at once."""
        ...

    def ended(self) -> str:
        """How, of one whose `read` is at its end."""
        ...

    def close(self) -> None: ...


class LocalRank:
    """A process that this one starts, and that ends with the thread that does."""

    def __init__(self, spec: Spec) -> None:
        self.name, self._turn = f"rank {spec.rank}", threading.Lock()
        self.process = start(spec)

    def fileno(self) -> int:
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read(self) -> bytes:
        return os.read(self.fileno(), 1 << 16)

    def write(self, data: bytes, patience: float) -> None:
        assert self.process.stdin is not None
        with self._turn:
            write_all(self.process.stdin.fileno(), data, patience)

    def beat(self) -> None:
        """It needs none."""

    def kill(self) -> None:
        self.process.kill()

    def ended(self) -> str:
        try:
            return f"ended with status {self.process.wait(1)}"
        except subprocess.TimeoutExpired:
            return "closed its output"

    def close(self) -> None:
        self.process.kill()
        self.process.wait(10)
        for end in (self.process.stdin, self.process.stdout):
            if end is not None:
                end.close()


class RemoteRank:
    """The connection to another host's verifier, which runs the process."""

    def __init__(self, number: int, host: int, wire: Sealed) -> None:
        self.name, self.wire = f"rank {number} on host {host}", wire

    def fileno(self) -> int:
        return self.wire.fileno()

    def read(self) -> bytes:
        messages = self.wire.read()
        return b"".join(messages) or b"\n"  # half a message is a sign of life

    def write(self, data: bytes, patience: float) -> None:
        self.wire.send(data, patience)

    def beat(self) -> None:
        self.wire.beat(BEAT_MESSAGE)

    def kill(self) -> None:
        self.wire.end()

    def ended(self) -> str:
        return "is gone"

    def close(self) -> None:
        self.wire.close()


def start(spec: Spec) -> subprocess.Popen[bytes]:
    """A rank's process, told what it is; its input does not block. Raises OSError."""
    rank = subprocess.Popen(
        [sys.executable, "-m", "hedgerow.engine.rank_process"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0,
    )  # fmt: skip
    assert rank.stdin is not None
    with contextlib.suppress(OSError):  # its end is seen where its output is read
        rank.stdin.write(pack(tuple(spec)))
    os.set_blocking(rank.stdin.fileno(), False)
    return rank
