"""What a subcommand that talks to a gateway is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NamedTuple

from hedgerow.client import Client


class Command(NamedTuple):
    """`run` gets an open client and the parsed arguments, and returns the exit status."""

    name: str
    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Client, argparse.Namespace], int]
