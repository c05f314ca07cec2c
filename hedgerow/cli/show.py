"""How a stream of chunks looks on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import cycle
from typing import Any, TextIO

from hedgerow.cli.answer import show_answer
from hedgerow.cli.command import say
from hedgerow.client import Answer, Chunk, Finished, FinishReason, Position, Started, SyncStream
from hedgerow.errors import Fenced, HedgerowError, Overloaded, Unavailable

# Background colours, two in turn, so that neighbouring runs are told apart on dark and light terminals.
COLOURS = ("\x1b[48;5;24m\x1b[38;5;231m", "\x1b[48;5;238m\x1b[38;5;231m")
RESET = "\x1b[0m"


class BrokenOff(HedgerowError):
    """An answer broke off in the middle; its session is there still, behind `position`."""

    def __init__(self, error: HedgerowError, position: Position) -> None:
        super().__init__(error.message, metadata=error.metadata)
        self.position = position


def follow(stream: SyncStream, args: argparse.Namespace) -> int:
    """Show a stream to its end; returns the exit status. Raises BrokenOff.

    Whoever leaves it cancels its session, or is told how to go on with it where `args.leave_running` says so.
    """
    try:
        with unbroken(stream):
            show(stream, as_json=args.json, runs=args.show_runs)
            return exit_status(stream)
    except (KeyboardInterrupt, SystemExit):
        if args.leave_running and stream.position.session_id:
            say(f"\nhedgerow: left running; go on with: {how_to_go_on(stream.position)}")
        raise


@contextmanager
def unbroken(stream: SyncStream) -> Iterator[None]:
    """Closes the stream. Raises BrokenOff for an answer that has begun and could not be gone on with."""
    try:
        with stream:
            yield
    except (Unavailable, Overloaded, Fenced) as error:
        if not stream.position.session_id:
            raise
        raise BrokenOff(error, stream.position) from None


def how_to_go_on(position: Position) -> str:
    """The command that does."""
    words = ["hedgerow resume", position.session_id]
    if position.token_offset:
        words += [f"--token-offset {position.token_offset} --digest {position.digest.hex()}"]
    if position.text_offset:
        words += [f"--text-offset {position.text_offset}"]
    return " ".join(words)


def show(stream: SyncStream, *, as_json: bool, runs: bool) -> Answer:
    """Print a stream as it comes, and return what it was."""
    if as_json:
        return _show_json(stream, sys.stdout)
    return _show_runs(stream, sys.stdout) if runs else show_answer(stream)


def _show_runs(stream: SyncStream, out: TextIO) -> Answer:
    """All text as it is, markers included: where a step began and ended matters here."""
    answer = Answer()
    marks = cycle(COLOURS)
    for chunk in stream:
        answer.add(chunk)
        if chunk.text:
            out.write(_marked(chunk.text, next(marks), coloured=out.isatty()))
            out.flush()
    out.write("\n")
    if stream.finished:
        out.write(f"{summary(stream.finished)}\n")
    return answer


def summary(finished: Finished) -> str:
    """One line about what it took."""
    usage = finished.usage
    rate = usage.completion_tokens / max(usage.steps, 1)
    return f"[{usage.completion_tokens} tokens, {usage.steps} steps, {rate:.2f} tokens a step, {finished.reason}]"


def exit_status(stream: SyncStream) -> int:
    """0, unless the session ended otherwise than the model or its limits would have it."""
    ended = stream.finished
    return int(ended is None or ended.reason in (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.ERROR))


def _marked(text: str, colour: str, *, coloured: bool) -> str:
    """One step's run of tokens: what the tree gave and the target agreed with, and the bonus."""
    if not coloured:
        return f"[{text}]"
    # A background colour that runs through a line's end would fill the rest of the terminal's line.
    return "\n".join(f"{colour}{line}{RESET}" if line else "" for line in text.split("\n"))


def _show_json(stream: SyncStream, out: TextIO) -> Answer:
    answer = Answer()
    ascii_only = not (getattr(out, "encoding", None) or "utf-8").lower().startswith("utf")
    for event in stream.events():
        kind = {Started: "started", Chunk: "chunk", Finished: "finished"}[type(event)]
        if isinstance(event, Chunk):
            answer.add(event)
        out.write(json.dumps({"event": kind, **plain(asdict(event))}, ensure_ascii=ascii_only) + "\n")
        out.flush()
    return answer


def plain(value: Any) -> Any:
    """What JSON can hold: digests in hexadecimal."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
