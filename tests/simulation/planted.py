"""Bugs that the simulation must find: each breaks one rule of the protocol in the shipped code, at run time."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from services.gateway import outbox
from services.gateway.messages import Append, AppendStatus
from services.gateway.outbox import Outbox
from services.gateway.session import Session
from services.gateway.table import SessionTable
from services.kvstore import scripts

Bug = Callable[[Path], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def _edited(folder: Path, name: str, *edits: tuple[str, str]) -> Iterator[None]:
    """The store's scripts, with a text in one of them replaced."""
    copy = folder / "scripts"  # of the shipped ones
    shutil.copytree(scripts.FOLDER, copy)
    text = (copy / f"{name}.lua").read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"{name}.lua has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    (copy / f"{name}.lua").write_text(text)
    with mock.patch.object(scripts, "FOLDER", copy):
        yield


def skip_the_epoch_check(folder: Path) -> contextlib.AbstractContextManager[None]:
    """The store takes appends of every epoch and owner."""
    return _edited(
        folder, "session",
        ("if epoch < session.epoch then return FENCED end", ""),
        ("if owner ~= session.owner then return FENCED end", ""),
    )  # fmt: skip


def accept_an_epoch_that_went_backwards(folder: Path) -> contextlib.AbstractContextManager[None]:
    """A store that forgot an epoch takes the appends of its owner."""
    return _edited(
        folder,
        "session",
        ("if epoch > session.epoch then return FORGOTTEN end", "if epoch > session.epoch then return nil end"),
    )


def apply_before_compare(folder: Path) -> contextlib.AbstractContextManager[None]:
    """What is sent again is appended again."""
    whole = "last = before_length + #tokens / 4; session.length, session.digest = last, after"
    return _edited(
        folder, "append",
        ("string.sub(tokens, (before_length - offset) * 4 + 1)", "tokens"),
        ("session.length, session.digest = last, after", whole),
    )  # fmt: skip


class _Equal(int):
    """A number that is equal to every other."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return 0


@contextlib.contextmanager
def skip_the_attempt_check(folder: Path) -> Iterator[None]:
    """The gateway takes the updates of every attempt."""
    shipped = SessionTable.stepped

    def stepped(table: SessionTable, updates: Sequence[Any], *others: Any) -> None:
        now = [update._replace(epoch=_Equal(update.epoch), attempt=_Equal(update.attempt)) for update in updates]
        shipped(table, now, *others)

    with mock.patch.object(SessionTable, "stepped", stepped):
        yield


@contextlib.contextmanager
def release_before_commit(folder: Path) -> Iterator[None]:
    """Readers get what the store has not acknowledged."""
    shipped = Session.extend

    def extend(session: Session, *arguments: Any) -> Append | None:
        append = shipped(session, *arguments)
        session.acked, session.acked_digest = len(session.tokens), session.digest
        session.wake()
        return append

    with mock.patch.object(Session, "extend", extend):
        yield


@contextlib.contextmanager
def finish_in_a_separate_call(folder: Path) -> Iterator[None]:
    """The end follows its tokens."""
    shipped = Outbox.add

    def add(box: Outbox, entries: Sequence[Append]) -> None:
        for entry in entries:
            if entry.end is not None and entry.tokens:
                end = entry.offset + len(entry.tokens)
                last = entry._replace(offset=end, tokens=(), before=entry.after, notes=())
                shipped(box, [entry._replace(end=None), last])
            else:
                shipped(box, [entry])

    def alone(line: Any) -> Append:
        entry: Append = line.entries[line.sent]
        line.sent += 1
        line.flying += 1
        return entry

    with mock.patch.object(Outbox, "add", add), mock.patch.object(outbox, "_joined", alone):
        yield


@contextlib.contextmanager
def lose_a_suffix_silently(folder: Path) -> Iterator[None]:
    """A store that has less than it acknowledged is believed to have everything."""
    shipped = SessionTable.appended

    def appended(table: SessionTable, results: Sequence[Any], *others: Any) -> None:
        now = []
        for result in results:
            session = table.sessions.get(result.session_id)
            if session is not None and result.status is AppendStatus.GAP:
                finish = session.end.reason if session.end else result.state.finish
                state = result.state._replace(length=len(session.tokens), finish=finish)
                result = result._replace(status=AppendStatus.OK, state=state)
            now.append(result)
        shipped(table, now, *others)

    with mock.patch.object(SessionTable, "appended", appended):
        yield


BUGS: dict[str, Bug] = {
    bug.__name__: bug
    for bug in (
        skip_the_epoch_check,
        skip_the_attempt_check,
        apply_before_compare,
        release_before_commit,
        finish_in_a_separate_call,
        lose_a_suffix_silently,
        accept_an_epoch_that_went_backwards,
    )
}
