"""Draws and walks on a GPU: one copy in, one pass, one copy out, whatever the trees.

The law is that of kernels/gpu/draw.py: a token may be another than PyTorch's where two candidates are nearer to each
other than rounding, so it belongs to the engine's `kernel_law`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from hedgerow.model.cuda_graph import Device, Kept, Recorded
from hedgerow.model.cuda_plan import Ints, bucket
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

    size: Bucket
    sent: torch.Tensor  # [words] on the host
    back: torch.Tensor  # [trees, MOST_ROWS + 2] on the host: path, length, bonus
    launch: Recorded


class CudaWalker:
    """`walk_trees` for one model's logits. Calls must take turns."""

    def __init__(self, vocabulary: int, device: Device) -> None:
        self.vocabulary, self._device = vocabulary, device
        self._logits = device.room(0, vocabulary, of=torch.float32)
        self._passes = Kept(self._make)

    def attach(self, logits: torch.Tensor) -> None:
        """`logits` [rows, V] are read where they lie when they are walked; others are copied there first."""
        self._logits = logits
        self._passes.clear()

    def __call__(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> list[Walked]:
        """As `kernels.tree_accept.walk_trees`; ValueError also for rows that are not there, and for trees above 64."""
        counts = [len(tree.parents) for tree in trees]
        _check(logits, trees, counts, self.vocabulary)
        if not trees:
            return []
        rows, starts = sum(counts), [0, *accumulate(counts)]
        size = Bucket(bucket(rows), bucket(len(trees)))
        if size.rows > len(self._logits):
            self.attach(self._device.room(size.rows, self.vocabulary, of=torch.float32))
        if any(tree.first != start for tree, start in zip(trees, starts, strict=False)):
            at = [tree.first + row for tree, count in zip(trees, counts, strict=True) for row in range(count)]
            logits = logits[at]
        if logits.data_ptr() != self._logits.data_ptr():
            self._logits[:rows] = logits[:rows]
        p = self._passes[size]
        self._fill(p, trees, starts)
        p.launch()
        self._device.wait()
        return [_walked(line, tree) for line, tree in zip(p.back.numpy(), trees, strict=False)]

    def _fill(self, p: Pass, trees: Sequence[WalkRows], starts: Sequence[int]) -> None:
        size, words = p.size, p.sent.numpy()
        rows, n = starts[-1], len(trees)
        words[:rows] = [parent for tree in trees for parent in tree.parents]
        words[rows : size.rows] = -1
        tokens = words[size.rows : 2 * size.rows]
        tokens[:rows] = [token for tree in trees for token in tree.tokens]
        begins = words[2 * size.rows : 2 * size.rows + size.trees + 1]
        begins[: n + 1], begins[n + 1 :] = starts, rows
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
        sent, block = self._device.host_room(size.words), self._device.room(size.words)
        back, out = (room(size.trees, MOST_ROWS + 2) for room in (self._device.host_room, self._device.room))
        parents, tokens, starts, laws = torch.split(
            block, [size.rows, size.rows, size.trees + 1, LAW_WORDS * size.trees]
        )
        law, logits = laws.view(LAW_WORDS, size.trees), self._logits[: size.rows]

        def launch() -> None:
            block.copy_(sent, non_blocking=True)
            masks = tree_mask(parents, starts)
            seeds = torch.stack([law[6], law[7]], -1).view(torch.int64).view(-1)
            fractions = law[:3].clone().view(torch.float32)
            drawn = Laws(fractions[0], law[3], fractions[1], fractions[2], seeds, law[4], law[5])
            path, length, bonus, _ = tree_accept(
                logits, parents, tokens, masks.depth, masks.mask, starts, drawn, MOST_ROWS
            )  # fmt: skip
            torch.cat([path, length.unsqueeze(1), bonus.unsqueeze(1)], 1, out=out)
            back.copy_(out, non_blocking=True)

        return Pass(size, sent, back, self._device.recorded(launch))


def _check(logits: torch.Tensor, trees: Sequence[WalkRows], counts: Sequence[int], vocabulary: int) -> None:
    count, columns = logits.shape
    if columns != vocabulary or logits.dtype != torch.float32:
        raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype}, {vocabulary} float32 were expected")
    for n, (tree, rows) in enumerate(zip(trees, counts, strict=True)):
        if len(tree.tokens) != rows:
            raise ValueError(f"{rows} parents and {len(tree.tokens)} tokens")
        if not 1 <= rows <= MOST_ROWS or tree.first < 0 or tree.first + rows > count:
            raise ValueError(f"tree {n}: no such rows, or more than {MOST_ROWS}")


def _walked(line: Ints, tree: WalkRows) -> Walked:
    path, bonus = line[: line[MOST_ROWS]].tolist(), int(line[MOST_ROWS + 1])
    if bonus < 0:
        raise ValueError(f"row {tree.first + path[-1]} has no largest finite logit")
    return Walked(path, bonus)
