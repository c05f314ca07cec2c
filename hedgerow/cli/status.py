"""`hedgerow status`: how the processes are, from the admin ports that are named; without any, a gateway's models."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from hedgerow.certificates import Tls
from hedgerow.cli import options
from hedgerow.cli.command import FAILED, NOBODY_THERE, Command
from hedgerow.client import Client, ProcessStatus, process_status
from hedgerow.errors import HedgerowError, Unavailable

HEAD = ("service", "address", "state", "version", "up", "what it does")
LOAD: Mapping[str, Mapping[str, str]] = {
    "gateway": {
        "sessions": 'hedgerow_gateway_held{what="sessions"}',
        "readers": 'hedgerow_gateway_held{what="readers"}',
        "without a verifier": "hedgerow_gateway_waiting_sessions",
        "appends not answered": 'hedgerow_gateway_held{what="unanswered"}',
        "verifiers": "hedgerow_gateway_verifiers",
        "failed over": "hedgerow_gateway_failed_over_total",
    },
    "verifier": {
        "running": "hedgerow_verifier_running_sequences",
        "waiting": "hedgerow_verifier_waiting_sequences",
        "free pages": "hedgerow_verifier_cache_free_pages",
        "pages": "hedgerow_verifier_cache_pages",
        "steps": "hedgerow_verifier_steps_total",
        "drafter": "hedgerow_verifier_drafter_up",
    },
    "drafter": {"verifiers": "hedgerow_drafter_verifiers"},
    "kvstore": {
        "exchanges with Redis": "hedgerow_kvstore_redis_exchanges_total",
        "without an answer": "hedgerow_kvstore_redis_silences_total",
        "too few replicas": "hedgerow_kvstore_redis_shortfalls_total",
    },
}
FACTS = ("model", "template", "acceptance", "limits", "api keys", "certificates", "peer certificates")
SPANS = ((86_400, "d"), (3600, "h"), (60, "min"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which processes."""
    parser.add_argument(
        "processes",
        nargs="*",
        metavar="HOST:PORT",
        help="admin ports (HEDGEROW_ADMIN_LISTEN) of any services, which say health, version, load and lag; "
        "without any: the models of the gateway at --address",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with every metric")


def run(client: Client, args: argparse.Namespace) -> int:
    """0: all serve. 1: one does not. 3: none answers."""
    if not args.processes:
        return _models(client, args)
    tls = options.tls(args)
    answers = asyncio.run(_ask(args.processes, tls))
    if args.json:
        for address, answer in answers.items():
            wrong = {"address": address, "error": str(answer)}
            print(json.dumps(wrong if isinstance(answer, HedgerowError) else asdict(answer)))
    else:
        _show([HEAD, *(row(address, answer) for address, answer in answers.items())])
    there = [answer for answer in answers.values() if isinstance(answer, ProcessStatus)]
    if not there:
        return NOBODY_THERE
    return 0 if len(there) == len(answers) and all(answer.serving for answer in there) else FAILED


def row(address: str, answer: ProcessStatus | HedgerowError) -> Sequence[str]:
    """One line of the table."""
    if isinstance(answer, HedgerowError):
        away = isinstance(answer, Unavailable) and "tls" not in answer.metadata
        return ("?", address, "no answer" if away else "no status", "", "", answer.message)
    state = "draining" if answer.draining else "serving" if answer.serving else "not serving"
    said = [f"{name}: {why}" for name, why in sorted(answer.troubles.items())]
    said += [f"{name} {fact}" for name, fact in answer.facts.items() if name in FACTS]
    numbers = {what: answer.numbers.get(name) for what, name in LOAD.get(answer.service, {}).items()}
    said += [f"{what} {number:.0f}" for what, number in numbers.items() if number is not None]
    return (answer.service, address, state, answer.version, span(answer.uptime_seconds), ", ".join(said))


def span(seconds: float) -> str:
    """As people say it."""
    for size, unit in SPANS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


async def _ask(addresses: Sequence[str], tls: Tls | bool) -> dict[str, ProcessStatus | HedgerowError]:
    async def one(address: str) -> ProcessStatus | HedgerowError:
        try:
            return await process_status(address, tls=tls)
        except HedgerowError as error:
            return error

    unique = list(dict.fromkeys(part for each in addresses for part in each.split(",") if part))
    return dict(zip(unique, await asyncio.gather(*map(one, unique)), strict=True))


def _models(client: Client, args: argparse.Namespace) -> int:
    models = client.models()
    if args.json:
        for model in models:
            print(json.dumps(asdict(model)))
    else:
        print(f"gateway at {args.address}: it answers; name admin ports (HOST:PORT ...) for health, versions and load")
        for model in models:
            print(
                f"model {model.name}: {'ready' if model.ready else 'not ready'}, fingerprint {model.fingerprint[:12]}"
            )
    return 0 if models and all(model.ready for model in models) else FAILED


def _show(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in rows) for i in range(len(HEAD) - 1)]
    for line in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)), line[-1]]).rstrip())


COMMANDS = (Command("status", "how the processes are", add_arguments, run),)
