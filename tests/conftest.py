"""Pins the arithmetic before torch is loaded, as the services do: without it a row's bits depend on the row count."""

from __future__ import annotations

import os
import signal

from hedgerow.model.blas import pin_blas

pin_blas(os.environ)

import pytest  # noqa: E402
import torch  # noqa: E402  (after pin_blas: MKL reads its mode once)

from hedgerow.cli import embedded_redis, ports  # noqa: E402
from hedgerow.rpc import logs  # noqa: E402

# Ports are looked for now and taken a while later: tests of two workers look in two places.
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    share = len(ports.PORTS) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    first = int(worker.removeprefix("gw")) * share
    ports.PORTS = embedded_redis._PORTS = ports.PORTS[first : first + share]
# One: two that meet at barriers on cores that others use too made a step of the tiny model 60 times as long.
torch.set_num_threads(1)
# Shells start what runs in their background deaf to interrupts, and children would be too: some tests interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["tests.stack"]


@pytest.fixture(autouse=True)
def unbound() -> None:
    """What a test bound to its own log lines is in no other's."""
    logs._BOUND.set({})
