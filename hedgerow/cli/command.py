"""What a subcommand that talks to a gateway is, and what every one of them says and returns."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import NamedTuple

from hedgerow.client import Client
from hedgerow.errors import HedgerowError, InvalidRequest, NotFound, Unauthenticated, Unsupported

FAILED, REFUSED, NOBODY_THERE, INTERRUPTED, TERMINATED = 1, 2, 3, 130, 143


class Command(NamedTuple):
    """`run` gets an open client and the parsed arguments, and returns the exit status."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Client, argparse.Namespace], int]


def status_of(error: HedgerowError) -> int:
    """The exit status of an error that a gateway raised."""
    return REFUSED if isinstance(error, InvalidRequest | NotFound | Unsupported | Unauthenticated) else FAILED


def say(text: str) -> None:
    """A line on standard error; where that cannot be written to, there is nobody left to tell."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)
