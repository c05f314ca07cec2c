"""Draws and walks on a GPU: one copy in, one pass, one copy out, whatever the trees.

The law is that of kernels/gpu/draw.py: a token may be another than PyTorch's where two candidates are nearer to each
other than rounding, so it belongs to the engine's `kernel_law`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hedgerow.model.cuda_graph import Kept, Recorded
from hedgerow.model.cuda_plan import bucket
from kernels.gpu.draw import Laws
from kernels.gpu.tree_accept import MOST_ROWS, tree_accept
from kernels.gpu.tree_mask import tree_mask
from kernels.tree_accept import Walked, WalkRows

MOST_TOP_K = 1 << 30
LAW_WORDS = 8  # of a sequence's law: seven numbers, the seed in two words


class Bucket(NamedTuple):
    rows: int
    trees: int

    @property
    def words(self) -> int:
        return 2 * self.rows + self.trees + 1 + LAW_WORDS * self.trees


class Pass(NamedTuple):
    """The buffers of one bucket."""

    logits: torch.Tensor  # [rows, V]
    sent: torch.Tensor  # [words] on the host
    block: torch.Tensor  # [words] on the device
    out: torch.Tensor  # [trees, MOST_ROWS + 2]: path, length, bonus
    back: torch.Tensor  # the same on the host
    launch: Recorded


class CudaWalker:
    """`walk_trees` for one model's logits. Calls must take turns."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self.device = vocabulary, device
        self._passes = Kept(self._make)

    def __call__(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
        """As `kernels.tree_accept.walk_trees`; ValueError also for rows that are not there, and for trees above 64."""
        counts = [len(tree.parents) for tree in trees]
        _check(logits, trees, counts, self.vocabulary)
        if not trees:
            return []
        rows = sum(counts)
        p = self._passes[Bucket(bucket(rows), bucket(len(trees)))]
        self._fill(p, trees, counts)
        p.block.copy_(p.sent, non_blocking=True)
        starts = np.cumsum([0, *counts[:-1]])
        if all(tree.first == start for tree, start in zip(trees, starts, strict=True)):
            p.logits[:rows].copy_(logits[:rows])
        else:
            at = [tree.first + row for tree, count in zip(trees, counts, strict=True) for row in range(count)]
            p.logits[:rows].copy_(logits[at])
        p.launch()
        p.back.copy_(p.out, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return [_walked(line, tree) for line, tree in zip(p.back.tolist(), trees, strict=False)]

    def _fill(self, p: Pass, trees: Sequence[WalkRows], counts: Sequence[int]) -> None:
        size = Bucket(p.logits.shape[0], p.out.shape[0])
        words = p.sent.numpy()
        rows, n = sum(counts), len(trees)
        words[:rows] = [parent for tree in trees for parent in tree.parents]
        words[rows : size.rows] = -1
        tokens = words[size.rows : 2 * size.rows]
        tokens[:rows] = [token for tree in trees for token in tree.tokens]
        tokens[rows:] = -1
        starts = words[2 * size.rows : 2 * size.rows + size.trees + 1]
        starts[0], starts[1 : n + 1], starts[n + 1 :] = 0, np.cumsum(counts), rows
        laws = words[2 * size.rows + size.trees + 1 :].reshape(LAW_WORDS, size.trees)
        laws[:, n:] = 0
        given = [tree.law for tree in trees]
        floats = laws.view(np.float32)
        floats[0, :n] = [law.temperature for law in given]
        floats[1, :n] = [law.top_p for law in given]
        floats[2, :n] = [law.min_p for law in given]
        laws[3, :n] = [min(law.top_k, MOST_TOP_K) for law in given]
        wide = laws.view(np.uint32)
        wide[4, :n] = [law.sample_index for law in given]
        wide[5, :n] = [law.position for law in given]
        wide[6, :n] = [law.seed & 0xFFFFFFFF for law in given]
        wide[7, :n] = [law.seed >> 32 for law in given]

    def _make(self, size: Bucket) -> Pass:
        pinned = self.device.type == "cuda"
        sent = torch.zeros(size.words, dtype=torch.int32, pin_memory=pinned)
        block = sent.to(self.device)
        logits = torch.zeros(size.rows, self.vocabulary, device=self.device)
        out = torch.zeros(size.trees, MOST_ROWS + 2, dtype=torch.int32, device=self.device)
        back = torch.zeros(out.shape, dtype=torch.int32, pin_memory=pinned)
        parents, tokens, starts, laws = torch.split(
            block, [size.rows, size.rows, size.trees + 1, LAW_WORDS * size.trees]
        )
        law = laws.view(LAW_WORDS, size.trees)

        def launch() -> None:
            masks = tree_mask(parents, starts)
            seeds = torch.stack([law[6], law[7]], -1).view(torch.int64).view(-1)
            fractions = law[:3].contiguous().view(torch.float32)
            drawn = Laws(fractions[0], law[3], fractions[1], fractions[2], seeds, law[4], law[5])
            accepted = tree_accept(logits, parents, tokens, masks.depth, masks.mask, starts, drawn, MOST_ROWS)
            out[:, :MOST_ROWS], out[:, MOST_ROWS], out[:, MOST_ROWS + 1] = (
                accepted.path, accepted.length, accepted.bonus
            )  # fmt: skip

        return Pass(logits, sent, block, out, back, Recorded(launch, self.device))


def _check(logits: torch.Tensor, trees: Sequence[WalkRows], counts: Sequence[int], vocabulary: int) -> None:
    count, columns = logits.shape
    if columns != vocabulary or logits.dtype != torch.float32:
        raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype}, {vocabulary} float32 were expected")
    for n, (tree, rows) in enumerate(zip(trees, counts, strict=True)):
        if len(tree.tokens) != rows:
            raise ValueError(f"{rows} parents and {len(tree.tokens)} tokens")
        if not 1 <= rows <= MOST_ROWS or tree.first < 0 or tree.first + rows > count:
            raise ValueError(f"tree {n}: no such rows, or more than {MOST_ROWS}")


def _walked(line: Sequence[int], tree: WalkRows) -> Walked:
    path, bonus = line[: line[MOST_ROWS]], line[MOST_ROWS + 1]
    if bonus < 0:
        raise ValueError(f"row {tree.first + path[-1]} has no largest finite logit")
    return Walked(list(path), bonus)
