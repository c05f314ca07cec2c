"""One rank of a tensor-parallel group that is not its first: `python -m hedgerow.engine.rank_process`.

The first rank (`ranks.py`) writes what to do to this process's standard input: the same calls in the same order as it
makes itself. Nothing but the collectives gives anything back. On standard output goes a line every BEAT seconds, so
that whoever watches can tell a rank that hangs; `ready` once when the weights are there, `failed` before an end.

It ends with the first rank: at the end of its input, when a collective fails, or by the kernel where neither is seen.
SIGINT and SIGTERM are ignored: a group drains as its first rank does.
"""

from __future__ import annotations

import ctypes
import json
import marshal
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from hedgerow.engine.numa import bind

BEAT = 0.5
LENGTH = struct.Struct("=I")
MOST_BYTES = 64 << 20  # of one message
PR_SET_PDEATHSIG = 1


class Spec(NamedTuple):
    """What a rank is told first."""

    folder: str
    rank: int
    ranks: int
    meeting: str
    patience: float  # seconds of a collective
    threads: int
    backend: str
    parent: int  # process id
    cores: list[int]  # usable by the group
    engine: str  # "torch" or "compiled"
    feature_layers: list[int]


def pack(message: Any) -> bytes:
    """A message of plain numbers, texts, tuples and lists, with its length before it."""
    data = marshal.dumps(message)
    return LENGTH.pack(len(data)) + data


def unpack(stream: BinaryIO) -> Any:
    """The next message; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if length > MOST_BYTES:
        raise ValueError(f"a message of {length} bytes, the most is {MOST_BYTES}")
    data = stream.read(length)
    return marshal.loads(data) if len(data) == length else None


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    told = os.dup(1)
    os.dup2(2, 1)  # what anybody prints is for the log
    say = speaker(told)
    spec = Spec(*unpack(sys.stdin.buffer))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spec.parent:
        os._exit(1)
    threading.Thread(target=beat, args=(say,), daemon=True).start()
    try:
        serve(spec, say)
    except BaseException as error:  # noqa: BLE001  whatever it is, the group is over, and told why
        say(f"failed {json.dumps(f'{type(error).__name__}: {error}')}")
        os._exit(1)
    os._exit(0)


def speaker(fd: int) -> Callable[[str], None]:
    """Writes lines; ends the process where nobody reads them any more."""
    turn = threading.Lock()

    def say(line: str) -> None:
        with turn:
            try:
                os.write(fd, line.encode() + b"\n")
            except OSError:
                os._exit(1)

    return say


def beat(say: Callable[[str], None]) -> None:
    while True:
        say("")
        threading.Event().wait(BEAT)


def serve(spec: Spec, say: Callable[[str], None]) -> None:
    """Loads this rank's part and follows the first rank until that ends."""
    bind(spec.rank, spec.ranks, frozenset(spec.cores))
    import torch

    from hedgerow.model.batch import SequenceRows
    from hedgerow.model.ranked import load_rank
    from kernels.collectives import connect

    torch.set_num_threads(spec.threads)
    backend: Any = spec.backend
    peers = connect(backend, spec.meeting, spec.rank, spec.ranks, spec.patience, lambda: None)
    engine: Any = spec.engine
    model: Any = load_rank(engine, Path(spec.folder), spec.feature_layers, spec.threads, peers)
    say(f"ready {json.dumps(model.kernel_law)}")
    caches: dict[int, Any] = {}
    while (message := unpack(sys.stdin.buffer)) is not None:
        kind, number, *rest = message
        if kind == "cache":
            caches[number] = model.new_cache(*rest)
        elif kind == "forward":
            model.forward([SequenceRows(*rows) for rows in rest[0]], caches[number])
        elif kind == "copy":
            caches[number].copy(*rest)
        else:
            raise ValueError(f"no message of the kind {kind!r}")


if __name__ == "__main__":
    main()
