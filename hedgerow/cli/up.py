"""`hedgerow up`: the whole stack in the foreground, one log, stopped with Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from hedgerow.certificates import Tls, read
from hedgerow.cli.folders import check_drafter, check_target
from hedgerow.cli.ports import parse_address
from hedgerow.cli.supervisor import Stack, StackConfig, find_checkout
from hedgerow.client import API_KEY
from hedgerow.errors import HedgerowError, InvalidRequest

BUNDLED = Path("models") / "sapling"
SERVICES = ("gateway", "drafter", "verifier", "kvstore")
PREFIX = "HEDGEROW_"
ADDRESSES = ("LISTEN", "ADMIN_LISTEN", "VERIFIER", "DRAFTER", "KVSTORE")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 130
MAX_BUDGET = 63  # the verifier's default
MOST_PROCESSES = 16  # of one service
MOST_RANKS = 64  # of one verifier
KINDS = ("dflash", "lookup", "none")
LEVELS = ("debug", "info", "warning", "error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `hedgerow up`."""
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="checkpoint of the target; the bundled one if not given"
    )
    _add_drafter(parser)
    parser.add_argument("--listen", default="127.0.0.1:7411", metavar="HOST:PORT", help="address of the gateway")
    for service, more in (
        ("gateway", "on the ports after --listen"),
        ("verifier", "each loads the model"),
        ("kvstore", "on the same Redis"),
    ):
        parser.add_argument(f"--{service}s", type=int, default=1, metavar="N", help=f"{service} processes, {more}")
    parser.add_argument(
        "--tensor-parallel", type=int, default=1, metavar="N", help="ranks that share the model, a process each"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="where target and drafter are computed; cpu if not given"
    )
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder of the embedded store; .hedgerow if not given")
    parser.add_argument("--redis", metavar="URL", help="use this Redis instead of the embedded one")
    parser.add_argument("--budget", type=int, metavar="N", help="most nodes of a tree for requests that do not say")
    parser.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="TLS on every hop with tls.crt, tls.key and ca.crt of this folder; the certificate names 127.0.0.1",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SERVICE.FIELD=VALUE",
        help="any setting of docs/configuration.md, say verifier.engine=torch; may be repeated",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="least severe event that is shown")


def _add_drafter(parser: argparse.ArgumentParser) -> None:
    drafter = parser.add_mutually_exclusive_group()
    drafter.add_argument(
        "--drafter", type=Path, metavar="DIR", help="checkpoint of its drafter; DIR-dflash if not given"
    )
    drafter.add_argument("--no-drafter", action="store_true", help="plain decoding, no drafter process")
    drafter.add_argument(
        "--drafter-kind",
        choices=KINDS,
        help="lookup: drafts from the session's own text, without weights; none: as --no-drafter; dflash if not given",
    )
    parser.add_argument(
        "--drafter-in-process",
        action=argparse.BooleanOptionalAction,
        help="the drafter is computed in the verifier's process: no messages to it, and on one GPU steps feed each "
        "other; what crashes in it takes the verifier along. If neither is given: with --device cuda, where there is "
        "one verifier of one rank and nothing is --set for the drafter",
    )


def run(args: argparse.Namespace) -> int:
    """Starts the stack and blocks until Ctrl-C or SIGTERM. Returns the exit status: 130 if it was not up yet."""
    status = INTERRUPTED
    _interrupt_once()
    try:
        root = find_checkout()
        check_target(args.model or root / BUNDLED)
        config = stack_config(args, root)
        if config.drafter is not None:
            check_drafter(config.drafter)
        _name_what_is_not_read(os.environ)
        stack = Stack(config, _log)
        stack.start(_say)
        with _stopped(stack):
            _say(f"its processes: hedgerow status {' '.join(map(stack.admin_address, stack.services))}")
            _say(f"hedgerow is up: {stack.addresses('gateway')}   (Ctrl-C stops it)")
            status = 0
            threading.Event().wait()
    except KeyboardInterrupt:
        return status
    except BrokenPipeError:
        raise  # whoever read us has gone
    except (HedgerowError, OSError) as error:
        print(f"hedgerow up: {error}", file=sys.stderr)
        return 1
    raise AssertionError("nothing but a signal ends the wait")


def stack_config(args: argparse.Namespace, root: Path) -> StackConfig:
    """What the options ask for, in the checkout `root`. Raises InvalidRequest."""
    model: Path = args.model or root / BUNDLED
    kind = "none" if args.no_drafter else args.drafter_kind or "dflash"
    if not model.is_dir():  # before its drafter's name is made of it
        raise InvalidRequest("--model", str(model), "an existing folder")
    if args.drafter_in_process and kind != "dflash":
        raise InvalidRequest("--drafter-in-process", kind, "a DFlash drafter")
    _, port = parse_address(args.listen)
    for option in ("gateways", "verifiers", "kvstores"):
        if not 1 <= getattr(args, option) <= MOST_PROCESSES:
            raise InvalidRequest(f"--{option}", getattr(args, option), f"in [1, {MOST_PROCESSES}]")
    if port and port + args.gateways > 1 << 16:
        raise InvalidRequest("--listen", args.listen, f"a port that leaves room for {args.gateways} gateways")
    settings = _settings(args.set, {} if args.tls is None else tls_settings(args.tls))
    if not 1 <= args.tensor_parallel <= MOST_RANKS:
        raise InvalidRequest("--tensor-parallel", args.tensor_parallel, f"in [1, {MOST_RANKS}]")
    if args.tensor_parallel > 1:
        settings.setdefault("verifier", {}).setdefault("TENSOR_PARALLEL", str(args.tensor_parallel))
    if args.device is not None:
        for service in ("verifier", "drafter"):
            settings.setdefault(service, {}).setdefault("DEVICE", args.device)
    most = settings.get("verifier", {}).get("MAX_BUDGET", str(MAX_BUDGET))
    if args.budget is not None and (args.budget < 0 or (most.isdecimal() and args.budget > int(most))):
        raise InvalidRequest("--budget", args.budget, f"at least 0 and at most {most}, the verifier's max_budget")
    return StackConfig(
        root=root,
        model=model.resolve(),
        drafter=_drafter(args.drafter, model) if kind == "dflash" else None,
        lookup=kind == "lookup",
        hosted=_hosted(args, kind, settings.get("verifier", {})),
        data=(args.data or root / ".hedgerow").resolve(),
        listen=args.listen,
        gateways=args.gateways,
        verifiers=args.verifiers,
        kvstores=args.kvstores,
        redis_url=args.redis,
        budget=args.budget,
        log_level=args.log_level,
        settings=settings,
    )


def _hosted(args: argparse.Namespace, kind: str, verifier: Mapping[str, str]) -> bool:
    """Whether the drafter is computed in the verifier's process: as asked, else where steps then feed each other."""
    own = [text for text in args.set if text.startswith("drafter.")]
    if args.drafter_in_process and own:
        raise InvalidRequest("--set", own[0], "a setting of the verifier's, whose process has the drafter")
    if args.drafter_in_process is not None:
        return bool(args.drafter_in_process)
    alone = args.verifiers == 1 and verifier.get("TENSOR_PARALLEL", "1") == "1"
    takes = kind == "dflash" and verifier.get("FEATURES", "auto") in ("auto", "hidden")
    return verifier.get("DEVICE") == "cuda" and alone and takes and not own


def tls_settings(folder: Path) -> dict[str, str]:
    """What each service is told of the files in `folder`. Raises InvalidRequest with the file that is wrong."""
    files = Tls(*((folder / name).resolve() for name in ("ca.crt", "tls.crt", "tls.key")))
    try:
        read(files)
    except InvalidRequest as why:
        raise InvalidRequest("--tls", str(getattr(files, why.field)), why.limit) from None
    return {"TLS_CA": str(files.ca), "TLS_CERT": str(files.cert), "TLS_KEY": str(files.key)}


def _settings(given: Sequence[str], all_have: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Settings by service. Values are checked by the service itself. Raises InvalidRequest."""
    chosen: dict[str, dict[str, str]] = {service: dict(all_have) for service in SERVICES if all_have}
    for text in given:
        name, equals, value = text.partition("=")
        service, dot, field = name.partition(".")
        if not (equals and dot and field and service in SERVICES):
            raise InvalidRequest("--set", text, f"SERVICE.FIELD=VALUE, where SERVICE is one of {', '.join(SERVICES)}")
        if field.upper() in ADDRESSES:
            raise InvalidRequest("--set", text, "no address: the services find each other by theirs; see --listen")
        chosen.setdefault(service, {})[field.upper()] = value
    return chosen


def _name_what_is_not_read(env: Mapping[str, str]) -> None:
    """Variables are the services' own way of configuration; here they would go to all four, and most fit one.

    Their values are not shown: some are secrets.
    """
    for name in sorted(key for key in env if key.startswith(PREFIX) and key != API_KEY):
        field = name.removeprefix(PREFIX).lower()
        _say(f"{name} is not read by `hedgerow up`; --set SERVICE.{field}=VALUE passes it to a service")


def _drafter(given: Path | None, model: Path) -> Path:
    drafter = given or model.with_name(model.name + "-dflash")
    if given is None and not drafter.is_dir():
        raise InvalidRequest("--drafter", str(drafter), "an existing folder; --no-drafter decodes without one")
    return drafter.resolve()


def _log(name: str, text: str) -> None:
    """One log of all services. One write a line: the services' threads write here too, and must outlive its reader."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{name:>10} | {text}\n")


@contextlib.contextmanager
def _stopped(stack: Stack) -> Iterator[None]:
    """Stops the stack at the end of a block."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _say("stopping; running calls have 10 s, a second Ctrl-C ends everything at once")
        stack.stop()
        with contextlib.suppress(OSError):
            _say("stopped")


def _interrupt_once() -> None:
    """SIGINT and SIGTERM stop the stack, also where a shell's `&` had SIGINT ignored; the next one ends it at once.

    The children die with this process.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt

    for each in SIGNALS:
        signal.signal(each, interrupt)


def _say(text: str) -> None:
    print(text, flush=True)
