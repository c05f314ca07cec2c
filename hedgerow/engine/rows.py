"""From a step's works and trees to the rows of one forward pass, and from its draws to accepted paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hedgerow.engine.sampler import RowDraw, draw
from hedgerow.engine.scheduler import Work
from hedgerow.engine.sequence import Phase
from hedgerow.engine.tree import Tree
from hedgerow.model.batch import SequenceRows
from kernels.tree_accept import accept_walk

UNDRAWN = -1  # no token


class Part(NamedTuple):
    """One sequence's part of a forward pass."""

    work: Work
    tree: Tree | None
    rows: SequenceRows
    first_row: int  # in the pass's features
    first_draw: int  # in the pass's logits
    draws: list[RowDraw]  # one per wanted row

    @property
    def drawn_first(self) -> range:
        """Draws that are made before any walk."""
        greedy = self.work.sequence.start.sampling.temperature == 0
        return range(len(self.draws) if greedy else min(len(self.draws), 1))


class Walk(NamedTuple):
    """What the target agreed with, cut where the sequence ends."""

    path: Sequence[int]  # rows to commit, ascending; in DECODING each the parent of the next, row 0 the anchor
    tokens: list[int]  # to emit: the path's tokens below the anchor and the bonus, up to the end of the sequence
    accepted: int  # nodes that the target agreed with, the cut ones included


def build(works: Sequence[Work], trees: dict[int, Tree], page_size: int) -> list[Part]:
    """Lays the rows of all works out one after the other."""
    parts: list[Part] = []
    row = draw = 0
    for work in works:
        tree = trees.get(work.sequence.number) if work.phase is Phase.DECODING else None
        part = _part(work, tree, row, draw, page_size)
        row, draw = row + len(part.rows.tokens), draw + len(part.draws)
        parts.append(part)
    return parts


def _part(work: Work, tree: Tree | None, row: int, draw: int, page_size: int) -> Part:
    sequence, (tokens, parents) = work.sequence, _tokens(work, tree)
    depths: Sequence[int] = ()
    if work.phase is Phase.DECODING:
        depths = (0, *tree.depth) if tree else (0,)
    elif (
        work.phase is Phase.PREFILLING and not sequence.output and work.prefix + work.rows == len(sequence.start.prompt)
    ):
        depths = (len(tokens) - 1,)  # the prompt's last row draws the token at offset 0
    first = work.prefix + 1  # position that row 0 draws
    offset = first - len(sequence.start.prompt)
    rows = SequenceRows(
        prefix=work.prefix,
        pages=sequence.pages[: -(-(work.prefix + len(tokens)) // page_size)],
        tokens=tokens,
        parents=parents,
        want_logits=range(len(tokens)) if work.phase is Phase.DECODING else depths,
    )
    draws = [RowDraw(sequence.start.sampling, first + depth, offset + depth) for depth in depths]
    return Part(work, tree, rows, row, draw, draws)


def _tokens(work: Work, tree: Tree | None) -> tuple[Sequence[int], Sequence[int]]:
    """Tokens and parents: a chunk of the prompt, a chain of committed output, or the anchor and its tree."""
    prompt, output = work.sequence.start.prompt, work.sequence.output
    if work.phase is Phase.DECODING:
        if tree is None:
            return (output[-1],), (-1,)
        return (output[-1], *tree.tokens), (-1, *(parent + 1 for parent in tree.parents))
    begin, end = work.prefix, work.prefix + work.rows
    if work.phase is Phase.PREFILLING:
        return prompt[begin:end], range(-1, work.rows - 1)
    return output[begin - len(prompt) : end - len(prompt)], range(-1, work.rows - 1)


def walk_all(parts: Sequence[Part], logits: torch.Tensor, eos: frozenset[int]) -> list[Walk]:
    """Draws from `logits` [wanted rows of all parts, V] and follows the draws down every tree.

    Level by level, all parts together, so that of a seeded part only the rows that its walk reaches are drawn: a row's
    draw depends on no other row. Greedy rows cost next to nothing and are all drawn with the first level.
    """
    drawn = [[UNDRAWN] * len(part.draws) for part in parts]
    wanted = [(n, row) for n, part in enumerate(parts) for row in part.drawn_first]
    while wanted:
        places = [parts[n].first_draw + row for n, row in wanted]
        rows = logits if len(places) == len(logits) else logits[places]
        tokens = draw(rows, [parts[n].draws[row] for n, row in wanted], eos)
        for (n, row), token in zip(wanted, tokens, strict=True):
            drawn[n][row] = token
        ends = [(n, _path(parts[n], drawn[n])[-1]) for n, part in enumerate(parts) if part.tree is not None]
        wanted = [(n, row) for n, row in ends if drawn[n][row] == UNDRAWN]
    return [_walk(part, tokens) for part, tokens in zip(parts, drawn, strict=True)]


def _walk(part: Part, drawn: Sequence[int]) -> Walk:
    """Cuts the path where the sequence ends. Its stop watch then has seen the tokens: once per step."""
    sequence, path = part.work.sequence, _path(part, drawn)
    if part.work.phase is not Phase.DECODING:
        return Walk(path, sequence.truncate(drawn), 0)
    tokens = sequence.truncate([*(part.rows.tokens[row] for row in path[1:]), drawn[path[-1]]])
    return Walk(path[: len(tokens)], tokens, len(path) - 1)


def _path(part: Part, drawn: Sequence[int]) -> Sequence[int]:
    """The part's rows that the draws so far lead to."""
    if part.tree is None:
        return range(part.work.rows)
    return accept_walk(part.rows.parents, part.rows.tokens, drawn)


def moves(part: Part, path: Sequence[int], page_size: int) -> tuple[list[int], list[int]]:
    """Flat cache slots (from, to) that put the path's rows into consecutive positions; empty where they are already."""
    pages, prefix = part.work.sequence.pages, part.work.prefix
    pairs = [(prefix + row, prefix + i) for i, row in enumerate(path) if row != i]

    def flat(slot: int) -> int:
        return pages[slot // page_size] * page_size + slot % page_size

    return [flat(source) for source, _ in pairs], [flat(target) for _, target in pairs]
