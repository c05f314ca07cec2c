"""From a block's logits to trees on a GPU: one pass and one copy out. Of the same marginals the heap's trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from hedgerow.model.cuda_graph import Device, Kept, Recorded
from hedgerow.model.cuda_plan import Ints, bucket
from kernels.gpu.topk_logprobs import topk_logprobs
from kernels.gpu.tree_build import MOST_NODES, tree_build
from kernels.tree_build import PlainTree, plain_trees

NODES = (8, 16, 32, MOST_NODES)  # few sizes: each compiles four kernels where it is first used


class Bucket(NamedTuple):
    sequences: int
    nodes: int


class Pass(NamedTuple):
    """The buffers of one bucket."""

    sent: torch.Tensor  # [2, sequences] on the host: budgets, caps
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
        size = Bucket(bucket(count), next(nodes for nodes in NODES if nodes >= max(budgets)))
        if size.sequences > len(self._logits):
            self.attach(self._device.room(size.sequences, self.depth, self.vocabulary, of=torch.float32))
        if logits.data_ptr() != self._logits.data_ptr():
            self._logits[:count] = logits
        p = self._passes[size]
        asked = p.sent.numpy()
        asked[:, count:] = 0
        asked[0, :count], asked[1, :count] = budgets, [min(cap, MOST_NODES) for cap in caps]  # above it none cuts
        p.launch()
        self._device.wait()
        return [self._tree(line) for line in p.back.numpy()[:count]]

    @staticmethod
    def _tree(line: Ints) -> PlainTree:
        nodes, count = len(line) // 3, int(line[-1])
        tokens, parents, bits = (line[at : at + count] for at in (0, nodes, 2 * nodes))
        return PlainTree(tokens.tolist(), parents.tolist(), bits.view(np.float32).tolist())

    def _make(self, size: Bucket) -> Pass:
        sent, asked = (room(2, size.sequences) for room in (self._device.host_room, self._device.room))
        back, out = (room(size.sequences, 3 * size.nodes + 1) for room in (self._device.host_room, self._device.room))
        logits = self._logits[: size.sequences]

        def launch() -> None:
            asked.copy_(sent, non_blocking=True)
            best = topk_logprobs(logits, size.nodes)
            built = tree_build(best.logprobs, best.tokens, asked[0], asked[1], size.nodes)
            bits = built.logprobs.view(torch.int32)
            torch.cat([built.tokens, built.parents, bits, built.counts.unsqueeze(1)], 1, out=out)
            back.copy_(out, non_blocking=True)

        return Pass(sent, back, self._device.recorded(launch))
