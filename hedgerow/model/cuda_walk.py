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
from hedgerow.model.cuda_plan import LAW_WORDS, SEQUENCES, Ints, aligned, at_least, bucket, fill_laws, law_words
from kernels.gpu.draw import Laws
from kernels.gpu.tree_accept import MOST_ROWS, Accepted, tree_accept
from kernels.gpu.tree_mask import TreeMask, tree_mask
from kernels.tree_accept import Walked, WalkRows

BACK = MOST_ROWS + 2  # words of a walk: path, length, bonus


class Bucket(NamedTuple):
    rows: int
    trees: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Words of parents, tokens, first rows and laws, each at an aligned place."""
        return aligned(self.rows), aligned(self.rows), aligned(self.trees + 1), law_words(self.trees)


class Pass(NamedTuple):
    """The buffers of one bucket."""

    size: Bucket
    sent: torch.Tensor  # [sum of the sizes] on the host
    back: torch.Tensor  # [trees, BACK] on the host
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
        if not trees:
            return []
        back = self.launch(logits, trees)
        self._device.wait()
        return read_walks(back.numpy(), trees)

    def launch(self, logits: torch.Tensor, trees: Sequence[WalkRows]) -> torch.Tensor:
        """Where the walks arrive on the host, for `read_walks` once the device is there; before the next call."""
        counts = [len(tree.parents) for tree in trees]
        _check(logits, trees, counts, self.vocabulary)
        rows, starts = sum(counts), [0, *accumulate(counts)]
        size = Bucket(bucket(rows), at_least(len(trees), SEQUENCES))
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
        return p.back

    def prepare(self, trees: int) -> None:
        """Compiles and records the pass over as many trees of a row."""
        self._passes[Bucket(bucket(trees), at_least(trees, SEQUENCES))].launch.prepare()

    def _fill(self, p: Pass, trees: Sequence[WalkRows], starts: Sequence[int]) -> None:
        rows, n = starts[-1], len(trees)
        parents, tokens, begins, laws = np.split(p.sent.numpy(), np.cumsum(p.size.sizes)[:-1])
        parents[:rows] = [parent for tree in trees for parent in tree.parents]
        parents[rows:] = -1
        tokens[:rows] = [token for tree in trees for token in tree.tokens]
        begins[: n + 1], begins[n + 1 :] = starts, rows
        fill_laws(laws, [tree.law for tree in trees])

    def _make(self, size: Bucket) -> Pass:
        words = sum(size.sizes)
        sent, block = self._device.host_room(words), self._device.room(words)
        back, out = (room(size.trees, BACK) for room in (self._device.host_room, self._device.room))
        parents, tokens, starts, laws = torch.split(block, list(size.sizes))
        parents, tokens, starts = parents[: size.rows], tokens[: size.rows], starts[: size.trees + 1]
        drawn, logits = read_laws(laws, size.trees), self._logits[: size.rows]

        def launch() -> None:
            block.copy_(sent, non_blocking=True)
            masks = tree_mask(parents, starts)
            walk(logits, parents, tokens, masks, starts, drawn, out)
            back.copy_(out, non_blocking=True)

        return Pass(size, sent, back, self._device.recorded(launch))


def read_laws(block: torch.Tensor, trees: int) -> Laws:
    """What `fill_laws` wrote, on the device. Views."""
    table = block.view(LAW_WORDS, -1)
    temperature, top_p, min_p = table[:3].view(torch.float32)[:, :trees]
    top_k, sample_index, position = table[3:6, :trees]
    seeds = table[6:].view(torch.int64).view(-1)[:trees]
    return Laws(temperature, top_k, top_p, min_p, seeds, sample_index, position)


def walk(
    logits: torch.Tensor,
    parents: torch.Tensor,
    tokens: torch.Tensor,
    masks: TreeMask,
    starts: torch.Tensor,
    laws: Laws,
    out: torch.Tensor,
) -> Accepted:
    """Draws at every row and walks; out [trees, BACK] gets path, length and bonus of each tree."""
    accepted = tree_accept(logits, parents, tokens, masks.depth, masks.mask, starts, laws, MOST_ROWS)
    torch.cat([accepted.path, accepted.length.unsqueeze(1), accepted.bonus.unsqueeze(1)], 1, out=out)
    return accepted


def read_walks(back: Ints, trees: Sequence[WalkRows]) -> list[Walked]:
    """`walk`'s lines, on the host. ValueError names a row that could not be drawn."""
    return [_walked(line, tree) for line, tree in zip(back[: len(trees)].tolist(), trees, strict=True)]


def _check(logits: torch.Tensor, trees: Sequence[WalkRows], counts: Sequence[int], vocabulary: int) -> None:
    count, columns = logits.shape
    if columns != vocabulary or logits.dtype != torch.float32:
        raise ValueError(f"logits {tuple(logits.shape)} of {logits.dtype}, {vocabulary} float32 were expected")
    for n, (tree, rows) in enumerate(zip(trees, counts, strict=True)):
        if len(tree.tokens) != rows:
            raise ValueError(f"{rows} parents and {len(tree.tokens)} tokens")
        if not 1 <= rows <= MOST_ROWS or tree.first < 0 or tree.first + rows > count:
            raise ValueError(f"tree {n}: no such rows, or more than {MOST_ROWS}")


def _walked(line: list[int], tree: WalkRows) -> Walked:
    path, bonus = line[: line[MOST_ROWS]], line[MOST_ROWS + 1]
    if bonus < 0:
        raise ValueError(f"row {tree.first + path[-1]} has no largest finite logit")
    return Walked(path, bonus)
