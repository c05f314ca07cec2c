"""The integers of a step that feeds the next one: one block on the device, filled once for its members."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Generic, NamedTuple, cast

import numpy as np

from hedgerow.model.cuda_draft_state import CudaDraftState
from hedgerow.model.cuda_draft_step import DraftFields, DraftShape, split_draft
from hedgerow.model.cuda_plan import Block, Fields, Ints, Shape, Step, aligned, fill, fill_laws, split
from hedgerow.model.fed import FedLine, FedMember
from kernels.gpu.fed_step import LINE
from kernels.gpu.row_layout import PAGE
from kernels.gpu.tree_build import MOST_NODES


class FedShape(NamedTuple):
    """The bucket of a step."""

    rows: int
    sequences: int
    nodes: int  # of a tree, at most; 0: nothing is drafted
    block: int  # the drafter's
    pages: int  # of a sequence, at most, in the target's cache
    draft_pages: int  # in the drafter's

    @property
    def verify(self) -> Shape:
        return Shape(self.rows, self.rows, self.sequences, self.pages, True, False, True)

    @property
    def draft(self) -> DraftShape:
        q = self.sequences if self.nodes else 0
        return DraftShape(q * self.block, q, self.block, self.draft_pages, self.nodes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of each part of the block."""
        q = self.sequences
        return (self.verify.words, self.draft.words, *[q] * 5, self.draft.features)

    @property
    def words(self) -> int:
        return sum(map(aligned, self.sizes))

    @property
    def line(self) -> int:
        """Words of what is told of one member's walk."""
        return LINE + (self.block if self.nodes else 1)

    @property
    def told(self) -> int:
        """Words that the host gets: all walks' lines, then all trees' as `cuda_trees.build` writes them."""
        trees = self.sequences * (3 * self.nodes + 1) if self.nodes else 0
        return aligned(self.sequences * self.line) + trees

    def split_told(self, told: Block) -> tuple[Block, Block]:
        """[sequences, line] and [sequences, 3 nodes + 1]; the latter is empty where nothing is drafted."""
        q, begin = self.sequences, aligned(self.sequences * self.line)
        return told[: q * self.line].reshape(q, -1), told[begin:].reshape(q, -1)


class Parts(NamedTuple, Generic[Block]):
    """Of a block, as NumPy's or torch's. The fields' and the draft's are those of steps without a successor."""

    fields: Fields[Block]
    drafts: DraftFields[Block]  # whose budgets are `ask`
    live: Block  # [sequences]
    ask: Block  # [sequences] most nodes, -1: out
    anchor: Block  # [sequences] tokens
    last: Block  # [sequences] position of the last anchor
    begin: Block  # [sequences] of the drafting context, -1: none
    source: Block  # [sequences * block] rows of the step, -1: none


def split_fed(block: Block, shape: FedShape) -> Parts[Block]:
    """Views of `block` [shape.words]."""
    begins = accumulate(map(aligned, shape.sizes), initial=0)
    cut = [block[begin : begin + size] for begin, size in zip(begins, shape.sizes, strict=False)]
    fields, drafts, live, ask, anchor, last, begin, source = cut
    of_draft = split_draft(drafts, shape.draft)._replace(budgets=ask)
    return Parts(split(fields, shape.verify), of_draft, live, ask, anchor, last, begin, source)


def fill_members(parts: Parts[Ints], members: Sequence[FedMember], step: Step | None, base: int, mask: int) -> None:
    """Writes a block of zeros on the host. `step`: their anchors as rows; None: there is no member. `base`: the cache's
    first page in its arena; `mask`: the drafter's token of a place to fill."""
    f, d, n = parts.fields, parts.drafts, len(members)
    f.seq[:], f.widths[:] = -1, PAGE
    parts.ask[n:], parts.begin[:], parts.source[:], d.slot[:] = -1, -1, -1, -1
    if step is not None:
        fill(f, step, base)
        fill_laws(f.laws, [member.law for member in members])
    f.wanted[:], f.chain[:] = np.arange(len(f.wanted)), 0
    parts.live[:n] = 1
    parts.ask[:n] = [member.budget for member in members]
    parts.anchor[:n] = [member.anchor for member in members]
    parts.last[:n] = [member.last for member in members]
    if len(d.start):
        _fill_contexts(parts, members, mask)


def _fill_contexts(parts: Parts[Ints], members: Sequence[FedMember], mask: int) -> None:
    d, sequences = parts.drafts, len(parts.drafts.start)
    tokens, places = d.tokens.reshape(sequences, -1), d.position.reshape(sequences, -1)
    tokens[:], places[:] = mask, np.arange(places.shape[1])
    for n, member in enumerate(members):
        tokens[n, 0] = member.anchor
        if member.context is None:
            continue
        state = cast(CudaDraftState, member.context)
        places[n] += member.prefix
        parts.begin[n] = d.start[n] = state.start
        d.end[n], d.anchor[n] = state.end, member.prefix
        d.caps[n] = min(member.cap, MOST_NODES)  # above it none cuts
        d.pages[n, : len(state.pages)] = state.pages


def read_lines(told: Ints, shape: FedShape, members: int) -> list[FedLine]:
    """What a step told of its first `members` members."""
    walks, trees = shape.split_told(told)
    lines, nodes = list[FedLine](), shape.nodes
    for walk, tree, bits in zip(
        walks[:members].tolist(), trees[:members].tolist(), trees.view(np.float32)[:members], strict=True
    ):
        path = walk[LINE : LINE + walk[0]]
        count = tree[-1] if nodes and path else 0
        logprobs = bits[2 * nodes : 2 * nodes + count].tolist() if count else ()
        lines.append(FedLine(tree[:count], tree[nodes : nodes + count], logprobs, path, walk[1]))
    return lines
