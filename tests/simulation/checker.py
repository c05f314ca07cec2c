"""What must hold in every execution, checked as it happens: at the store's log, at the gateway's lips, at the client.

The log: one owner and one epoch at a time, tokens of the model's law, digests that fit, an end that is written once and
with the last token, nothing after it. The gateway: no token leaves that was never in the log. The client: one stream in
order, without a gap, without a repetition, its text and digests those of its tokens, at most one end.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hedgerow.engine.types import Finish
from hedgerow.v1 import common_pb2, kvstore_pb2
from services.kvstore import codec
from services.kvstore.scripts import Script
from tests.simulation.clocks import EPOCH
from tests.simulation.known import Known
from tests.simulation.law import KERNEL_LAWS, Asked

CHANGING = ("create", "append", "acquire", "close", "cancel", "delete", "release")
RECORD = b":record"
NOBODY = bytes(16)
LATE = 1.0
"""Virtual seconds after a deadline or cancel in which a token may be generated: a step, and the way to the verifier."""


def key_of(session_id: str) -> bytes:
    """Where a session's record is."""
    return b"hedgerow:{%b}%b" % (session_id.encode(), RECORD)


class Violation(Exception):
    """A promise is broken."""


class Log(NamedTuple):
    """A session as it is stored."""

    epoch: int
    owner: bytes
    birth: bytes
    finish: int
    tokens: tuple[int, ...]
    digest: bytes
    chunks: int
    inexact_from: float
    steps: int  # that it cost, of all gateways together
    billed: int  # tokens that its usage names


class Checker:
    """`violations` are sentences; the first one matters. `now` gives virtual time, `calm` that of the last fault."""

    def __init__(self, memory: Any, note: Any, now: Callable[[], float], calm: Callable[[], float]) -> None:
        self._memory, self._note, self.now, self.calm = memory, note, now, calm
        self._names = {Script(name).source: name for name in CHANGING}
        self.changed: Callable[[str], None] = lambda script: None
        """Told of every change of a session, by the name of its script."""
        self.jumps = False  # the services' wall clocks do
        self.sessions: dict[str, Known] = {}
        self._times: dict[str, list[float]] = {}  # when each token of a session was first generated
        self.violations: list[str] = []
        memory.before, memory.after = self.before, self.after

    def fail(self, what: str) -> None:
        """Something is wrong."""
        self.violations.append(what)
        self._note("checker", f"VIOLATION {what}")

    # The store's log.

    def before(self, keys: Sequence[bytes], arguments: Sequence[bytes]) -> Log | None:
        """A script is about to run."""
        return self.log(keys[0]) if keys and keys[0].endswith(RECORD) else None

    def after(self, source: bytes, keys: Sequence[bytes], arguments: Sequence[bytes], reply: Any, seen: Any) -> None:
        """A script has run."""
        if not keys or not keys[0].endswith(RECORD):
            return
        now = self.log(keys[0])
        if now == seen:
            return
        script = self._names.get(source, "")
        self.changed(script)
        session_id = keys[0][len(b"hedgerow:{") : -len(b"}" + RECORD)].decode()
        known = self._known(session_id, keys[0])
        if now is None:
            known.deleted = True
            self._note("redis", f"{session_id[:6]} is deleted")
            return
        self._note("redis", f"{session_id[:6]} epoch {now.epoch} length {len(now.tokens)} finish {now.finish}")
        self._change(known, seen, now, script, arguments)

    def forgot(self) -> None:
        """The store lost its last changes, deletions among them."""
        for session_id, known in self.sessions.items():
            known.deleted = self._memory.value(b"hedgerow:{%b}:mark" % session_id.encode()) == b"deleted"
            known.forgotten |= not known.deleted and self.log(key_of(session_id)) is None
            known.forgot |= known.inexact_from < math.inf
            known.over = math.inf  # so may be what ended it

    def generated(self, session_id: str, end: int) -> None:
        """A verifier has a session's tokens up to `end`."""
        times = self._times.setdefault(session_id, [])
        times += [self.now()] * (end - len(times))

    def cancelled(self, session_id: str) -> None:
        """A client was told that a session is cancelled; the store knows, unless it has lost session or mark."""
        stored = self._memory.value(key_of(session_id))
        if stored and int(stored[b"cancel"]):
            known = self.sessions[session_id]
            known.over = min(known.over, self.now())

    def log(self, key: bytes) -> Log | None:
        """The session as it is stored now; None: there is none."""
        stored = self._memory.value(key)
        if not stored:
            return None
        chunks = self._memory.value(key[: -len(RECORD)] + b":log") or []
        packed = b"".join(fields[1] for _, fields in chunks)
        tokens = struct.unpack(f"<{len(packed) // 4}I", packed)
        if int(stored[b"length"]) != len(tokens):
            self.fail(f"{key!r} says length {stored[b'length']!r} and has {len(tokens)} tokens")
        usage = common_pb2.Usage.FromString(stored[b"usage"] or stored.get(b"spent", b""))
        return Log(
            int(stored[b"epoch"]), stored[b"owner"], stored[b"birth"], int(stored[b"finish"]), tokens,
            stored[b"digest"], len(chunks), float(stored.get(b"best_effort_from", math.inf)),
            usage.steps, usage.completion_tokens,
        )  # fmt: skip

    def _known(self, session_id: str, key: bytes) -> Known:
        known = self.sessions.get(session_id)
        if known is None:
            record = kvstore_pb2.SessionRecord.FromString(self._memory.value(key)[b"record"])
            s = record.resolved
            asked = Asked(s.seed, tuple(record.prompt), s.max_tokens, tuple(s.stop), s.ignore_eos)
            known = self.sessions[session_id] = Known(session_id, asked, self._variant(key))
            known.over = self._deadline(key)
        return known

    def _variant(self, key: bytes) -> int:
        record = kvstore_pb2.SessionRecord.FromString(self._memory.value(key)[b"record"])
        return KERNEL_LAWS.index(record.fingerprint.kernel_law)

    def _change(self, known: Known, seen: Log | None, now: Log, script: str, arguments: Sequence[bytes]) -> None:
        who, length = known.session_id[:6], len(now.tokens)
        if seen is None:
            known.begins_again(self._variant(key_of(known.session_id)))
        if wrong := known.stored(now.tokens, now.inexact_from):
            self.fail(f"{who}: {wrong}")
        elif now.digest != known.digest_of(now.tokens):
            self.fail(f"{who}: the digest at {length} is not that of the tokens")
        if seen is None:
            if known.deleted:
                self.fail(f"{who} was deleted and is back")
            known.births.add(now.birth)
            return
        if now.birth != seen.birth:
            self._begins_anew(known, seen, now, script)
            return
        if now.epoch < seen.epoch or (now.owner not in (seen.owner, NOBODY) and now.epoch == seen.epoch):
            self.fail(f"{who}: epoch {seen.epoch} became {now.epoch} of another owner")
        if now.epoch > known.epoch:
            known.epoch = now.epoch
        if seen.finish and (now.finish != seen.finish or now.tokens != seen.tokens):
            self.fail(f"{who}: finish {seen.finish} at {len(seen.tokens)} became {now.finish} at {length}")
        if now.tokens != seen.tokens or now.finish != seen.finish:
            self._grown(known, seen, now, script, arguments)
        known.committed = max(known.committed, length)
        known.ended = known.ended or now.finish

    def _begins_anew(self, known: Known, seen: Log, now: Log, script: str) -> None:
        """Nobody had got a token of it, and its key is used again."""
        key, failed = key_of(known.session_id), seen.finish == Finish.ERROR and not seen.tokens
        if script != "create" or not failed or now.tokens or now.epoch <= seen.epoch:
            self.fail(f"{known.session_id[:6]}: another birth in place of {seen}")
        known.births.add(now.birth)
        known.epoch, known.ended, known.variant, known.inexact_from = now.epoch, 0, self._variant(key), math.inf
        known.over = self._deadline(key)

    def _deadline(self, key: bytes) -> float:
        """In virtual time."""
        unix_ms = int(self._memory.value(key)[b"deadline"])
        return unix_ms / 1000 - EPOCH if unix_ms and not self.jumps else math.inf

    def _grown(self, known: Known, seen: Log, now: Log, script: str, arguments: Sequence[bytes]) -> None:
        who, length = known.session_id[:6], len(now.tokens)
        if now.tokens[: len(seen.tokens)] != seen.tokens:
            self.fail(f"{who}: committed tokens {seen.tokens} became {now.tokens}")
        if script == "append":
            fields = codec._ENTRY.unpack_from(arguments[0])
            epoch, owner = fields[0], next(field for field in fields if isinstance(field, bytes))
        elif script == "close":
            epoch, owner = int(arguments[0]), arguments[1]
        else:
            self.fail(f"{who}: the log or its end was changed by neither append nor close")
            return
        if (epoch, owner) != (seen.epoch, seen.owner):
            self.fail(f"{who}: changed under epoch {epoch} while epoch {seen.epoch} is stored")
        end = known.end_of(now.tokens)
        if end and now.finish == 0:
            self.fail(f"{who}: the last token is committed without its finish")
        if now.steps < seen.steps or (now.finish and not now.steps <= length == now.billed):
            self.fail(f"{who}: {seen.steps} steps became {now.steps} at {length}, of {now.billed} tokens")
        known.short |= bool(now.finish) and length < known.released
        known.failed |= now.finish == Finish.ERROR and not length
        times = self._times.get(known.session_id, [])
        if length > len(times):
            self.fail(f"{who}: {length} tokens are committed, {len(times)} were generated")
        elif length and (late := times[length - 1] - max(known.over, self.calm())) > LATE:
            self.fail(f"{who}: token {length - 1} was generated {late:.3f} s after a deadline, cancel or fault")
        if now.finish in (Finish.STOP, Finish.LENGTH) and now.finish != end:
            self.fail(f"{who}: finish {now.finish} at {length}, where {end.name} is")

    def final(self, lost: int, views: Sequence[Any]) -> None:
        """Everything is over, and Redis has forgotten `lost` transactions; `views` are the streams (views.py)."""
        if lost:
            return  # what is lost after its end has nobody who would write it again
        for session_id, known in self.sessions.items():
            log = self.log(key_of(session_id))
            if log is not None and len(log.tokens) < known.released:
                self.fail(f"{session_id[:6]}: {known.released} tokens were released, {len(log.tokens)} are stored")
        for view in views:
            if view.finished is None or view.started is None:
                continue
            log = self.log(key_of(view.started.session_id))
            reason = view.finished.reason.value
            if log is not None and (Finish(log.finish).name.lower(), log.tokens) != (reason, tuple(view.tokens)):
                self.fail(f"{view.name}: ended with {reason} at {len(view.tokens)}, the log says {log}")
        for view in views:
            if view.started is not None:
                self._statistics(view, key_of(view.started.session_id))

    def _statistics(self, view: Any, key: bytes) -> None:
        """Those of a stream are those of its tokens in the log, whoever gave it and whenever."""
        stored = self._memory.value(key)
        if not stored:
            return
        steps = self._steps(key)
        if steps and not kvstore_pb2.SessionRecord.FromString(stored[b"record"]).return_steps:
            self.fail(f"{view.name}: nobody asked for statistics, and {len(steps)} are stored")
        shown = [step for end, step in steps if view.begin < end <= len(view.tokens)]
        came = [(s.step_id, s.tree_nodes, s.accepted, s.emitted) for s in view.steps]
        if came != shown:
            self.fail(f"{view.name}: the steps {came} came with tokens {view.begin} to {len(view.tokens)} of {steps}")
        if view.finished is not None and not len(steps) <= view.finished.usage.steps <= len(view.tokens):
            self.fail(f"{view.name}: {view.finished.usage} of {len(steps)} steps and {len(view.tokens)} tokens")

    def _steps(self, key: bytes) -> list[tuple[int, tuple[int, ...]]]:
        """The stored steps of a session, each behind its end."""
        found = list[tuple[int, tuple[int, ...]]]()
        for (at, _), fields in self._memory.value(key[: -len(RECORD)] + b":log") or []:
            begin, end = at - 1, at - 1 + len(fields[1]) // 4
            for step in kvstore_pb2.AppendEntry.FromString(b"".join(fields[5:6])).committed_steps:
                if begin < step.end <= end:
                    s = step.stats
                    found.append((step.end, (s.step_id, s.tree_nodes, s.accepted, s.emitted)))
        return found

    # The gateway's lips.

    def sent(self, call: Any, path: str, message: Any) -> None:
        """A server sends a message."""
        if not path.startswith("/hedgerow.v1.GatewayService/") or not hasattr(message, "event"):
            return
        event, said = message.event, call.said
        session_id = said.session or getattr(call.request, "session_id", "")
        if said.finished:
            self.fail(f"{session_id[:6]}: {event} after the end")
        if event.HasField("started"):
            said.session = event.started.session_id
        elif event.HasField("chunk"):
            begin, end = event.chunk.token_offset, event.chunk.token_offset + len(event.chunk.tokens)
            if said.end not in (-1, begin):
                self.fail(f"{session_id[:6]}: sent tokens from {begin} after those up to {said.end}")
            said.end = end
            self.released(session_id, end)
        elif event.HasField("finished"):
            said.finished = True

    def released(self, session_id: str, end: int) -> None:
        """A gateway gives tokens up to `end` to a client."""
        known = self.sessions.get(session_id)
        if known is None:
            self.fail(f"{session_id[:6]}: released without a record")
            return
        if end > known.committed:
            self.fail(f"{session_id[:6]}: released {end} tokens, at most {known.committed} were ever committed")
        known.released = max(known.released, end)
