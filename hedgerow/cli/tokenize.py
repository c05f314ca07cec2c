"""`hedgerow tokenize`: the token ids of a text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hedgerow.cli.command import Command
from hedgerow.cli.generate import prompt_of, read
from hedgerow.client import Client, Message
from hedgerow.errors import InvalidRequest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The text, and whether it is one turn of a chat."""
    parser.add_argument("prompt", nargs="?", help="the text; `-`, or nothing in a pipe: standard input")
    parser.add_argument("--file", type=Path, metavar="PATH", help="the text of this file")
    parser.add_argument("--model", metavar="NAME", default="", help="one of `hedgerow models`")
    parser.add_argument("--chat", action="store_true", help="as a user's message, with the template around it")
    parser.add_argument("--tools", type=Path, metavar="FILE", help="with --chat: these tools declared, as JSON")
    parser.add_argument("--json", action="store_true", help="a JSON array")


def run(client: Client, args: argparse.Namespace) -> int:
    """The ids on one line."""
    text = prompt_of(args)
    if args.tools is not None and not args.chat:
        raise InvalidRequest("--tools", str(args.tools), "given together with --chat")
    tools = None if args.tools is None else read(args.tools, "--tools")
    tokens = client.tokenize([Message("user", text)] if args.chat else text, model=args.model, tools=tools)
    print(json.dumps(tokens) if args.json else " ".join(map(str, tokens)))
    return 0


COMMANDS = (Command("tokenize", "show the token ids of a text", add_arguments, run),)
