"""The `hedgerow` command: one subcommand a file.

Exit status: 0 done, 1 an error, 2 a request that is not allowed (and wrong usage), 3 nothing answers at the address,
130 interrupted, 143 terminated. Whoever interrupts or terminates an answer cancels its session.
"""

from __future__ import annotations

import argparse
import errno
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from hedgerow import __version__
from hedgerow.cli import chat, generate, models, options, sessions, status, tokenize, up, weights
from hedgerow.cli.command import FAILED, INTERRUPTED, NOBODY_THERE, TERMINATED, Command, say, status_of
from hedgerow.cli.evaluation import command as evaluation
from hedgerow.cli.show import BrokenOff, how_to_go_on
from hedgerow.client import Client, Retry
from hedgerow.errors import Cancelled, HedgerowError, InvalidRequest, Unavailable

ADDRESS, ADDRESS_VARIABLE = "localhost:7411", "HEDGEROW_ADDRESS"
ATTEMPTS = 4  # of a call that has given nothing yet: a person sees at once that nobody is there
UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # what a full or broken output raises


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        return _run(argv)
    except BrokenPipeError:
        _leave_unwritten()  # whoever read us (head, less) has enough
        return 0
    except (KeyboardInterrupt, Cancelled):
        say("")
        return INTERRUPTED
    except OSError as error:
        if error.errno not in UNWRITTEN:
            raise
        _leave_unwritten()
        say(f"hedgerow: the output cannot be written: {error.strerror}")
        return FAILED


def _leave_unwritten() -> None:
    """The interpreter's own flush at exit must not complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(argv: Sequence[str] | None) -> int:
    args = argparse.Namespace(address="")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model's text may not be of the terminal's alphabet
    try:
        _parser().parse_args(argv, args)
        return int(args.run(args))
    except HedgerowError as error:
        if isinstance(error, Cancelled):
            raise
        return _explain(error, args.address)
    finally:
        sys.stdout.flush()  # here a closed pipe can still be told from a failure


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hedgerow", description="Exact tree-speculative serving of K2-class models.")
    parser.add_argument("--version", action="version", version=f"hedgerow {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    up_parser = commands.add_parser("up", help="start the whole stack on this machine")
    up.add_arguments(up_parser)
    up_parser.set_defaults(run=up.run)
    weights.add_commands(commands)
    for module in (generate, chat, models, tokenize, status, sessions, evaluation):
        for command in module.COMMANDS:
            child = commands.add_parser(command.name, help=command.help, description=command.help)
            child.add_argument(
                "--address",
                metavar="HOST:PORT[,...]",
                default=os.environ.get(ADDRESS_VARIABLE) or ADDRESS,
                help=f"where the gateways are; {ADDRESS_VARIABLE} sets the default, now %(default)s",
            )
            child.add_argument(
                "--patience",
                metavar="SECONDS",
                type=float,
                default=Retry().total,
                help="for how long to try to go on with what broke, %(default)g",
            )
            child.add_argument("--tenant", metavar="NAME", default="", help="on whose behalf")
            options.add_tls(child)
            command.add_arguments(child)
            child.set_defaults(run=_with_client(command))
    return parser


def _with_client(command: Command) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        try:
            retry = Retry(attempts=ATTEMPTS, total=args.patience)
        except InvalidRequest as error:
            raise InvalidRequest("--patience", args.patience, error.limit) from None
        with _terminable(), Client(args.address, retry=retry, tenant=args.tenant, tls=options.tls(args)) as client:
            return command.run(client, args)

    return run


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM leaves as Ctrl-C does: a session whose client is `timeout 5 hedgerow generate` ends with it."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _explain(error: HedgerowError, address: str) -> int:
    if isinstance(error, Unavailable) and error.metadata.get("connected") == "no" and "tls" not in error.metadata:
        say(
            f"hedgerow: nothing answers at {address}. Start a stack with `hedgerow up`, or name another gateway with "
            f"--address or {ADDRESS_VARIABLE}."
        )
        return NOBODY_THERE
    say(f"hedgerow: {error}")
    if "tls" in error.metadata:
        return NOBODY_THERE
    if isinstance(error, BrokenOff):
        say(f"hedgerow: the answer broke off; go on with: {how_to_go_on(error.position)}")
    elif error.retry_after:
        say(f"hedgerow: trying again in {error.retry_after:g} s can help")
    return status_of(error)
