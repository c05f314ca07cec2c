"""`hedgerow sessions`, `session`, `resume` and `cancel`: list sessions, look at one, go on with it, or end it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

from hedgerow.cli import options
from hedgerow.cli.command import Command
from hedgerow.cli.show import follow, plain
from hedgerow.client import Client, Running, SessionStatus, Stored
from hedgerow.errors import InvalidRequest

Told = TypeVar("Told", Running, Stored)


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


def add_action(parser: argparse.ArgumentParser) -> None:
    """What to do, and with which."""
    parser.add_argument(
        "action", choices=("ls", "show", "cancel"), help="list those that are retained; show or end some"
    )
    parser.add_argument("--running", action="store_true", help="ls: those that run on the gateways of --address alone")
    parser.add_argument("session_ids", nargs="*", metavar="session_id", help="for show and cancel")
    parser.add_argument("--most", type=int, default=1000, metavar="N", help="longest list, %(default)s")
    parser.add_argument("--json", action="store_true", help="ls: one JSON object a line")


def sessions(client: Client, args: argparse.Namespace) -> int:
    """Those of the tenant: all that the store retains, or, with --running, what each gateway of --address runs."""
    if args.action == "ls":
        if args.session_ids:
            raise InvalidRequest("session_id", args.session_ids[0], "left out of `ls`")
        if args.running:
            _list(client.sessions(most=args.most), _running, as_json=args.json)
        else:
            _list(client.stored_sessions(most=args.most), _stored, as_json=args.json)
        return 0
    if not args.session_ids:
        raise InvalidRequest("session_id", None, f"given to `{args.action}`")
    for session_id in args.session_ids:
        one = argparse.Namespace(session_id=session_id, delete=False)
        (session if args.action == "show" else cancel)(client, one)
    return 0


def _list(found: Sequence[Told], line: Callable[[Told], str], *, as_json: bool) -> None:
    for each in found:
        print(json.dumps(asdict(each)) if as_json else line(each))


def _running(each: Running) -> str:
    return (
        f"{each.session_id}  {_about(each)}, {each.uncommitted_tokens} not committed, {each.readers} readers"
        f"{_left(each)}  {each.gateway}"
    )


def _stored(each: Stored) -> str:
    status = each.finish_reason if each.status is SessionStatus.ENDED else each.status
    tenant = f"  tenant {each.tenant}" if each.tenant else ""
    owner = f"  owner {each.owner[:8]}" if each.owner else ""
    left = "" if each.status is SessionStatus.ENDED else _left(each)
    return f"{each.session_id}  {status:<9}  {_about(each)}{left}{tenant}{owner}"


def _about(each: Running | Stored) -> str:
    age = max(0.0, time.time() - each.created_unix_ms / 1000)
    return f"{each.model}  {age:.0f} s  {each.prompt_tokens}+{each.token_count}/{each.max_tokens} tokens"


def _left(each: Running | Stored) -> str:
    return f", ends in {each.deadline_unix_ms / 1000 - time.time():.0f} s" if each.deadline_unix_ms else ""


def cancel(client: Client, args: argparse.Namespace) -> int:
    """End it within one step."""
    print("cancelled" if client.cancel(args.session_id) else "it had ended")
    return 0


COMMANDS = (
    Command("sessions", "list the sessions that are retained or run, show or end some", add_action, sessions),
    Command("session", "show or delete what is recorded of a session", add_session_and_delete, session),
    Command("resume", "go on with a session's stream", add_position, resume),
    Command("cancel", "end a session", add_session, cancel),
)
