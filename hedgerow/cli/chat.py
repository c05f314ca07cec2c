"""`hedgerow chat`: a conversation, turn by turn, or one question."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import NamedTuple

from hedgerow.cli import options
from hedgerow.cli.command import Command, say, status_of
from hedgerow.cli.generate import read
from hedgerow.cli.show import exit_status, show, unbroken
from hedgerow.client import Client, Message, SyncStream
from hedgerow.errors import Cancelled, HedgerowError, InvalidRequest, Unavailable

PROMPT = "> "
HELP = "Ctrl-C stops an answer, at the prompt it ends as Ctrl-D and /exit do; /new starts over"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The question and the options."""
    parser.add_argument("question", nargs="?", help="ask this and end; without it: a conversation")
    parser.add_argument("--system", metavar="TEXT", help="a system message at the beginning")
    parser.add_argument("--tools", type=Path, metavar="FILE", help="declare these tools: OpenAI's array, as JSON")
    thinking = parser.add_mutually_exclusive_group()
    thinking.add_argument("--thinking", action="store_true", default=None, help="let the model think first")
    thinking.add_argument("--no-thinking", action="store_false", dest="thinking", help="do not let it")
    options.add_arguments(parser)


def run(client: Client, args: argparse.Namespace) -> int:
    """One question, the lines of a pipe as turns, or a conversation on a terminal.

    The exit status of a pipe's is that of the first answer that failed.
    """
    beginning = [Message("system", args.system)] if args.system else []
    args.tools = None if args.tools is None else read(args.tools, "--tools")
    if args.question is not None:
        stream = _ask(client, [*beginning, Message("user", args.question)], args)
        with unbroken(stream):
            show(stream, as_json=args.json, runs=args.show_runs)
            return exit_status(stream)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history, where the platform has it
        say(HELP)
    return _converse(client, beginning, args)


def _converse(client: Client, beginning: list[Message], args: argparse.Namespace) -> int:
    messages, status = list(beginning), 0
    while (question := _next_question()) is not None:
        if question == "/new":
            messages = list(beginning)
        elif question:
            messages.append(Message("user", question))
            answer = _answer(client, messages, args)
            if answer.message is None:
                messages.pop()
            else:
                messages.append(answer.message)
            status = status or answer.status
    return 0 if sys.stdin.isatty() else status


def _next_question() -> str | None:
    """The next line; None: the end. Raises InvalidRequest for bytes that are no text."""
    try:
        line = input(PROMPT if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None
    except UnicodeDecodeError:
        raise InvalidRequest("question", "standard input", "UTF-8 text") from None
    return None if line in ("/exit", "/quit") else line


class _Answer(NamedTuple):
    """None: there is none, and the question is not part of the conversation. `status` is what a script gets."""

    message: Message | None
    status: int


def _answer(client: Client, messages: list[Message], args: argparse.Namespace) -> _Answer:
    try:
        stream = _ask(client, messages, args)
        with unbroken(stream):
            return _Answer(show(stream, as_json=args.json, runs=args.show_runs).message(), exit_status(stream))
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        say("\n(stopped)")
    except (Unavailable, Cancelled):
        raise
    except HedgerowError as error:
        say(f"hedgerow: {error}")
        return _Answer(None, status_of(error))
    return _Answer(None, 0)


def _ask(client: Client, messages: list[Message], args: argparse.Namespace) -> SyncStream:
    return client.chat(messages, tools=args.tools, thinking=args.thinking, **options.options(args))


COMMANDS = (Command("chat", "talk to the model", add_arguments, run),)
