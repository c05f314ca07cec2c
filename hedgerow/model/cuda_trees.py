"""From a block's logits to trees on a GPU: one pass and one copy out. Of the same marginals the heap's trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hedgerow.model.cuda_graph import Kept, Recorded
from hedgerow.model.cuda_plan import bucket
from kernels.gpu.topk_logprobs import topk_logprobs
from kernels.gpu.tree_build import MOST_NODES, tree_build
from kernels.tree_build import PlainTree, build_size, plain_trees


class Bucket(NamedTuple):
    sequences: int
    nodes: int


class Pass(NamedTuple):
    """The buffers of one bucket."""

    logits: torch.Tensor  # [sequences, L, V]
    sent: torch.Tensor  # [2, sequences] on the host: budgets, caps
    asked: torch.Tensor  # the same on the device
    out: torch.Tensor  # [sequences, 3 nodes + 1] int32: tokens, parents, the bits of the log-probabilities, count
    back: torch.Tensor  # the same on the host
    launch: Recorded


class CudaTrees:
    """`plain_trees` for one drafter's logits. Calls must take turns."""

    def __init__(self, depth: int, vocabulary: int, device: torch.device) -> None:
        self.depth, self.vocabulary, self.device = depth, vocabulary, device
        self._passes = Kept(self._make)

    def __call__(self, logits: torch.Tensor, budgets: Sequence[int], caps: Sequence[int]) -> list[PlainTree]:
        """One tree a sequence; logits [S, L, V] float32."""
        if not budgets:
            return []
        if max(budgets) > MOST_NODES:
            return plain_trees(logits.cpu(), budgets, caps)
        count = len(budgets)
        p = self._passes[Bucket(bucket(count), build_size(max(budgets)))]
        asked = p.sent.numpy()
        asked[:, count:] = 0
        asked[0, :count], asked[1, :count] = budgets, [min(cap, MOST_NODES) for cap in caps]  # above it none cuts
        p.asked.copy_(p.sent, non_blocking=True)
        p.logits[:count].copy_(logits)
        p.launch()
        p.back.copy_(p.out, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return [self._tree(p.back[n]) for n in range(count)]

    @staticmethod
    def _tree(line: torch.Tensor) -> PlainTree:
        nodes, count = len(line) // 3, int(line[-1])
        tokens, parents, bits = (line[at : at + count] for at in (0, nodes, 2 * nodes))
        return PlainTree(tokens.tolist(), parents.tolist(), bits.view(torch.float32).tolist())

    def _make(self, size: Bucket) -> Pass:
        pinned = self.device.type == "cuda"
        logits = torch.zeros(size.sequences, self.depth, self.vocabulary, device=self.device)
        sent = torch.zeros(2, size.sequences, dtype=torch.int32, pin_memory=pinned)
        asked = sent.to(self.device)
        out = torch.zeros(size.sequences, 3 * size.nodes + 1, dtype=torch.int32, device=self.device)
        back = torch.zeros(out.shape, dtype=torch.int32, pin_memory=pinned)

        def launch() -> None:
            best = topk_logprobs(logits, size.nodes)
            built = tree_build(best.logprobs, best.tokens, asked[0], asked[1], size.nodes)
            tokens, parents, bits, counts = torch.split(out, [size.nodes, size.nodes, size.nodes, 1], 1)
            tokens.copy_(built.tokens)
            parents.copy_(built.parents)
            bits.copy_(built.logprobs.view(torch.int32))
            counts.copy_(built.counts.unsqueeze(1))

        return Pass(logits, sent, asked, out, back, Recorded(launch, self.device))
