"""The `hedgerow` command: one subcommand a file.

Exit status: 0 done, 1 an error, 2 a request that is not allowed (and wrong usage), 3 nothing answers at the address,
130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from hedgerow import __version__
from hedgerow.cli import chat, generate, models, sessions, tokenize, up
from hedgerow.cli.command import Command
from hedgerow.client import Client
from hedgerow.errors import Cancelled, HedgerowError, InvalidRequest, NotFound, Unavailable, Unsupported

ADDRESS, ADDRESS_VARIABLE = "localhost:7411", "HEDGEROW_ADDRESS"
NOT_REACHED = ("failed to connect", "errors resolving")  # gRPC's words; a call that breaks later has others
FAILED, REFUSED, NOBODY_THERE, INTERRUPTED = 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        return _run(argv)
    except BrokenPipeError:
        # Whoever read us (head, less) has enough; the interpreter's own flush at exit must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, Cancelled):
        print(file=sys.stderr)
        return INTERRUPTED


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
    for module in (generate, chat, models, tokenize, sessions):
        for command in module.COMMANDS:
            child = commands.add_parser(command.name, help=command.help, description=command.help)
            child.add_argument(
                "--address",
                metavar="HOST:PORT",
                default=os.environ.get(ADDRESS_VARIABLE) or ADDRESS,
                help=f"where the gateway is; {ADDRESS_VARIABLE} sets the default, now %(default)s",
            )
            command.add_arguments(child)
            child.set_defaults(run=_with_client(command))
    return parser


def _with_client(command: Command) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        with Client(args.address) as client:
            return command.run(client, args)

    return run


def _explain(error: HedgerowError, address: str) -> int:
    reached = "reason" in error.metadata or not any(words in error.message for words in NOT_REACHED)
    if isinstance(error, Unavailable) and not reached:
        print(
            f"hedgerow: nothing answers at {address}. Start a stack with `hedgerow up`, or name another gateway with "
            f"--address or {ADDRESS_VARIABLE}.",
            file=sys.stderr,
        )
        return NOBODY_THERE
    print(f"hedgerow: {error}", file=sys.stderr)
    if error.retry_after:
        print(f"hedgerow: trying again in {error.retry_after:g} s can help", file=sys.stderr)
    return REFUSED if isinstance(error, InvalidRequest | NotFound | Unsupported) else FAILED
