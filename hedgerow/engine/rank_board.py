"""Notes that the ranks of a group leave with the first one until they are connected: where each of them listens."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable

from hedgerow.engine.rank_channels import Channel
from hedgerow.engine.rank_process import BEAT, pack


class Board:
    """`put` and `get` are rank 0's (`kernels.collectives.Notes`); `line` is what another one says.

    `check` raises where waiting is in vain, `write` where a rank cannot be told.
    """

    def __init__(self, check: Callable[[], None], write: Callable[[Channel, bytes], None]) -> None:
        self._check, self._write = check, write
        self._notes: dict[str, bytes] = {}
        self._wanted: list[tuple[str, Channel]] = []
        self._changed = threading.Condition()

    def put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._notes[key] = value
            due = [channel for wanted, channel in self._wanted if wanted == key]
            self._wanted = [each for each in self._wanted if each[0] != key]
            self._changed.notify_all()
        for channel in due:
            self._write(channel, pack(("note", value)))

    def get(self, key: str) -> bytes:
        while True:
            self._check()
            with self._changed:
                if self._changed.wait_for(lambda: key in self._notes, BEAT):
                    return self._notes[key]

    def line(self, channel: Channel, kind: str, said: str) -> None:
        """`put KEY BASE64` or `get KEY`."""
        if kind == "put":
            key, _, value = said.partition(" ")
            self.put(key, base64.b64decode(value))
            return
        with self._changed:
            value_now = self._notes.get(said)
            if value_now is None:
                self._wanted.append((said, channel))
        if value_now is not None:
            self._write(channel, pack(("note", value_now)))
