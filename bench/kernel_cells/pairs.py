"""Conditional trees: the selector's probabilities of pairs, and the best paths of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.kernel_cells import Call, Cell, Work
from kernels.gpu import tree_pairs
from kernels.gpu.pair_scores import BENCH_SHAPES, pair_scores, reference

VOCABULARY = 163840


def cells() -> Iterator[Cell]:
    books = [torch.randn(VOCABULARY, BENCH_SHAPES[0][-1], device="cuda") for _ in range(2)]  # shared: 0.3 GB
    for shape in BENCH_SHAPES:
        yield cell(*shape, books)
    for shape in tree_pairs.BENCH_SHAPES:
        yield tree_cell(*shape)


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


def tree_cell(sequences: int, depth: int, k: int, nodes: int) -> Cell:
    def make() -> Call:
        logprobs = (torch.randn(sequences, depth, k, k, device="cuda") - 4).log_softmax(-1).sort(-1, descending=True)[0]
        choice = torch.rand(sequences, depth, k, k, device="cuda").argsort(-1).int()
        tokens = torch.rand(sequences, depth, VOCABULARY // 64, device="cuda").topk(k).indices.int()
        given = logprobs.contiguous(), choice, tokens, torch.full((sequences,), nodes, device="cuda", dtype=torch.int32)

        def check() -> None:
            got = tree_pairs.tree_pairs(*given, nodes)
            scores, named, words, budgets = (part.cpu() for part in given)
            want = tree_pairs.reference(scores, named, words, budgets, nodes)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))

        return Call(lambda: tree_pairs.tree_pairs(*given, nodes), check=check)

    read = sequences * depth * k * (2 * k + 1) * 4
    work = Work(read, sequences * nodes * 24)
    return Cell("tree_pairs", f"S={sequences} depth={depth} K={k} budget={nodes}", work, make, read, most_sets=100)
