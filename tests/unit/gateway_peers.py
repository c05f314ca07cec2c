"""A verifier and a store for one SessionTable, in memory: same rules, no wire, delivered when the test says so."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from hedgerow import digest
from hedgerow.errors import HedgerowError
from services.gateway.messages import (
    Append,
    Appended,
    AppendStatus,
    End,
    Granted,
    Start,
    State,
    StepStats,
    Timings,
    Update,
)
from services.gateway.ports import Watcher
from services.gateway.reader import Reader
from services.gateway.session import Options, Session
from services.gateway.table import SessionTable
from services.gateway.types import Fingerprint, Finish, Mode, Model, Record, Sampling, Speculation
from services.gateway.upkeep import QUIET
from services.gateway.verifiers import WAIT, Policy, Verifiers

OWNER = b"o" * 16
SAME = Fingerprint()


def record(session_id: str = "s1", prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 1000) -> Record:
    sampling = Sampling(seed=1, max_tokens=max_tokens)
    return Record(
        session_id, b"b" * 16, "m", "", prompt, Sampling(), sampling, Speculation(), Fingerprint(), Mode.EXACT, 0
    )


def stats(emitted: int, nodes: int = 4) -> StepStats:
    return StepStats(1, 8, nodes, emitted - 1, emitted, 1, nodes + 1)


class MemoryStore:
    """The append rules of DESIGN section 7 over a dict."""

    def __init__(self) -> None:
        self.sent: deque[Sequence[Append]] = deque()
        self.messages = 0
        self.states: dict[str, State] = {}
        self.tokens: dict[str, list[int]] = {}
        self.digests: dict[str, list[bytes]] = {}
        self.marked: set[str] = set()

    def create(self, new: Record) -> int:
        first = digest.first(new.session_id, new.prompt)
        self.states[new.session_id] = State(1, OWNER, 0, first)
        self.tokens[new.session_id], self.digests[new.session_id] = [], [first]
        return 1

    def append(self, entries: Sequence[Append]) -> None:
        assert len({entry.session_id for entry in entries}) == len(entries), "one entry a session"
        self.messages += 1
        self.sent.append(entries)

    def answer(self) -> list[Appended]:
        """Apply the oldest message."""
        return [self._apply(entry) for entry in self.sent.popleft()]

    def lose(self, session_id: str, length: int, epoch: int = 1) -> None:
        """A fail-over to a replica that was behind: its tokens from `length` on and its later epochs are gone."""
        del self.tokens[session_id][length:], self.digests[session_id][length + 1 :]
        was = self.states[session_id]
        self.states[session_id] = State(epoch, was.owner, length, self.digests[session_id][-1])

    def forget(self, session_id: str) -> None:
        """Its answers are still to be passed on: the table must not mind them."""

    def end(self, session_id: str) -> State:
        return self.states[session_id]

    def _apply(self, a: Append) -> Appended:
        state = self.states.get(a.session_id)
        if state is None:
            return Appended(a.session_id, AppendStatus.NOT_FOUND, State())
        status = self._check(a, state)
        if status is AppendStatus.OK:
            fresh = a.tokens[state.length - a.offset :]
            for token in fresh:
                self.tokens[a.session_id].append(token)
                self.digests[a.session_id].append(digest.extend(self.digests[a.session_id][-1], [token]))
            assert self.digests[a.session_id][-1] == a.after, "the caller's digest after is wrong"
            state = state._replace(length=state.length + len(fresh), digest=self.digests[a.session_id][-1])
            if a.end and not state.finish:
                state = state._replace(finish=a.end.reason, usage=a.end.usage, matched_stop=a.end.matched_stop)
            self.states[a.session_id] = state
        return Appended(a.session_id, status, state._replace(cancel_marked=a.session_id in self.marked))

    def _check(self, a: Append, state: State) -> AppendStatus:
        if a.epoch != state.epoch:
            return AppendStatus.FENCED if a.epoch < state.epoch else AppendStatus.FORGOTTEN
        if a.offset > state.length:
            return AppendStatus.FINISHED if state.finish else AppendStatus.GAP
        overlap = self.tokens[a.session_id][a.offset :]
        if overlap != list(a.tokens[: len(overlap)]):
            return AppendStatus.CONFLICT
        if a.offset == state.length and a.before != state.digest:
            return AppendStatus.DIGEST_MISMATCH
        if state.finish:
            known = a.offset + len(a.tokens) <= state.length
            repeated = a.end.reason is state.finish if a.end else bool(a.tokens)
            return AppendStatus.OK if known and repeated else AppendStatus.FINISHED
        return AppendStatus.OK


class RecordingEngine:
    """What a verifier was told. Its fingerprint is that of `record`."""

    def __init__(self, address: str = "v1", fingerprint: Fingerprint = SAME) -> None:
        self.address, self.attached, self.draining = address, True, False
        self.model: Model | None = Model("m", fingerprint, 4096, 4096, max_budget=63, default_budget=8)
        self.starts: list[Start] = []
        self.cancels: list[tuple[str, int, int]] = []
        self.offsets: dict[str, int] = {}

    def start(self, start: Start) -> None:
        self.starts.append(start._replace(committed=list(start.committed)))

    def cancel(self, session_id: str, epoch: int, attempt: int) -> None:
        self.cancels.append((session_id, epoch, attempt))

    def committed(self, session_id: str, epoch: int, attempt: int, offset: int) -> None:
        assert offset >= self.offsets.get(session_id, 0), "committed offsets only grow"
        self.offsets[session_id] = offset


class RecordingLeases:
    """What was asked of leases; the test answers repairs."""

    def __init__(self) -> None:
        self.released: list[tuple[str, int]] = []
        self.repairs: list[tuple[str, int, int]] = []
        self.waiting: deque[Callable[[Granted | HedgerowError], None]] = deque()

    def release(self, record: Record, epoch: int) -> None:
        self.released.append((record.session_id, epoch))

    def repair(
        self, record: Record, epoch: int, floor: int, repaired: Callable[[Granted | HedgerowError], None]
    ) -> None:
        self.repairs.append((record.session_id, epoch, floor))
        self.waiting.append(repaired)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """One table between its peers."""

    def __init__(
        self,
        lag: int = 1000,
        patience: float = 10.0,
        policy: Policy = WAIT,
        others: Sequence[RecordingEngine] = (),
        watcher: Watcher | None = None,
        quiet: float = QUIET,
    ) -> None:
        self.engine, self.store, self.clock = RecordingEngine(), MemoryStore(), Clock()
        self.verifiers = Verifiers([self.engine, *others], policy, self.clock, lambda: 0.5, watcher or Watcher())
        self.leases = RecordingLeases()
        self.unrecorded: list[Record] = []
        self.table = SessionTable(
            self.verifiers,
            self.store,
            self.leases,
            lag=lag,
            patience=patience,
            quiet=quiet,
            unrecorded=self.unrecorded.append,
            clock=self.clock,
        )
        self.woken = 0

    def begin(self, new: Record | None = None, options: Options | None = None) -> Session:
        new = new or record()
        return self.table.begin(new, self.store.create(new), options or Options())

    def read(self, session: Session) -> Reader:
        return self.table.read(session, self._wake)

    def step(self, *updates: Update) -> None:
        self.table.stepped(updates, Timings(total_ns=1))

    def acknowledge(self) -> None:
        self.table.appended(self.store.answer())

    def later(self, seconds: float) -> None:
        self.clock.now += seconds
        self.table.sweep()

    def _wake(self) -> None:
        self.woken += 1


def update(session: Session, tokens: Sequence[int], offset: int | None = None, **more: object) -> Update:
    """The next update of a session; `offset` where it is not the expected one."""
    at = len(session.tokens) if offset is None else offset
    base = Update(session.id, session.epoch, session.attempt, at, tokens, stats=stats(max(len(tokens), 1)))
    return base._replace(**more)  # type: ignore[arg-type]


def ended(reader: Reader) -> End | None:
    session = reader.session
    return session.end if session.done else None


STOP, LENGTH, CANCELLED, DEADLINE, ERROR = (
    Finish.STOP, Finish.LENGTH, Finish.CANCELLED, Finish.DEADLINE, Finish.ERROR,
)  # fmt: skip
