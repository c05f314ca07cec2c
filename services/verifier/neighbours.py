"""Whether a drafter without a card is fed the layers it was made for: it is tried with their neighbours' features too.

Layers that are off by one fit in every shape and change no token; the drafter only drafts worse. So the target writes
some text greedily, and the drafter drafts it three times: from the layers it names, from those one below and from those
one above. Nobody has to know how well it drafts: where a neighbour is better, the names are wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from hedgerow.engine.reads import OfFeatures, Reads
from hedgerow.engine.types import DraftAnswer, DraftBatch, DraftWork
from hedgerow.model.batch import SequenceRows
from hedgerow.model.interface import Taps, Target
from kernels.mla_tree_attention import PAGE

# The target goes on from these; no tokenizer is here, and none is needed for texts like these.
TEXTS = (
    b'def mean(values):\n    """The arithmetic mean of a list of numbers."""\n    total = 0.0\n'
    b"    for value in values:\n        total += value\n    return total / len(values)\n\n\ndef median(values):\n",
    b'class Queue:\n    """First in, first out."""\n\n    def __init__(self):\n        self.items = []\n\n'
    b"    def push(self",
    b"The library opens at nine in the morning and closes at six in the evening. On Sundays it is",
    b"import json\nimport os\n\n\ndef read_settings(path):\n    if not os.path.exists(path):\n        return {}\n",
)
WRITTEN = 64  # tokens after each
MOST_SECONDS = 30.0  # of the target's passes, all together
MOST_CHAIN = 7
CHUNK = 32  # feature rows of one message; those of Kimi's drafters are 172 KB each
FIRST_STEP = FIRST_SEQUENCE = 1 << 62  # numbers that no step and no sequence of the engine has
LEAST_STEPS = 12  # of the layers it names, for a judgement
NOTHING = torch.empty(0, 0)


class Text(NamedTuple):
    """What the target wrote, and what a drafter reads of it by shift of the layers: [positions, width] each."""

    tokens: list[int]
    begin: int  # of what was written
    features: dict[int, torch.Tensor]


class Tried(NamedTuple):
    """Tokens a step from the layers that the drafter names, and by shift from their neighbours."""

    per_step: float
    beside: dict[int, float]

    @property
    def best(self) -> tuple[int, float]:
        """The better neighbour's shift, and its tokens a step."""
        return max(self.beside.items(), key=lambda pair: pair[1])


class Drafts(Protocol):
    """Whoever answers with trees: `hedgerow.engine.step.Drafter`."""

    async def draft(self, batch: DraftBatch) -> DraftAnswer | None: ...


def shifts(layers: Sequence[int], depth: int) -> list[int]:
    """By how much all layers can be shifted, 0 first."""
    return [0, *(by for by in (-1, 1) if layers and min(layers) + by >= 0 and max(layers) + by < depth)]


def write(model: Target, reads: Reads, vocabulary: Sequence[bytes], seconds: float = MOST_SECONDS) -> list[Text]:
    """`writing`, at once and as far as it gets."""
    found: list[Text] = []
    for _ in writing(found, model, reads, vocabulary, seconds):
        pass
    return found


@torch.inference_mode()
def writing(
    found: list[Text],
    model: Target,
    reads: Reads,
    vocabulary: Sequence[bytes],
    seconds: float = MOST_SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[None]:
    """Lets the target write, and adds to `found` every text that is whole: one pass a turn, so that its steps go on
    between two. None that would begin when all passes have taken `seconds` is begun. Nothing where its layers cannot be
    changed or have no neighbour.
    """
    layers = tuple(model.feature_layers)
    wanted = shifts(layers, model.config.num_hidden_layers)
    if not isinstance(model, Taps) or not isinstance(reads, OfFeatures) or len(wanted) == 1:
        return
    by_piece = {piece: token for token, piece in reversed(list(enumerate(vocabulary))) if piece}
    cache, left = model.new_cache(-(-(max(map(len, TEXTS)) + WRITTEN) // PAGE)), seconds
    room = model.config.max_position_embeddings

    def one(text: bytes) -> Iterator[None]:
        prompt = encoded(text, by_piece)
        if not prompt or len(prompt) + WRITTEN > room:
            return
        tokens, features = list[int](), dict[int, torch.Tensor]()
        for token in continued(model, cache, prompt):
            tokens.append(token)
            yield
        for by in wanted:
            model.tap([layer + by for layer in layers])
            try:
                features[by] = reads.of(features_of(model, cache, [*prompt, *tokens[:-1]]))
            finally:
                model.tap(layers)  # before the next step
            yield
        found.append(Text([*prompt, *tokens], len(prompt), features))

    for text in TEXTS:
        passes, begun = one(text), clock()
        for _ in passes:
            left -= clock() - begun
            if left <= 0:
                return
            yield
            begun = clock()


def encoded(text: bytes, by_piece: dict[bytes, int]) -> list[int]:
    """The longest piece at each place; empty where one begins with none."""
    longest, tokens, at = max(map(len, by_piece), default=0), [], 0
    while at < len(text):
        ends = range(min(len(text), at + longest), at, -1)
        end = next((end for end in ends if text[at:end] in by_piece), None)
        if end is None:
            return []
        tokens.append(by_piece[text[at:end]])
        at = end
    return tokens


def continued(model: Target, cache: Any, prompt: list[int]) -> Iterator[int]:
    """WRITTEN tokens after the prompt, greedily; a pass each."""
    pages, last = range(cache.pages), len(prompt) - 1
    rows = SequenceRows(0, pages, prompt, range(-1, last), [last], True)
    for position in range(len(prompt), len(prompt) + WRITTEN):
        token = int(model.forward([rows], cache).logits[0].argmax())
        yield token
        rows = SequenceRows(position, pages, [token], [-1], [0])


def features_of(model: Target, cache: Any, tokens: list[int]) -> torch.Tensor:
    """[tokens, the target's feature width]"""
    rows = SequenceRows(0, range(cache.pages), tokens, range(-1, len(tokens) - 1), [], True)
    return model.forward([rows], cache).features.clone()


async def try_layers(drafter: Drafts, texts: Sequence[Text], budget: int) -> Tried | None:
    """Has all texts drafted by every shift. None where the drafter does not answer, or too little can be said."""
    asking = Asking(drafter, min(budget, MOST_CHAIN))
    per_step: dict[int, float] = {}
    for by in texts[0].features if texts else ():
        steps = accepted = 0
        for text in texts:
            found = await asking.draft(text, text.features[by])
            if found is None:
                return None
            steps, accepted = steps + len(found), accepted + sum(found)
        if not steps:
            return None
        if by == 0 and steps < LEAST_STEPS:
            return None
        per_step[by] = 1 + accepted / steps
    own = per_step.pop(0, None)
    return None if own is None or not per_step else Tried(own, per_step)


class Asking:
    """Drafts of texts that are there already, one sequence at a time."""

    def __init__(self, drafter: Drafts, budget: int) -> None:
        self._drafter, self._budget = drafter, budget
        self._step, self._sequence = FIRST_STEP, FIRST_SEQUENCE

    async def draft(self, text: Text, features: torch.Tensor) -> list[int] | None:
        """How many of each chain's tokens were the text's, step by step; None where there was no answer."""
        self._sequence += 1
        sent, at, accepted = 0, text.begin, list[int]()
        while at + self._budget + 1 < len(text.tokens):  # a step near the end could not accept all
            while at - sent > CHUNK:
                await self._ask(DraftWork(self._sequence, sent, features[sent : sent + CHUNK], 0, at, 0, 1))
                sent += CHUNK
            work = DraftWork(self._sequence, sent, features[sent:at], text.tokens[at], at, self._budget, 1)
            answer = await self._ask(work)
            if answer is None or len(answer.trees) != 1:
                return None
            sent, chain = at, answer.trees[0].nodes.tokens
            expected = text.tokens[at + 1 :]
            same = next((i for i, (a, b) in enumerate(zip(chain, expected, strict=False)) if a != b), len(chain))
            accepted.append(min(same, self._budget))
            at += accepted[-1] + 1
        await self._drafter.draft(DraftBatch(self._next_step(), (), (self._sequence,)))
        return accepted

    async def _ask(self, work: DraftWork) -> DraftAnswer | None:
        return await self._drafter.draft(DraftBatch(self._next_step(), (work,)))

    def _next_step(self) -> int:
        self._step += 1
        return self._step
