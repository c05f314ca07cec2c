"""Connections of this machine to itself."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

Ends = tuple[socket.socket, socket.socket]


@contextmanager
def connected() -> Iterator[Ends]:
    """Both ends of one TCP connection."""
    listening = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listening.getsockname())
    other, _ = listening.accept()
    with listening, one, other:
        yield one, other
