"""Draft, verification and what follows from it as one CUDA graph: its inputs are what the step before left there.

    drafter's context <- features that were accepted      trees <- draft      rows <- trees, anchors
    walks <- verify step, moves in the cache              anchors, positions, features <- walks

The host sends something only when the members change, and gets one copy a step, of walks and trees, into places that
take turns: so a step may be launched before the one before it was read. All of it is in one stream: a page that the
host gives away while a step still writes there is written by its next owner behind that.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple, cast

import torch

from hedgerow.errors import InvalidRequest, InvariantViolation
from hedgerow.model.batch import SequenceRows
from hedgerow.model.cuda import CudaK2
from hedgerow.model.cuda_cache import CudaCache
from hedgerow.model.cuda_dflash import MOST_CLOSE, MOST_FEATURES, CudaDFlash
from hedgerow.model.cuda_draft_state import CudaDraftState
from hedgerow.model.cuda_draft_step import DraftStep
from hedgerow.model.cuda_fed_block import FedShape, Parts, fill_members, read_lines, split_fed
from hedgerow.model.cuda_graph import Kept, Recorded, inference, prepare_all
from hedgerow.model.cuda_plan import MOST_SEQUENCES, SEQUENCES, Step, at_least, bucket, fill, read
from hedgerow.model.cuda_shapes import shape_of
from hedgerow.model.cuda_trees import NODES, build
from hedgerow.model.cuda_walk import read_laws, read_walks
from hedgerow.model.fed import AHEAD, HORIZON, FedLine, FedMember
from hedgerow.model.interface import Verified
from kernels.gpu.fed_step import Contexts, Places, Rows, follow_on, pack, pick
from kernels.gpu.follow import one_after_another
from kernels.tree_accept import WalkRows


class Launched(NamedTuple):
    """A step that may be under way."""

    told: torch.Tensor  # on the host, where its lines arrive
    mark: torch.cuda.Event | None
    counted: int  # rows whose experts come with it


class Prompts(NamedTuple):
    """Chunks that may be under way."""

    features: torch.Tensor  # on the host, where they arrive
    walks: torch.Tensor | None  # as well
    trees: Sequence[WalkRows]
    mark: torch.cuda.Event | None


class Pass(NamedTuple):
    """The buffers and launches of one shape."""

    shape: FedShape
    block: torch.Tensor
    parts: Parts[torch.Tensor]  # of it
    told: torch.Tensor
    step: Recorded
    rest: Recorded  # into the contexts goes what the last step accepted


class CudaFed:
    """FedSteps of one target and one drafter on one device. What it captured is theirs: it is made anew with them."""

    def __init__(self, target: CudaK2, draft: CudaDFlash) -> None:
        self._target, self._draft, self._device = target, draft, target.device
        self.block, self.most_nodes, self.positions = draft.block_size, NODES[-1], draft.positions
        self.most_members = min(MOST_SEQUENCES, MOST_FEATURES // self.block)
        self._came = self._device.room(
            0, target.feature_width, of=torch.float32
        )  # accepted features, of one line at a time
        self._passes, self._seen = Kept(self._make), self._owned()
        self._entered: Pass | None = None
        self._members: Sequence[FedMember] = ()
        self._asked: Sequence[int] = ()
        self._back: list[torch.Tensor] = []  # places on the host, in turns

    @staticmethod
    def serves(target: CudaK2, draft: CudaDFlash) -> bool:
        """Whether the drafter reads this target's features, on its device, and each block by itself."""
        return (
            (target.device.place, target.feature_width) == (draft.device.place, draft.feature_width)
            and target.feature_layers == tuple(draft.feature_layers)
            and target.config.vocab_size == draft.vocab_size
            and draft.config.convolution is None
        )

    @property
    def stale(self) -> bool:
        return any(now is not then for now, then in zip(self._owned(), self._seen, strict=True))

    @inference
    def prepare(self, sequences: int, budgets: Sequence[int]) -> None:
        most, largest = min(sequences, self.most_members), min(max(budgets), self.most_nodes)
        with self._target._turn, self._draft._turn:
            each = [(min(budget, self.most_nodes), count) for budget in budgets for count in range(1, most + 1)]
            # of other budgets what is compiled; what is recorded of them is when they come
            each += [(nodes, count) for nodes in NODES if nodes < largest for count in SEQUENCES if count <= most]
            wanted = {self._shape([budget] * count) for budget, count in each}
            shapes = sorted(wanted, reverse=True)  # rooms grow once
            prepare_all("a fed step", shapes, lambda shape: self._pass(shape).step, self._device)
            drafting = [shape for shape in shapes if shape.nodes]
            prepare_all("what follows fed steps", drafting, lambda shape: self._pass(shape).rest, self._device)
            self._target._walker.prepare(1)  # of a prompt's first token

    @inference
    def enter(self, members: Sequence[FedMember], cache: CudaCache) -> Sequence[int]:
        t, d = self._target, self._draft
        asked = [member.budget for member in members]
        if not 1 <= len(members) <= self.most_members or min(asked) < 0 or max(asked) > self.most_nodes:
            limit = f"1 to {self.most_members} members of 0 to {self.most_nodes} nodes"
            raise InvalidRequest("members", asked, limit)
        step = self._anchors(members, cache)
        with t._turn, d._turn:
            states = [cast(CudaDraftState, member.context) for member in members if member.context is not None]
            until = [self._reserve(member) for member in members]
            if any(state.behind for state in states):
                d._flush(states, 0)
            p = self._pass(self._shape(asked))
            sent = self._device.host_room(p.shape.words)
            fill_members(split_fed(sent.numpy(), p.shape), members, step, cache.base, d.config.mask_token_id)
            p.block.copy_(sent, non_blocking=True)
            self._device.busy = True
        self._entered, self._members, self._asked = p, members, asked
        self._back = [self._device.host_room(p.shape.told) for _ in range(AHEAD)]
        return until

    def suits(self, asked: Sequence[int]) -> bool:
        if self._entered is None or asked == self._asked:
            return self._entered is not None
        shape, needed = self._entered.shape, self._shape([most for most in asked if most >= 0])
        same = shape._replace(rows=0, nodes=0) == needed._replace(rows=0, nodes=0)
        enough = needed.rows <= shape.rows and needed.nodes <= shape.nodes
        return same and enough and 2 * needed.rows >= shape.rows and bool(needed.nodes) == bool(shape.nodes)

    @inference
    def launch(self, asked: Sequence[int]) -> Launched:
        p, t = self._entered, self._target
        if p is None or self.stale:
            raise InvariantViolation("a step was launched that nobody entered, or whose buffers have moved")
        with t._turn, self._draft._turn:
            if list(asked) != list(self._asked):
                sent = self._device.host_room(p.shape.sequences)
                sent.numpy()[:] = [*asked, *[-1] * (p.shape.sequences - len(asked))]
                p.parts.ask.copy_(sent, non_blocking=True)
                self._asked = list(asked)
            p.step()
            t._count_experts(p.shape.rows)
            counted, t._counted = t._counted, 0  # known when the step is collected
            told = self._back.pop(0)
            self._back.append(told)
            told.copy_(p.told, non_blocking=True)
            return Launched(told, self._device.mark(), counted)

    def collect(self, launched: Launched) -> list[FedLine]:
        self._device.reach(launched.mark)
        assert self._entered is not None
        lines = read_lines(launched.told.numpy(), self._entered.shape, len(self._members))
        if launched.counted:
            self._target._counted = sum(len(line.tokens) + 1 for line in lines if line.path)
        return lines

    @inference
    def compute(self, rows: Sequence[SequenceRows], cache: CudaCache, trees: Sequence[WalkRows] = ()) -> Prompts | None:
        t = self._target
        asked = t._asked(rows, cache)
        with t._turn:
            shape = shape_of(asked, t._room.rows, t._most_pages)
            if self.stale or shape.rows > t._room.rows or len(asked.parts) > MOST_SEQUENCES:
                return None
            step = t._passes[shape]
            fill(step.asked, asked, cache.base)  # what was there has been read: no other chunk is under way
            step.launch()
            walks = t._walker.launch(t._room.logits[: len(asked.wanted)], trees) if trees else None
            return Prompts(t._features[: asked.rows], walks, trees, self._device.mark())

    def computed(self, launched: Prompts) -> Verified:
        self._device.reach(launched.mark)
        walks = launched.walks
        walked = read_walks(walks.numpy(), launched.trees) if walks is not None else []
        return Verified(walked, launched.features)

    @inference
    def leave(self, ends: Sequence[int]) -> None:
        p, members = self._entered, self._members
        self._entered = None
        if p is None or not p.shape.nodes or self.stale:
            return
        with self._target._turn, self._draft._turn:
            p.rest()
            self._draft.device.busy = True
            for member, end in zip(members, ends, strict=True):
                if member.context is not None:
                    cast(CudaDraftState, member.context).end = end

    def _owned(self) -> tuple[object, ...]:
        """Buffers of the models that captured steps hold."""
        t, d = self._target, self._draft
        return t._room, t._arena.data, t.feature_layers, d._room, d._arena.data, self._came

    def _anchors(self, members: Sequence[FedMember], cache: CudaCache) -> Step:
        """InvalidRequest for a member that makes no sense."""
        t = self._target
        if cache.arena is not t._arena:
            raise InvalidRequest("cache", "another model's", "made by this target's new_cache")
        rows = [SequenceRows(m.prefix, m.pages, (m.anchor,), (-1,), range(1), limit=m.limit) for m in members]
        for n, member in enumerate(members):
            if member.context is not None and member.context.end != member.prefix:
                raise InvalidRequest(f"members[{n}].context", member.context.end, f"to end at {member.prefix}")
        return read(rows, t.config.vocab_size, t.positions, cache.pages)

    def _reserve(self, member: FedMember) -> int:
        """Takes pages of the drafter's; the position up to which they reach."""
        if member.context is None:
            return member.last
        ahead = min(member.last, member.prefix + HORIZON, self._draft.positions)
        cast(CudaDraftState, member.context).reserve(ahead)
        return max(ahead, member.prefix)

    def _shape(self, asked: Sequence[int]) -> FedShape:
        rows, most = sum(asked) + len(asked), max(asked)
        rows = min(bucket(rows), max(self._target._room.rows, rows))
        nodes = at_least(most, NODES) if most else 0
        pages, draft_pages = self._target._most_pages, self._draft._most_pages
        return FedShape(rows, at_least(len(asked), SEQUENCES), nodes, self.block, pages, draft_pages)

    def _pass(self, shape: FedShape) -> Pass:
        """What a larger pool or room has made wrong is made again."""
        t, d = self._target, self._draft
        t._prepare(shape.rows)
        if shape.sequences * shape.block > d._room.rows:
            d._make_room(shape.sequences)
        if shape.draft.features > len(self._came):
            self._came = self._device.room(shape.draft.features, t.feature_width, of=torch.float32)
        if self.stale:
            self._seen = self._owned()
            self._passes.clear()
        return self._passes[shape]

    def _make(self, shape: FedShape) -> Pass:
        t, d, device = self._target, self._draft, self._device
        block, told = device.room(shape.words), device.room(shape.told)
        empty = device.host_room(shape.words)
        fill_members(split_fed(empty.numpy(), shape), (), None, 0, d.config.mask_token_id)
        block.copy_(empty)
        parts, (lines, trees) = split_fed(block, shape), shape.split_told(told)
        f, of, q = parts.fields, parts.drafts, shape.sequences
        verify = t.step(shape.verify, f)
        drafts = DraftStep(d.config, d._weights, d._room, shape.draft, of)
        rows = Rows(f.tokens, f.parents, f.seq, f.first, f.starts)
        places = Places(parts.live, parts.anchor, f.prefix, read_laws(f.laws, q).position, parts.last)
        contexts = Contexts(
            of.tokens, of.position, of.start, of.end, of.anchor, parts.begin, of.pages, of.slot, of.at, parts.source
        )
        logits, walks, features = d._logits[:q], t._room.walks[:q], t._room.features
        came, vocabulary = self._came[: shape.draft.features], t.config.vocab_size

        def plain() -> None:
            pack(None, places, parts.ask, rows, vocabulary, first=True)
            verify.run(t._arena.data)
            follow_on(walks, f.starts, places, None, lines)

        def step() -> None:
            with one_after_another() if q > MOST_CLOSE else nullcontext():
                drafts.run(d._pool(), came)
                build(logits, parts.ask, of.caps, trees)
            pack(trees, places, parts.ask, rows, vocabulary)
            verify.run(t._arena.data)
            follow_on(walks, f.starts, places, contexts, lines)
            pick(features, parts.source, came)

        def rest() -> None:
            if shape.nodes:
                drafts.append(d._pool(), came)

        launch = device.recorded(step if shape.nodes else plain)
        return Pass(shape, block, parts, told, launch, device.recorded(rest))
