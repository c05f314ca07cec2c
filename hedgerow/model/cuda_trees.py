"""From a block's logits to trees on a GPU: one pass and one copy out. Of the same marginals the heap's trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hedgerow.model.cuda_graph import Device, Kept, Recorded
from hedgerow.model.cuda_plan import SEQUENCES, Ints, aligned, at_least
from kernels.gpu.topk_logprobs import topk_logprobs
from kernels.gpu.tree_build import MOST_NODES, Trees, tree_build
from kernels.tree_build import PlainTree, plain_trees

NODES = (8, 16, 32, MOST_NODES)  # few sizes: each compiles four kernels where it is first used


class Bucket(NamedTuple):
    sequences: int
    nodes: int


class Pass(NamedTuple):
    """The buffers of one bucket."""

    sent: torch.Tensor  # [2, aligned(sequences)] on the host: budgets, caps
    back: torch.Tensor  # [sequences, 3 nodes + 1] on the host: tokens, parents, the log-probabilities' bits, count
    launch: Recorded


class CudaTrees:
    """`plain_trees` for one drafter's logits. Calls must take turns."""

    def __init__(self, depth: int, vocabulary: int, device: Device) -> None:
        self.depth, self.vocabulary, self._device = depth, vocabulary, device
        self._logits = device.room(0, depth, vocabulary, of=torch.float32)
        self._passes = Kept(self._make)

    def attach(self, logits: torch.Tensor) -> None:
        """`logits` [S, L, V] are read where they lie; others are copied there first."""
        self._logits = logits
        self._passes.clear()

    def __call__(self, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]:
        """One tree a sequence; logits [S, L, V] float32."""
        if not budgets:
            return []
        if max(budgets) > MOST_NODES:
            return plain_trees(logits.cpu(), budgets, caps)
        count = len(budgets)
        size = Bucket(at_least(count, SEQUENCES), at_least(max(budgets), NODES))
        if size.sequences > len(self._logits):
            self.attach(self._device.room(size.sequences, self.depth, self.vocabulary, of=torch.float32))
        if logits.data_ptr() != self._logits.data_ptr():
            self._logits[:count] = logits
        p = self._passes[size]
        asked = p.sent.numpy()
        fill_trees(asked[0], asked[1], budgets, caps)
        p.launch()
        self._device.wait()
        return read_trees(p.back.numpy()[:count])

    def _make(self, size: Bucket) -> Pass:
        lines = (2, aligned(size.sequences))
        sent, asked = (room(*lines) for room in (self._device.host_room, self._device.room))
        back, out = (room(size.sequences, 3 * size.nodes + 1) for room in (self._device.host_room, self._device.room))
        logits = self._logits[: size.sequences]

        def launch() -> None:
            asked.copy_(sent, non_blocking=True)
            build(logits, asked[0, : size.sequences], asked[1, : size.sequences], out)
            back.copy_(out, non_blocking=True)

        return Pass(sent, back, self._device.recorded(launch))


def build(logits: torch.Tensor, budgets: torch.Tensor, caps: torch.Tensor, out: torch.Tensor) -> None:
    """Trees of logits [S, L, V] into out [S, 3 nodes + 1], as `read_trees` reads them."""
    nodes = out.shape[1] // 3
    best = topk_logprobs(logits, nodes)
    pack(tree_build(best.logprobs, best.tokens, budgets, caps, nodes), out)


def pack(built: Trees, out: torch.Tensor) -> None:
    """Trees of so many nodes into out [S, 3 nodes + 1]."""
    bits = built.logprobs.view(torch.int32)
    torch.cat([built.tokens, built.parents, bits, built.counts.unsqueeze(1)], 1, out=out)


def fill_trees(to_budgets: Ints, to_caps: Ints, budgets: Sequence[int], caps: Sequence[int]) -> None:
    """Writes what `build` is asked; what is left of the lines are trees without a node."""
    count = len(budgets)
    to_budgets[:count], to_budgets[count:] = budgets, 0
    to_caps[:count], to_caps[count:] = [min(cap, MOST_NODES) for cap in caps], 0  # above it none cuts


def read_trees(lines: Ints) -> list[PlainTree]:
    """The trees that `build` made, on the host."""
    trees, nodes = list[PlainTree](), lines.shape[1] // 3
    for line, logprobs in zip(lines.tolist(), lines.view(np.float32)[:, 2 * nodes : -1], strict=True):
        count = line[-1]
        tree = PlainTree(line[:count], line[nodes : nodes + count], logprobs[:count].tolist())
        trees.append(tree)
    return trees
