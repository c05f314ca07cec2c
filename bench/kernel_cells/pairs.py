"""Conditional trees: the selector's probabilities of pairs."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.kernel_cells import Call, Cell, Work
from kernels.gpu.pair_scores import BENCH_SHAPES, pair_scores, reference

VOCABULARY = 163840


def cells() -> Iterator[Cell]:
    books = [torch.randn(VOCABULARY, BENCH_SHAPES[0][-1], device="cuda") for _ in range(2)]  # shared: 0.3 GB
    for shape in BENCH_SHAPES:
        yield cell(*shape, books)


def cell(sequences: int, depth: int, k: int, rank: int, books: list[torch.Tensor]) -> Cell:
    def make() -> Call:
        logprobs = (torch.randn(sequences, depth, k, device="cuda") - 4).sort(-1, descending=True).values
        tokens = torch.rand(sequences, depth, VOCABULARY, device="cuda").topk(k).indices.int()
        state = torch.randn(sequences, depth, rank, device="cuda")
        anchors = torch.randint(0, VOCABULARY, (sequences,), dtype=torch.int32, device="cuda")
        caps = torch.zeros(sequences, dtype=torch.int32, device="cuda")

        def check() -> None:
            given = [part[:2] for part in (logprobs, tokens, state, anchors, caps)]
            got, want = pair_scores(*given, *books)[0], reference(*given, *books)[0]
            torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)

        return Call(lambda: pair_scores(logprobs, tokens, state, anchors, caps, *books), check=check)

    work = Work(sequences * depth * (2 * k + 1) * rank * 4, sequences * depth * k * k * 8)
    return Cell("pair_scores", f"S={sequences} depth={depth} K={k} rank={rank}", work, make, work.read, most_sets=40)
