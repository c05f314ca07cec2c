"""Drafts without a model: what followed the last tokens where they stood before in the session's own text.

Every place whose last two tokens are those at the anchor is a guess, the newest MOST_PLACES of them; the longer the
text before it agrees, the more it counts. Guesses that begin alike share nodes:

    P(child | node) = s * c     s: the child's share of 4^m over the guesses that pass the node, m the agreeing tokens
                                c = 1 - 1 / (m + 1) of the best of them: long agreement rarely ends at once

and a tree holds the most probable nodes, best first. It needs no weights and no features: it reads tokens. Text that is
edited or quoted repeats itself; other text gives few guesses, and those below LEAST are left out.
"""

from __future__ import annotations

import heapq
import math
import time
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from hedgerow.errors import InvalidRequest
from hedgerow.model.proposer import Proposed
from kernels.tree_build import PlainTree

MOST_PLACES = 16
MOST_AGREEING = 24  # tokens that are compared
LEAST = 0.1  # probability of a node
MOST_KEPT = 1 << 17  # tokens of a session; of more, the older half is forgotten


class LookupState:
    """A sequence's text: the tokens of positions start .. end - 1, and where each pair of neighbours stood last."""

    def __init__(self) -> None:
        self.reset(0)

    def reset(self, position: int) -> None:
        """Forgets everything; the next token is that of `position`."""
        self.start = self.end = position
        self._clear()

    def _clear(self) -> None:
        self.tokens, self._before = array("i"), array("i")
        self._last: dict[tuple[int, int], int] = {}  # pair -> the place behind its last occurrence

    def extend(self, tokens: Sequence[int]) -> None:
        self.end += len(tokens)
        if len(self.tokens) + len(tokens) > MOST_KEPT:
            kept = self.tokens[-(MOST_KEPT // 2) :]
            self._clear()
            self._index(kept)
        self._index(tokens)

    def _index(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            place = len(self.tokens)
            pair = (self.tokens[-1] if place else -1, token)
            self.tokens.append(token)
            self._before.append(self._last.get(pair, 0))
            self._last[pair] = place + 1

    def places(self, anchor: int) -> list[int]:
        """Where the text goes on after the last token and the anchor, newest first."""
        place = self._last.get((self.tokens[-1] if self.tokens else -1, anchor), 0)
        found = list[int]()
        while place and len(found) < MOST_PLACES:
            found.append(place)
            place = self._before[place - 1]
        return found


class Guess(NamedTuple):
    """What might follow, and how many tokens before it agree."""

    tokens: Sequence[int]
    agreeing: int


class Lookup:
    """A Proposer. `depth`: of its trees."""

    feature_layers: tuple[int, ...] = ()
    feature_width = 1
    checkpoint_hash = target_head_hash = ""

    def __init__(self, vocab_size: int, positions: int, depth: int = 16) -> None:
        self.vocab_size, self.positions, self.block_size = vocab_size, positions, depth + 1

    def new_state(self) -> LookupState:
        """An empty text that starts at position 0."""
        return LookupState()

    def append(self, state: LookupState, features: torch.Tensor, position: int) -> None:
        """Appends tokens [n, 1] of positions position .. position+n-1; position is the state's end."""
        if position != state.end:
            raise InvalidRequest("position", position, f"the end of the sequence's context, {state.end}")
        tokens = [int(token) for token in features[:, 0].tolist()]
        bad = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
        if bad is not None:
            raise InvalidRequest("features", bad, f"tokens below {self.vocab_size}")
        state.extend(tokens)

    def propose(
        self,
        states: Sequence[LookupState],
        anchors: Sequence[int],
        positions: Sequence[int],
        budgets: Sequence[int],
        caps: Sequence[int],
    ) -> Proposed:
        found = [self.guesses(state, anchor) for state, anchor in zip(states, anchors, strict=True)]
        forwarded = time.perf_counter_ns()
        asks = zip(found, budgets, caps, strict=True)
        return Proposed([best_first(guesses, budget, cap) for guesses, budget, cap in asks], forwarded)

    def warm(self, sizes: Sequence[int]) -> None:
        """There is nothing to make."""

    def guesses(self, state: LookupState, anchor: int) -> list[Guess]:
        """Of every place, newest first. A place near the end goes on with what it says itself, as in a repetition."""
        text, depth, found = state.tokens, self.block_size - 1, list[Guess]()
        for place in state.places(anchor):
            agreeing = 2
            while agreeing < min(place, MOST_AGREEING) and text[place - 1 - agreeing] == text[-agreeing]:
                agreeing += 1
            tokens = text[place : place + depth].tolist()
            if len(tokens) < depth:
                tokens.append(anchor)
            period = len(text) + 1 - place
            while len(tokens) < depth:
                tokens.append(tokens[-period])
            found.append(Guess(tokens, agreeing))
        return found


def best_first(guesses: Sequence[Guess], budget: int, cap: int) -> PlainTree:
    """The most probable nodes, at most `budget`, and at most `cap` different tokens at one depth (0: any number)."""
    tree, seen = PlainTree([], [], []), dict[int, set[int]]()
    heap = children(-1, 0, 0.0, guesses)
    heapq.heapify(heap)
    while heap and len(tree.tokens) < budget:
        cost, depth, token, parent, mine = heapq.heappop(heap)
        known = seen.setdefault(depth, set())
        if cap and token not in known and len(known) >= cap:
            continue
        known.add(token)
        node = len(tree.tokens)
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.logprobs.append(-cost)
        for child in children(node, depth, -cost, mine):
            heapq.heappush(heap, child)
    return tree


Entry = tuple[float, int, int, int, Sequence[Guess]]  # cost, depth, token, parent, the guesses that pass it


def children(parent: int, depth: int, sigma: float, guesses: Sequence[Guess]) -> list[Entry]:
    """The nodes below one of `depth` and log-probability `sigma`. No two are equal in cost, depth, token and parent."""
    by_token: dict[int, list[Guess]] = {}
    for guess in guesses:
        if depth < len(guess.tokens):
            by_token.setdefault(guess.tokens[depth], []).append(guess)
    whole = sum(weight(guess) for mine in by_token.values() for guess in mine)
    found: list[Entry] = []
    for token, mine in by_token.items():
        agreeing = depth + max(guess.agreeing for guess in mine)
        probability = sum(map(weight, mine)) / whole * (1 - 1 / (agreeing + 1))
        if sigma + math.log(probability) >= math.log(LEAST):
            found.append((-(sigma + math.log(probability)), depth + 1, token, parent, mine))
    return found


def weight(guess: Guess) -> float:
    return 4.0**guess.agreeing
