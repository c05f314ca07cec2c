"""python -m hedgerow.weights inspect | convert | rehearse: what the `hedgerow` command runs under these names.

Exit status: 0 done, 1 a fault was found or something broke, 2 not allowed as it was asked for, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

from hedgerow.errors import HedgerowError, InvalidRequest
from hedgerow.model.fields import ConfigError
from hedgerow.model.headers import CheckpointError
from hedgerow.model.reading import Progress
from hedgerow.weights.convert import convert, verify
from hedgerow.weights.published import MINI, MINI_FP8, ONE_LAYER, TRAITS, TRUE, Member, Sizes
from hedgerow.weights.rehearse import write
from hedgerow.weights.rehearse_drafter import DraftKind, check_beside, write_drafter
from hedgerow.weights.report import inspect, lines, read_all

FAULTY, REFUSED, INTERRUPTED = 1, 2, 130
MOST_RANKS = 64
SIZES = {"mini": MINI, "layer": ONE_LAYER, "true": TRUE}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names in a folder may be of any alphabet, or of none
    args = parser().parse_args(argv)
    try:
        return int(args.run(args))
    except (ConfigError, CheckpointError) as error:
        say(f"hedgerow {args.command}: {error}")
        return FAULTY
    except HedgerowError as error:
        say(f"hedgerow {args.command}: {error}")
        return REFUSED if isinstance(error, InvalidRequest) else FAULTY
    except OSError as error:
        say(f"hedgerow {args.command}: {error.filename or 'a file'}: {error.strerror}")
        return FAULTY
    except KeyboardInterrupt:
        say("")
        return INTERRUPTED


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="hedgerow", description="Checkpoint folders before they are served.")
    commands = top.add_subparsers(dest="command", required=True)
    add_inspect(commands.add_parser("inspect", help="say what a folder is, what it needs and what is wrong with it"))
    add_convert(commands.add_parser("convert", help="lay a published folder out as one file a rank"))
    add_rehearse(commands.add_parser("rehearse", help="write a folder of a published layout with random weights"))
    return top


def add_inspect(p: argparse.ArgumentParser) -> None:
    """Reads names, sizes and headers; with --verify everything."""
    p.description = "Says what FOLDER is, what it needs and what is wrong with it. Exit status 1: something is."
    p.add_argument("folder", type=Path, metavar="FOLDER", help="a checkpoint folder, published or converted")
    p.add_argument("--ranks", type=int, metavar="N", help="also what keeps N GPUs from sharing it")
    p.add_argument("--verify", action="store_true", help="read all of it: checksums of a converted folder, or the hash")
    p.add_argument("--json", action="store_true", help="one JSON object")
    p.set_defaults(run=run_inspect)


def run_inspect(args: argparse.Namespace) -> int:
    if args.ranks is not None and not 1 <= args.ranks <= MOST_RANKS:
        raise InvalidRequest("--ranks", args.ranks, f"in [1, {MOST_RANKS}]")
    report = inspect(args.folder, args.ranks)
    if args.verify and not report.fault_count:
        read_all(args.folder, report, tell)
    print(report.as_json() if args.json else "\n".join(lines(report)))
    return FAULTY if report.fault_count else 0


def add_convert(p: argparse.ArgumentParser) -> None:
    """Killed in the middle, the same command goes on."""
    p.description = "Writes TARGET, or finishes it: the same command after a kill goes on where the last one was."
    p.add_argument("source", type=Path, metavar="SOURCE", help="a published checkpoint folder")
    p.add_argument("target", type=Path, metavar="TARGET", help="a new folder; in a second run the same one")
    p.add_argument("--ranks", type=int, default=1, metavar="N", help="GPUs that share the model, %(default)s")
    p.add_argument("--verify", action="store_true", help="read a finished TARGET again and compare its checksums")
    p.set_defaults(run=run_convert)


def run_convert(args: argparse.Namespace) -> int:
    if not 1 <= args.ranks <= MOST_RANKS:
        raise InvalidRequest("--ranks", args.ranks, f"in [1, {MOST_RANKS}]")
    manifest = convert(args.source, args.target, args.ranks, say, tell)
    if args.verify:
        verify(args.target, tell)
    size = sum(parts[-1].end for parts in manifest.files)
    print(f"{args.target}: {manifest.ranks} files, {size / 1e9:.2f} GB, order {manifest.order}, checksums compared")
    return 0


def add_rehearse(p: argparse.ArgumentParser) -> None:
    """Sizes come from --size, and single ones from the options after it."""
    p.description = "Writes names, types and shards exactly as published, with random weights: to rehearse with."
    p.add_argument("folder", type=Path, metavar="FOLDER", help="a new or an empty folder")
    p.add_argument("--member", choices=get_args(Member), default="k2.6", help="whose layout, %(default)s")
    p.add_argument(
        "--size", choices=tuple(SIZES), default="mini",
        help="mini: all 61 layers, small widths, 0.2 GB; layer: one MoE layer at true widths, 15 GB; true: all, 595 GB",
    )  # fmt: skip
    p.add_argument("--layers", type=int, metavar="N", help="another number of layers")
    p.add_argument("--experts", type=int, metavar="N", help="another number of experts a layer")
    p.add_argument("--vocab", type=int, metavar="N", help="another vocabulary, at least 512")
    p.add_argument(
        "--drafter", choices=get_args(DraftKind), help="also a drafter of the layout published for Kimi, FOLDER-dflash"
    )
    p.add_argument("--tokenizer", type=Path, metavar="DIR", help="take tiktoken.model and its like from this folder")
    p.add_argument("--seed", type=int, default=0, metavar="N", help="decides every weight, %(default)s")
    p.set_defaults(run=run_rehearse)


def run_rehearse(args: argparse.Namespace) -> int:
    member = cast(Member, args.member)
    s = MINI_FP8 if TRAITS[member].fp8 and args.size == "mini" else SIZES[args.size]
    s, folder = changed(s, args), args.folder.resolve()
    drafter = check_beside(folder) if args.drafter else None
    write(folder, member, s, args.seed, args.tokenizer)
    print(f"{args.folder}: {member}, {args.size}")
    if drafter is not None:
        write_drafter(drafter, member, s, args.drafter, args.seed)
        print(f"{drafter}: {args.drafter}, for it")
    return 0


def changed(s: Sizes, args: argparse.Namespace) -> Sizes:
    """With the sizes that were given. Raises InvalidRequest."""
    given = {name: getattr(args, name) for name in ("layers", "experts", "vocab") if getattr(args, name) is not None}
    for name, value in given.items():
        if value < (512 if name == "vocab" else 1):
            raise InvalidRequest(f"--{name}", value, "at least 512" if name == "vocab" else "at least 1")
    s = dataclasses.replace(s, **given)
    return dataclasses.replace(s, top_k=min(s.top_k, s.experts), dense_layers=min(s.dense_layers, s.layers))


def tell(progress: Progress) -> None:
    say(str(progress))


def say(text: str) -> None:
    """A line beside the result."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
