"""`hedgerow generate`: continue a text."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hedgerow.cli import options
from hedgerow.cli.command import Command
from hedgerow.cli.show import follow
from hedgerow.client import Client
from hedgerow.errors import InvalidRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The prompt and the options."""
    parser.add_argument("prompt", nargs="?", help="the text to continue; `-`, or nothing in a pipe: standard input")
    parser.add_argument("--file", type=Path, metavar="PATH", help="continue this file's text")
    options.add_arguments(parser)
    options.add_leaving(parser)


def run(client: Client, args: argparse.Namespace) -> int:
    """Stream the continuation to standard output; Ctrl-C cancels it."""
    return follow(client.generate(prompt_of(args), **options.options(args)), args)


def prompt_of(args: argparse.Namespace) -> str:
    """The text from wherever it was given. Raises InvalidRequest."""
    if args.prompt is not None and args.file is not None:
        raise InvalidRequest("prompt", args.prompt, "not given together with --file")
    if args.file is not None:
        return read(args.file, "--file")
    if args.prompt is not None and args.prompt != "-":
        return str(args.prompt)
    if args.prompt is None and sys.stdin.isatty():
        raise InvalidRequest("prompt", None, "given as an argument, with --file, or on standard input")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError:
        raise InvalidRequest("prompt", "standard input", "UTF-8 text") from None


def read(path: Path, option: str) -> str:
    """The text of a file that an option names. Raises InvalidRequest."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(option, str(path), f"a readable file: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(option, str(path), "UTF-8 text") from None


COMMANDS = (Command("generate", "continue a text", add_arguments, run),)
