"""From a step's works and trees to the rows of one forward pass, and from its draws to accepted paths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hedgerow.engine.sampler import DrawnTree, RowDraw, drawing, edits, follow, walk_rows
from hedgerow.engine.scheduler import Work
from hedgerow.engine.sequence import Phase
from hedgerow.engine.tree import Tree
from hedgerow.engine.types import StepStats
from hedgerow.model.batch import ForwardOutput, SequenceRows
from hedgerow.model.interface import Cache, Target, Verified, WholeSteps
from kernels.tree_accept import Walked

Done = ForwardOutput | Verified  # of a step's pass


class Part(NamedTuple):
    """One sequence's part of a forward pass."""

    work: Work
    tree: Tree | None
    rows: SequenceRows
    first_row: int  # in the pass's features
    drawn: DrawnTree | None  # its rows in the pass's logits; None: nothing is drawn


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
        row, draw = row + len(part.rows.tokens), draw + len(part.rows.want_logits)
        parts.append(part)
    return parts


def _part(work: Work, tree: Tree | None, row: int, draw: int, page_size: int) -> Part:
    sequence, (tokens, parents) = work.sequence, _tokens(work, tree)
    prompt, last = len(sequence.start.prompt), len(tokens) - 1
    wanted, at, drawn = range(0), work.prefix + 1, None  # `at`: the position that row 0 draws
    if work.phase is Phase.DECODING:
        wanted = range(len(tokens))
        depths = (0, *tree.depth) if tree else (0,)
        drawn = DrawnTree(draw, parents, tokens, depths, RowDraw(sequence.start.sampling, at, at - prompt))
    elif work.phase is Phase.PREFILLING and not sequence.output and work.prefix + work.rows == prompt:
        wanted = range(last, last + 1)  # the prompt's last row draws the token at offset 0
        drawn = DrawnTree(draw, (-1,), tokens[-1:], (0,), RowDraw(sequence.start.sampling, prompt, 0))
    rows = SequenceRows(
        prefix=work.prefix,
        pages=sequence.pages[: -(-(work.prefix + len(tokens)) // page_size)],
        tokens=tokens,
        parents=parents,
        want_logits=wanted,
        prompt=work.phase is Phase.PREFILLING,
        limit=prompt + sequence.start.sampling.max_tokens,
    )
    return Part(work, tree, rows, row, drawn)


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


def compute(parts: Sequence[Part], model: Target, whole: WholeSteps | None, cache: Cache) -> Done:
    """The forward pass; with draws and moves in it, where the model has that, and all that is drawn are trees whose
    logits nothing changes, beside nothing but prompts."""
    asked = [part.rows for part in parts]
    trees = [part.drawn for part in parts if part.drawn is not None and part.work.phase is Phase.DECODING]
    chunks = sum(part.drawn is None and part.work.phase is Phase.PREFILLING for part in parts)
    apart = not trees or len(trees) + chunks < len(parts)
    if whole is None or apart or any(edits(tree.draw) for tree in trees):
        return model.forward(asked, cache)
    with drawing():
        return whole.verify(asked, cache, walk_rows(trees))


def accept(parts: Sequence[Part], done: Done, model: Target, cache: Cache, eos: frozenset[int]) -> list[Walk]:
    """Draws, follows the draws down every tree, all parts together, and moves accepted latents into place: what of this
    is not done."""
    drawn = [part.drawn for part in parts if part.drawn is not None]
    walked = iter(done.walked if isinstance(done, Verified) else follow(done.logits, drawn, eos, model.walk))
    walks = [_walk(part, next(walked) if part.drawn is not None else None) for part in parts]
    if not isinstance(done, Verified):
        moved = [moves(part, walk.path, cache.page_size) for part, walk in zip(parts, walks, strict=True)]
        sources = [slot for source, _ in moved for slot in source]
        if sources:
            cache.copy(sources, [slot for _, target in moved for slot in target])
    return walks


def _walk(part: Part, walked: Walked | None) -> Walk:
    """Cuts the path where the sequence ends. Its stop watch then has seen the tokens: once per step."""
    if walked is None:
        return Walk(range(part.work.rows), [], 0)
    sequence, path = part.work.sequence, walked.path
    if part.work.phase is not Phase.DECODING:
        return Walk(range(part.work.rows), sequence.truncate([walked.bonus]), 0)
    tokens = sequence.truncate([*(part.rows.tokens[row] for row in path[1:]), walked.bonus])
    return Walk(path[: len(tokens)], tokens, len(path) - 1)


def moves(part: Part, path: Sequence[int], page_size: int) -> tuple[list[int], list[int]]:
    """Flat cache slots (from, to) that put the path's rows into consecutive positions; empty where they are already."""
    pages, prefix = part.work.sequence.pages, part.work.prefix
    pairs = [(prefix + row, prefix + i) for i, row in enumerate(path) if row != i]

    def flat(slot: int) -> int:
        return pages[slot // page_size] * page_size + slot % page_size

    return [flat(source) for source, _ in pairs], [flat(target) for _, target in pairs]


def picked(features: torch.Tensor, first: int, path: Sequence[int]) -> torch.Tensor:
    """The path's rows of `features`, counted from row `first`; a slice where they are neighbours.

    By NumPy: torch takes ten times as long for an index of a few rows.
    """
    if path[-1] == len(path) - 1:
        return features[first : first + len(path)]
    return torch.from_numpy(features.numpy()[[first + row for row in path]])


def stats(part: Part, walk: Walk, step_id: int, sequences: int, total_rows: int) -> StepStats:
    """What a step of `sequences` and `total_rows` did for one of them."""
    nodes = part.tree.tokens if part.tree else ()
    shown = part.work.sequence.start.want_trees
    return StepStats(
        step_id=step_id,
        budget=part.work.budget,
        tree_nodes=len(nodes),
        accepted=walk.accepted,
        emitted=len(walk.tokens),
        batch_sequences=sequences,
        batch_rows=total_rows,
        tree_parents=part.tree.parents if part.tree and shown else (),
        tree_tokens=nodes if shown else (),
    )
