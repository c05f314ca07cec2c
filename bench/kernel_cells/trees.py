"""Trees, draws, walks and cache moves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.kernel_cells import Call, Cell, Work
from kernels.gpu import draw, kv_compact, kv_write, topk_logprobs, tree_accept, tree_build, tree_mask
from kernels.sample import Law

LAYERS, WIDTH, SLOTS = 61, 576, 1 << 14  # of K2.6; the pool holds 1.2 GB
GREEDY = Law(0.0, 0, 1.0, 0.0, 1, 0, 100)
LAWS = {
    "greedy": GREEDY,
    "T=1": GREEDY._replace(temperature=1.0),
    "T=0.8 top-k 50 top-p 0.95": GREEDY._replace(temperature=0.8, top_k=50, top_p=0.95),
    "T=1 top-p 0.95 min-p 0.02": GREEDY._replace(temperature=1.0, top_p=0.95, min_p=0.02),
}
LIMITS = {"greedy": 8.0, "T=0.8 top-k 50 top-p 0.95": 60.0}


def numbers(count: int, value: int = 0) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int32, device="cuda")


def cells() -> Iterator[Cell]:
    for s, depth, nodes in tree_build.BENCH_SHAPES:
        yield build_cell(s, depth, nodes)
    for s, depth, vocabulary, k in topk_logprobs.BENCH_SHAPES:
        yield top_cell(s, depth, vocabulary, k)
    for s, rows in tree_mask.BENCH_SHAPES:
        yield mask_cell(s, rows)
    for s, rows, vocabulary in draw.BENCH_SHAPES:
        for name, law in LAWS.items():
            yield accept_cell(s, rows, vocabulary, name, law)
    for layers, width, s, rows in kv_compact.BENCH_SHAPES:
        yield compact_cell(layers, width, s, rows)
    for rows, width in kv_write.BENCH_SHAPES:
        yield write_cell(rows, width)


def build_cell(s: int, depth: int, nodes: int) -> Cell:
    def make() -> Call:
        logits = torch.randn(s, depth, 512, device="cuda") * 2
        best = topk_logprobs.topk_logprobs(logits, nodes)
        budgets, caps = numbers(s, nodes), numbers(s)

        def check() -> None:
            want = tree_build.reference(*best, budgets, caps, nodes)
            got = tree_build.tree_build(*best, budgets, caps, nodes)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

        return Call(lambda: tree_build.tree_build(*best, budgets, caps, nodes), check=check)

    rows = tree_build.table(depth, nodes, torch.device("cpu")).numel()
    work = Work(read=s * depth * nodes * 8 + rows * 8, written=s * nodes * 24)
    limit, sets = (20.0, 800) if (s, nodes) == (64, 63) else (None, 100)
    return Cell("tree_build", f"S={s} depth={depth} budget={nodes}", work, make, work.read, limit=limit, most_sets=sets)


def top_cell(s: int, depth: int, vocabulary: int, k: int) -> Cell:
    def make() -> Call:
        logits = torch.randn(s, depth, vocabulary, device="cuda")

        def check() -> None:
            got, want = topk_logprobs.topk_logprobs(logits, k), topk_logprobs.reference(logits, k)
            assert torch.equal(got.tokens, want.tokens)
            torch.testing.assert_close(got.logprobs, want.logprobs, atol=2e-6, rtol=2e-6)

        return Call(lambda: topk_logprobs.topk_logprobs(logits, k), check=check)

    read = s * depth * vocabulary * 4
    limit = 15.0 if (s, vocabulary) == (8, 20480) else None
    shape = f"[{s}, {depth}, {vocabulary}] fp32 k={k}"
    return Cell("topk_logprobs", shape, Work(read, s * depth * k * 8), make, read, limit=limit)


@dataclass(frozen=True)
class Forest:
    """Random trees, and logits whose draws follow them a few levels down."""

    parents: torch.Tensor
    tokens: torch.Tensor
    row_start: torch.Tensor
    logits: torch.Tensor


def forest(s: int, rows: int, vocabulary: int) -> Forest:
    chance = torch.rand(s, rows)
    parents = (chance * torch.arange(rows)).int()
    parents[:, 0] = -1
    tokens = torch.stack([torch.randperm(max(vocabulary, rows))[:rows] for _ in range(s)]).int()
    logits = torch.randn(s * rows, vocabulary, device="cuda") * 2
    row_start = torch.arange(0, s * rows + 1, rows, dtype=torch.int32)
    return Forest(parents.view(-1).cuda(), tokens.view(-1).cuda(), row_start.cuda(), logits)


def mask_cell(s: int, rows: int) -> Cell:
    def make() -> Call:
        trees = forest(s, rows, 64)

        def check() -> None:
            got = tree_mask.tree_mask(trees.parents, trees.row_start)
            want = tree_mask.reference(trees.parents, trees.row_start)
            assert torch.equal(got.mask, want.mask)
            assert torch.equal(got.depth, want.depth)

        return Call(lambda: tree_mask.tree_mask(trees.parents, trees.row_start), check=check)

    return Cell("tree_mask", f"S={s} rows={rows}", Work(s * rows * 4, s * rows * 12), make, s * rows * 16, most_sets=50)


def accept_cell(s: int, rows: int, vocabulary: int, name: str, law: Law) -> Cell:
    def make() -> Call:
        trees = forest(s, rows, vocabulary)
        laws = draw.Laws.of([law._replace(seed=n) for n in range(s)], "cuda")
        masks = tree_mask.tree_mask(trees.parents, trees.row_start)

        def run() -> tree_accept.Accepted:
            return tree_accept.tree_accept(
                trees.logits, trees.parents, trees.tokens, masks.depth, masks.mask, trees.row_start, laws, min(rows, 64)
            )

        def check() -> None:
            got = run()
            assert bool((got.bonus >= 0).all())
            if law.temperature == 0:
                assert torch.equal(got.emitted[:, 0], trees.logits[trees.row_start[:-1].long()].argmax(1).int())

        return Call(run, check=check)

    read = s * rows * vocabulary * 4
    limit = LIMITS.get(name) if s * rows == 128 and vocabulary == 20480 else None
    shape = f"{s * rows} rows x {vocabulary}, {name}"
    return Cell("tree_accept", shape, Work(read), make, read, limit=limit, most_sets=20)


def compact_cell(layers: int, width: int, s: int, rows: int) -> Cell:
    cache = torch.empty(0, dtype=torch.bfloat16, device="cuda")

    def make() -> Call:
        nonlocal cache
        if not len(cache):
            cache = torch.randn(layers, SLOTS, width, device="cuda", dtype=torch.bfloat16)
        held = 2 * rows
        slots = torch.randperm(SLOTS)[: s * held].cuda()
        path = torch.cat([torch.zeros(s, 1), 1 + torch.rand(s, held - 1).argsort(1)[:, : rows - 1].sort(1).values], 1)
        arguments = (
            slots, torch.arange(0, s * held + 1, held, dtype=torch.int32).cuda(), path.int().cuda(), numbers(s, rows)
        )  # fmt: skip

        def check() -> None:
            mine, theirs = cache[:2].clone(), cache[:2].clone()
            kv_compact.reference(theirs, *arguments)
            kv_compact.kv_compact(mine, *arguments)
            assert torch.equal(mine, theirs)

        return Call(lambda: kv_compact.kv_compact(cache, *arguments), check=check)

    moved = layers * width * 2 * s * rows
    limit = 6.0 if s * rows == 16 else None
    return Cell(
        "kv_compact",
        f"{s} x {rows} rows, {layers} layers",
        Work(moved, moved),
        make,
        2 * moved,
        limit=limit,
        most_sets=100,
    )


def write_cell(rows: int, width: int) -> Cell:
    cache = torch.empty(0, dtype=torch.bfloat16, device="cuda")

    def make() -> Call:
        nonlocal cache
        if not len(cache):
            cache = torch.zeros(SLOTS * 16, width, device="cuda", dtype=torch.bfloat16)
        slots = torch.randperm(len(cache))[:rows].cuda()
        values = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)

        def check() -> None:
            assert torch.equal(cache[slots], values)

        return Call(lambda: kv_write.kv_write(cache, slots, values), check=check)

    moved = rows * width * 2
    return Cell("kv_write", f"{rows} rows x {width}", Work(moved + rows * 8, moved), make, 2 * moved, most_sets=100)
