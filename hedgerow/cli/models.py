"""`hedgerow models`: what is served."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from hedgerow.cli.command import Command
from hedgerow.client import Client


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How it is shown."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(client: Client, args: argparse.Namespace) -> int:
    """A line a model."""
    for model in client.models():
        if args.json:
            print(json.dumps(asdict(model)))
        else:
            state = "ready" if model.ready else "not ready"
            print(
                f"{model.name}  {state}, context {model.context_length}, vocabulary {model.vocab_size}, "
                f"budget {model.default_budget}, fingerprint {model.fingerprint[:12]}"
            )
    return 0


COMMANDS = (Command("models", "list what is served", add_arguments, run),)
