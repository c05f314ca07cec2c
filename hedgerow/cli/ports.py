"""Addresses of the stack's processes: read, tried, and taken where nobody else is."""

from __future__ import annotations

import contextlib
import errno
import random
import socket
from collections.abc import Iterator

from hedgerow.errors import InvalidRequest, Unavailable

# Below Linux' ephemeral range: no outgoing connection can take a child's port while the child is down.
PORTS = range(20000, 30000)


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port". Raises InvalidRequest."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or len(port) > 5 or int(port) > 65535:
        raise InvalidRequest("listen", address, "host:port with a port of at most 65535")
    host = host.strip("[]")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise InvalidRequest("listen", address, f"host:port with a host's name: {error}") from None
    return host, int(port)


def check_free(host: str, port: int) -> None:
    """Raises Unavailable when somebody listens there; gRPC itself would share the port without a word."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an old connection in TIME_WAIT is no listener
        try:
            probe.bind((host, port))
        except OSError as error:
            why = "another process listens there" if error.errno == errno.EADDRINUSE else str(error)
            raise Unavailable(f"{host}:{port}", f"{why}; choose another with --listen") from error


def free_ports(count: int) -> Iterator[int]:
    """`count` distinct ports on which nobody listens now."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(Unavailable):
            check_free("127.0.0.1", port)
            found.append(port)
        if len(found) == count:
            return iter(found)
    raise Unavailable("ports", f"fewer than {count} free ones from {PORTS.start} to {PORTS.stop}")
