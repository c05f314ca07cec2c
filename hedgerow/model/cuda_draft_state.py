"""What a drafter on a GPU holds of one sequence: pages of keys and values, and features on the host that wait."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hedgerow.errors import InvalidRequest
from hedgerow.model.cuda_cache import Arena
from hedgerow.model.cuda_draft_step import DraftFields, Ints
from hedgerow.model.draft_config import DraftConfig
from kernels.gpu.row_layout import PAGE

LEAST_PAGES = 256  # of a pool
Floats = npt.NDArray[np.float32]


class CudaDraftState:
    """A sequence's context: positions start .. end - 1 have been appended, the last of them still on the host."""

    def __init__(self, arena: Arena) -> None:
        self.arena, self.pages = arena, list[int]()
        self.waiting: list[Floats] = []  # rows of features
        self.start = self.end = 0
        weakref.finalize(self, _give_all, arena, self.pages)

    def reset(self, position: int) -> None:
        """Forgets everything; the next features are those of `position`."""
        _give_all(self.arena, self.pages)
        self.waiting.clear()
        self.start = self.end = position

    @property
    def behind(self) -> int:
        """Rows that wait."""
        return sum(map(len, self.waiting))

    def reserve(self, ahead: int = 0) -> None:
        """Takes pages up to `end`, or up to position `ahead`."""
        needed = (max(self.end, ahead) - 1) // PAGE - self.start // PAGE + 1
        while len(self.pages) < needed:
            if not self.arena.free:
                more = max(LEAST_PAGES, self.arena.pages)  # doubling: each move makes captured passes wrong
                self.arena.give(self.arena.take(more), more)
            self.pages.append(self.arena.take(1))


def _give_all(arena: Arena, pages: list[int]) -> None:
    for page in pages:
        arena.give(page, 1)
    pages.clear()


def take_waiting(states: Sequence[CudaDraftState], room: Floats) -> list[int]:
    """Moves rows that wait, as many as go into `room`, there; how many of each state."""
    taken, parts, left = list[int](), list[Floats](), len(room)
    for state in states:
        count = min(state.behind, left)
        left -= count
        taken.append(count)
        while count:
            rows = state.waiting.pop(0)
            if len(rows) > count:
                state.waiting.insert(0, rows[count:])
                rows = rows[:count]
            parts.append(rows)
            count -= len(rows)
    if parts:
        np.concatenate(parts, out=room[: len(room) - left])
    return taken


def check_draft(
    states: Sequence[CudaDraftState], anchors: Sequence[int], positions: Sequence[int], c: DraftConfig
) -> None:
    """InvalidRequest for an anchor or a position that makes no sense."""
    count = len(states)
    if not count == len(anchors) == len(positions):
        raise InvalidRequest("states", count, "as many as anchors and positions")
    for n, (state, anchor, position) in enumerate(zip(states, anchors, positions, strict=True)):
        if not 0 <= anchor < c.vocab_size:
            raise InvalidRequest(f"anchors[{n}]", anchor, "within the vocabulary")
        if not state.end <= position < c.max_position_embeddings:
            limit = f"at least the end of its context, {state.end}, and below {c.max_position_embeddings}"
            raise InvalidRequest(f"positions[{n}]", position, limit)


def fill_features(f: DraftFields[Ints], states: Sequence[CudaDraftState], rows: Sequence[int]) -> None:
    """Where `rows` gathered features of each state go: its last positions, but for what still waits behind them."""
    slots, at = list[int](), list[int]()
    for state, count in zip(states, rows, strict=True):
        if count:
            end, first, pages = state.end - state.behind, state.start // PAGE, state.pages
            at += range(end - count, end)
            slots += [pages[p // PAGE - first] * PAGE + p % PAGE for p in range(end - count, end)]
    n = len(slots)
    f.slot[:n], f.slot[n:] = slots, -1
    f.at[:n], f.at[n:] = at, 0


def fill_blocks(
    f: DraftFields[Ints], states: Sequence[CudaDraftState], anchors: Sequence[int], positions: Sequence[int]
) -> None:
    """A place without a sequence keeps the rows it had: its context is empty, and nobody reads what comes of it."""
    count, sequences = len(states), len(f.start)
    f.tokens.reshape(sequences, -1)[:count, 0] = anchors
    places = f.position.reshape(sequences, -1)
    places[:count] = np.array(positions)[:, None] + np.arange(places.shape[1])
    f.start[:count], f.start[count:] = [state.start for state in states], 0
    f.end[:count], f.end[count:] = [state.end for state in states], 0
    f.anchor[:count], f.anchor[count:] = positions, 0
    for pages, state in zip(f.pages, states, strict=False):
        pages[: len(state.pages)] = state.pages
