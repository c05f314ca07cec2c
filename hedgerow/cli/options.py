"""The options of generation, shared by `generate` and `chat`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hedgerow.certificates import Tls, read
from hedgerow.client import Options
from hedgerow.errors import InvalidRequest

TLS_VARIABLES = {"ca": "HEDGEROW_TLS_CA", "cert": "HEDGEROW_TLS_CERT", "key": "HEDGEROW_TLS_KEY"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything that becomes an `Options`, and how the answer is shown."""
    parser.add_argument("--model", metavar="NAME", help="one of `hedgerow models`; needed when there are several")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--top-p", type=float, metavar="P", help="smallest set of tokens that reaches P, in (0, 1]")
    parser.add_argument("--top-k", type=int, metavar="K", help="the K most likely tokens; 0 keeps all")
    parser.add_argument("--min-p", type=float, metavar="P", help="tokens at least P times as likely as the best")
    parser.add_argument("--seed", type=int, metavar="N", help="repeats a sampled answer, token for token")
    parser.add_argument("--budget", type=int, metavar="N", help="most nodes of a draft tree; 0 is plain decoding")
    parser.add_argument(
        "--stop",
        action="append",
        metavar="TEXT",
        help="ends the answer; \\n, \\r and \\t are understood; may be repeated",
    )
    add_output(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    """How an answer is shown."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line, the last one with the usage")
    parser.add_argument(
        "--show-runs", action="store_true", help="mark the tokens that one step accepted: colours, or brackets"
    )


def add_leaving(parser: argparse.ArgumentParser) -> None:
    """What becomes of the session when this command ends before it."""
    parser.add_argument(
        "--leave-running", action="store_true", help="Ctrl-C leaves the session going on, and says how to resume it"
    )


def add_tls(parser: argparse.ArgumentParser) -> None:
    """How to reach what speaks TLS."""
    texts = {
        "ca": "authorities whose certificates are believed",
        "cert": "certificate to show, where one is asked for",
        "key": "its private key",
    }
    parser.add_argument(
        "--tls", action="store_true", help="over TLS, with the usual authorities if there is no --tls-ca"
    )
    for field, variable in TLS_VARIABLES.items():
        parser.add_argument(
            f"--tls-{field}",
            type=Path,
            metavar="FILE",
            default=os.environ.get(variable) or None,
            help=f"{texts[field]} (PEM; so over TLS); {variable} sets the default",
        )


def tls(args: argparse.Namespace) -> Tls | bool:
    """What was given; False: no TLS. Raises InvalidRequest with the option."""
    given = Tls(args.tls_ca, args.tls_cert, args.tls_key)
    if given == Tls():
        return bool(args.tls)
    try:
        read(given)
    except InvalidRequest as why:
        raise InvalidRequest(f"--tls-{why.field}", str(getattr(given, why.field)), why.limit) from None
    return given


def options(args: argparse.Namespace) -> Options:
    """What was given; what was not stays out."""
    names = ("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "budget")
    given = Options()
    for name in names:
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)  # type: ignore[literal-required]  # names are keys of Options
    if args.stop:
        given["stop"] = [_unescape(text) for text in args.stop]
    if args.json or args.show_runs:
        given["return_steps"] = True
    if getattr(args, "leave_running", False):
        given["leave_running"] = True
    return given


def _unescape(text: str) -> str:
    """A newline is hard to type in a shell: \\n, \\t and the like become what they mean."""
    for escape, meaning in (("\\n", "\n"), ("\\t", "\t"), ("\\r", "\r")):
        text = text.replace(escape, meaning)
    return text
