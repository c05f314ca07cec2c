"""`hedgerow inspect`, `convert` and `rehearse`: they work on folders, and need the engine's packages, not a gateway.

Those are not in the wheel. This process becomes `python -m hedgerow.weights` of the checkout or image, so that signals
and the exit status are its own; it reads its arguments itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from typing import Any

from hedgerow.cli.supervisor import find_checkout

COMMANDS = {
    "inspect": "say what a checkpoint folder is, what it needs and what is wrong with it",
    "convert": "lay a checkpoint folder out as one file a rank",
    "rehearse": "write a folder of a published layout with random weights",
}


def add_commands(commands: Any) -> None:
    """`commands`: of argparse's subparsers. What follows a command is for the program that it becomes."""
    for name, text in COMMANDS.items():
        child = commands.add_parser(name, help=text, add_help=False, prefix_chars="\0")
        child.add_argument("arguments", nargs="*")
        child.set_defaults(run=partial(become, name))


def become(name: str, args: argparse.Namespace) -> int:
    """Does not return. Raises Unavailable where there is no checkout."""
    root = str(find_checkout())
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    sys.stdout.flush()
    command = [sys.executable, "-m", "hedgerow.weights", name, *args.arguments]
    os.execve(sys.executable, command, {**os.environ, "PYTHONPATH": path})
