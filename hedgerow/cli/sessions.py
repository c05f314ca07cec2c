"""`hedgerow session` and `hedgerow cancel`: look at one session, or end it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from hedgerow.cli.command import Command
from hedgerow.cli.show import plain
from hedgerow.client import Client


def add_session(parser: argparse.ArgumentParser) -> None:
    """Which session."""
    parser.add_argument("session_id", help="the id that the session's first event gave")


def add_session_and_delete(parser: argparse.ArgumentParser) -> None:
    """Which session, and whether to remove it."""
    add_session(parser)
    parser.add_argument("--delete", action="store_true", help="remove its prompt and tokens instead")


def session(client: Client, args: argparse.Namespace) -> int:
    """What is recorded of it, as JSON. Exit status 1: there was nothing to delete."""
    if args.delete:
        existed = client.delete_session(args.session_id)
        print("deleted" if existed else "there was none")
        return int(not existed)
    print(json.dumps(plain(asdict(client.get_session(args.session_id))), indent=2))
    return 0


def cancel(client: Client, args: argparse.Namespace) -> int:
    """End it within one step."""
    print("cancelled" if client.cancel(args.session_id) else "it had ended")
    return 0


COMMANDS = (
    Command("session", "show or delete what is recorded of a session", add_session_and_delete, session),
    Command("cancel", "end a session", add_session, cancel),
)
