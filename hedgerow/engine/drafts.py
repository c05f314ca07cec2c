"""The verifier's side of drafting: what the drafter is asked for, and what of its answer can be used.

Nothing here can change a token. A drafter that is absent, late, restarted or wrong costs its sequences one plain step,
and a counter says so.
"""

from __future__ import annotations

import torch

from hedgerow.engine.scheduler import Work
from hedgerow.engine.sequence import AttachedSequence, Phase
from hedgerow.engine.tree import InvalidTree, Tree, validate_tree
from hedgerow.engine.types import DraftAnswer, DraftBatch, DraftTree, DraftWork

NO_FEATURES = torch.empty(0, 0)


class DraftDesk:
    """Composes requests, checks answers, and knows per sequence which features the drafter has."""

    def __init__(self, feature_rows: int, vocab_size: int) -> None:
        self._feature_rows, self._vocab_size = feature_rows, vocab_size
        self._incarnation = b""
        self._sent: dict[int, int] = {}  # by sequence that the drafter has heard of: the first position it lacks
        self._release: list[int] = []
        self.refused: dict[str, int] = {}  # trees, by reason
        self.missed = 0  # steps whose trees came too late or not at all

    @property
    def has_releases(self) -> bool:
        return bool(self._release)

    def forget(self, sequence: AttachedSequence) -> None:
        """The sequence has ended; the drafter hears of it with the next request."""
        if self._sent.pop(sequence.number, None) is not None:
            self._release.append(sequence.number)
        if sequence.features is not None:
            sequence.features.leave()

    def compose(self, step_id: int, works: list[Work]) -> DraftBatch:
        """One request: new features of every sequence that speculates, and the anchors that want a tree.

        Prompt features go along while the prompt is computed, with budget 0. Features are at most `feature_rows` rows;
        a sequence whose features do not reach its anchor yet (its drafter restarted) sends more in the next step and
        gets no tree in this one.
        """
        asked, left = [], self._feature_rows
        for work in works:
            draft = self._ask(work, left)
            if draft is not None:
                left -= draft.features.shape[0]
                asked.append(draft)
                self._sent.setdefault(draft.sequence, 0)
        return DraftBatch(step_id, asked, tuple(self._release), self._incarnation)

    def _ask(self, work: Work, left: int) -> DraftWork | None:
        sequence, ring = work.sequence, work.sequence.features
        plain = work.budget == 0 and work.phase is Phase.DECODING  # its features wait in the ring
        if ring is None or not sequence.budget or plain:
            return None
        position = max(self._sent.get(sequence.number, 0), ring.start)
        rows = min(ring.end - position, left)
        whole = position + rows == work.prefix and rows > 0
        budget = work.budget if whole or position == work.prefix else 0
        waits = work.phase is not Phase.DECODING and not work.feed
        if budget == 0 and (rows == 0 or waits):
            return None
        return DraftWork(
            sequence=sequence.number,
            feature_position=position,
            features=ring.read(position, rows) if rows else NO_FEATURES,
            anchor=sequence.output[-1] if work.phase is Phase.DECODING else 0,
            anchor_position=work.prefix,
            budget=budget,
            topk_cap=sequence.start.topk_cap,
        )

    def trees(self, works: list[Work], batch: DraftBatch, answer: DraftAnswer | None) -> dict[int, Tree]:
        """The usable trees by sequence number, cut to what each sequence may emit in this step."""
        wanted = {draft.sequence: draft for draft in batch.works}
        del self._release[: len(batch.release)]  # told once: a drafter that missed it evicts them in time
        if answer is None or answer.step_id != batch.step_id:
            self.missed += any(draft.budget for draft in batch.works)
            return {}
        by_number = {work.sequence.number: work for work in works}
        self._note_sent(batch, answer)
        for each in works:
            if each.sequence.features is not None:
                each.sequence.features.sent = self._sent.get(each.sequence.number, 0)
        trees: dict[int, Tree] = {}
        for drafted in answer.trees:
            draft, work = wanted.get(drafted.sequence), by_number.get(drafted.sequence)
            if draft is None or work is None or draft.budget == 0 or not len(drafted.nodes.tokens):
                continue
            tree = self.checked(drafted, draft)
            if tree is not None:
                trees[drafted.sequence] = shallow(tree, work.room - 1)
        return trees

    def _note_sent(self, batch: DraftBatch, answer: DraftAnswer) -> None:
        """Moves the marks. A new incarnation has nothing: every sequence sends again what its ring still holds."""
        lacks = {tree.sequence: tree.features_from for tree in answer.trees}
        for draft in batch.works:
            end = draft.feature_position + draft.features.shape[0]
            self._sent[draft.sequence] = min(max(lacks.get(draft.sequence, end), 0), end)
        if self._incarnation not in (b"", answer.incarnation):
            self._sent = dict.fromkeys(self._sent, 0)
        self._incarnation = answer.incarnation

    def checked(self, drafted: DraftTree, draft: DraftWork) -> Tree | None:
        """None for a tree that must not be verified; counted."""
        try:
            return validate_tree(
                drafted.nodes,
                budget=draft.budget,
                topk_cap=draft.topk_cap,
                max_depth=draft.budget,
                vocab_size=self._vocab_size,
            )
        except InvalidTree as error:
            self.refused[error.why] = self.refused.get(error.why, 0) + 1
            return None


def shallow(tree: Tree, depth: int) -> Tree:
    """The nodes down to `depth`: what lies deeper than the tokens still wanted cannot be emitted."""
    if not tree.depth or max(tree.depth) <= depth:
        return tree
    kept = [node for node, at in enumerate(tree.depth) if at <= depth]
    place = {-1: -1} | {node: i for i, node in enumerate(kept)}
    return Tree(
        tokens=tuple(tree.tokens[node] for node in kept),
        parents=tuple(place[tree.parents[node]] for node in kept),
        depth=tuple(tree.depth[node] for node in kept),
    )
