"""One rank of a tensor-parallel group that is not its first: `python -m hedgerow.engine.rank_process`.

The first rank (`ranks.py`) writes what to do to this process's standard input: the same calls in the same order as it
makes itself. Nothing but the collectives gives anything back. On standard output goes a line every BEAT seconds, so
that whoever watches can tell a rank that hangs; `put` and `get` before the ranks are connected, `ready` once when the
weights are there, `failed` before an end. On another host its ends are at that host's verifier (`rank_host.py`), which
passes all of it on.

It ends with the process that started it: at the end of its input, when a collective fails, or by the kernel where
neither is seen.
SIGINT and SIGTERM are ignored: a group drains as its first rank does.
"""

from __future__ import annotations

import base64
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

from hedgerow.engine.numa import bind, device_node

BEAT = 0.5
LENGTH = struct.Struct("=I")
MOST_BYTES = 64 << 20  # of one message
BEAT_MESSAGE = LENGTH.pack(0)
PR_SET_PDEATHSIG = 1


class Spec(NamedTuple):
    """What a rank is told first."""

    folder: str
    rank: int
    ranks: int
    place: tuple[int, int]  # among the ranks of its host: the how manieth, of how many
    address: str  # of its host, for the other ranks
    patience: float  # seconds of a collective
    threads: int
    backend: str
    parent: int  # process id
    cores: list[int]  # usable by the ranks of its host
    engine: str  # "torch", "compiled" or "cuda"
    feature_layers: list[int]
    tell_hash: bool  # of the checkpoint: where this is the first rank that reads its host's
    room: tuple[int, int | None] = (0, None)  # rows of a step and pages of the cache that a device must have room for


def pack(message: Any) -> bytes:
    """A message of plain numbers, texts, tuples and lists, with its length before it."""
    data = marshal.dumps(message)
    return LENGTH.pack(len(data)) + data


def unpack(stream: BinaryIO) -> Any:
    """The next message; None at the end of the stream. What is empty is a sign of life of whoever writes."""
    length = 0
    while not length:
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


class Asked:
    """Notes that the first rank keeps: lines say what is put or wanted, a message brings what was wanted."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say

    def put(self, key: str, value: bytes) -> None:
        self._say(f"put {key} {base64.b64encode(value).decode()}")

    def get(self, key: str) -> bytes:
        """Raises EOFError where the first rank has gone."""
        self._say(f"get {key}")
        message = unpack(sys.stdin.buffer)
        if message is None:
            raise EOFError("the first rank has gone")
        found: bytes = message[1]
        return found


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


def _node(spec: Spec) -> int | None:
    """Of this rank's device."""
    if spec.engine != "cuda":
        return None
    from hedgerow.model.devices import pci_address

    return device_node(pci_address(spec.place[0]))


def check_memory(spec: Spec) -> None:
    """Raises CheckpointError where this rank's device has too little: before ranks meet, so none has begun to load."""
    import torch

    from hedgerow.model.config import K2Config
    from hedgerow.model.cuda_memory import Asked, check_device

    folder, device = Path(spec.folder), torch.device("cuda", spec.place[0])
    check_device(folder, K2Config.from_folder(folder), device, Asked(*spec.room), len(spec.feature_layers), spec.ranks)


def serve(spec: Spec, say: Callable[[str], None]) -> None:
    """Loads this rank's part and follows the first rank until that ends."""
    bind(*spec.place, frozenset(spec.cores), _node(spec))
    import torch

    from hedgerow.model.batch import SequenceRows
    from hedgerow.model.loader import checkpoint_hash
    from hedgerow.model.ranked import load_rank
    from kernels.collectives import connect
    from kernels.sample import Law
    from kernels.tree_accept import WalkRows

    torch.set_num_threads(spec.threads)
    if spec.engine == "cuda":
        torch.cuda.set_device(spec.place[0])
        check_memory(spec)
    backend: Any = spec.backend
    peers = connect(backend, Asked(say), spec.rank, spec.ranks, spec.patience, address=spec.address)
    engine: Any = spec.engine
    model: Any = load_rank(engine, Path(spec.folder), spec.feature_layers, spec.threads, peers, spec.place[0])
    read = checkpoint_hash(Path(spec.folder)) if spec.tell_hash else ""
    free = int(torch.cuda.mem_get_info()[0]) if spec.engine == "cuda" else None
    say(f"ready {json.dumps([model.kernel_law, read, free])}")
    caches: dict[int, Any] = {}
    while (message := unpack(sys.stdin.buffer)) is not None:
        kind, number, *rest = message
        if kind == "cache":
            caches[number] = model.new_cache(*rest)
        elif kind == "drop":
            del caches[number]
        elif kind == "tap":
            model.tap(*rest)
        elif kind == "forward":
            model.forward([SequenceRows(*rows) for rows in rest[0]], caches[number])
        elif kind == "verify":
            trees = [WalkRows(first, parents, tokens, Law(*law)) for first, parents, tokens, law in rest[1]]
            model.verify([SequenceRows(*rows) for rows in rest[0]], caches[number], trees)
        elif kind == "prepare":
            model.prepare(*rest)
        elif kind == "gather":
            model.gather()
        elif kind == "copy":
            caches[number].copy(*rest)
        else:
            raise ValueError(f"no message of the kind {kind!r}")


if __name__ == "__main__":
    main()
