"""`hedgerow session`, `resume` and `cancel`: look at one session, go on with it, or end it."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from hedgerow.cli import options
from hedgerow.cli.command import Command
from hedgerow.cli.show import follow, plain
from hedgerow.client import Client
from hedgerow.errors import InvalidRequest


def add_session(parser: argparse.ArgumentParser) -> None:
    """Which session."""
    parser.add_argument("session_id", help="the id that the session's first event gave")


def add_session_and_delete(parser: argparse.ArgumentParser) -> None:
    """Which session, and whether to remove it."""
    add_session(parser)
    parser.add_argument("--delete", action="store_true", help="remove its prompt and tokens instead")


def add_position(parser: argparse.ArgumentParser) -> None:
    """Which session, from where on, and how it is shown."""
    add_session(parser)
    parser.add_argument("--token-offset", type=int, default=0, metavar="N", help="tokens that are known already")
    parser.add_argument("--digest", default="", metavar="HEX", help="the digest that came with the last of them")
    parser.add_argument("--text-offset", type=int, default=0, metavar="N", help="bytes of text that are known already")
    options.add_output(parser)
    options.add_leaving(parser)


def resume(client: Client, args: argparse.Namespace) -> int:
    """Its stream, from its beginning or from where another one ended; Ctrl-C cancels it."""
    try:
        digest = bytes.fromhex(args.digest)
    except ValueError:
        raise InvalidRequest("--digest", args.digest, "32 hexadecimal digits") from None
    stream = client.resume(
        args.session_id, args.token_offset, digest, args.text_offset, leave_running=args.leave_running
    )
    return follow(stream, args)


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
    Command("resume", "go on with a session's stream", add_position, resume),
    Command("cancel", "end a session", add_session, cancel),
)
